"""Groups of runs → what one does better than another, and how sure that is. Pure: no files, no plots.

    compare(groups, at="steps", metric="return", threshold=None, ranges=None) -> Comparison

Scores are taken at the same place of all runs: the horizon, where the shortest of them ends, or later where another has
no value yet; a run that is over keeps its last. The statistics are those of rliable (interquartile mean, stratified
bootstrap, probability of improvement, performance profiles).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.bench.files import Floats, number_of
from paceline.bench.groups import Group
from paceline.bench.study import RunData, solved_at
from paceline.config import UserError
from paceline.stats import (
    bootstrap_interval,
    improvement_interval,
    iqm,
    performance_profile,
    probability_of_improvement,
    profile_interval,
    stratified_bootstrap_interval,
)

AXES = {"steps": "environment steps", "time": "wall seconds"}
RETURN, EVALUATION = "return", "eval"
POINTS = 101
"""Of a mean curve, and thresholds of a profile."""


@dataclass(frozen=True)
class Estimate:
    """A figure over runs, with its 95 % bootstrap interval; without one where a single run is all there is."""

    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1


@dataclass(frozen=True)
class Reached:
    """When the return first reached the threshold: of the runs that did."""

    runs: int
    of: int
    steps: Estimate | None
    seconds: Estimate | None


@dataclass(frozen=True)
class Profile:
    thresholds: list[float]
    share: list[float]
    """Of the runs that score above each."""
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True)
class MeanCurve:
    """Over the runs of one task, up to the horizon; the interval is that of the mean."""

    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True)
class Result:
    """One group."""

    label: str
    key: dict[str, Any]
    names: list[str]
    """Of the runs that count."""
    counts: dict[str, int]
    """All its runs, by state."""
    scores: list[float]
    """At the horizon, a run each, in the order of `names`."""
    score: Estimate
    """Interquartile mean of these."""
    mean: float
    std: float | None
    """Over runs, N - 1 in the denominator: how much the seed decides."""
    area: Estimate
    """Mean height of the curve up to the horizon (before its first value, the least of any run): sample efficiency, or
    with `time` efficiency in time."""
    fall: float
    """Largest fall below what was reached before, mean over runs: stability."""
    last: Estimate
    """Mean of the scores at the end of each run."""
    steps_per_second: Estimate
    wall_seconds: Estimate
    env_steps: Estimate
    profile: Profile
    reached: Reached | None
    """None: no threshold is known."""
    curve: MeanCurve | None
    """None with several tasks."""
    time_split: dict[str, float]
    """Seconds of each part, mean over runs."""


@dataclass(frozen=True)
class Improvement:
    """How probably a run of `label` scores higher than one of `over`, in the same task."""

    label: str
    over: str
    probability: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    at: str
    metric: str
    unit: str
    """Of the scores."""
    tasks: list[str]
    horizon: dict[str, float]
    """By task, in steps or seconds."""
    threshold: float | None
    results: list[Result]
    """Of several tasks: over those that all groups have; empty if there are none."""
    improvements: list[Improvement]
    notes: list[str]
    """What a reader must know before believing the figures."""
    by_task: list[Comparison] = field(default_factory=list)
    """Where several tasks are compared by normalised scores: each by itself."""


def compare(
    groups: Sequence[Group],
    *,
    at: str = "steps",
    metric: str = RETURN,
    threshold: float | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Comparison:
    """`at`: steps or time, the axis on which the runs are brought to the same place. `metric`: return (mean of the last
    100 training episodes), eval (evaluations during training), or any column of `metrics.jsonl`; higher is better.
    `threshold`: None is the environment's own. `ranges`: by task, the values that count as 0 and 1; only with them may
    the runs be of several tasks. A UserError where there would be no common unit."""
    if at not in AXES:
        raise UserError(f"--at {at}: steps or time")
    used = [run for group in groups for run in group.used]
    if not used:
        raise UserError("no run has finished with figures, so there is nothing to compare; look at them with `status`")
    tasks = list(dict.fromkeys(run.task for run in used))
    mixed = len(tasks) > 1
    envs = {run.task: run.env for run in used}
    if mixed and ranges is None:
        raise UserError(
            f"the runs are of different tasks ({'; '.join(tasks)}), whose returns have no common unit: give runs of "
            "one, or --mixed for a table of each and normalised scores"
        )
    unknown = sorted({envs[task] for task in tasks if mixed and ranges is not None and task not in ranges})
    if unknown:
        raise UserError(
            f"no score range is known for {', '.join(unknown)}: give the values that count as 0 and 1, as in "
            f"--range {unknown[0]}=0,500"
        )
    scales = {task: (ranges or {})[task] if mixed else (0.0, 1.0) for task in tasks}
    series = {run.path: _series(run, metric, at, scales[run.task]) for run in used}
    silent = [run.name for run in used if not series[run.path][0].size]
    if silent:
        more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
        why = "no return, as no episode ended or none was a number," if metric == RETURN else f"no {metric}"
        raise UserError(f"there is {why} in {', '.join(silent[:5])}{more}: leave them out, or give another --metric")
    horizon, floor = {}, {}
    for task in tasks:
        of_task = [series[run.path] for run in used if run.task == task]
        horizon[task] = max(min(float(x[-1]) for x, _ in of_task), max(float(x[0]) for x, _ in of_task))
        floor[task] = min(float(y[0]) for _, y in of_task)
    limit = (
        threshold if threshold is not None or mixed or metric not in (RETURN, EVALUATION) else solved_at(used[0].env)
    )
    # Of several tasks together, those that all groups have: an easy one that some lack would decide between them.
    shared = [task for task in tasks if all(task in _tasks(group) for group in groups if group.used)]
    scored = [group for group in (_only(groups, shared) if mixed else groups) if group.used]
    parts = [_measure(group, series, horizon) for group in scored]
    scores = [0.0, *(float(value) for part in parts for values in part.values() for value in values)]
    thresholds = np.linspace(min(scores), max(scores[1:], default=0.0), POINTS)
    results = [
        _result(group, part, series, horizon, floor, thresholds, limit, at, mixed)
        for group, part in zip(scored, parts, strict=True)
    ]
    return Comparison(
        at=at,
        metric=metric,
        unit="normalised score" if mixed else "return" if metric in (RETURN, EVALUATION) else metric,
        tasks=tasks,
        horizon=horizon,
        threshold=limit,
        results=results,
        improvements=_improvements(results, parts),
        notes=[*_lacking(groups, tasks, shared), *_notes(groups, used, at, horizon, series)],
        by_task=[compare(_only(groups, [task]), at=at, metric=metric, threshold=threshold) for task in tasks if mixed],
    )


_Strata = dict[str, Floats]
_Series = tuple[Floats, Floats]


def _series(run: RunData, metric: str, at: str, scale: tuple[float, float]) -> _Series:
    """Where there are values: x on the axis, and the value, normalised."""
    steps, seconds = run.curve.steps, run.curve.seconds
    if metric == EVALUATION:
        rows = [row for row in run.evaluations if row.get("kind") is None]
        x, y = (np.array([number_of(row.get(name)) for row in rows]) for name in ("env_steps", "return_mean"))
        x = np.interp(x, steps, seconds) if at == "time" and x.size else x
    else:
        x, y = steps if at == "steps" else seconds, run.column("return_mean" if metric == RETURN else metric)
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], (y[known] - scale[0]) / (scale[1] - scale[0])


def _measure(group: Group, series: Mapping[Any, _Series], horizon: Mapping[str, float]) -> _Strata:
    """Scores at the horizon by task."""
    found: dict[str, list[float]] = {}
    for run in group.used:
        found.setdefault(run.task, []).append(float(np.interp(horizon[run.task], *series[run.path])))
    return {task: np.array(values) for task, values in found.items()}


def _result(
    group: Group,
    strata: _Strata,
    series: Mapping[Any, _Series],
    horizon: Mapping[str, float],
    floor: Mapping[str, float],
    thresholds: Floats,
    limit: float | None,
    at: str,
    mixed: bool,
) -> Result:
    runs = sorted(group.used, key=lambda run: list(strata).index(run.task))  # the order of the scores
    values = list(strata.values())
    scores = np.concatenate(values)
    several = min(map(len, values)) > 1
    ends_of_tasks = np.cumsum([len(each) for each in values])[:-1]
    low, high = stratified_bootstrap_interval(values) if several else (None, None)
    ends = profile_interval(values, thresholds) if several else None
    curves = [series[run.path] for run in runs]
    grids = [np.linspace(0.0, horizon[run.task], POINTS) for run in runs]
    # A run that has no value yet has nothing to show: the least that any run began with.
    heights = [
        np.interp(grid, x, y, left=floor[run.task]) for run, grid, (x, y) in zip(runs, grids, curves, strict=True)
    ]

    def over(each: Sequence[float]) -> Estimate:
        """Of a figure by run."""
        return estimate(*np.split(np.array(each, np.float64), ends_of_tasks))

    return Result(
        label=group.label,
        key=group.key,
        names=[run.name for run in runs],
        counts={state: group.count(state) for state in dict.fromkeys(run.state for run in group.runs)},
        scores=[float(score) for score in scores],
        score=Estimate(iqm(scores), low, high, len(scores)),
        mean=float(scores.mean()),
        std=float(scores.std(ddof=1)) if len(scores) > 1 else None,
        area=over([float(np.trapezoid(each) / (POINTS - 1)) for each in heights]),
        fall=float(np.mean([float((np.maximum.accumulate(y) - y).max()) for _, y in curves])),
        last=over([float(y[-1]) for _, y in curves]),
        steps_per_second=over([run.steps_per_second for run in runs]),
        wall_seconds=over([run.wall_seconds for run in runs]),
        env_steps=over([float(run.env_steps) for run in runs]),
        profile=Profile(
            [float(each) for each in thresholds],
            performance_profile(values, thresholds).tolist(),
            None if ends is None else ends[0].tolist(),
            None if ends is None else ends[1].tolist(),
        ),
        reached=None if limit is None or mixed else _reached(runs, curves, limit, at),
        curve=None if mixed else _mean_curve(grids[0], np.array(heights), max(float(x[0]) for x, _ in curves)),
        time_split=mean_split(runs),
    )


def estimate(*tasks: Sequence[float] | Floats) -> Estimate:
    """Mean over runs, those of each task resampled by themselves; values that are not finite do not count."""
    strata = [known for values in tasks if (known := [float(value) for value in values if math.isfinite(value)])]
    if not strata:
        return Estimate(math.nan, runs=0)
    together, low, high = [value for values in strata for value in values], None, None
    if min(map(len, strata)) > 1:
        many = len(strata) > 1
        low, high = stratified_bootstrap_interval(strata, np.mean) if many else bootstrap_interval(together)
    return Estimate(float(np.mean(together)), low, high, len(together))


def mean_split(runs: Sequence[RunData]) -> dict[str, float]:
    splits = [run.time_split for run in runs if run.time_split]
    parts = dict.fromkeys(part for split in splits for part in split)
    return {part: float(np.mean([split.get(part, 0.0) for split in splits])) for part in parts}


def first_reach(run: RunData, series: _Series, threshold: float, at: str) -> tuple[float, float] | None:
    """(env steps, wall seconds) of the first row at or above the threshold."""
    x, y = series
    above = np.flatnonzero(y >= threshold)
    if not above.size:
        return None
    here, curve = float(x[above[0]]), run.curve
    if at == "steps":
        return here, float(np.interp(here, curve.steps, curve.seconds))
    return float(np.interp(here, curve.seconds, curve.steps)), here


def _reached(runs: Sequence[RunData], curves: Sequence[_Series], limit: float, at: str) -> Reached:
    pairs = [first_reach(run, series, limit, at) for run, series in zip(runs, curves, strict=True)]
    found = [pair for pair in pairs if pair is not None]
    if not found:
        return Reached(0, len(runs), None, None)
    return Reached(len(found), len(runs), estimate([steps for steps, _ in found]), estimate([s for _, s in found]))


def _mean_curve(grid: Floats, heights: Floats, begin: float) -> MeanCurve:
    """From where all runs have a value."""
    keep = grid >= min(begin, float(grid[-1]))
    x, values = grid[keep], heights[:, keep]
    if len(values) == 1:
        return MeanCurve(x.tolist(), values[0].tolist(), None, None)
    rng = np.random.default_rng(0)
    picks = rng.integers(len(values), size=(2000, len(values)))
    drawn = values[picks].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return MeanCurve(x.tolist(), values.mean(axis=0).tolist(), low.tolist(), high.tolist())


def _improvements(results: Sequence[Result], parts: Sequence[_Strata]) -> list[Improvement]:
    found = []
    for number, (result, mine) in enumerate(zip(results, parts, strict=True)):
        for other, theirs in list(zip(results, parts, strict=True))[number + 1 :]:
            x, y = list(mine.values()), [theirs[task] for task in mine]
            several = min(map(len, [*x, *y])) > 1
            low, high = improvement_interval(x, y) if several else (None, None)
            found.append(Improvement(result.label, other.label, probability_of_improvement(x, y), low, high))
    return found


def _tasks(group: Group) -> Counter[str]:
    """Of the runs that count."""
    return Counter(run.task for run in group.used)


def _only(groups: Sequence[Group], tasks: Sequence[str]) -> list[Group]:
    """The groups as far as they are of these tasks."""
    held = [(group, [run for run in group.runs if run.task in tasks]) for group in groups]
    return [Group(group.label, group.key, runs) for group, runs in held if runs]


def _lacking(groups: Sequence[Group], tasks: Sequence[str], shared: Sequence[str]) -> list[str]:
    """What it means for figures of several tasks together that some groups have no run of some of them."""
    lacks = {group.label: [task for task in tasks if task not in _tasks(group)] for group in groups if group.used}
    notes = [f"{label}: no finished run of {'; '.join(missing)}" for label, missing in lacks.items() if missing]
    over = f"figures of several tasks together are of {'; '.join(shared)} alone, which all groups have"
    return [*notes, over if shared else "no task is one of all groups: nothing is scored together"] if notes else []


def _notes(
    groups: Sequence[Group],
    used: Sequence[RunData],
    at: str,
    horizon: Mapping[str, float],
    series: Mapping[Any, _Series],
) -> list[str]:
    notes = [f"{group.label}: no finished run, so no figures" for group in groups if not group.used]
    longest = {task: max(float(series[run.path][0][-1]) for run in used if run.task == task) for task in horizon}
    for task, end in horizon.items():
        if longest[task] > 1.1 * end:
            notes.append(
                f"{task}: scores are compared at {end:,.0f} {AXES[at]}, where the shortest run ends or, if later, all "
                f"have a value; the longest has {longest[task]:,.0f}"
            )
    versions = sorted({run.version or "unknown" for run in used})
    if len(versions) > 1:
        notes.append(f"made by different versions of paceline: {', '.join(versions)}")
    machines = sorted({f"{run.provenance.get('cpu_model')}, {run.provenance.get('cores')} cores" for run in used})
    if len(machines) > 1:
        notes.append(f"times and steps/s are of different machines: {'; '.join(machines)}")
    single = [group.label for group in groups if 1 in _tasks(group).values()]
    if single:
        notes.append(f"one run alone, so no interval: {'; '.join(single)}")
    return notes
