"""Time accounting. The parts add up to the wall time; `idle` is what no other part measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PARTS = ("start", "env", "act", "learn", "sync", "eval", "save", "idle")


class Clock:
    """Seconds by part since the command began, including earlier processes of a resumed run."""

    def __init__(self, began: float, before: dict[str, float] | None = None) -> None:
        """`began`: `time.perf_counter()` at the start of the command. `before`: the split of earlier processes."""
        self.began = began
        self.parts = dict.fromkeys(PARTS, 0.0) | (before or {})
        self._before = sum(self.parts.values())

    def ready(self) -> None:
        """Set-up is done: training begins."""
        self.parts["start"] += time.perf_counter() - self.began

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds

    def add_split(self, seconds: Mapping[str, float], share: float = 1.0) -> None:
        """Add the seconds of several parts, each multiplied by `share`."""
        for part, spent in seconds.items():
            self.parts[part] += share * spent

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.parts[part] += time.perf_counter() - before

    def split(self, wall_seconds: float | None = None) -> dict[str, float]:
        """The parts of the wall time, read now unless it is given."""
        parts = dict(self.parts)
        wall_seconds = self.wall_seconds if wall_seconds is None else wall_seconds
        parts["idle"] += max(0.0, wall_seconds - sum(parts.values()))
        return parts

    @property
    def wall_seconds(self) -> float:
        return self._before + time.perf_counter() - self.began

    @property
    def train_seconds(self) -> float:
        """Wall time without set-up."""
        return self.wall_seconds - self.parts["start"]
