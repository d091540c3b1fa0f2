"""Memory and CPU time of all processes of a run, including earlier processes of a resumed one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

SAMPLE_SECONDS = 2.0  # how often they are read


class Usage:
    def __init__(self, read: Callable[[], tuple[int, float]]) -> None:
        """`read`: see `Engine.usage`."""
        self._read = read
        self.memory = self.peak_memory = 0
        self.cpu_percent: float | None = None
        self._mark = (0.0, 0.0)  # CPU seconds and time at the start of training
        self._before = self._now = 0.0
        self._next = -math.inf

    def begin(self) -> None:
        self._now = self._read()[1]
        self._mark = (self._now, time.perf_counter())

    def sample(self, *, force: bool = False) -> bool:
        """Read them, if that is due: it takes milliseconds, so not every iteration. Returns whether it did."""
        now = time.perf_counter()
        if not force and now < self._next:
            return False
        self.memory, self._now = self._read()
        # Reading many processes is slow: spend at most 1 % of the time on it.
        self._next = now + max(SAMPLE_SECONDS, 100 * (time.perf_counter() - now))
        self.peak_memory = max(self.peak_memory, self.memory)
        elapsed = now - self._mark[1]
        self.cpu_percent = 100.0 * (self._now - self._mark[0]) / elapsed if elapsed > 0 else None
        return True

    @property
    def cpu_seconds(self) -> float:
        return self._before + self._now - self._mark[0]

    def state(self) -> dict[str, Any]:
        return {"peak_memory_bytes": self.peak_memory, "cpu_seconds": self.cpu_seconds}

    def restore(self, state: dict[str, Any]) -> None:
        self.peak_memory, self._before = state["peak_memory_bytes"], state["cpu_seconds"]
