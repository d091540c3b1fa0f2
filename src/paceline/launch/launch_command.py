"""`paceline launch -- COMMAND`: Ray on every host of the allocation, COMMAND once, nothing left behind."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.launch.find_allocation import find_allocation, first_hosts
from paceline.launch.launcher import Launcher
from paceline.launch.options import LaunchOptions
from paceline.launch.start_supervisor import run_rank
from paceline.ray_node import LAUNCHED
from paceline.schedulers import mpi
from paceline.schedulers.killed_run import mark_ended
from paceline.schedulers.profile import parse_ports
from paceline.schedulers.train_command import run_directory

NOT_FOUND = 127
FOLDER = "PACELINE_JOB_FOLDER"


def log_folder(given: str | None) -> Path:
    """Where the timeline goes: the folder given, else that of the job, else a new one."""
    stamp = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    return Path(given or os.environ.get(FOLDER) or f".paceline/launch/{stamp}")


def port_range(text: str) -> tuple[int, int]:
    try:
        return parse_ports(text)
    except ValueError as error:
        raise UserError(f"--ports {text}: {error}") from None


def run_launch(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    hosts: str | None = None,
    rehearse: int | None = None,
    nodes: int | None = None,
) -> int:
    """Run the command on the hosts of a file, on rehearsed hosts or on those of the allocation; its exit code."""
    if not command and not options.keep:
        raise UserError("launch needs a command: paceline launch -- COMMAND (or --keep for a cluster without one)")
    if hosts and rehearse is not None:
        raise UserError("--hosts and --rehearse exclude each other: give one of them")
    if not hosts and rehearse is None and command and is_inside(os.environ):
        return _run_inside(command)
    if mpi.OPEN_MPI_RANK in os.environ:
        os.environ["TERM"] = "dumb"  # for COMMAND: its terminal is Open MPI's, and nobody may be looking at it
    notice = mpi.undo_binding(os.environ)
    allocation, remote_argv = find_allocation(os.environ, hosts, rehearse)
    if nodes is not None:
        allocation = first_hosts(allocation, nodes)
    if options.container and allocation.rank is not None:
        words = shlex.join(options.container)
        raise UserError(f"--container {words}: mpirun, srun and similar commands start it: {words} paceline launch …")
    if allocation.rank:
        return run_rank(allocation, options.timeout)
    if notice:
        print(f"paceline launch: {notice}", file=sys.stderr, flush=True)
    available = allocation.size if allocation.rank is not None else len(allocation.hosts)
    if options.min_nodes is not None and available and options.min_nodes > available:
        raise UserError(f"--min-nodes {options.min_nodes}: the allocation has {available}")
    code = Launcher(allocation, remote_argv, options).run(command)
    if run := run_directory(command, Path.cwd()):
        mark_ended(Path(run), f"its command ended with exit code {code}")
    return code


def is_inside(environ: Mapping[str, str]) -> bool:
    """Whether this is COMMAND of another `paceline launch`, of a job script for instance."""
    # The file tells: a job that COMMAND submits inherits the variable.
    return LAUNCHED in environ and Path(environ[LAUNCHED]).exists()


def _run_inside(command: Sequence[str]) -> int:
    address = os.environ["RAY_ADDRESS"]
    text = f"this is inside `paceline launch`: the command uses its cluster at {address}; other options are ignored"
    print(f"paceline launch: {text}", file=sys.stderr, flush=True)
    words = [word.replace("{address}", address) for word in command]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"paceline launch: {words[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
