"""Compare groups of runs: which is better, and how sure that is. Pure: no files, no plots.

    compare(groups, at="steps", metric="return", threshold=None, ranges=None) -> Comparison

All scores are taken at the horizon: where the shortest run ends, or later if another run has no value yet. A run that
ended before keeps its last value. The statistics are those of rliable (interquartile mean, stratified bootstrap,
probability of improvement, performance profiles).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import UserError
from paceline.envs.solved import solved_return
from paceline.results.estimates import Estimate, mean_estimate, mean_time_split, ratio_estimate
from paceline.results.groups import RunGroup, groups_of_tasks
from paceline.results.run_files import Floats
from paceline.results.run_series import AXES, EVALUATION, RETURN, RunSeries, run_series
from paceline.results.runs import RunData
from paceline.stats import (
    improvement_interval,
    iqm,
    performance_profile,
    probability_of_improvement,
    profile_interval,
    stratified_bootstrap_interval,
)

FEW_RUNS = 5
"""A bootstrap over fewer runs than this gives intervals that are too narrow (Agarwal et al., 2021)."""
POINTS = 101
"""Points of a mean curve, and thresholds of a profile."""


@dataclass(frozen=True)
class ThresholdReached:
    """When the return first reached the threshold, over the runs that reached it."""

    runs: int
    of: int
    steps: Estimate | None
    seconds: Estimate | None


@dataclass(frozen=True)
class PerformanceProfile:
    thresholds: list[float]
    share: list[float]
    """Share of the runs that score above each threshold."""
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True)
class MeanCurve:
    """Mean over the runs of one task up to the horizon, and the interval of that mean."""

    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True)
class GroupResult:
    label: str
    key: dict[str, Any]
    names: list[str]
    """Names of the finished runs, which the figures are taken from."""
    counts: dict[str, int]
    """Number of runs by state."""
    scores: list[float]
    """Score of each run at the horizon, in the order of `names`."""
    score: Estimate
    """Interquartile mean of the scores."""
    mean: float
    std: float | None
    """Standard deviation over runs (N - 1): how much the seed matters."""
    area: Estimate
    """Mean height of the curve up to the horizon: efficiency in steps, or in time. Before a run's first value, the
    lowest first value of any run counts."""
    fall: float
    """Largest fall below an earlier value, mean over runs: stability."""
    last: Estimate
    """Mean of the values at the end of each run."""
    steps_per_second: Estimate
    speed_up: Estimate | None
    """Steps/s over those of the first group; None for that group, and with several tasks."""
    wall_seconds: Estimate
    env_steps: Estimate
    profile: PerformanceProfile
    reached: ThresholdReached | None
    """None without a threshold."""
    curve: MeanCurve | None
    """None with several tasks."""
    time_split: dict[str, float]
    """Seconds of each part, mean over runs."""


@dataclass(frozen=True)
class Improvement:
    """Probability that a run of `label` scores higher than a run of `over` in the same task."""

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
    """Unit of the scores."""
    tasks: list[str]
    horizon: dict[str, float]
    """By task, in steps or seconds."""
    threshold: float | None
    results: list[GroupResult]
    """With several tasks: over the tasks that all groups have; empty if there are none."""
    improvements: list[Improvement]
    notes: list[str]
    """What a reader must know before trusting the figures."""
    by_task: list[Comparison] = field(default_factory=list)
    """With several tasks: each task by itself."""


_Strata = dict[str, Floats]  # scores by task


@dataclass(frozen=True)
class _Setting:
    """What all groups are measured by."""

    at: str
    mixed: bool
    threshold: float | None
    series: Mapping[Path, RunSeries]
    """By run, the finite values on the axis, normalised if tasks are mixed."""
    horizon: dict[str, float]
    floor: dict[str, float]
    """By task, the lowest first value of any run."""


def compare(
    groups: Sequence[RunGroup],
    *,
    at: str = "steps",
    metric: str = RETURN,
    threshold: float | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Comparison:
    """Compare groups at equal steps or equal time.

    `at`: steps or time. `metric`: return (mean of the last 100 training episodes), eval (evaluations during training
    and by `paceline evaluate`), or a column of `metrics.jsonl`; higher is better. `threshold`: None takes the
    environment's own. `ranges`: the values that count as 0 and 1, by task; required if there are several tasks. Tasks
    without a range are compared only by themselves. UserError if scores have no common unit.
    """
    if at not in AXES:
        raise UserError(f"--at {at}: allowed: steps, time")
    used = [run for group in groups for run in group.used]
    if not used:
        raise UserError("no run has finished with figures, so there is nothing to compare; see `paceline status`")
    tasks = list(dict.fromkeys(run.task for run in used))
    every, mixed = tasks, len(tasks) > 1
    scales = _scales(tasks, ranges) if mixed else {tasks[0]: (0.0, 1.0)}
    tasks = [task for task in every if task in scales]
    used = [run for run in used if run.task in scales]
    if threshold is None and not mixed and metric in (RETURN, EVALUATION):
        threshold = solved_return(used[0].env)
    setting = _setting(used, tasks, at, metric, scales, threshold, mixed=mixed)
    # An easy task that only some groups have would decide between them.
    shared = [task for task in tasks if all(task in _task_counts(group) for group in groups if group.used)]
    scored = [group for group in (groups_of_tasks(groups, shared) if mixed else groups) if group.used]
    strata = [_scores(group, setting) for group in scored]
    scores = [0.0, *(float(value) for each in strata for values in each.values() for value in values)]
    thresholds = np.linspace(min(scores), max(scores[1:], default=0.0), POINTS)
    results = [
        _result(group, each, setting, thresholds, None if mixed or group is scored[0] else scored[0])
        for group, each in zip(scored, strata, strict=True)
    ]
    return Comparison(
        at=at,
        metric=metric,
        unit="normalised score" if mixed else "return" if metric in (RETURN, EVALUATION) else metric,
        tasks=tasks,
        horizon=setting.horizon,
        threshold=threshold,
        results=results,
        improvements=_improvements(results, strata),
        notes=[*_unranged(every, tasks), *_missing_tasks(groups, tasks, shared), *_notes(groups, used, setting)],
        by_task=[
            compare(groups_of_tasks(groups, [task]), at=at, metric=metric, threshold=threshold)
            for task in every
            if mixed
        ],
    )


def _scales(tasks: Sequence[str], ranges: Mapping[str, tuple[float, float]] | None) -> dict[str, tuple[float, float]]:
    if ranges is None:
        raise UserError(
            f"the runs are of different tasks ({'; '.join(tasks)}), whose returns have no common unit: give runs of "
            "one task, or --mixed for one table per task and normalised scores"
        )
    return {task: ranges[task] for task in tasks if task in ranges}


def _unranged(every: Sequence[str], ranged: Sequence[str]) -> list[str]:
    """A note on the tasks that the figures over all tasks leave out."""
    without = [task for task in every if task not in ranged]
    if not without:
        return []
    env = without[0].partition(" ")[0]
    return [
        f"no score range is known for {'; '.join(without)}, compared only by itself: give the values that count as 0 "
        f"and 1, as in --range {env}=0,500"
    ]


def _setting(
    used: Sequence[RunData],
    tasks: Sequence[str],
    at: str,
    metric: str,
    scales: Mapping[str, tuple[float, float]],
    threshold: float | None,
    *,
    mixed: bool,
) -> _Setting:
    series = {run.path: run_series(run, metric, at, scales[run.task]) for run in used}
    without = [run.name for run in used if not series[run.path][0].size]
    if without:
        more = f" and {len(without) - 5} more" if len(without) > 5 else ""
        what = "no return (no episode ended, or none was a number)" if metric == RETURN else f"no {metric}"
        raise UserError(f"{', '.join(without[:5])}{more}: {what}; leave them out, or give another --metric")
    horizon, floor = {}, {}
    for task in tasks:
        curves = [series[run.path] for run in used if run.task == task]
        horizon[task] = max(min(float(x[-1]) for x, _ in curves), max(float(x[0]) for x, _ in curves))
        floor[task] = min(float(y[0]) for _, y in curves)
    return _Setting(at, mixed, threshold, series, horizon, floor)


def _scores(group: RunGroup, setting: _Setting) -> _Strata:
    found: dict[str, list[float]] = {}
    for run in group.used:
        score = float(np.interp(setting.horizon[run.task], *setting.series[run.path]))
        found.setdefault(run.task, []).append(score)
    return {task: np.array(values) for task, values in found.items()}


def _result(
    group: RunGroup, strata: _Strata, setting: _Setting, thresholds: Floats, base: RunGroup | None
) -> GroupResult:
    """`base`: the group whose speed is 1."""
    runs = sorted(group.used, key=lambda run: list(strata).index(run.task))  # the order of the scores
    values, threshold = list(strata.values()), setting.threshold
    scores = np.concatenate(values)
    several = min(map(len, values)) > 1
    task_ends = np.cumsum([len(each) for each in values])[:-1]
    low, high = stratified_bootstrap_interval(values) if several else (None, None)
    ends = profile_interval(values, thresholds) if several else None
    curves = [setting.series[run.path] for run in runs]
    grids = [np.linspace(0.0, setting.horizon[run.task], POINTS) for run in runs]
    heights = [
        np.interp(grid, x, y, left=setting.floor[run.task])
        for run, grid, (x, y) in zip(runs, grids, curves, strict=True)
    ]

    def mean_of(values: Sequence[float]) -> Estimate:
        return mean_estimate(*np.split(np.array(values, np.float64), task_ends))

    return GroupResult(
        label=group.label,
        key=group.key,
        names=[run.name for run in runs],
        counts={state: group.count(state) for state in dict.fromkeys(run.state for run in group.runs)},
        scores=[float(score) for score in scores],
        score=Estimate(iqm(scores), low, high, len(scores)),
        mean=float(scores.mean()),
        std=float(scores.std(ddof=1)) if len(scores) > 1 else None,
        area=mean_of([float(np.trapezoid(each) / (POINTS - 1)) for each in heights]),
        fall=float(np.mean([float((np.maximum.accumulate(y) - y).max()) for _, y in curves])),
        last=mean_of([float(y[-1]) for _, y in curves]),
        steps_per_second=mean_of([run.steps_per_second for run in runs]),
        speed_up=None if base is None else _speed_up(group, base),
        wall_seconds=mean_of([run.wall_seconds for run in runs]),
        env_steps=mean_of([float(run.env_steps) for run in runs]),
        profile=PerformanceProfile(
            [float(each) for each in thresholds],
            performance_profile(values, thresholds).tolist(),
            None if ends is None else ends[0].tolist(),
            None if ends is None else ends[1].tolist(),
        ),
        reached=None if threshold is None or setting.mixed else _reached(runs, setting, threshold),
        curve=None if setting.mixed else _mean_curve(grids[0], np.array(heights), max(float(x[0]) for x, _ in curves)),
        time_split=mean_time_split(run.time_split for run in runs),
    )


def _speed_up(group: RunGroup, base: RunGroup) -> Estimate | None:
    speeds = [[run.steps_per_second for run in one.used if run.steps_per_second > 0] for one in (group, base)]
    return ratio_estimate(*speeds) if all(speeds) else None


def _reached(runs: Sequence[RunData], setting: _Setting, threshold: float) -> ThresholdReached:
    steps, seconds = [], []
    for run in runs:
        x, y = setting.series[run.path]
        above = np.flatnonzero(y >= threshold)
        if not above.size:
            continue
        first = float(x[above[0]])
        if setting.at == "steps":
            steps.append(first)
            seconds.append(float(np.interp(first, run.curve.steps, run.curve.seconds)))
        else:
            steps.append(float(np.interp(first, run.curve.seconds, run.curve.steps)))
            seconds.append(first)
    if not steps:
        return ThresholdReached(0, len(runs), None, None)
    return ThresholdReached(len(steps), len(runs), mean_estimate(steps), mean_estimate(seconds))


def _mean_curve(grid: Floats, heights: Floats, begin: float) -> MeanCurve:
    """From where all runs have a value."""
    keep = grid >= min(begin, float(grid[-1]))
    x, values = grid[keep], heights[:, keep]
    if len(values) == 1:
        return MeanCurve(x.tolist(), values[0].tolist(), None, None)
    picks = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [0.025, 0.975], axis=0)
    return MeanCurve(x.tolist(), values.mean(axis=0).tolist(), low.tolist(), high.tolist())


def _improvements(results: Sequence[GroupResult], strata: Sequence[_Strata]) -> list[Improvement]:
    found = []
    pairs = list(zip(results, strata, strict=True))
    for number, (result, mine) in enumerate(pairs):
        for other, theirs in pairs[number + 1 :]:
            x, y = list(mine.values()), [theirs[task] for task in mine]
            several = min(map(len, [*x, *y])) > 1
            low, high = improvement_interval(x, y) if several else (None, None)
            found.append(Improvement(result.label, other.label, probability_of_improvement(x, y), low, high))
    return found


def _task_counts(group: RunGroup) -> Counter[str]:
    return Counter(run.task for run in group.used)


def _missing_tasks(groups: Sequence[RunGroup], tasks: Sequence[str], shared: Sequence[str]) -> list[str]:
    """Notes on groups without a run of some task."""
    missing = {
        group.label: [task for task in tasks if task not in _task_counts(group)] for group in groups if group.used
    }
    notes = [f"{label}: no finished run of {'; '.join(names)}" for label, names in missing.items() if names]
    over = f"the figures over all tasks use only {'; '.join(shared)}, which all groups have"
    return [*notes, over if shared else "no task has runs of all groups, so there is no overall score"] if notes else []


def _notes(groups: Sequence[RunGroup], used: Sequence[RunData], setting: _Setting) -> list[str]:
    notes = [f"{group.label}: no finished run, so no figures" for group in groups if not group.used]
    for task, end in setting.horizon.items():
        longest = max(float(setting.series[run.path][0][-1]) for run in used if run.task == task)
        if longest > 1.1 * end:
            notes.append(
                f"{task}: scores are compared at {end:,.0f} {AXES[setting.at]}, where the shortest run ends or the "
                f"last one has its first value; the longest run has {longest:,.0f}"
            )
    versions = sorted({run.version or "unknown" for run in used})
    if len(versions) > 1:
        notes.append(f"the runs were made by different versions of paceline: {', '.join(versions)}")
    machines = sorted({f"{run.provenance.get('cpu_model')}, {run.provenance.get('cores')} cores" for run in used})
    if len(machines) > 1:
        notes.append(f"times and steps/s come from different machines: {'; '.join(machines)}")
    single = [group.label for group in groups if 1 in _task_counts(group).values()]
    if single:
        notes.append(f"a single run, so no interval: {'; '.join(single)}")
    few = [group.label for group in groups if 1 < min(_task_counts(group).values(), default=0) < FEW_RUNS]
    if few:
        notes.append(
            f"fewer than {FEW_RUNS} runs, whose intervals are too narrow, so differences are hints: {'; '.join(few)}"
        )
    return notes
