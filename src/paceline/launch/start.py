"""Starting a supervisor on this machine: by the launcher, or by a process of mpirun that is not the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.launch import mpi, rendezvous
from paceline.launch.scheduler import Allocation


def supervisor_argv(index: int, seconds: float) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        "paceline.launch.supervisor",
        "--index",
        str(index),
        "--seconds",
        f"{seconds:g}",
    ]


def start_supervisor(
    argv: Sequence[str], contact: rendezvous.Contact | None, output: int | None = None
) -> subprocess.Popen[bytes]:
    """On this machine, in a session of its own: what ends us does not end it, so that it can clean up."""
    reader, writer = os.pipe()
    try:
        where = [] if contact is None else ["--contact", str(reader)]
        process = subprocess.Popen(
            [*argv, *where],
            pass_fds=[reader],
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        if contact is not None:
            os.write(writer, contact.line().encode())
    finally:
        os.close(reader)
        os.close(writer)
    return process


def follow(allocation: Allocation, timeout: float) -> int:
    """What a process of mpirun does that is not the first: its supervisor joins the first, and it waits for the end."""
    assert allocation.rank is not None
    path = meeting_point(allocation)
    argv = [*supervisor_argv(allocation.rank, timeout), "--contact", str(path)]
    process = start_supervisor(argv, None)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # mpirun sends them to all; they are for the first
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    return process.wait()


def meeting_point(allocation: Allocation) -> Path:
    return rendezvous.folder(os.environ) / f"{allocation.job_id or 'job'}-{mpi.launch_id(os.environ)}"
