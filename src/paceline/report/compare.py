"""`paceline compare`: groups of runs side by side, as tables, files and a figure."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.suite import known_range
from paceline.config import UserError
from paceline.results.comparison import Comparison, GroupResult, compare
from paceline.results.discovery import Runs, paths_of, unreadable_folders
from paceline.results.groups import RunGroup, differences, group
from paceline.results.run_series import AXES, EVALUATION, RETURN
from paceline.results.runs import RunData, load_runs, problems_of
from paceline.results.text import UNKNOWN, bullets, counts, fixed, interval, seconds, table, times, with_interval
from paceline.run.directory import write_json, write_text

MIXED_KEYS = ("algo", "engine", "nodes", "workers")
"""Grouping keys for several tasks, whose other settings differ anyway."""
Ranges = dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class ComparedRuns:
    """Printed, or shown in a notebook, it is a page with tables; `result` has the numbers."""

    result: Comparison
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


def compare_runs(
    runs: Runs,
    *,
    by: Sequence[str] | None = None,
    at: str = "steps",
    metric: str = RETURN,
    threshold: float | None = None,
    mixed: bool = False,
    ranges: Sequence[str] = (),
) -> ComparedRuns:
    """Group runs, or the runs in folders, that differ only in their seed, and compare the groups. `by`: group by these
    settings. `at`: steps or time. `metric`: return, eval, or one in `metrics.jsonl`. `threshold`: the return that
    counts as solved. `mixed`: over several environments, by normalised scores, with `ranges` such as `Env-v0=0,100`."""
    folders = paths_of(runs)
    loaded = load_runs(folders)
    groups = group(loaded, by or (MIXED_KEYS if mixed else None))
    scales = _ranges_by_task(loaded, ranges) if mixed else None
    result = compare(groups, at=at, metric=metric, threshold=threshold, ranges=scales)
    return ComparedRuns(result, page(result, groups, loaded, scales, unreadable_folders(folders)))


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
    compared = compare_runs(paths, by=by, at=at, metric=metric, threshold=threshold, mixed=mixed, ranges=ranges)
    result, text = compared.result, compared.text
    print(text)
    if out is not None:
        words = [*paths, "--at", at, "--metric", metric, *(["--by", ",".join(by)] if by else [])]
        words += ["--threshold", f"{threshold:g}"] if threshold is not None else []
        words += ["--mixed"] if mixed else []
        words += [word for item in ranges for word in ("--range", item)]
        command = shlex.join(["paceline", "compare", *words, "--out", out])
        drawn = _write(Path(out).expanduser(), result, f"# Comparison\n\n```sh\n{command}\n```\n\n{_escape_html(text)}")
        print(f"written    {Path(out) / 'compare.md'}, {'.json, .csv and .png' if drawn else '.json and .csv'}")
    return 0


def page(
    result: Comparison,
    groups: Sequence[RunGroup],
    runs: Sequence[RunData],
    ranges: Ranges | None,
    unreadable: Sequence[str] = (),
) -> str:
    """In Markdown."""
    parts = [_introduction(result, ranges)]
    for one in [result, *result.by_task]:
        if one is not result:
            parts.append(f"## {one.tasks[0]}")
        if not one.results:
            parts.append(f"All tasks together: {UNKNOWN}")
            continue
        parts += [_scores(one), _speeds(one)]
        if one.improvements:
            parts.append(_improvements(one))
    parts.append(_legend(result))
    settings = {key: values for key, values in differences([one.runs[0] for one in groups]).items() if key != "seed"}
    if settings and len(groups) > 1:
        rows = [
            [f"`{key}`", *(UNKNOWN if value is None else str(value) for value in values)]
            for key, values in settings.items()
        ]
        parts.append("Settings that differ:\n\n" + table(["", *(one.label for one in groups)], rows))
    notes = [*result.notes, *problems_of(runs), *unreadable]
    if notes:
        parts.append(f"Notes:\n\n{bullets(notes)}")
    return "\n\n".join(parts) + "\n"


def _introduction(result: Comparison, ranges: Ranges | None) -> str:
    metrics = {RETURN: "return of the last 100 training episodes", EVALUATION: "return in evaluations"}
    metric = metrics.get(result.metric, f"`{result.metric}`")
    if not result.tasks:
        return f"Several tasks, none of them with a known range: {metric} at equal {AXES[result.at]}, each by itself."
    ends = "; ".join(f"{task} at {end:,.0f}" for task, end in result.horizon.items())
    text = f"{'; '.join(result.tasks)}: {metric} at equal {AXES[result.at]} ({ends})."
    if ranges is not None and result.by_task:
        text += " 0 and 1 are " + "; ".join(f"{ranges[t][0]:g} and {ranges[t][1]:g} in {t}" for t in result.tasks) + "."
    return text


def _scores(result: Comparison) -> str:
    threshold = result.threshold if not result.by_task else None
    head = ["group", "runs", f"{result.unit}, IQM", "95 % interval", "mean ± std", "mean height", "largest fall"]
    head += [] if threshold is None else [f"reached {threshold:g}", "after steps", "after time"]
    digits = 3 if result.by_task else 2
    rows = []
    for one in result.results:
        others = counts({state: many for state, many in one.counts.items() if state != "finished"})
        ends = interval(one.score.low, one.score.high, fixed(digits))
        std = "" if one.std is None else f" ± {one.std:.{digits}f}"
        row = [
            one.label,
            f"{len(one.names)}" + (f" ({others})" if others else ""),
            f"{one.score.value:,.{digits}f}",
            ends or ("one run" if one.score.runs == 1 else UNKNOWN),
            f"{one.mean:.{digits}f}{std}",
            f"{one.area.value:.{digits}f}",
            f"{one.fall:.{digits}f}",
        ]
        if threshold is not None and one.reached is not None:
            reached = one.reached
            row.append(f"{reached.runs} of {reached.of}")
            row.append(UNKNOWN if reached.steps is None else with_interval(reached.steps, fixed(0)))
            row.append(UNKNOWN if reached.seconds is None else with_interval(reached.seconds, fixed(1), " s"))
        rows.append(row)
    return table(head, rows)


def _speeds(result: Comparison) -> str:
    parts = list(dict.fromkeys(part for one in result.results for part in one.time_split))
    parts = [part for part in parts if any(_share(one, part) >= 0.005 for one in result.results)]
    last = f"{result.unit if not result.by_task else 'value'} at the end"
    faster = ["speed-up"] if any(one.speed_up for one in result.results) else []
    rows = [
        [
            one.label,
            f"{one.env_steps.value:,.0f}",
            with_interval(one.steps_per_second, fixed(0)),
            *("1×" if one.speed_up is None else with_interval(one.speed_up, times) for _ in faster),
            seconds(one.wall_seconds.value),
            with_interval(one.last, fixed(2)),
            *(f"{100 * _share(one, part):.0f} %" for part in parts),
        ]
        for one in result.results
    ]
    return table(["group", "steps", "steps/s", *faster, "wall time", last, *(f"time: {part}" for part in parts)], rows)


def _improvements(result: Comparison) -> str:
    rows = [
        [
            f"{one.label} over {one.over}",
            f"{one.probability:.2f}",
            interval(one.low, one.high, fixed(2)) or "single run",
        ]
        for one in result.improvements
    ]
    return table(["", "probability that a run scores higher", "95 % interval"], rows)


def _legend(result: Comparison) -> str:
    text = (
        "IQM: mean of the middle half of the runs. Intervals: percentile bootstrap over runs, each task by itself. "
        "Mean height: of the curve up to where scores are taken (sample efficiency). Largest fall: below an earlier "
        "value of the run, mean over runs (stability). Steps/s: steps over training time, which excludes the start; "
        "wall time includes it. Speed-up: steps/s over those of the first group."
    )
    if result.threshold is not None:
        text += f" Reached: first row at or above {result.threshold:g}, over the runs that reached it; times include "
        text += "the start."
    return text


def _share(result: GroupResult, part: str) -> float:
    total = sum(result.time_split.values())
    return result.time_split.get(part, 0.0) / total if total else 0.0


def _ranges_by_task(runs: Sequence[RunData], given: Sequence[str]) -> Ranges:
    """The range given for a task's environment, else the known one."""
    by_env: Ranges = {}
    for item in given:
        env, _, ends = item.rpartition("=")
        try:
            low, high = (float(end) for end in ends.split(","))
        except ValueError:
            low = high = 0.0
        if not env or low >= high:
            raise UserError(f"--range {item}: expected ENV=LEAST,GREATEST, as in CartPole-v1=0,500")
        by_env[env] = (low, high)
    found: Ranges = {}
    for run in runs:
        scale = by_env.get(run.env) or known_range(run.env, run.section("env").get("kwargs") or {})
        if scale is not None:
            found[run.task] = scale
    return found


def _write(folder: Path, result: Comparison, text: str) -> bool:
    """Whether the figure was drawn too."""
    from paceline.report.figures import draw_comparison

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "compare.md", text)
        write_json(folder / "compare.json", dataclasses.asdict(result))
        write_text(folder / "compare.csv", _csv(result))
        return draw_comparison(result, folder / "compare.png")
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror}); choose another folder") from None


def _escape_html(text: str) -> str:
    """Reasons and names may hold HTML, which Markdown would pass through."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _csv(result: Comparison) -> str:
    """One row per group; each estimate as value, low, high."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    estimates = ("score", "area", "last", "steps_per_second", "wall_seconds", "env_steps")
    ends = [f"{name}{end}" for name in estimates for end in ("", "_low", "_high")]
    last = ["reached", "steps_to", "seconds_to", "speed_up"]
    writer.writerow(["task", "group", "runs", "mean", "std", "fall", *ends, *last])
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
                    None if row.speed_up is None else row.speed_up.value,
                ]
            )
    return text.getvalue()
