"""The hosts that a launch may use, and how a command is run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.config import UserError
from paceline.launch.launcher import RemoteArgv
from paceline.schedulers import SCHEDULERS, mpi, ssh
from paceline.schedulers.scheduler import Allocation
from paceline.schedulers.this_machine import rehearsal, this_machine


def find_allocation(
    environ: Mapping[str, str], hosts: str | None, rehearse: int | None
) -> tuple[Allocation, RemoteArgv]:
    """The rehearsed hosts, those of a file, of a batch job or of mpirun; else this machine."""
    if rehearse is not None:
        return rehearsal(rehearse), ssh.remote_argv
    if hosts is not None:
        return ssh.allocation(Path(hosts)), ssh.remote_argv
    ranks = mpi.ranks(environ)
    for scheduler in SCHEDULERS.values():
        found = scheduler.allocation(environ)
        if found is not None:
            if ranks is not None:
                found = replace(found, rank=ranks[0], size=ranks[1])
            return found, scheduler.remote_argv
    return mpi.allocation(environ) or this_machine(), ssh.remote_argv


def first_hosts(allocation: Allocation, nodes: int) -> Allocation:
    if allocation.rank is not None:
        raise UserError("--nodes: under mpirun, srun and similar commands every rank takes part; start fewer ranks")
    if nodes > len(allocation.hosts):
        raise UserError(f"--nodes {nodes}: the allocation has {len(allocation.hosts)}")
    return replace(allocation, hosts=allocation.hosts[:nodes])
