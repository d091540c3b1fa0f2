"""Processes that mpirun, mpiexec, srun or aprun have started on each host, known by their variables (no mpi4py)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping

from paceline.schedulers import SCHEDULERS
from paceline.schedulers.scheduler import Allocation

OPEN_MPI_RANK = "OMPI_COMM_WORLD_RANK"
# Rank and size; the first pair that is set counts. Launchers come before the protocols they speak, and SLURM last: it
# also sets its variables for mpirun's own daemons.
VARIABLES = (
    (OPEN_MPI_RANK, "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PALS_RANKID", "PALS_SIZE"),  # Cray PALS
    ("ALPS_APP_PE", "ALPS_APP_SIZE"),  # Cray ALPS: aprun sets no size
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("PMIX_RANK", "PMIX_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)
SIZES = ("PMI_SIZE", "COBALT_JOBSIZE", "SLURM_NTASKS")
DAEMONS = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte")
"""Programs of Open MPI that start its ranks."""
BINDING = re.compile(
    r"(OMPI|PRTE)_MCA_\w*(binding_policy|cpu_list|cpu_set|cpus_per_rank|cpus_per_proc|rankfile)="
    r"|(OMPI|PRTE)_MCA_\w*mapping_policy=.*pe=",
    re.IGNORECASE,
)
"""Variables through which Open MPI passes on that the user has chosen a binding."""
LAUNCHER_IDS = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "PALS_APID", "ALPS_APP_ID"),
    *("JSM_JOB_ID", "PMI_JOBID"),
)


def ranks(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """This process's rank and the number of processes (0 if unknown); None where it is the only one."""
    for rank, size in VARIABLES:
        if (number := environ.get(rank, "")).isdecimal():
            known = next((environ[name] for name in (size, *SIZES) if environ.get(name, "").isdecimal()), "0")
            if rank == "SLURM_PROCID" and ("SLURM_STEP_ID" not in environ or size not in environ):
                continue  # a batch script
            # One process starts the others itself; `srun --pty bash` too has PMI's variables at many sites.
            return (int(number), int(known)) if int(known) != 1 else None
    return None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    found = ranks(environ)
    return None if found is None else Allocation("mpi", launch_id(environ), (), rank=found[0], size=found[1])


def undo_binding(environ: Mapping[str, str]) -> str:
    """Give this process the cores of Open MPI's daemon, which started it and is not bound itself.

    By default Open MPI binds a rank to one core, or to a few; here a rank stands for a whole host. A binding that the
    user asked for stays. Returns a notice for the user; empty where the process is not bound.
    """
    if OPEN_MPI_RANK not in environ or not hasattr(os, "sched_setaffinity"):
        return ""
    import psutil

    with contextlib.suppress(psutil.Error, OSError, StopIteration):
        daemon = next(each for each in psutil.Process().parents() if each.name() in DAEMONS)
        before, every = os.sched_getaffinity(0), os.sched_getaffinity(daemon.pid)
        if before < every:
            bound = f"to {len(before)} of {len(every)} cores"
            if any(BINDING.match(f"{name}={value}") for name, value in environ.items()):
                return f"mpirun binds each process {bound}, as it was told; --bind-to none allows all"
            os.sched_setaffinity(0, every)
            return f"mpirun bound each process {bound}; all are used (--cpus N limits them)"
    return ""


def launch_id(environ: Mapping[str, str]) -> str:
    """Equal for all processes of one mpirun and different for the next, as far as variables tell."""
    scheduler_ids = [name for scheduler in SCHEDULERS.values() for name in scheduler.id_variables]
    known = [f"{name}={environ[name]}" for name in (*LAUNCHER_IDS, *scheduler_ids) if environ.get(name)]
    if not known and environ.get("MPI_LOCALNRANKS", "0") == environ.get("PMI_SIZE"):
        # MPICH without a scheduler sets no id. Where all processes are on one host, its daemon there identifies it:
        # the parent of each process, which leads a session.
        import psutil

        with contextlib.suppress(psutil.Error):
            known = [f"daemon={psutil.Process(os.getsid(0)).ppid()}"]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
