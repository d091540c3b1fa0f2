"""The trials of a sweep as a table, and which point is the best."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.resolve import resolve_tree, tidy, to_tree
from paceline.run.console import duration
from paceline.run.directory import replacing, write_text
from paceline.tune.plan import DONE, EARLY, Sweep
from paceline.tune.space import Point

COLUMNS = ("name", "status", "location", "iteration", "time", "steps", "return")


@dataclass(frozen=True)
class Judged:
    """A point, by the mean over its seeds."""

    point: int
    values: Point
    scores: list[float]
    whole: bool
    """All its seeds ran to their end."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)


def judge(sweep: Sweep) -> list[Judged]:
    """The points with a score, the best first: those with all seeds done before the others."""
    found = []
    for point in dict.fromkeys(trial.point for trial in sweep.trials):
        trials = [trial for trial in sweep.trials if trial.point == point]
        scores = [trial.score for trial in trials if trial.score is not None and trial.status in (DONE, EARLY)]
        if scores:
            found.append(Judged(point, trials[0].values, scores, all(trial.status == DONE for trial in trials)))
    sign = -1 if sweep.mode == "max" else 1
    return sorted(found, key=lambda judged: (not judged.whole, sign * judged.mean))


def table(sweep: Sweep) -> str:
    """Of all trials, then of the points if they have several seeds."""
    other = sweep.metric != "return_mean"
    head = [*COLUMNS, *([sweep.metric] if other else []), *sweep.space, "error"]
    rows = [
        [
            trial.name,
            trial.status,
            trial.location,
            str(trial.iteration),
            duration(trial.seconds),
            f"{trial.steps:,}",
            number(trial.return_mean),
            *([number(trial.score)] if other else []),
            *(shown(trial.values.get(key)) for key in sweep.space),
            trial.error if len(trial.error) <= 60 else f"{trial.error[:59]}…",
        ]
        for trial in sweep.trials
    ]
    text = _aligned(head, rows)
    if len(sweep.trials) > len({trial.point for trial in sweep.trials}):
        points = [
            [str(j.point), number(j.mean), str(len(j.scores)), *(shown(j.values.get(key)) for key in sweep.space)]
            for j in judge(sweep)
        ]
        text += "\n\n" + _aligned(["point", f"mean {sweep.metric}", "seeds", *sweep.space], points)
    return text


def write_tables(sweep: Sweep) -> None:
    """`trials.csv` and `trials.txt`."""
    with replacing(sweep.folder / "trials.csv", sync=False) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "score", *sweep.space, "error"])
        for t in sweep.trials:
            facts = [t.name, t.status, t.location, t.iteration, round(t.seconds, 3), t.steps, t.return_mean, t.score]
            writer.writerow([*facts, *(shown(t.values.get(key)) for key in sweep.space), t.error])
    write_text(sweep.folder / "trials.txt", table(sweep) + "\n", sync=False)


def write_best(sweep: Sweep, best: Judged) -> None:
    """What `paceline train --config` takes as it is."""
    trial = next(trial for trial in sweep.trials if trial.point == best.point)
    given = tidy(sweep.tree(trial))
    config, _ = resolve_tree(given, preset=sweep.preset)
    tree = _settled(given, to_tree(config))
    if sweep.preset is not None:
        tree["preset"] = sweep.preset
    about = f"# {sweep.metric} {number(best.mean)}, {len(best.scores)} seed(s): {describe(best.values)}\n"
    if sweep.search == "pbt":
        about += "# Of a population: these are the last of several settings that this member has had.\n"
    write_text(sweep.folder / "best.yaml", about + yaml.safe_dump(tree, sort_keys=False))


def _settled(given: Any, config: Any) -> Any:
    """What was given, with the values that it came to: a number where the command line has a text."""
    if isinstance(given, dict) and isinstance(config, dict):
        return {key: _settled(value, config[key]) for key, value in given.items() if key in config}
    return config


def describe(values: Point) -> str:
    return ", ".join(f"{key}={shown(value)}" for key, value in values.items())


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    keep = [i for i in range(len(head)) if head[i] != "error" or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in keep}
    return "\n".join("  ".join(line[i].ljust(widths[i]) for i in keep).rstrip() for line in lines)
