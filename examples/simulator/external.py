"""A program that is asked by lines of JSON, with a time limit on every answer. It knows nothing of environments."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import IO, Any, NoReturn

CLOSE_SECONDS = 2.0
LAST_WORDS = 2000


class SimulatorLost(Exception):
    """It died, or did not answer in time, or answered nonsense. It was ended; the next request starts a new one."""


class Simulator:
    def __init__(self, command: Sequence[str], *, answer_seconds: float, start_seconds: float = 60.0) -> None:
        """Starts nothing yet: that is done by the first request, in the process that makes it.

        `start_seconds`: allowed to the first answer in addition, for loading a mesh or a licence.
        """
        self.command = list(command)
        self.answer_seconds, self.start_seconds = answer_seconds, start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Other lines that the program prints, not beginning with `{`, are passed over."""
        seconds = self.answer_seconds
        if self._process is None:
            self._start()
            seconds += self.start_seconds
        deadline = time.monotonic() + seconds
        self._write(json.dumps(request).encode() + b"\n", deadline, seconds)
        while not (line := self._read_line(deadline, seconds)).startswith(b"{"):
            pass
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self._lose(f"it answered {line[:80]!r}, which is not JSON")
        return answer

    def close(self) -> None:
        """The end of its input is the sign to go; whoever does not is killed, with the processes it has started."""
        if self._process is not None:
            self._process = None
            self._forget()

    def _start(self) -> None:
        self._unread = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as the program runs
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,  # not a pipe: one that nobody reads fills up and stops the program
                bufsize=0,
                start_new_session=True,  # a group of its own, so that it can be ended with all that it starts
            )
        except OSError as error:
            self._errors.close()
            raise SimulatorLost(f"it cannot be started: {error.strerror}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._forget = weakref.finalize(
            self, _end, self._process, self._errors, os.getpid()
        )  # at the exit at the latest

    def _write(self, unsent: bytes, deadline: float, seconds: float) -> None:
        """A pipe holds 64 KiB: what is longer waits for the program to read, and that has a limit too."""
        assert self._process is not None and self._process.stdin is not None
        while unsent:
            with selectors.DefaultSelector() as ready:
                ready.register(self._process.stdin, selectors.EVENT_WRITE)
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    self._lose(f"it has read no request in {seconds:g} s")
            try:
                unsent = unsent[os.write(self._process.stdin.fileno(), unsent) :]
            except OSError:  # nobody reads it
                self._lose("it has ended")

    def _read_line(self, deadline: float, seconds: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        while b"\n" not in self._unread:
            with selectors.DefaultSelector() as ready:
                ready.register(self._process.stdout, selectors.EVENT_READ)
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    self._lose(f"no answer in {seconds:g} s")
            part = os.read(self._process.stdout.fileno(), 2**16)
            if not part:
                self._lose("it has ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lose(self, reason: str) -> NoReturn:
        assert self._process is not None
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait(CLOSE_SECONDS)
        if reason == "it has ended":
            reason += f" by signal {-code}" if code < 0 else f" with exit code {code}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - LAST_WORDS))
        words = self._errors.read().decode(errors="replace").strip()
        self.close()
        raise SimulatorLost(f"{reason}; it last said: {words}" if words else reason)


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork has a copy of the handle, and no business with the program
        return
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(CLOSE_SECONDS)
    process.stdout.close()
    errors.close()
