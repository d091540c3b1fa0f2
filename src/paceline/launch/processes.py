"""The processes below a supervisor: nothing escapes it, and everything ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

OPEN_FILES = 65_535
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which COMMAND has a limited time to save and end."""


@contextlib.contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Processes that are started meanwhile, and their children, never get this signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that no process of Ray's gets out of sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_with(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            sys.exit(128 + signal.SIGTERM)


def raise_limits() -> None:
    """Allow more open files: each worker needs dozens."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descendants(folder: Path | None) -> list[psutil.Process]:
    """All descendants and, where orphans cannot be adopted, this user's processes that name the folder."""
    found = psutil.Process().children(recursive=True)
    if sys.platform != "linux" and folder is not None:
        known = {process.pid for process in found} | {os.getpid()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in known and any(str(folder) in word for word in process.cmdline()):
                    found.append(process)
    return found


def kill_all(folder: Path | None, seconds: float) -> int:
    """Kill all descendants; returns how many are left. Ray's daemons have nothing to save, but take 30 s to stop."""
    limit = time.monotonic() + seconds
    while True:
        reap()
        living = descendants(folder)
        if not living or time.monotonic() > limit:
            return len(living)
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def reap() -> dict[int, int]:
    """Exit codes, by pid, of children that have ended, adopted ones included."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
