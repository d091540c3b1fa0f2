"""Where the time goes. The parts add up to the wall time; what is not measured otherwise is `idle`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("start", "env", "act", "learn", "sync", "eval", "save", "idle")


class Clock:
    """Seconds of each part since the command began, those of earlier incarnations of the run included."""

    def __init__(self, began: float, before: dict[str, float] | None = None) -> None:
        self._began = began  # of time.perf_counter
        self.parts = dict.fromkeys(PARTS, 0.0) | (before or {})
        self._before = sum(self.parts.values())

    def ready(self) -> None:
        """Set-up is over, training begins."""
        self.parts["start"] += time.perf_counter() - self._began

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.parts[part] += time.perf_counter() - before

    def split(self) -> dict[str, float]:
        parts = dict(self.parts)
        parts["idle"] += max(0.0, self.wall_seconds - sum(parts.values()))
        return parts

    @property
    def wall_seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    @property
    def train_seconds(self) -> float:
        """Since training began: the wall time without the set-up."""
        return self.wall_seconds - self.parts["start"]
