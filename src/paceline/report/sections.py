"""Runs → the sections of a report. Each says what it can from the runs there are, and what it cannot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.bench.comparison import Comparison, compare, mean_split
from paceline.bench.files import FINISHED, INTERRUPTED, Tree
from paceline.bench.groups import Group
from paceline.bench.scaling_results import verdict_on_training
from paceline.bench.study import RunData
from paceline.config import UserError
from paceline.report import charts
from paceline.report.blocks import (
    Block,
    Cell,
    Chart,
    Pair,
    Section,
    Table,
    Text,
    count,
    estimate_cell,
    interval,
    listed,
    number,
    percent,
    seconds,
    times,
)
from paceline.report.speed import Family, families

MOST_TIMELINES = 4
SHORT = 1.1
"""How many times the steps at which returns are compared a run may have without a word."""


class Task:
    """The groups of one task, with what is computed from them once."""

    def __init__(self, name: str, groups: list[Group], number_: int) -> None:
        self.name, self.groups = name, groups
        self.slots = {group.label: slot for slot, group in enumerate(groups)}
        self.id = f"task{number_}"
        shown = [
            Group(group.label, group.key, [run for run in group.runs if charts.has_returns(run)]) for group in groups
        ]
        self.silent = [run.name for group in groups for run in group.used if not charts.has_returns(run)]
        self.families = families(groups)
        self.by_steps: Comparison | None = None
        self.by_time: Comparison | None = None
        self.problem = ""
        try:
            self.by_steps, self.by_time = compare(shown, at="steps"), compare(shown, at="time")
        except UserError:
            self.problem = "No run of it has finished with a return, so there are no statistics."

    @property
    def runs(self) -> list[RunData]:
        return [run for group in self.groups for run in group.runs]

    @property
    def cut(self) -> str:
        """` at N steps`, where returns are compared well before the end of the longest run; else nothing."""
        if self.by_steps is None:
            return ""
        (end,) = self.by_steps.horizon.values()
        longest = max(run.env_steps for group in self.groups for run in group.used if charts.has_returns(run))
        return f" at {number(end)} steps" if longest > SHORT * end else ""

    def family_of(self, group: Group) -> tuple[Family, int] | None:
        for family in self.families:
            for place, point in enumerate(family.points):
                if point.group.label == group.label:
                    return family, place
        return None


def results(tasks: Sequence[Task]) -> Section:
    """The table: what came out of each group."""
    blocks: list[Block] = []
    for task in tasks:
        blocks.append(_table_of_groups(task))
        if task.by_steps is not None:
            blocks += [Text(text, "note") for text in task.by_steps.notes]
        if task.problem:
            blocks.append(Text(f"{task.name}: {task.problem}", "notice"))
        if task.silent:
            blocks.append(Text(f"In no return: {listed(task.silent)} (no episode ended).", "note"))
        if task.by_steps is not None and task.by_steps.improvements:
            blocks.append(_table_of_improvements(task.by_steps))
    return Section("results", "Results", blocks)


def _table_of_groups(task: Task) -> Table:
    found = {result.label: result for result in task.by_steps.results} if task.by_steps else {}
    solved = task.by_steps.threshold if task.by_steps else None
    head = ["group", "runs", "return", "steps/s", "wall time", "steps"]
    head += [f"time to {number(solved)}"] if solved is not None else []
    head += ["speed-up", "efficiency"] if task.families else []
    rows = []
    # By return, where more workers are not the question.
    scores = {label: result.score.value for label, result in found.items()}
    first = task.groups if task.families else sorted(task.groups, key=lambda one: -scores.get(one.label, -math.inf))
    for group in first:
        result = found.get(group.label)
        states = Counter(run.state for run in group.runs)
        missing = ", ".join(f"{many} {state}" for state, many in states.items() if state != FINISHED)
        row = [
            Cell(group.label, slot=task.slots[group.label]),
            Cell(f"{states[FINISHED]} of {len(group.runs)}", missing),
        ]
        if result is None:
            rows.append([*row, *[Cell("–")] * (len(head) - 2)])
            continue
        row += [estimate_cell(result.score), estimate_cell(result.steps_per_second)]
        row += [estimate_cell(result.wall_seconds, seconds), Cell(number(result.env_steps.value))]
        if solved is not None:
            reached = result.reached
            some = "" if reached is None or reached.runs == reached.of else f"{reached.runs} of {reached.of} runs"
            if reached is None or reached.seconds is None:
                row.append(Cell("not reached"))
            else:
                row.append(
                    Cell(
                        seconds(reached.seconds.value),
                        some or interval(reached.seconds.low, reached.seconds.high, seconds),
                    )
                )
        place = task.family_of(group)
        if task.families and place is None:
            row += [Cell("–"), Cell("–")]
        elif place is not None:
            point = place[0].points[place[1]]
            base = place[1] == 0
            row.append(Cell("1×", "the base") if base else estimate_cell(point.speed_up, times))
            row.append(Cell("100 %") if base else estimate_cell(point.efficiency, percent))
        rows.append(row)
    horizon = next(iter(task.by_steps.horizon.values())) if task.by_steps else None
    at = "" if horizon is None else f"; return: interquartile mean over runs at {number(horizon)} steps, else means"
    caption = f"{task.name}{at}. Below: 95 % bootstrap intervals over runs."
    return Table(caption, head, rows, numbers=tuple(range(1, len(head))))


def _table_of_improvements(comparison: Comparison) -> Table:
    rows = [
        [Cell(one.label), Cell(one.over), Cell(percent(one.probability), interval(one.low, one.high, percent))]
        for one in comparison.improvements
    ]
    head = ["a run of", "returns more than one of", "probability"]
    return Table("Probability of improvement", head, rows, (2,), fold="How probably is one better than another?")


def missing(runs: Sequence[RunData], closed: Sequence[str] = ()) -> Section:
    """What is not there, said plainly; also when nothing is missing."""
    blocks: list[Block] = []
    open_ = [run for run in runs if run.state != FINISHED]
    resumed = [f"{run.name} ({run.resumed}×)" for run in runs if run.resumed]
    if open_:
        states = Counter(run.state for run in open_)
        said = ", ".join(f"{many} {state}" for state, many in states.items())
        text = (
            f"{len(open_)} of {count(len(runs), 'run')} did not finish: {said}. Only finished runs are in the figures."
        )
        blocks.append(Text(text, "bad" if states["failed"] else "notice"))
        rows = [
            [
                Cell(run.name),
                Cell(run.state, state=run.state),
                Cell(number(run.env_steps)),
                Cell(run.reason or "–", _resume(run)),
            ]
            for run in open_
        ]
        blocks.append(Table("Runs that did not finish", ["run", "state", "steps", "why"], rows, (2,)))
    else:
        blocks.append(Text("All runs finished."))
    if resumed:
        once = "counted once" if len(resumed) == 1 else "each counted once"
        said = f"{count(len(resumed), 'run')} interrupted and resumed, {once}: {listed(resumed)}."
        blocks.append(Text(said))
    blocks += [Text(f"{text}.", "notice") for text in closed]
    problems = [[Cell(run.name), Cell(text)] for run in runs for text in run.problems]
    if problems:
        blocks.append(Table("What is wrong with files", ["run", "problem"], problems))
    return Section("missing", "What is missing", blocks)


def _resume(run: RunData) -> str:
    return f"go on: paceline train --resume {run.path}" if run.state == INTERRUPTED and run.usable else ""


def learning(tasks: Sequence[Task]) -> Section:
    blocks: list[Block] = []
    for task in tasks:
        data = charts.curves(task.by_steps, task.by_time, task.groups, task.slots)
        if not data["series"]:
            blocks.append(Text(f"{task.name}: no episode has ended, so there is no curve.", "note"))
            continue
        several = any("low" in one["steps"] for one in data["series"])
        band = " The bands are 95 % bootstrap intervals of the mean over runs." if several else ""
        mean = (
            "mean over runs, up to where the shortest ends"
            if task.by_steps
            else "each run by itself: none has finished"
        )
        controls = ("x", "members") if task.by_steps else ("x",)
        says = f"Learning curves of {task.name}: {listed([one['label'] for one in data['series']])}. {_ends(task)}"
        caption = (
            f"Return, mean of the last 100 training episodes; {mean}.{band} Click a name to hide it, drag to zoom."
        )
        blocks.append(Chart(f"{task.id}-curves", task.name, says, data, controls, caption))
    return Section("learning", "Learning curves", blocks)


def _ends(task: Task) -> str:
    if task.by_steps is None:
        return ""
    return " ".join(f"{one.label} ends at {number(one.last.value)}." for one in task.by_steps.results)


def scaling(tasks: Sequence[Task]) -> Section | None:
    blocks: list[Block] = []
    for task in (task for task in tasks if task.families):
        up, even = charts.scaling(task.families)
        said = "; ".join(
            f"{family.label}: " + ", ".join(f"{times(p.speed_up.value)} with {p.workers}" for p in family.points)
            for family in task.families
        )
        pair = [Chart(f"{task.id}-speedup", "Speed-up", f"Speed-up over workers. {said}", up)]
        pair.append(Chart(f"{task.id}-efficiency", "Efficiency", f"Efficiency over workers. {said}", even))
        blocks += [Text(task.name)] if len(tasks) > 1 else []
        blocks.append(Pair(pair))
        rows = [
            [
                Cell(point.group.label, slot=slot),
                Cell(number(point.workers)),
                estimate_cell(point.speed),
                estimate_cell(point.speed_up, times),
                estimate_cell(point.efficiency, percent),
                Cell(seconds(_mean([run.wall_seconds for run in point.group.used]))),
            ]
            for slot, family in enumerate(task.families)
            for point in family.points
        ]
        blocks += [Text(text) for family in task.families if (text := law_of(family))]
        head = ["group", "workers", "steps/s", "speed-up", "efficiency", "wall time"]
        blocks.append(Table("Speed by number of workers", head, rows, (1, 2, 3, 4, 5), fold="The figures"))
    if not blocks:
        return None
    blocks.append(
        Text(
            "Speed is environment steps by training time, start excluded; speed-up is over the fewest workers of the "
            "same kind, efficiency is that by how many times the workers. Bars are 95 % bootstrap intervals over runs.",
            "note",
        )
    )
    return Section("scaling", "Scaling", blocks)


def law_of(family: Family) -> str:
    """What a law makes of the points, what it foresees, and how well it did so before."""
    fit, ahead, check = family.fit, family.prediction, family.check
    if fit is None:
        return ""
    if ahead is None:
        return (
            f"{family.label}: the most workers are slower than the fewest; no law allows for that, nothing is foreseen."
        )
    sure = interval(fit.serial.low, fit.serial.high, percent)
    text = f"{family.label}: by {fit.law.title()}'s law {percent(fit.serial.value)}" + (f" ({sure})" if sure else "")
    text += " of the time is not shortened by more workers; "
    sure = interval(ahead.speed_up.low, ahead.speed_up.high, times)
    text += f"{ahead.workers} of them would give {times(ahead.speed_up.value)}" + (f" ({sure})" if sure else "")
    text += ", if each has a core."
    if check is not None:
        said = {True: "inside", False: "outside", None: "without"}[check.inside]
        text += (
            f" Foreseen from the others, {check.prediction.workers} workers gave {times(check.measured.value)} where "
        )
        text += f"{times(check.prediction.speed_up.value)} were expected, {said} the interval."
    return text


def time_split(groups: Sequence[Group]) -> Section | None:
    counted = {group.label: group.used for group in groups}
    if not any(counted.values()):
        counted = {group.label: group.runs for group in groups}
    rows = {label: split for label, runs in counted.items() if (split := mean_split(runs))}
    if not rows:
        return None
    data = charts.split(rows)
    parts = [part["name"] for part in data["parts"]]
    said = "; ".join(
        f"{label}: " + ", ".join(f"{part} {percent(split.get(part, 0.0) / sum(split.values()))}" for part in parts)
        for label, split in rows.items()
        if sum(split.values())
    )
    table = [
        [Cell(label), *(Cell(seconds(split.get(part, 0.0))) for part in parts), Cell(seconds(sum(split.values())))]
        for label, split in rows.items()
    ]
    verdicts = [[Cell(group.label), Cell(text)] for group in groups if (text := verdict_of(group))]
    blocks: list[Block] = [
        Chart(
            "time-parts",
            "Where the time went",
            f"Shares of the time. {said}",
            data,
            ("unit",),
            "Mean over the runs of a group.",
        ),
        Table(
            "Time by part, mean over runs",
            ["group", *parts, "all"],
            table,
            tuple(range(1, len(parts) + 2)),
            fold="The figures",
        ),
    ]
    if verdicts:
        blocks.append(
            Table("What bounds the whole run, start and all, and what would help", ["group", "verdict"], verdicts)
        )
    return Section("time", "Time split", blocks)


def verdict_of(group: Group, *, training: bool = False) -> str:
    """What bounds most of its runs, in the words of one of these. `training`: of that time alone, as a speed-up is."""
    runs = [run for run in group.used if run.verdict]
    said = [verdict_on_training(run) if training else run.verdict for run in runs]
    if not said:
        return ""
    bound, many = Counter(text.partition(":")[0] for text in said).most_common(1)[0]
    text = next(text for text in said if text.startswith(bound))
    return text if many == len(said) else f"{text} ({many} of {len(said)} runs)"


def load(groups: Sequence[Group]) -> Section | None:
    """How busy each node was; of runs on Ray, which know it."""
    rows: list[list[Cell]] = []
    bars: dict[str, float] = {}
    for group in groups:
        for node, held in _hosts(group).items():
            share = _mean([float(one.get("cpu_seconds") or 0.0) / _core_seconds(run, one) for run, one in held])
            mean = {
                name: _mean([float(one.get(name) or 0.0) for _, one in held])
                for name in ("workers", "cores", "env_steps", "memory_bytes")
            }
            bars[f"{group.label} · {node}"] = share
            texts = [number(mean["workers"]), number(mean["cores"]), number(round(mean["env_steps"]))]
            texts += [percent(share), f"{mean['memory_bytes'] / 2**20:,.0f} MiB"]
            rows.append([Cell(group.label), Cell(node), *map(Cell, texts)])
    if not rows:
        return None
    head = ["group", "node", "workers", "cores", "steps", "CPU", "memory"]
    says = "CPU in use. " + "; ".join(f"{label}: {percent(share)}" for label, share in bars.items())
    caption = "CPU time of the processes of a run by wall time and cores; mean over runs."
    blocks: list[Block] = [
        Chart("node-load", "CPU in use by node", says, charts.load(bars), caption=caption),
        Table("Load by node, mean over runs", head, rows, (2, 3, 4, 5, 6)),
    ]
    return Section("load", "Load by node", blocks)


def _core_seconds(run: RunData, host: Tree) -> float:
    return max(run.wall_seconds, 1e-9) * max(1, int(host.get("cores") or 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _hosts(group: Group) -> dict[str, list[tuple[RunData, Tree]]]:
    found: dict[str, list[tuple[RunData, Tree]]] = {}
    for run in group.used:
        for one in run.summary.get("hosts") or []:
            if isinstance(one, dict):
                node = f"{one.get('host')} {one.get('address') or ''}".rstrip()
                found.setdefault(node, []).append((run, one))
    return found


def timelines(found: Mapping[str, Sequence[Tree]]) -> Section | None:
    blocks: list[Block] = []
    for index, (name, events) in enumerate(list(found.items())[:MOST_TIMELINES]):
        data = charts.timeline(events)
        if not data["spans"]:
            continue
        said = [f"{span['row']} {span['phase']} at {span['from']} s" for span in data["spans"]]
        says = f"Phases of each host: {listed(said, 30)}"
        blocks.append(Chart(f"timeline{index}", name, says, data))
        rows = [
            [
                Cell(f"{float(e.get('seconds') or 0):.2f}"),
                Cell(str(e.get("host"))),
                Cell(str(e.get("phase"))),
                Cell(str(e.get("detail") or "")),
            ]
            for e in events
        ]
        blocks.append(Table(f"Timeline of {name}", ["seconds", "host", "phase", "detail"], rows, fold="The events"))
    if len(found) > MOST_TIMELINES:
        blocks.append(Text(f"Not drawn: {listed(list(found)[MOST_TIMELINES:])}.", "note"))
    return Section("cluster", "Cluster timeline", blocks) if blocks else None
