"""Starting supervisors: on this machine, and the command that starts one elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from paceline.launch import rendezvous
from paceline.schedulers.scheduler import Allocation


def supervisor_argv(index: int, seconds: float, python: str = sys.executable) -> list[str]:
    """Command of the supervisor with this number, which looks for its launcher this long."""
    return [python, "-P", "-m", "paceline.launch.supervisor", "--index", str(index), "--seconds", f"{seconds:g}"]


def start_supervisor(
    argv: Sequence[str], contact: rendezvous.Contact | None, output: int | None = None, *, by_input: bool = False
) -> subprocess.Popen[bytes]:
    """In its own session, so that it can clean up when this process is killed. `by_input`: the contact is its standard
    input, because a container closes other files."""
    reader, writer = os.pipe()
    is_descriptor = contact is not None and not by_input
    try:
        process = subprocess.Popen(
            [*argv, *(["--contact", str(reader)] if is_descriptor else [])],
            pass_fds=[reader] if is_descriptor else [],
            stdin=reader if by_input else None if output is None else subprocess.DEVNULL,
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


def run_rank(allocation: Allocation, timeout: float) -> int:
    """A rank of mpirun other than the launcher's: its supervisor joins the launcher, and this process waits for it."""
    assert allocation.rank is not None
    argv = [*supervisor_argv(allocation.rank, timeout), "--contact", str(rendezvous.file_for(allocation))]
    process = start_supervisor(argv, None)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # mpirun sends them to all ranks; the launcher handles them
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    return process.wait()
