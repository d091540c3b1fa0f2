"""`paceline launch -- COMMAND`: Ray on every host of the allocation, COMMAND once, and nothing left behind."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.launch.cluster import Options, Remote
    from paceline.launch.scheduler import Allocation

FAILED = 1
NOT_FOUND = 127
FOLDER = "PACELINE_JOB_FOLDER"


def add_launch(verbs: Any) -> None:
    launch = verbs.add_parser(
        "launch",
        help="run a command on the machines of an allocation",
        usage="paceline launch [options] -- COMMAND …",
        description="Starts Ray on every host that is ours (of a SLURM, OAR, PBS or Cobalt job, of mpirun and the "
        "like, of --hosts, else this machine), runs COMMAND once on the first, with RAY_ADDRESS set and {address} "
        "replaced by it, passes signals on to it, returns its exit code, and ends all that it started.",
    )
    launch.add_argument(
        "--hosts", metavar="FILE", help="hosts to reach by ssh, one a line: [user@]name[:port] [cpus=N]"
    )
    launch.add_argument("--rehearse", type=int, metavar="N", help="N nodes as processes on this machine")
    launch.add_argument("--interface", metavar="IF", help="network between the hosts, as ib0 or hsn0")
    launch.add_argument("--nodes", type=int, metavar="N", help="the first N hosts alone (default: all)")
    launch.add_argument("--min-nodes", type=int, metavar="N", help="go on with so many (default: all must come)")
    launch.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for all to be ready (default: 120)")
    launch.add_argument("--cpus", type=int, metavar="N", help="of each host (default: those that are ours)")
    launch.add_argument("--port", type=int, default=0, metavar="P", help="of Ray's head (default: a free one)")
    launch.add_argument("--dashboard", action="store_true", help="Ray's dashboard, on the head's 127.0.0.1")
    launch.add_argument("--keep", action="store_true", help="keep the cluster after COMMAND, until Ctrl-C")
    launch.add_argument("--log", metavar="DIR", help="folder of the timeline (default: .paceline/launch/TIME)")
    launch.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="after --")
    launch.set_defaults(run=run_launch)


def run_launch(options: argparse.Namespace) -> int:
    from paceline.config import UserError

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command and not options.keep:
        raise UserError("launch: a command is needed: paceline launch -- COMMAND (or --keep for a cluster alone)")
    for name, least in (("nodes", 1), ("min_nodes", 1), ("cpus", 1), ("timeout", 1), ("port", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: at least {least}")
    if options.hosts and options.rehearse is not None:
        raise UserError("--hosts and --rehearse: give one of them")
    if not options.hosts and options.rehearse is None and command and _is_inside(os.environ):
        return _run_inside(command)
    allocation, remote = find_allocation(os.environ, options.hosts, options.rehearse)
    from paceline.launch import cluster, start

    if options.nodes is not None:
        allocation = _first(allocation, options.nodes)
    if allocation.rank:
        return start.follow(allocation, options.timeout)
    hosts = allocation.size if allocation.rank is not None else len(allocation.hosts)
    if options.min_nodes is not None and hosts and options.min_nodes > hosts:
        raise UserError(f"--min-nodes {options.min_nodes}: the allocation has {hosts}")
    try:
        return cluster.Cluster(allocation, remote, _settings(options)).run(command)
    except cluster.LaunchError as error:
        import sys

        print(f"paceline: failed: {error}", file=sys.stderr)
        return FAILED


def _first(allocation: Allocation, nodes: int) -> Allocation:
    from dataclasses import replace

    from paceline.config import UserError

    if allocation.rank is not None:
        raise UserError("--nodes: under mpirun, srun and the like every rank takes part; start fewer of them")
    if nodes > len(allocation.hosts):
        raise UserError(f"--nodes {nodes}: the allocation has {len(allocation.hosts)}")
    return replace(allocation, hosts=allocation.hosts[:nodes])


def _is_inside(environ: Mapping[str, str]) -> bool:
    """In COMMAND of another `paceline launch`, of a job script for instance. The variable may be left over."""
    from paceline.launch.node import LAUNCHED

    return LAUNCHED in environ and Path(environ[LAUNCHED]).exists()


def _run_inside(command: Sequence[str]) -> int:
    import sys

    address = os.environ["RAY_ADDRESS"]
    text = f"this is inside `paceline launch`: the command runs on its cluster at {address}, other options do not count"
    print(f"paceline launch: {text}", file=sys.stderr, flush=True)
    words = [word.replace("{address}", address) for word in command]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"paceline launch: {words[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND


def _settings(options: argparse.Namespace) -> Options:
    import time

    from paceline.launch.cluster import Options

    stamp = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    folder = options.log or os.environ.get(FOLDER) or Path(".paceline/launch") / stamp
    return Options(
        folder=Path(folder),
        interface=options.interface,
        min_nodes=options.min_nodes,
        timeout=options.timeout,
        keep=options.keep,
        cpus=options.cpus,
        port=options.port,
        dashboard=options.dashboard,
    )


def find_allocation(environ: Mapping[str, str], hosts: str | None, rehearse: int | None) -> tuple[Allocation, Remote]:
    """The hosts that are ours, and how a command is run on another of them."""
    from dataclasses import replace

    from paceline.launch import SCHEDULERS, local, mpi, ssh

    if rehearse is not None:
        return local.rehearsal(rehearse), ssh.remote_argv
    if hosts is not None:
        return ssh.allocation(Path(hosts)), ssh.remote_argv
    ranks = mpi.ranks(environ)
    for scheduler in SCHEDULERS.values():
        found = scheduler.allocation(environ)
        if found is not None:
            if ranks is not None:
                found = replace(found, rank=ranks[0], size=ranks[1])
            return found, scheduler.remote_argv
    return mpi.allocation(environ) or local.alone(), ssh.remote_argv
