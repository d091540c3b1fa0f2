"""The report of `paceline envs check`, and short texts for values, spaces and errors."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from paceline.config import printable


@dataclass(repr=False)
class CheckReport:
    id: str
    problems: list[str] = field(default_factory=list)
    """Violations of the API: training would fail or learn from wrong data."""
    warnings: list[str] = field(default_factory=list)
    """What would make a run slow, unrepeatable or hard to learn."""
    steps_per_second: float = math.nan
    """Of one instance, including resets."""
    reset_share: float = math.nan
    """The share of that time spent in `reset`."""
    spaces: list[str] = field(default_factory=list)
    episode: list[tuple[str, ...]] = field(default_factory=list)
    """A random episode: step, action, observation, reward, end."""

    def __repr__(self) -> str:
        return self.text()

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def text(self) -> str:
        lines = [self.id, *(f"  {line}" for line in self.spaces)]
        if self.episode:
            rows = [("step", "action", "observation", "reward", "end"), *self.episode]
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            lines += ["", "A random episode:"]
            lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if not math.isnan(self.steps_per_second):
            lines += ["", f"{self.steps_per_second:,.0f} steps/s, {self.reset_share:.0%} of the time in reset"]
        for title, entries in (("Problems", self.problems), ("Warnings", self.warnings)):
            lines += ["", f"{title}:", *(f"  - {entry}" for entry in entries)] if entries else []
        verdict = f"{len(self.problems)} problem(s): not ready to train on" if self.problems else "ready to train on"
        return printable("\n".join([*lines, "", f"{self.id}: {verdict}"]))


def short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(short, value)) + ")"
    if isinstance(value, np.ndarray):
        if value.size > 8:
            return f"{value.dtype}{list(value.shape)} {value.min():.3g}..{value.max():.3g}"
        return "[" + " ".join(map(short, value.ravel().tolist())) + "]"
    return f"{value:.3g}" if isinstance(value, float | np.floating) else str(value)[:60]


def short_space(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Dict):
        return "Dict(" + ", ".join(f"{key}: {short_space(part)}" for key, part in space.spaces.items()) + ")"
    if isinstance(space, spaces.Tuple):
        return "Tuple(" + ", ".join(map(short_space, space.spaces)) + ")"
    if isinstance(space, spaces.Box) and not space.low.size:
        return f"Box{list(space.shape)} of {space.dtype}, empty"
    if isinstance(space, spaces.Box):
        return f"Box{list(space.shape)} of {space.dtype} in {space.low.min():.3g}..{space.high.max():.3g}"
    return str(space)


def describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
