"""The private folder of a Ray on this host, and the processes that use it: nothing is left when its owner is gone.

The owner, which starts Ray, locks the folder as long as it lives. Run as a program, this file guards the folder: it
waits for the end of its owner. If both are killed, the next Ray of the same user finds a folder that nobody locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

PREFIX = "pl-"
LOCK = "lock"
TOKEN = "token"
MAX_FOLDER_LENGTH = 37  # Ray's folder in it has 39: names of Unix sockets, which Ray creates below it, are limited
GUARD_SECONDS = 2.0  # for processes to end by themselves
KILL_SECONDS = 10.0

_locks: dict[Path, int] = {}


def _drop_locks_in_child() -> None:
    """A forked child would hold its parent's locks after the parent's death."""
    for fd in _locks.values():
        with contextlib.suppress(OSError):
            os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def make_folder() -> Path:
    """Ray's folder on this host: short, and inside a private folder because Ray makes its own world-writable."""
    scratch = os.environ.get("TMPDIR", "")
    for place in _places():
        with contextlib.suppress(OSError):
            if place == scratch:  # a job's script creates it on its own host only
                Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            outer = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            _lock(outer)
            folder = outer / "r"
            folder.mkdir()
            return folder
    raise OSError(
        "no folder for Ray: /tmp and /var/tmp are not writable, and TMPDIR is unset, too long or not writable"
    )


@functools.cache
def make_scratch() -> Path:
    """The scratch folder of this process. Ray kills its workers, so what one leaves is removed as abandoned."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    _lock(folder)
    return folder


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)
    fd = _locks.pop(folder.parent, None)
    if fd is not None:
        os.close(fd)


def write_token(folder: Path, token: str) -> Path:
    path = folder / TOKEN
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path


def remove_abandoned() -> None:
    """Remove folders of this user on this host whose owner is gone, and kill the Ray processes that still use them."""
    for place in {*_places(), tempfile.gettempdir()}:
        for outer in Path(place).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), _owned_by_nobody(outer) as abandoned:
                if abandoned:
                    kill_processes(outer / "r")
                    shutil.rmtree(outer, ignore_errors=True)


def kill_processes(folder: Path, known: set[tuple[int, float]] | None = None) -> int:
    """Kill this user's Ray processes that use the folder, and the `known` ones (pid, start time); how many are left."""
    import psutil  # here: others only read the name of the token

    limit = time.monotonic() + KILL_SECONDS
    while found := [process for process in psutil.process_iter() if _belongs(process, folder, known or set())]:
        if time.monotonic() > limit:
            break
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)
    return len(found)


def _places() -> list[str]:
    places = dict.fromkeys((os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"))
    return [place for place in places if place and len(place) + 12 <= MAX_FOLDER_LENGTH]


def _lock(outer: Path) -> None:
    """The lock gets its name once it is taken, so that nobody finds it free before."""
    hidden = outer / f".{LOCK}"
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks: nobody will call the folder abandoned
        os.close(fd)
        return
    os.write(fd, socket.gethostname().encode())
    hidden.rename(outer / LOCK)
    _locks[outer] = fd


@contextlib.contextmanager
def _owned_by_nobody(outer: Path) -> Iterator[bool]:
    """Whether the folder is this user's, from this host and locked by nobody. The block holds its lock."""
    about = outer.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        yield False
        return
    fd = os.open(outer / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.read(fd, 300).decode(errors="replace") == socket.gethostname()
    finally:
        os.close(fd)


def _belongs(process: psutil.Process, folder: Path, known: set[tuple[int, float]]) -> bool:
    import psutil

    try:
        if (process.pid, process.create_time()) in known:
            return process.status() != psutil.STATUS_ZOMBIE
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        words = process.cmdline()
        if words and words[0].startswith("ray::"):  # a worker, whose title replaces its command line and its variables
            return any(file.path.startswith(f"{folder}/") for file in process.open_files())
        # Not just any process that names the folder: it might be the user's editor.
        named = any(f"{folder}/" in word or word.endswith(str(folder)) for word in words)
        return named and any("/ray/" in word for word in words[:4])
    except psutil.Error:
        return False


def guard() -> None:
    """Wait for the end of the owner. It writes lines to our input, folder and processes, of which the last counts.

    Most processes end with the owner, but two of Ray's helpers would stay for minutes.
    """
    lines = list(sys.stdin)
    if lines:
        time.sleep(GUARD_SECONDS)
        folder, children = json.loads(lines[-1])
        kill_processes(Path(folder), set(map(tuple, children)))
        remove_folder(Path(folder))


if __name__ == "__main__":
    guard()
