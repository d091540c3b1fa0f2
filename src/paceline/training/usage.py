"""Memory and CPU time of all processes of a run, including earlier processes of a resumed one."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from paceline import machine
from paceline.machine import Usage
from paceline.training.engine import Engine

SAMPLE_SECONDS = 2.0  # how often they are read


class UsageMeter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.memory = self.peak_memory = 0
        self.cpu_percent: float | None = None
        self.other_cpu_percent: float | None = None
        """CPU use of other programs on the machine of the command; 100 is one core."""
        self._total = self._stepping = Usage()  # since the start of training
        self._start, self._start_stepping, self._began = Usage(), Usage(), (0.0, 0.0)
        self._earlier, self._earlier_stepping = Usage(), Usage()  # of the processes that this run resumes
        self._is_stepping_known = False
        self._next = -math.inf

    def begin(self) -> None:
        self._start = self._engine.usage()
        self._start_stepping = self._engine.stepping_usage(self._start) or Usage()
        self._began = (time.perf_counter(), machine.busy_seconds())

    def sample(self, *, force: bool = False) -> bool:
        """Read them, if that is due: it takes milliseconds, so not every iteration. Returns whether it did."""
        now = time.perf_counter()
        if not force and now < self._next:
            return False
        total = self._engine.usage()
        stepping = self._engine.stepping_usage(total)
        self._is_stepping_known = stepping is not None
        self.memory, self._total = total.memory_bytes, total.since(self._start)
        self._stepping = (stepping or Usage()).since(self._start_stepping)
        others = machine.busy_seconds() - self._began[1] - self._total.cpu_seconds
        # Reading many processes is slow: spend at most 1 % of the time on it.
        self._next = now + max(SAMPLE_SECONDS, 100 * (time.perf_counter() - now))
        self.peak_memory = max(self.peak_memory, self.memory)
        elapsed = now - self._began[0]
        self.cpu_percent = 100.0 * self._total.cpu_seconds / elapsed if elapsed > 0 else None
        self.other_cpu_percent = 100.0 * max(0.0, others) / elapsed if elapsed > 0 else None
        return True

    @property
    def cpu_seconds(self) -> float:
        return self._earlier.cpu_seconds + self._total.cpu_seconds

    @property
    def stepping(self) -> Usage | None:
        """Of the processes that step environments, if it is known."""
        return self._earlier_stepping.plus(self._stepping) if self._is_stepping_known else None

    @property
    def other_share(self) -> float | None:
        """Share of the cores of the machine that other programs use."""
        used = self.other_cpu_percent
        return None if used is None else used / 100.0 / (os.cpu_count() or 1)

    def state(self) -> dict[str, Any]:
        stepping = self.stepping or Usage()
        return {
            "peak_memory_bytes": self.peak_memory,
            "cpu_seconds": self.cpu_seconds,
            "stepping_seconds": [stepping.cpu_seconds, stepping.waited_seconds],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.peak_memory = state["peak_memory_bytes"]
        self._earlier = Usage(0, state["cpu_seconds"])
        self._earlier_stepping = Usage(0, *state.get("stepping_seconds", (0.0, 0.0)))  # older runs lack it
