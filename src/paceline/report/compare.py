"""`paceline compare`: groups of runs beside each other, as tables, files and a figure, from their directories alone."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.comparison import AXES, RETURN, Comparison, Estimate, Result, compare
from paceline.bench.groups import Group, differences, group
from paceline.bench.plan import known_range
from paceline.bench.results import table
from paceline.bench.study import RunData, load_runs, problems_of, unreadable
from paceline.config import UserError
from paceline.report.blocks import seconds
from paceline.run.directory import write_json, write_text

ACROSS = ("algo", "engine", "nodes", "workers")
"""How runs of several tasks are grouped: the settings of one task are not those of another."""


def run_compare(
    paths: Sequence[str],
    *,
    by: Sequence[str] | None = None,
    at: str = "steps",
    metric: str = RETURN,
    threshold: float | None = None,
    mixed: bool = False,
    ranges: Sequence[str] = (),
    out: str | None = None,
) -> int:
    """Print the tables; with `out` also write `compare.md`, `.json`, `.csv` and `.png` into that folder."""
    runs = load_runs([Path(path) for path in paths])
    groups = group(runs, by or (ACROSS if mixed else None))
    scales = _scales(runs, ranges) if mixed else None
    result = compare(groups, at=at, metric=metric, threshold=threshold, ranges=scales)
    text = page(result, groups, runs, scales, unreadable(Path(path) for path in paths))
    print(text)
    if out is not None:
        words = [*paths, "--at", at, "--metric", metric, *(["--by", ",".join(by)] if by else [])]
        words += ["--threshold", f"{threshold:g}"] if threshold is not None else []
        words += ["--mixed"] if mixed else []
        words += [word for item in ranges for word in ("--range", item)]
        command = shlex.join(["paceline", "compare", *words, "--out", out])
        drawn = _write(Path(out).expanduser(), result, f"# Comparison\n\n```sh\n{command}\n```\n\n{_harmless(text)}")
        print(f"written    {Path(out) / 'compare.md'}, {'.json, .csv and .png' if drawn else '.json and .csv'}")
    return 0


def page(
    result: Comparison,
    groups: Sequence[Group],
    runs: Sequence[RunData],
    scales: dict[str, tuple[float, float]] | None,
    closed: Sequence[str] = (),
) -> str:
    """In Markdown."""
    parts = [_about(result, scales)]
    for one in [result, *result.by_task]:
        if one is not result:
            parts.append(f"## {one.tasks[0]}")
        if not one.results:
            parts.append("All tasks together: –")
            continue
        parts.append(_scores(one))
        parts.append(_speeds(one))
        if one.improvements:
            parts.append(_improvements(one))
    parts.append(_legend(result))
    settings = differences([member.runs[0] for member in groups])
    shown = {key: values for key, values in settings.items() if key != "seed"}
    if shown and len(groups) > 1:
        labels = [member.label for member in groups]
        rows = [
            [f"`{key}`", *("–" if value is None else str(value) for value in values)] for key, values in shown.items()
        ]
        parts.append("Settings in which they differ:\n\n" + table(["", *labels], rows))
    said = [*result.notes, *problems_of(runs), *closed]
    if said:
        parts.append("To be known:\n\n" + "\n".join(f"- {line}" for line in said))
    return "\n\n".join(parts) + "\n"


def _about(result: Comparison, scales: dict[str, tuple[float, float]] | None) -> str:
    ends = "; ".join(f"{task} at {end:,.0f}" for task, end in result.horizon.items())
    text = f"{'; '.join(result.tasks)}: {_named(result)} at equal {AXES[result.at]} ({ends})."
    if scales is not None and len(result.tasks) > 1:
        text += " 0 and 1 are " + "; ".join(f"{scales[t][0]:g} and {scales[t][1]:g} in {t}" for t in result.tasks) + "."
    return text


def _named(result: Comparison) -> str:
    names = {RETURN: "return of the last 100 training episodes", "eval": "return in evaluations"}
    return names.get(result.metric, f"`{result.metric}`")


def _scores(result: Comparison) -> str:
    limit = result.threshold if len(result.tasks) == 1 else None
    head = ["group", "runs", f"{result.unit}, IQM", "95 % interval", "mean ± std", "mean height", "largest fall"]
    head += [] if limit is None else [f"reached {limit:g}", "after steps", "after time"]
    digits = 3 if len(result.tasks) > 1 else 2
    rows = []
    for one in result.results:
        row = [one.label, _runs(one), f"{one.score.value:,.{digits}f}", interval(one.score, digits)]
        std = "" if one.std is None else f" ± {one.std:.{digits}f}"
        row += [f"{one.mean:.{digits}f}{std}", f"{one.area.value:.{digits}f}", f"{one.fall:.{digits}f}"]
        if limit is not None and one.reached is not None:
            reached = one.reached
            row += [f"{reached.runs} of {reached.of}"]
            row += ["–" if reached.steps is None else _with_interval(reached.steps, 0)]
            row += ["–" if reached.seconds is None else _with_interval(reached.seconds, 1, " s")]
        rows.append(row)
    return table(head, rows)


def _speeds(result: Comparison) -> str:
    parts = list(dict.fromkeys(part for one in result.results for part in one.time_split))
    parts = [part for part in parts if any(_share(one, part) >= 0.005 for one in result.results)]
    head = [
        "group",
        "steps",
        "steps/s",
        "wall time",
        f"{result.unit if len(result.tasks) == 1 else 'value'} at the end",
    ]
    rows = [
        [
            one.label,
            f"{one.env_steps.value:,.0f}",
            _with_interval(one.steps_per_second, 0),
            seconds(one.wall_seconds.value),
            _with_interval(one.last, 2),
            *(f"{100 * _share(one, part):.0f} %" for part in parts),
        ]
        for one in result.results
    ]
    return table([*head, *(f"time: {part}" for part in parts)], rows)


def _improvements(result: Comparison) -> str:
    rows = [
        [
            f"{one.label} over {one.over}",
            f"{one.probability:.2f}",
            "one run alone" if one.low is None or one.high is None else f"{one.low:.2f} to {one.high:.2f}",
        ]
        for one in result.improvements
    ]
    return table(["", "probability that a run scores higher", "95 % interval"], rows)


def _legend(result: Comparison) -> str:
    text = (
        "IQM: mean of the middle half of the runs. Intervals: percentile bootstrap over runs, of each task by itself. "
        "Mean height: of the curve from the start to where scores are taken (sample efficiency). Largest fall: below "
        "what the run had reached before, mean over runs (stability). Steps/s: steps over the training time, the start "
        "left out; wall time has it."
    )
    if result.threshold is not None:
        text += f" Reached: first row at or above {result.threshold:g}, of the runs that did; time with the start."
    return text


def interval(estimate: Estimate, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return "one run" if estimate.runs == 1 else "–"
    return f"{estimate.low:,.{digits}f} to {estimate.high:,.{digits}f}"


def _with_interval(estimate: Estimate, digits: int, unit: str = "") -> str:
    if not estimate.runs:
        return "–"
    ends = f" ({interval(estimate, digits)})" if estimate.low is not None else ""
    return f"{estimate.value:,.{digits}f}{unit}{ends}"


def _share(result: Result, part: str) -> float:
    total = sum(result.time_split.values())
    return result.time_split.get(part, 0.0) / total if total else 0.0


def _runs(result: Result) -> str:
    others = [f"{count} {state}" for state, count in result.counts.items() if state != "finished"]
    return f"{len(result.names)}" + (f" ({', '.join(others)})" if others else "")


def _scales(runs: Sequence[RunData], given: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By task: what was given for its environment, else what is known."""
    asked: dict[str, tuple[float, float]] = {}
    for item in given:
        env, _, ends = item.rpartition("=")
        try:
            low, high = (float(end) for end in ends.split(","))
        except ValueError:
            low = high = 0.0
        if not env or low >= high:
            raise UserError(f"--range {item}: ENV=LEAST,GREATEST is expected, as in CartPole-v1=0,500")
        asked[env] = (low, high)
    found: dict[str, tuple[float, float]] = {}
    for run in runs:
        section = run.config.get("env")
        kwargs: dict[str, Any] = (section.get("kwargs") if isinstance(section, dict) else None) or {}
        scale = asked.get(run.env) or known_range(run.env, kwargs)
        if scale is not None:
            found[run.task] = scale
    return found


