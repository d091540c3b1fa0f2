"""Ends a run that cannot stop by itself in time: a simulator hangs, or the iteration is longer than the time left.

Python runs signal handlers in the main thread, between its own instructions, so a step that never returns delays them
for ever. `signal.set_wakeup_fd` tells this thread about a signal all the same. Only a simulator that blocks *and* keeps
the interpreter's lock stops this thread, too.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping

from paceline.config import UserError
from paceline.schedulers.scheduler import GRACE
from paceline.training.signals import ENDING
from paceline.training.stopping import DEADLINE_SECONDS, Deadline

GRACE_SECONDS = 30.0
"""Where nobody says: SLURM's default."""
EXIT_SECONDS = 2.0  # to end the process after the save
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # come before the end of an allocation, not before a kill
_END = b"\0"


def grace_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get(GRACE, "")
    try:
        seconds = float(text) if text else GRACE_SECONDS
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise UserError(f"{GRACE}={text}: expected the seconds between a signal and the kill that follows it")
    return seconds


class Watchdog:
    """Calls `end` with the reason, in a thread of its own, when the run must be saved at once. `save_seconds`: how
    long a save takes."""

    def __init__(
        self, end: Callable[[str], None], save_seconds: Callable[[], float], deadline: Deadline, grace: float
    ) -> None:
        self._end, self._save_seconds, self._deadline, self._grace = end, save_seconds, deadline, grace
        self._signal: tuple[int, float] | None = None  # the first one, and when it came
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            if self._left()[0] <= 0:
                self._deadline = Deadline({})  # already past: the run ends after its first iteration
            self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            signal.set_wakeup_fd(self._previous)
            os.write(self._writer, _END)
            self._thread.join()
            os.close(self._writer)
            os.close(self._reader)

    def _watch(self) -> None:
        while True:
            left, reason = self._left()
            if left <= 0:
                self._end(reason)
                return
            if not select.select([self._reader], [], [], None if left == math.inf else left)[0]:
                continue
            for number in os.read(self._reader, 64):
                if number == _END[0]:
                    return
                if number in ENDING and self._signal is None:
                    self._signal = number, time.monotonic()

    def _left(self) -> tuple[float, str]:
        """Seconds until the run must be saved, and why."""
        save = 2 * self._save_seconds()
        left = self._deadline.at - time.time() - save - DEADLINE_SECONDS / 2
        reason = "the allocation ends"
        if self._signal is not None:
            number, came = self._signal
            limit = came + self._grace - min(save + EXIT_SECONDS, self._grace / 2) - time.monotonic()
            if number not in WARNINGS or left == math.inf:
                left, reason = min(left, limit), f"{signal.Signals(number).name} received"
        return left, reason
