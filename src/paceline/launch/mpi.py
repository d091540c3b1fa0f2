"""mpirun, mpiexec, srun, aprun and the like: one process on each host already, known by its variables. No mpi4py."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping

import psutil

from paceline.launch.scheduler import Allocation

# Rank, size, and what names the launch: the first pair that is there counts. Those of the launchers come before those
# of the protocols they speak, and SLURM's last: it sets them for mpirun's own daemons too.
VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PALS_RANKID", "PALS_SIZE"),  # Cray PALS
    ("ALPS_APP_PE", "ALPS_APP_SIZE"),  # Cray ALPS: aprun says no size
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("PMIX_RANK", "PMIX_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)
LAUNCH = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "PALS_APID", "ALPS_APP_ID"),
    *("JSM_JOB_ID", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "COBALT_JOBID", "OAR_JOB_ID"),
)
SIZES = ("PMI_SIZE", "COBALT_JOBSIZE", "SLURM_NTASKS")


def ranks(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Which of how many processes this is; None where it is the only one. Size 0: nobody says."""
    for rank, size in VARIABLES:
        if (number := environ.get(rank, "")).isdecimal():
            known = next((environ[name] for name in (size, *SIZES) if environ.get(name, "").isdecimal()), "0")
            if rank == "SLURM_PROCID" and ("SLURM_STEP_ID" not in environ or size not in environ):
                continue  # a batch script
            # Also `srun --pty bash`, which has PMI's variables at many sites: it reaches the other hosts itself.
            return (int(number), int(known)) if int(known) != 1 else None
    return None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    found = ranks(environ)
    return None if found is None else Allocation("mpi", launch_id(environ), (), rank=found[0], size=found[1])


def launch_id(environ: Mapping[str, str]) -> str:
    """The same for all processes of one mpirun, and another for the next, as far as its variables tell."""
    said = [f"{name}={environ[name]}" for name in LAUNCH if environ.get(name)]
    if not said and environ.get("MPI_LOCALNRANKS", "0") == environ.get("PMI_SIZE"):
        # MPICH without a scheduler names nothing; where all are on one host, it is known by its daemon there, the
        # parent of each process that leads a session.
        with contextlib.suppress(psutil.Error):
            said = [f"daemon={psutil.Process(os.getsid(0)).ppid()}"]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
