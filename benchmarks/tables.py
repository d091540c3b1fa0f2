"""Measurements as rows that pass or fail, and rows as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, Literal

import numpy as np

from paceline.results.text import table
from paceline.stats import bootstrap_interval

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Row:
    """One bar. With a peer, the median ratio must reach `factor`; alone, our worst value must stay within `limit`."""

    job: str
    measure: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    better: Literal["lower", "higher"] = "lower"
    factor: float = 1.0
    limit: float = math.nan
    digits: int = 1
    floor_seconds: float | None = None
    times_floor: list[float] = field(default_factory=list)
    """Our training times, as multiples of the arithmetic floor."""
    by_chance: bool = False
    """The measure depends mostly on the seed: a worse median fails only if a permutation test confirms it."""
    problems: list[str] = field(default_factory=list)
    """Reasons why the comparison is invalid, such as less work than agreed."""

    @property
    def ratios(self) -> list[float]:
        """One ratio per pair, over 1 if ours is better. The two ran in turns, so a slow minute affected both."""
        return [ratio_of(peer, ours, self.better) for peer, ours in zip(self.peer, self.ours, strict=True)]

    @property
    def p_worse(self) -> float:
        """Permutation test: how often a random relabelling makes ours at least as much worse, by mean rank."""
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
            return median(self.ratios) >= self.factor or (self.by_chance and self.p_worse > SIGNIFICANT)
        return max(self.ours) < self.limit if self.better == "lower" else min(self.ours) > self.limit

    @property
    def bar(self) -> str:
        if self.peer:
            return f"≥ {self.factor:.3g}×"
        return f"{'<' if self.better == 'lower' else '>'} {number(self.limit, self.digits)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None is a run that did not reach the goal, or a missing limit."""
        content = {
            **asdict(self),
            "peer": _finite(self.peer),
            "ours": _finite(self.ours),
            "limit": _finite([self.limit])[0],
            "passed": self.passed,
        }
        if self.peer:
            content |= {"ratios": _finite(self.ratios), "ratio": _finite([median(self.ratios)])[0]}
            content["ratio_interval"] = interval_of(self.ratios)
        if self.by_chance:
            content["p_worse"] = self.p_worse
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Row:
        row = {each.name: content[each.name] for each in fields(cls)}
        never = -math.inf if row["better"] == "higher" else math.inf
        for side in ("peer", "ours"):
            row[side] = [never if value is None else value for value in row[side]]
        return cls(**{**row, "limit": math.nan if row["limit"] is None else row["limit"]})


def ratio_of(theirs: float, ours: float, better: str) -> float:
    """Over 1 if ours is better."""
    good, bad = (ours, theirs) if better == "lower" else (theirs, ours)
    if math.isinf(good):  # ours did not reach the goal
        return 0.0
    return bad / good if good else math.inf


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % bootstrap interval of the median; None with fewer than two values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return bootstrap_interval(values, np.median)


def ratio_text(values: Sequence[float]) -> str:
    """The median, and its interval."""
    between = interval_of(values)
    middle = median(values)
    text = "never" if math.isinf(middle) else f"{middle:.2f}×"
    return text if between is None else f"{text} ({between[0]:.2f}–{between[1]:.2f})"


def number(value: float, digits: int) -> str:
    return "never" if math.isinf(value) else f"{value:,.{digits}f}"


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return number(values[0], digits)
    low, high = number(min(values), digits), number(max(values), digits)
    return f"{number(median(values), digits)} ({low}–{high})"


def bars_table(rows: Iterable[Row], failures: dict[str, str]) -> str:
    """One line for each bar, and for each part that could not be measured."""
    rows = list(rows)
    header = ["job", "measure", "peer", "ours", "ratio (95 % interval)", "bar", "verdict"]
    floor = any(row.floor_seconds is not None for row in rows)
    lines = [
        [
            row.job,
            row.measure,
            spread(row.peer, row.digits),
            spread(row.ours, row.digits),
            ratio_text(row.ratios) if row.peer else "–",
            row.bar,
            ("pass" if row.passed else "**FAIL**")
            + (f" (p = {row.p_worse:.2f} for no difference)" if row.by_chance else "")
            + "".join(f"; {problem}" for problem in row.problems),
            *(["–" if row.floor_seconds is None else f"{row.floor_seconds:.2f}"] if floor else []),
            *(["–" if row.floor_seconds is None else ratio_text(row.times_floor)] if floor else []),
        ]
        for row in rows
    ]
    lines += [
        [part, "–", "–", "–", "–", "–", f"**not measured**: {reason.splitlines()[0]}", *["–"] * (2 * floor)]
        for part, reason in failures.items()
    ]
    return table([*header, *(["arithmetic floor, s", "ours, of the floor"] if floor else [])], lines)


def work_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """What each side did in each job, as medians."""

    def middle(records: list[dict[str, Any]], key: str, digits: int) -> str:
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
    return table(header, lines)


def commands(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The commands of the first seed, each once."""
    lines = [
        record["command"]
        for records in runs.values()
        for record in records
        if record["seed"] == min(each["seed"] for each in records)
    ]
    return list(dict.fromkeys(lines))


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
