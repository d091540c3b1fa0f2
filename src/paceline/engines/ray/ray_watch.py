"""Notices at once when a daemon of Ray on this host dies.

The workers die with the raylet, and the raylet with its agents. Without the GCS they go on for a minute, which is
enough to save the run. Ray itself may end this process, without a word, before anybody else learns of it.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

GCS = "GCS"
DAEMONS = {"raylet": "raylet", "gcs_server": GCS}
CLOSE_SECONDS = 5.0
WHY = "it was killed, perhaps for lack of memory. --resume continues from the last checkpoint"


class RayWatch:
    def __init__(self, raylet_socket: str, session: str) -> None:
        """`raylet_socket`, `session`: the socket of this host's raylet and the folder of its session."""
        self.failure: str | None = None
        """Which daemon died."""
        self.is_over = False
        """Whether all workers die with it."""
        self.on_failure: Callable[[str], None] | None = None
        """Called at once, in another thread: it may be the last thing that this process does."""
        self._pidfds = {fd: text for pid, text in _daemons(raylet_socket, session) if (fd := _open(pid)) is not None}
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._writer)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():  # else `on_failure` hangs, and the thread still reads them
            for fd in (self._reader, *self._pidfds):
                os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._reader, *self._pidfds):
            poll.register(fd, select.POLLIN)
        while True:
            died = [fd for fd, _ in poll.poll()]
            if self._reader in died:
                return
            for fd in died:
                poll.unregister(fd)
                if self.failure is None:
                    self.failure = f"Ray's {self._pidfds[fd]} died: {WHY}"
                    if self.on_failure is not None:
                        self.on_failure(self.failure)
                self.is_over |= GCS not in self._pidfds[fd]


def _daemons(raylet_socket: str, session: str) -> list[tuple[int, str]]:
    """The pids of raylet, its agents and the GCS, each with its name. The GCS runs on the head of the cluster only."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        name = DAEMONS.get(Path(words[0]).name)
        if name and any(raylet_socket in word or f"{session}/" in word for word in words):
            found.append((process.pid, f"{name} (process {process.pid})"))
            with suppress(psutil.Error):
                agents = [child.pid for child in process.children() if _is_agent(child)]
                found += [(pid, f"agent (process {pid})") for pid in agents]
    return found


def _is_agent(process: psutil.Process) -> bool:
    try:
        return "agent" in " ".join(process.cmdline()).lower()
    except psutil.Error:
        return False


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)  # of Linux
    except (AttributeError, OSError):
        return None
