"""Groups that differ in their number of workers → what more of them brought."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench import laws
from paceline.bench.comparison import Estimate, estimate
from paceline.bench.groups import Group, differences

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
    fit: laws.Fit | None
    """Of Amdahl's law; of Gustafson's where the work grows with the workers."""
    check: laws.Check | None
    prediction: laws.Prediction | None
    """For twice the most workers."""


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
    rates = [[run.steps_per_second for run in group.used] for group in members]
    fewest = members[0].used[0].workers
    points, samples = [], dict[int, list[float]]()
    for group, values in zip(members, rates, strict=True):
        workers = group.used[0].workers
        samples.setdefault(workers, values)  # of several numbers of nodes the fewest, which come first
        gain = Estimate(1.0, 1.0, 1.0, len(values)) if group is members[0] else laws.ratio(values, rates[0])
        points.append(Point(group, workers, estimate(values), gain, _scaled(gain, fewest / workers)))
    run = members[-1].used[0]
    weak = run.value("engine.scaling") == "weak"
    law = "gustafson" if weak else "amdahl"
    return Family(
        label=f"{run.algo}, {run.engine}" + (", weak" if weak else ""),
        points=points,
        fit=laws.fit(law, samples),
        check=laws.check(law, samples),
        prediction=laws.predict(law, samples, 2 * max(samples)),
    )


def _scaled(one: Estimate, by: float) -> Estimate:
    low, high = (None if end is None else end * by for end in (one.low, one.high))
    return Estimate(one.value * by, low, high, one.runs)
