"""Measurements as rows with a verdict, and rows as Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np

from measuring import Record

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Row:
    """One bar. With a peer the median ratio has to reach `factor`; alone, the worst of ours has to hold `limit`."""

    job: str
    measure: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    better: Literal["lower", "higher"] = "lower"
    factor: float = 1.0
    limit: float = math.nan
    digits: int = 1
    floor_seconds: float | None = None
    by_chance: bool = False
    """The measure is mostly the luck of the seed: a worse median fails only if a permutation test shows it is worse."""
    problems: list[str] = field(default_factory=list)
    """What makes the comparison void: less work done than agreed."""

    def _ratio(self, peer: float, ours: float) -> float:
        better, worse = (ours, peer) if self.better == "lower" else (peer, ours)
        if math.isinf(better):  # we did not get there
            return 0.0
        return worse / better if better else math.inf

    @property
    def ratio(self) -> float:
        return self._ratio(median(self.peer), median(self.ours))

    @property
    def worst_ratio(self) -> float:
        return min(self._ratio(peer, ours) for peer, ours in zip(self.peer, self.ours, strict=True))

    @property
    def p_worse(self) -> float:
        """How often a random relabelling of all runs makes ours at least as much worse as it was, by mean rank."""
        both = np.argsort(np.argsort([*self.peer, *self.ours])).astype(float)
        if self.better == "higher":
            both = -both
        n, rng = len(self.peer), np.random.default_rng(0)
        seen = both[n:].mean() - both[:n].mean()
        shuffled = np.array([rng.permutation(both) for _ in range(10_000)])
        return float((shuffled[:, n:].mean(axis=1) - shuffled[:, :n].mean(axis=1) >= seen).mean())

    @property
    def passed(self) -> bool:
        if self.problems:
            return False
        if self.peer:
            return self.ratio >= self.factor or (self.by_chance and self.p_worse > SIGNIFICANT)
        return max(self.ours) < self.limit if self.better == "lower" else min(self.ours) > self.limit

    @property
    def bar(self) -> str:
        if self.peer:
            return f"≥ {self.factor:g}×"
        return f"{'<' if self.better == 'lower' else '>'} {number(self.limit, self.digits)}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "measure": self.measure,
            "peer": finite(self.peer),
            "ours": finite(self.ours),
            "ratio": finite([self.ratio])[0] if self.peer else None,
            "worst_ratio": finite([self.worst_ratio])[0] if self.peer else None,
            "bar": self.bar,
            "floor_seconds": self.floor_seconds,
            "p_worse": self.p_worse if self.by_chance else None,
            "passed": self.passed,
            "problems": self.problems,
        }


def finite(values: list[float]) -> list[float | None]:
    """For JSON, which has no infinity: None is a run that did not get there."""
    return [value if math.isfinite(value) else None for value in values]


def number(value: float, digits: int) -> str:
    return "never" if math.isinf(value) else f"{value:,.{digits}f}"


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return number(values[0], digits)
    low, high = number(min(values), digits), number(max(values), digits)
    return f"{number(median(values), digits)} ({low}–{high})"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bars_table(rows: list[Row]) -> str:
    header = ["job", "measure", "peer", "ours", "ratio (worst pair)", "bar", "arithmetic floor, s", "verdict"]
    lines = [
        [
            row.job,
            row.measure,
            spread(row.peer, row.digits),
            spread(row.ours, row.digits),
            f"{row.ratio:.2f}× ({row.worst_ratio:.2f}×)" if row.peer else "–",
            row.bar,
            "–" if row.floor_seconds is None else f"{row.floor_seconds:.2f}",
            ("pass" if row.passed else "**FAIL**")
            + (f" (p = {row.p_worse:.2f} for no difference)" if row.by_chance else "")
            + "".join(f"; {problem}" for problem in row.problems),
        ]
        for row in rows
    ]
    return _markdown(header, lines)


def work_table(runs: dict[str, list[Record]]) -> str:
    """What each side did in each job, as medians."""

    def middle(records: list[Record], key: str, digits: int) -> str:
        values = [record[key] for record in records if record.get(key) is not None]
        return number(median(values), digits) if values else "–"

    lines = []
    for job, records in runs.items():
        for system in dict.fromkeys(record["system"] for record in records):
            of_system = [record for record in records if record["system"] == system]
            counts = [middle(of_system, key, 0) for key in ("env_steps", "optimizer_steps")]
            rest = [middle(of_system, "train_seconds", 2), middle(of_system, "return_last100", 1)]
            lines.append([job, system, str(len(of_system)), *counts, *rest])
    header = ["job", "system", "runs", "env steps", "optimizer steps", "training, s", "return, last 100 episodes"]
    return _markdown(header, lines)


def commands(runs: dict[str, list[Record]]) -> str:
    """The first command of each system in each job; the others differ in the seed."""
    lines = []
    for records in runs.values():
        first = {record["system"]: record["command"] for record in reversed(records)}
        lines += [first[system] for system in sorted(first)]
    return "```sh\n" + "\n".join(dict.fromkeys(lines)) + "\n```"
