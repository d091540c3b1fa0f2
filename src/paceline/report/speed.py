"""Groups that differ in their number of workers → what more of them brought."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench import laws
from paceline.bench.comparison import Estimate, estimate
from paceline.bench.groups import Group, differences
from paceline.bench.study import RunData

_SIZE = ("workers", "nodes", "engine", "seed")
# What may grow with the workers: by hand in weak scaling, or where `auto` chose it.
_MAY_GROW = ("env.envs_per_worker", "stop.total_steps", "ppo.minibatch_size")


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
    """Of groups of one task. Any setting that differs makes another kind, but for the few that follow from the number
    of workers."""
    held = [group for group in groups if group.used]
    kinds = _by(held, [key for key in _differing(held) if key not in (*_SIZE, *_MAY_GROW)])
    of_engines = [members for kind in kinds for members in _by_engine(kind)]
    alike = [members for one in of_engines for members in _by(one, _telling(one))]
    scaled = [members for members in alike if len({group.used[0].workers for group in members}) > 1]
    found = [_family(members) for members in scaled]
    names = [family.label for family in found]
    return [replace(one, label=one.points[-1].group.label) if names.count(one.label) > 1 else one for one in found]


def _differing(groups: Sequence[Group]) -> dict[str, list[Any]]:
    return differences([group.used[0] for group in groups])


def _by(groups: Sequence[Group], keys: Sequence[str]) -> list[list[Group]]:
    """Together where the values of all `keys` are the same."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        values = [group.used[0].value(key) for key in keys]
        found.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(group)
    return list(found.values())


def _by_engine(groups: Sequence[Group]) -> list[list[Group]]:
    """Each engine by itself. One local process is what more of them are compared with on Ray, unless that has one
    worker, too: so it is with `--engine auto`."""
    engines = {members[0].used[0].engine: members for members in _by(groups, ["engine"])}
    if "ray" in engines and all(group.used[0].workers > 1 for group in engines["ray"]):
        engines["ray"] = [*engines.pop("local", []), *engines["ray"]]
    return list(engines.values())


def _telling(groups: Sequence[Group]) -> list[str]:
    """Of the settings that may grow with the workers those that do not: they differ with as many. A minibatch may
    grow with its rollout, and no other way."""
    grown = [key for key in _differing(groups) if key in _MAY_GROW]
    by_size = _by(groups, ["workers", "nodes"])
    telling = {key for key in grown if any(len(_by(members, [key])) > 1 for members in by_size)}
    if "ppo.minibatch_size" in grown and len({_minibatches(group.used[0]) for group in groups}) > 1:
        telling.add("ppo.minibatch_size")
    return sorted(telling)


def _minibatches(run: RunData) -> float | None:
    """Of a rollout."""
    sizes = [run.value(key) for key in ("env.envs_per_worker", "ppo.rollout_steps", "ppo.minibatch_size")]
    if not all(isinstance(size, int | float) and size > 0 for size in sizes):
        return None
    return float(sizes[0] * sizes[1] / sizes[2])


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
    check = laws.check(law, samples)
    off = check.error if check is not None else 0.0
    return Family(
        label=f"{run.algo}, {run.engine}" + (", weak" if weak else ""),
        points=points,
        fit=laws.fit(law, samples),
        check=check,
        prediction=laws.predict(law, samples, 2 * max(samples), off),
    )


def _scaled(one: Estimate, by: float) -> Estimate:
    low, high = (None if end is None else end * by for end in (one.low, one.high))
    return Estimate(one.value * by, low, high, one.runs)
