"""Find groups that differ only in their number of workers, and compute their speed-up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import algorithm_name
from paceline.results import scaling_laws as laws
from paceline.results.estimates import Estimate, mean_estimate, ratio_estimate
from paceline.results.groups import RunGroup, differences
from paceline.results.runs import RunData

_SIZE = ("workers", "nodes", "engine", "seed")
# Settings that may grow with the workers: set by hand in weak scaling, or chosen by `auto`.
_MAY_GROW = ("env.envs_per_worker", "stop.total_steps", "ppo.minibatch_size")


@dataclass(frozen=True)
class ScalingPoint:
    group: RunGroup
    workers: int
    speed: Estimate
    """Steps per second of training time."""
    speed_up: Estimate
    """Speed over that with the fewest workers."""
    efficiency: Estimate
    """Speed-up over the growth of the workers."""


@dataclass(frozen=True)
class ScalingSeries:
    """Groups that differ only in their number of workers and what follows from it; the fewest workers first."""

    label: str
    points: list[ScalingPoint]
    fit: laws.LawFit | None
    """Amdahl's law, or Gustafson's if the work grows with the workers."""
    check: laws.HeldOutCheck | None
    prediction: laws.Prediction | None
    """For twice the most workers."""


def scaling_series(groups: Sequence[RunGroup]) -> list[ScalingSeries]:
    """The series among groups of one task. Any setting that differs starts another series, except the few that may
    grow with the workers."""
    held = [group for group in groups if group.used]
    kinds = _by(held, [key for key in _differing(held) if key not in (*_SIZE, *_MAY_GROW)])
    by_engine = [members for kind in kinds for members in _by_engine(kind)]
    alike = [members for one in by_engine for members in _by(one, _constant_settings(one))]
    scaled = [members for members in alike if len({group.used[0].workers for group in members}) > 1]
    found = [_series(members) for members in scaled]
    names = [series.label for series in found]
    return [replace(one, label=one.points[-1].group.label) if names.count(one.label) > 1 else one for one in found]


def _differing(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    return differences([group.used[0] for group in groups])


def _by(groups: Sequence[RunGroup], keys: Sequence[str]) -> list[list[RunGroup]]:
    """Groups with the same values of all `keys`."""
    found: dict[str, list[RunGroup]] = {}
    for group in groups:
        values = [group.used[0].value(key) for key in keys]
        found.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(group)
    return list(found.values())


def _by_engine(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """One list per engine. If Ray has no run with one worker, as under `--engine auto`, a local run is its base."""
    engines = {members[0].used[0].engine: members for members in _by(groups, ["engine"])}
    if "ray" in engines and all(group.used[0].workers > 1 for group in engines["ray"]):
        engines["ray"] = [*engines.pop("local", []), *engines["ray"]]
    return list(engines.values())


def _constant_settings(groups: Sequence[RunGroup]) -> list[str]:
    """Those of `_MAY_GROW` that differ although the number of workers is the same. A minibatch may only grow together
    with its rollout."""
    differing = [key for key in _differing(groups) if key in _MAY_GROW]
    by_size = _by(groups, ["workers", "nodes"])
    found = {key for key in differing if any(len(_by(members, [key])) > 1 for members in by_size)}
    if "ppo.minibatch_size" in differing and len({_minibatches(group.used[0]) for group in groups}) > 1:
        found.add("ppo.minibatch_size")
    return sorted(found)


def _minibatches(run: RunData) -> float | None:
    """Minibatches per rollout."""
    sizes = [run.value(key) for key in ("env.envs_per_worker", "ppo.rollout_steps", "ppo.minibatch_size")]
    if not all(isinstance(size, int | float) and size > 0 for size in sizes):
        return None
    return float(sizes[0] * sizes[1] / sizes[2])


def _series(members: list[RunGroup]) -> ScalingSeries:
    members = sorted(members, key=lambda group: (group.used[0].workers, group.used[0].nodes))
    speeds = [[run.steps_per_second for run in group.used] for group in members]
    fewest = members[0].used[0].workers
    points, samples = [], dict[int, list[float]]()
    for group, values in zip(members, speeds, strict=True):
        workers = group.used[0].workers
        samples.setdefault(workers, values)  # with several numbers of nodes, the fewest
        gain = Estimate(1.0, 1.0, 1.0, len(values)) if group is members[0] else ratio_estimate(values, speeds[0])
        points.append(ScalingPoint(group, workers, mean_estimate(values), gain, gain.scaled(fewest / workers)))
    run = members[-1].used[0]
    weak = run.value("engine.scaling") == "weak"
    law = laws.GUSTAFSON if weak else laws.AMDAHL
    ahead = laws.forecast(law, samples)
    return ScalingSeries(
        label=f"{algorithm_name(run.algo)}, {run.engine}" + (", weak" if weak else ""),
        points=points,
        fit=laws.fit(law, samples),
        check=ahead.check,
        prediction=ahead.prediction,
    )
