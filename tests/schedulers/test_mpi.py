from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paceline.schedulers import mpi

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2", "PMIX_NAMESPACE": "17@1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OPEN_MPI, (2, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, (0, 8)),
        ({"PALS_RANKID": "3", "PALS_SIZE": "5", "PMI_RANK": "9", "PMI_SIZE": "99"}, (3, 5)),
        ({"ALPS_APP_PE": "1", "COBALT_JOBSIZE": "16"}, (1, 16)),
        ({"ALPS_APP_PE": "1"}, (1, 0)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),  # the batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, None),  # salloc's shell
        ({"SLURM_PROCID": "0", **OPEN_MPI}, (2, 4)),  # mpirun in a batch script
        ({"PMI_RANK": "what"}, None),
        (
            {"PMIX_RANK": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
            None,
        ),  # --pty
        ({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "1", "PMI_SIZE": "2"}, (1, 2)),  # one process a host, not one in all
    ],
    ids=str,
)
def test_ranks(environ: dict[str, str], expected: tuple[int, int] | None) -> None:
    assert mpi.ranks(environ) == expected


def test_the_processes_of_one_launch_meet_and_those_of_another_do_not() -> None:
    other_rank = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    assert mpi.launch_id(OPEN_MPI) == mpi.launch_id(other_rank)
    assert mpi.launch_id(OPEN_MPI) != mpi.launch_id({**OPEN_MPI, "PMIX_NAMESPACE": "18@1"})
    found = mpi.allocation(OPEN_MPI)
    assert found is not None and (found.rank, found.size, found.hosts) == (2, 4, ())


def test_mpich_names_no_launch() -> None:
    """On several hosts nothing may be taken that differs between them; on one, two launches at once are told apart."""
    there = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node1"}
    assert mpi.launch_id(there) == mpi.launch_id({**there, "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node2"})
    # In a session of its own, as MPICH's processes are: the leader of ours may be outside of a container, and unknown.
    code = "import json, sys; from paceline.schedulers import mpi; print(mpi.launch_id(json.loads(sys.argv[1])))"
    ids = [
        subprocess.check_output(
            [sys.executable, "-c", code, json.dumps({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_RANK": rank})],
            start_new_session=True,
            text=True,
            timeout=60,
        ).strip()
        for rank in "01"
    ]
    assert ids[0] == ids[1] != mpi.launch_id(there)


UNBIND = """
import os
from paceline.schedulers import mpi
before, notice = len(os.sched_getaffinity(0)), mpi.undo_binding(os.environ)
print(before, len(os.sched_getaffinity(0)), notice, flush=True)
"""


@pytest.mark.needs("mpirun")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is nothing to bind to")
@pytest.mark.parametrize(
    ("options", "before", "after", "said"),
    [
        ("", 1, 0, "all are used"),
        ("--bind-to core", 1, 1, "--bind-to none"),
        ("--map-by slot:pe=1", 1, 1, "--bind-to none"),
        ("--bind-to none", 0, 0, ""),
    ],
)
def test_the_binding_of_open_mpi(options: str, before: int, after: int, said: str) -> None:
    """Its default is undone; what the user asked for stays, and is told. 0 stands for all cores."""
    every = len(os.sched_getaffinity(0))
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "1", *options.split()]
    line = subprocess.check_output([*argv, sys.executable, "-c", UNBIND], text=True, timeout=60).strip()
    words = line.split(maxsplit=2)
    assert words[:2] == [str(before or every), str(after or every)], line
    assert said in line and (len(words) == 3) == bool(said), line
