"""The trials of a search as tables, and the points in order of their scores."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.config.resolve import resolve_tree, tidy, to_tree
from paceline.run.console import duration
from paceline.run.directory import replacing, write_text
from paceline.tune.space import Point
from paceline.tune.sweep_plan import DONE, EARLY, Sweep, Trial


@dataclass(frozen=True)
class PointScore:
    point: int
    values: Point
    scores: list[float]
    """One for each seed."""
    complete: bool
    """All its seeds ran to their end."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)


def rank_points(sweep: Sweep) -> list[PointScore]:
    """The points that have a score, best first. Points with all seeds done come before the others."""
    ranked = []
    for point in dict.fromkeys(trial.point for trial in sweep.trials):
        trials = [trial for trial in sweep.trials if trial.point == point]
        scores = [trial.score for trial in trials if trial.score is not None and trial.status in (DONE, EARLY)]
        if scores:
            ranked.append(PointScore(point, trials[0].values, scores, all(trial.status == DONE for trial in trials)))
    sign = -1 if sweep.mode == "max" else 1
    return sorted(ranked, key=lambda point: (not point.complete, sign * point.mean))


def write_tables(sweep: Sweep) -> None:
    """`trials.csv` and `trials.txt`."""
    rows = [_row(sweep, trial) for trial in sweep.trials]
    with replacing(sweep.folder / "trials.csv", sync=False) as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_text(sweep.folder / "trials.txt", table(sweep) + "\n", sync=False)


def table(sweep: Sweep) -> str:
    """All trials, then the points if they have several seeds."""
    unused = {"score"} if sweep.metric == "return_mean" else set()
    if not any(trial.error for trial in sweep.trials):
        unused.add("error")
    columns = [key for key in _row(sweep, sweep.trials[0]) if key not in unused]
    lines = [[sweep.metric if key == "score" else key for key in columns]]
    for trial in sweep.trials:
        row = _row(sweep, trial) | {
            "time": duration(trial.seconds),
            "steps": f"{trial.steps:,}",
            "return": number(trial.return_mean),
            "score": number(trial.score),
            "error": trial.error if len(trial.error) <= 60 else f"{trial.error[:59]}…",
        }
        lines.append([str(row[key]) for key in columns])
    text = _align(lines)
    if len(sweep.trials) > len({trial.point for trial in sweep.trials}):
        points = [
            [str(p.point), number(p.mean), str(len(p.scores)), *(shown(p.values.get(key)) for key in sweep.space)]
            for p in rank_points(sweep)
        ]
        text += "\n\n" + _align([["point", f"mean {sweep.metric}", "seeds", *sweep.space], *points])
    return text


def write_best(sweep: Sweep, best: PointScore) -> None:
    """`best.yaml`, for `paceline train --config`."""
    trial = next(trial for trial in sweep.trials if trial.point == best.point)
    given = tidy(sweep.tree(trial))
    config, _ = resolve_tree(given, preset=sweep.preset)
    tree = _resolved(given, to_tree(config))
    if sweep.preset is not None:
        tree["preset"] = sweep.preset
    comment = f"# {sweep.metric} {number(best.mean)}, {len(best.scores)} seed(s): {describe(best.values)}\n"
    if sweep.search == "pbt":
        comment += "# From a population: this member had other settings before these, its last.\n"
    write_text(sweep.folder / "best.yaml", comment + yaml.safe_dump(tree, sort_keys=False))


def describe(values: Point) -> str:
    return ", ".join(f"{key}={shown(value)}" for key, value in values.items())


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "status": trial.status,
        "location": trial.location,
        "iteration": trial.iteration,
        "time": round(trial.seconds, 3),
        "steps": trial.steps,
        "return": trial.return_mean,
        "score": trial.score,
        **{key: shown(trial.values.get(key)) for key in sweep.space},
        "error": trial.error,
    }


def _resolved(given: Any, config: Any) -> Any:
    """The settings that were given, with their final values: a number where the command line has a text."""
    if isinstance(given, dict) and isinstance(config, dict):
        return {key: _resolved(value, config[key]) for key, value in given.items() if key in config}
    return config


def _align(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
