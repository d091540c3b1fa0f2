"""Groups that differ in their number of workers → what more of them brought."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.comparison import Estimate
from paceline.bench.groups import Group, differences

RESAMPLES = 2000
_DECIDED_BY_SIZE = ("workers", "nodes", "seed")


@dataclass(frozen=True)
class Point:
    group: Group
    workers: int
    speed: Estimate
    """Steps per second of training time."""
    speed_up: Estimate
    """Over the fewest workers."""
    efficiency: Estimate
    """Speed-up over how many times the workers."""


@dataclass(frozen=True)
class Family:
    """Groups alike in all that does not follow from the number of workers, the fewest first."""

    label: str
    points: list[Point]


def families(groups: Sequence[Group]) -> list[Family]:
    """Of groups of one task. A setting that differs counts as another kind unless the number of workers decides it, as
    it does the engine in `--engine auto` and the environments of each worker in strong scaling."""
    held = [group for group in groups if group.used]
    found: dict[str, list[Group]] = {}
    for algo in dict.fromkeys(group.used[0].algo for group in held):
        alike = [group for group in held if group.used[0].algo == algo]
        telling = _telling(alike)
        for number, group in enumerate(alike):
            kind = {key: values[number] for key, values in telling.items()}
            found.setdefault(json.dumps([algo, kind], sort_keys=True, default=str), []).append(group)
    scaled = [members for members in found.values() if len({group.used[0].workers for group in members}) > 1]
    return [_family(members) for members in scaled]


def _telling(groups: list[Group]) -> dict[str, list[Any]]:
    """The settings that differ between groups of the same number of workers."""
    firsts = [group.used[0] for group in groups]
    differing = {key: values for key, values in differences(firsts).items() if key not in _DECIDED_BY_SIZE}
    telling = {}
    for key, values in differing.items():
        by_size: dict[Any, set[str]] = {}
        for run, value in zip(firsts, values, strict=True):
            by_size.setdefault((run.workers, run.nodes), set()).add(json.dumps(value, default=str))
        if any(len(each) > 1 for each in by_size.values()):
            telling[key] = values
    return telling


def _family(members: list[Group]) -> Family:
    members = sorted(members, key=lambda group: (group.used[0].workers, group.used[0].nodes))
    speeds = [np.array([run.steps_per_second for run in group.used]) for group in members]
    base, fewest = speeds[0], members[0].used[0].workers
    points = []
    for number, (group, values) in enumerate(zip(members, speeds, strict=True)):
        workers = group.used[0].workers
        low, high = (1.0, 1.0) if number == 0 else _ratio_interval(values, base)
        ratio, more = float(values.mean() / base.mean()), workers / fewest
        speed_up = Estimate(ratio, low, high, len(values))
        efficiency = Estimate(
            ratio / more, None if low is None else low / more, None if high is None else high / more, len(values)
        )
        points.append(Point(group, workers, _mean(values), speed_up, efficiency))
    run = members[-1].used[0]
    return Family(f"{run.algo}, {run.engine}", points)


def _mean(values: Any) -> Estimate:
    if len(values) == 1:
        return Estimate(float(values[0]))
    drawn = values[np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high), len(values))


def _ratio_interval(values: Any, base: Any) -> tuple[float | None, float | None]:
    """Percentile bootstrap of the ratio of the means; both sides are resampled."""
    if len(values) < 2 or len(base) < 2:
        return None, None
    rng = np.random.default_rng(0)
    above = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    below = base[rng.integers(len(base), size=(RESAMPLES, len(base)))].mean(axis=1)
    low, high = np.quantile(above / below, [0.025, 0.975])
    return float(low), float(high)