def _write(folder: Path, result: Comparison, text: str) -> bool:
    """Whether the figure is among the files."""
    from paceline.report.figures import draw_comparison

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "compare.md", text)
        write_json(folder / "compare.json", dataclasses.asdict(result))
        write_text(folder / "compare.csv", _csv(result))
        return draw_comparison(result, folder / "compare.png")
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror}); choose another folder") from None


def _harmless(text: str) -> str:
    """Reasons and names may hold HTML, which a reader of Markdown would take for such."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _csv(result: Comparison) -> str:
    """A row per group; the estimates as value, low, high."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    estimates = ("score", "area", "last", "steps_per_second", "wall_seconds", "env_steps")
    ends = [f"{name}{end}" for name in estimates for end in ("", "_low", "_high")]
    writer.writerow(["task", "group", "runs", "mean", "std", "fall", *ends, "reached", "steps_to", "seconds_to"])
    for one in [result, *result.by_task]:
        for row in one.results:
            each: list[Any] = [getattr(row, name) for name in estimates]
            reached = row.reached
            writer.writerow(
                [
                    "; ".join(one.tasks),
                    row.label,
                    len(row.names),
                    row.mean,
                    row.std,
                    row.fall,
                    *(value for estimate in each for value in (estimate.value, estimate.low, estimate.high)),
                    None if reached is None else reached.runs,
                    None if reached is None or reached.steps is None else reached.steps.value,
                    None if reached is None or reached.seconds is None else reached.seconds.value,
                ]
            )
    return text.getvalue()
