"""The sections of a report about results: tables, learning curves, scaling, time split, load, timelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.report import charts
from paceline.report.blocks import Block, Cell, Chart, ChartPair, PageSection, Table, Text, estimate_cell
from paceline.report.task_results import TaskResults
from paceline.results.comparison import Comparison, GroupResult
from paceline.results.estimates import mean_time_split
from paceline.results.groups import RunGroup
from paceline.results.run_files import FINISHED, INTERRUPTED, Tree
from paceline.results.runs import RunData
from paceline.results.scaling_figures import training_verdict
from paceline.results.scaling_series import ScalingSeries
from paceline.results.text import (
    UNKNOWN,
    count,
    counts,
    interval,
    listed,
    number,
    percent,
    seconds,
    times,
    with_interval,
)

MAX_TIMELINES = 4


def results(tasks: Sequence[TaskResults]) -> PageSection:
    blocks: list[Block] = []
    for task in tasks:
        blocks.append(_group_table(task))
        if task.by_steps is None:
            text = f"{task.name}: no run has finished with a return, so there are no statistics."
            blocks.append(Text(text, "notice"))
        else:
            blocks += [Text(text, "note") for text in task.by_steps.notes]
        if task.without_returns:
            blocks.append(Text(f"No return: {listed(task.without_returns)} (no episode ended).", "note"))
        if task.by_steps is not None and task.by_steps.improvements:
            blocks.append(_improvement_table(task.by_steps))
    return PageSection("results", "Results", blocks)


def _group_table(task: TaskResults) -> Table:
    found = {result.label: result for result in task.by_steps.results} if task.by_steps else {}
    solved = task.by_steps.threshold if task.by_steps else None
    head = ["group", "runs", "return", "steps/s", "wall time", "steps"]
    head += [f"time to {number(solved)}"] if solved is not None else []
    head += ["speed-up", "efficiency"] if task.series else []
    scores = {label: result.score.value for label, result in found.items()}
    ordered = task.groups
    if not task.series:
        ordered = sorted(ordered, key=lambda group: -scores.get(group.label, -math.inf))
    rows = []
    for group in ordered:
        others = {state: many for state, many in _states(group.runs).items() if state != FINISHED}
        row = [
            Cell(group.label, slot=task.slots[group.label]),
            Cell(f"{group.count(FINISHED)} of {len(group.runs)}", counts(others)),
        ]
        result = found.get(group.label)
        if result is None:
            rows.append([*row, *[Cell(UNKNOWN)] * (len(head) - 2)])
            continue
        row += [estimate_cell(result.score), estimate_cell(result.steps_per_second)]
        row += [estimate_cell(result.wall_seconds, seconds), Cell(number(result.env_steps.value))]
        row += [_reached_cell(result)] if solved is not None else []
        row += _speed_up_cells(task, group) if task.series else []
        rows.append(row)
    at = (
        ""
        if task.horizon is None
        else f": interquartile mean of the return at {number(task.horizon)} steps, else means"
    )
    caption = f"{task.name}{at}. Below each figure: 95 % bootstrap interval over runs."
    return Table(caption, head, rows, numbers=tuple(range(1, len(head))))


def _reached_cell(result: GroupResult) -> Cell:
    reached = result.reached
    if reached is None or reached.seconds is None:
        return Cell("not reached")
    ends = interval(reached.seconds.low, reached.seconds.high, seconds)
    return Cell(seconds(reached.seconds.value), ends if reached.runs == reached.of else _of(reached.runs, reached.of))


def _of(some: int, every: int) -> str:
    return f"{some} of {every} runs"


def _speed_up_cells(task: TaskResults, group: RunGroup) -> list[Cell]:
    found = task.scaling_point(group)
    if found is None:
        return [Cell(UNKNOWN), Cell(UNKNOWN)]
    point, is_base = found
    if is_base:
        return [Cell("1×", "the base"), Cell("100 %")]
    return [estimate_cell(point.speed_up, times), estimate_cell(point.efficiency, percent)]


def _improvement_table(comparison: Comparison) -> Table:
    rows = [
        [Cell(one.label), Cell(one.over), Cell(percent(one.probability), interval(one.low, one.high, percent))]
        for one in comparison.improvements
    ]
    head = ["a run of", "returns more than one of", "probability"]
    return Table("Probability of improvement", head, rows, (2,), fold="How likely is one better than another?")


def missing(runs: Sequence[RunData], unreadable: Sequence[str] = ()) -> PageSection:
    """Runs that did not finish, resumed runs and damaged files; also says if there are none."""
    blocks: list[Block] = []
    unfinished = [run for run in runs if run.state != FINISHED]
    if unfinished:
        states = _states(unfinished)
        text = f"{len(unfinished)} of {count(len(runs), 'run')} did not finish: {counts(states)}. "
        blocks.append(Text(f"{text}The figures use only finished runs.", "bad" if "failed" in states else "notice"))
        rows = [
            [
                Cell(run.name),
                Cell(run.state, state=run.state),
                Cell(number(run.env_steps)),
                Cell(run.reason or UNKNOWN, _resume_hint(run)),
            ]
            for run in unfinished
        ]
        blocks.append(Table("Runs that did not finish", ["run", "state", "steps", "reason"], rows, (2,)))
    else:
        blocks.append(Text("All runs finished."))
    resumed = [f"{run.name} ({run.resumed}×)" for run in runs if run.resumed]
    if resumed:
        each = "" if len(resumed) == 1 else "each "
        text = f"{count(len(resumed), 'run')} interrupted and resumed, {each}counted once: {listed(resumed)}."
        blocks.append(Text(text))
    blocks += [Text(f"{text}.", "notice") for text in unreadable]
    problems = [[Cell(run.name), Cell(text)] for run in runs for text in run.problems]
    if problems:
        blocks.append(Table("Problems with files", ["run", "problem"], problems))
    return PageSection("missing", "What is missing", blocks)


def _states(runs: Sequence[RunData]) -> dict[str, int]:
    return dict(Counter(run.state for run in runs))


def _resume_hint(run: RunData) -> str:
    return f"continue: paceline train --resume {run.path}" if run.state == INTERRUPTED and run.usable else ""


def learning(tasks: Sequence[TaskResults]) -> PageSection:
    blocks: list[Block] = []
    for task in tasks:
        data = charts.curves(task.by_steps, task.by_time, task.groups, task.slots)
        if not data["series"]:
            blocks.append(Text(f"{task.name}: no episode has ended, so there is no curve.", "note"))
            continue
        ends, mean = "", "one line per run, since none has finished"
        if task.by_steps is not None:
            ends = " ".join(f"{one.label} ends at {number(one.last.value)}." for one in task.by_steps.results)
            mean = "mean over runs, up to the end of the shortest"
        has_band = any("low" in one["steps"] for one in data["series"])
        band = " Bands are 95 % bootstrap intervals of the mean over runs." if has_band else ""
        description = f"Learning curves of {task.name}: {listed([one['label'] for one in data['series']])}. {ends}"
        caption = (
            f"Return, mean of the last 100 training episodes; {mean}.{band} Click a name to hide it, drag to zoom."
        )
        controls = ("x", "members") if task.by_steps else ("x",)
        blocks.append(Chart(f"{task.id}-curves", task.name, description, data, controls, caption))
    return PageSection("learning", "Learning curves", blocks)


def scaling(tasks: Sequence[TaskResults]) -> PageSection | None:
    blocks: list[Block] = []
    for task in (task for task in tasks if task.series):
        speed_up, efficiency = charts.scaling(task.series)
        text = "; ".join(
            f"{series.label}: " + ", ".join(f"{times(p.speed_up.value)} with {p.workers}" for p in series.points)
            for series in task.series
        )
        blocks += [Text(task.name)] if len(tasks) > 1 else []
        blocks.append(
            ChartPair(
                [
                    Chart(f"{task.id}-speedup", "Speed-up", f"Speed-up over workers. {text}", speed_up),
                    Chart(f"{task.id}-efficiency", "Efficiency", f"Efficiency over workers. {text}", efficiency),
                ]
            )
        )
        blocks += [Text(text) for series in task.series if (text := forecast_text(series))]
        rows = [
            [
                Cell(point.group.label, slot=slot),
                Cell(number(point.workers)),
                estimate_cell(point.speed),
                estimate_cell(point.speed_up, times),
                estimate_cell(point.efficiency, percent),
                Cell(seconds(_mean([run.wall_seconds for run in point.group.used]))),
            ]
            for slot, series in enumerate(task.series)
            for point in series.points
        ]
        head = ["group", "workers", "steps/s", "speed-up", "efficiency", "wall time"]
        blocks.append(Table("Speed by number of workers", head, rows, (1, 2, 3, 4, 5), fold="The figures"))
    if not blocks:
        return None
    note = (
        "Speed: environment steps per second of training time, which excludes the start. Speed-up: relative to the "
        "fewest workers of the same series. Efficiency: speed-up over the growth of the workers. Bars are 95 % "
        "bootstrap intervals over runs."
    )
    return PageSection("scaling", "Scaling", [*blocks, Text(note, "note")])


def forecast_text(series: ScalingSeries) -> str:
    """The fitted law, its forecast, and how well it predicted a measurement."""
    fit, ahead, check = series.fit, series.prediction, series.check
    if fit is None:
        return ""
    if ahead is None:
        return f"{series.label}: speed-up falls as workers are added, so no forecast is made."
    text = f"{series.label}: by {fit.law.title()}'s law {with_interval(fit.serial, percent)} of the time is serial; "
    text += f"{ahead.workers} workers would give {with_interval(ahead.speed_up, times)} if each has its own core."
    if check is not None:
        inside = {True: "inside the interval", False: "outside the interval", None: "no interval"}[check.inside]
        text += (
            f" Check: for {check.prediction.workers} workers the others predict "
            f"{times(check.prediction.speed_up.value)}; measured {times(check.measured.value)}, {inside}."
        )
    return text


def time_split(groups: Sequence[RunGroup]) -> PageSection | None:
    counted = {group.label: group.used for group in groups}
    if not any(counted.values()):
        counted = {group.label: group.runs for group in groups}
    splits = {label: mean_time_split(run.time_split for run in runs) for label, runs in counted.items()}
    splits = {label: split for label, split in splits.items() if split}
    if not splits:
        return None
    data = charts.time_split(splits)
    parts = [part["name"] for part in data["parts"]]
    text = "; ".join(
        f"{label}: " + ", ".join(f"{part} {percent(split.get(part, 0.0) / sum(split.values()))}" for part in parts)
        for label, split in splits.items()
        if sum(split.values())
    )
    rows = [
        [Cell(label), *(Cell(seconds(split.get(part, 0.0))) for part in parts), Cell(seconds(sum(split.values())))]
        for label, split in splits.items()
    ]
    caption, numbers = "Mean over the runs of a group.", tuple(range(1, len(parts) + 2))
    blocks: list[Block] = [
        Chart("time-parts", "Time split", f"Shares of the time. {text}", data, ("unit",), caption),
        Table("Time by part, mean over runs", ["group", *parts, "all"], rows, numbers, fold="The figures"),
    ]
    verdicts = [[Cell(group.label), Cell(text)] for group in groups if (text := group_verdict(group))]
    if verdicts:
        title = "What limits the whole run, including the start, and what would help"
        blocks.append(Table(title, ["group", "verdict"], verdicts))
    return PageSection("time", "Time split", blocks)


def group_verdict(group: RunGroup, *, training: bool = False) -> str:
    """The most frequent verdict on its runs. `training`: on the training time, which a speed-up is about."""
    verdicts = [training_verdict(run) if training else run.verdict for run in group.used if run.verdict]
    if not verdicts:
        return ""
    bound, many = Counter(text.partition(":")[0] for text in verdicts).most_common(1)[0]
    text = next(text for text in verdicts if text.startswith(bound))
    return text if many == len(verdicts) else f"{text} ({_of(many, len(verdicts))})"


def load(groups: Sequence[RunGroup]) -> PageSection | None:
    """How busy each node was; only runs on Ray measure it."""
    rows: list[list[Cell]] = []
    bars: dict[str, float] = {}
    for group in groups:
        for node, held in _hosts(group).items():
            share = _mean([float(host.get("cpu_seconds") or 0.0) / _core_seconds(run, host) for run, host in held])
            mean = {
                name: _mean([float(host.get(name) or 0.0) for _, host in held])
                for name in ("workers", "cores", "env_steps", "memory_bytes")
            }
            bars[f"{group.label} · {node}"] = share
            texts = [number(mean["workers"]), number(mean["cores"]), number(round(mean["env_steps"]))]
            texts += [percent(share), f"{mean['memory_bytes'] / 2**20:,.0f} MiB"]
            rows.append([Cell(group.label), Cell(node), *map(Cell, texts)])
    if not rows:
        return None
    head = ["group", "node", "workers", "cores", "steps", "CPU", "memory"]
    description = "CPU in use. " + "; ".join(f"{label}: {percent(share)}" for label, share in bars.items())
    caption = "CPU time of a run's processes over wall time and cores; mean over runs."
    blocks: list[Block] = [
        Chart("node-load", "CPU in use by node", description, charts.load(bars), caption=caption),
        Table("Load by node, mean over runs", head, rows, (2, 3, 4, 5, 6)),
    ]
    return PageSection("load", "Load by node", blocks)


def _core_seconds(run: RunData, host: Tree) -> float:
    return max(run.wall_seconds, 1e-9) * max(1, int(host.get("cores") or 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _hosts(group: RunGroup) -> dict[str, list[tuple[RunData, Tree]]]:
    found: dict[str, list[tuple[RunData, Tree]]] = {}
    for run in group.used:
        for host in run.summary.get("hosts") or []:
            node = f"{host.get('host')} {host.get('address') or ''}".rstrip()
            found.setdefault(node, []).append((run, host))
    return found


def timelines(found: Mapping[str, Sequence[Tree]]) -> PageSection | None:
    blocks: list[Block] = []
    for index, (name, events) in enumerate(list(found.items())[:MAX_TIMELINES]):
        data = charts.timeline(events)
        if not data["spans"]:
            continue
        phases = [f"{span['row']} {span['phase']} at {span['from']} s" for span in data["spans"]]
        blocks.append(Chart(f"timeline{index}", name, f"Phases of each host: {listed(phases, 30)}", data))
        rows = [
            [
                Cell(f"{float(event.get('seconds') or 0):.2f}"),
                Cell(str(event.get("host"))),
                Cell(str(event.get("phase"))),
                Cell(str(event.get("detail") or "")),
            ]
            for event in events
        ]
        blocks.append(Table(f"Timeline of {name}", ["seconds", "host", "phase", "detail"], rows, fold="The events"))
    if len(found) > MAX_TIMELINES:
        blocks.append(Text(f"Not drawn: {listed(list(found)[MAX_TIMELINES:])}.", "note"))
    return PageSection("cluster", "Cluster timeline", blocks) if blocks else None
