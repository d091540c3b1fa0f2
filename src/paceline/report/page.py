"""`paceline report`: one self-contained page about runs, as HTML or Markdown."""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from paceline.config import UserError, algorithm_name
from paceline.report import assets, markdown, origins, sections
from paceline.report.blocks import Chart, ChartPair, Page, PageSection, Tile
from paceline.report.task_results import TaskResults, short_names, task_results
from paceline.results.comparison import FEW_RUNS, Comparison
from paceline.results.discovery import Runs, bench_commands, paths_of, unreadable_folders
from paceline.results.estimates import Estimate
from paceline.results.groups import RunGroup, group
from paceline.results.run_files import FAILED, FINISHED, Tree
from paceline.results.runs import RunData, load_runs, read_timeline
from paceline.results.scaling_series import ScalingSeries
from paceline.results.text import count, counts, interval, listed, number, percent, seconds, times
from paceline.run.directory import write_text

ENDINGS = {".html": "html", ".htm": "html", ".md": "md"}


def write_report(
    paths: Sequence[Path],
    out: str | None = None,
    *,
    form: str | None = None,
    title: str | None = None,
    timelines: Sequence[Path] = (),
) -> Path | None:
    """Write the report and return its path; `-` prints Markdown and returns None."""
    printed = out == "-"
    target = Path(out or f"report.{form or 'html'}").expanduser()
    by_ending = "md" if printed else ENDINGS.get(target.suffix.lower(), form)
    form = form or by_ending
    if form is None:
        raise UserError(f"--out {out}: a report ends in .html or .md; otherwise give --format")
    if form != by_ending:
        raise UserError(f"--out {out} and --format {form} do not agree: omit --format, or change the ending")
    if form == "html":
        assets.check()
    for folder in timelines:
        if not (folder / "timeline.jsonl").is_file():
            raise UserError(f"--timeline {folder}: no timeline.jsonl in it; give the folder of `launch --log`")
    page = build(paths, load_runs(paths), title=title, timelines=timelines)
    text = render_html(page) if form == "html" else markdown.render(page)
    if printed:
        sys.stdout.write(text)
        return None
    try:
        write_text(target, text, sync=False)
    except OSError as error:
        raise UserError(f"--out {target}: cannot be written ({error.strerror}); choose another path") from None
    return target


def report(
    runs: Runs,
    out: str | Path = "report.html",
    *,
    title: str | None = None,
    timelines: Sequence[Path] = (),
) -> Path:
    """Write one self-contained page about runs or folders of runs, as HTML or, if `out` ends in .md, as Markdown.
    Returns its path. `timelines`: folders of `paceline launch --log`."""
    written = write_report(paths_of(runs), str(out), title=title, timelines=timelines)
    assert written is not None
    return written


def build(
    paths: Sequence[Path], runs: list[RunData], *, title: str | None = None, timelines: Sequence[Path] = ()
) -> Page:
    groups, tasks = group(runs), task_results(runs)
    parts = [
        sections.results(tasks),
        sections.missing(runs, unreadable_folders(paths)),
        sections.learning(tasks),
        sections.scaling(tasks),
        sections.time_split(groups),
        sections.load(groups),
        sections.timelines(find_timelines(paths, runs, timelines)),
        origins.configuration(groups),
        origins.provenance(runs),
        origins.reproduce(runs, bench_commands(paths), paths),
    ]
    headline, *findings = summary(tasks, runs)
    folder = Path(paths[0]).expanduser().resolve().name
    return Page(
        title=title or (folder if len(paths) == 1 else f"{folder} and {len(paths) - 1} more"),
        lead=lead(runs, groups),
        made=f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC",
        headline=headline,
        findings=findings,
        tiles=tiles(tasks, runs),
        sections=[part for part in parts if part is not None],
    )


def lead(runs: Sequence[RunData], groups: Sequence[RunGroup]) -> str:
    envs = short_names(list(dict.fromkeys(run.env for run in runs)))
    algos = dict.fromkeys(algorithm_name(run.algo).upper() for run in runs)
    what = f"{listed(list(algos), 4)} on {listed(list(dict.fromkeys(envs.values())), 4)}"
    sizes = sorted({run.workers for run in runs})
    workers = f" with {', '.join(map(str, sizes))} worker{'' if sizes == [1] else 's'}" if sizes else ""
    return f"{what}{workers}: {count(len(runs), 'run')} in {count(len(groups), 'group')}."


def summary(tasks: Sequence[TaskResults], runs: Sequence[RunData]) -> list[str]:
    """The main findings, the most important first: speed-up, returns, and what did not finish."""
    lines: list[str] = []
    for series in (series for task in tasks for series in task.series):
        lines += _speed_up_findings(series)
    is_scaled = bool(lines)
    for task in tasks:
        if task.by_steps is None:
            ended = all(run.state in (FINISHED, FAILED) for run in task.runs)
            lines.append(f"{task.name}: no run has finished{'' if ended else ' yet'}.")
        else:
            lines += _return_findings(task, task.by_steps, with_verdict=not is_scaled)
    unfinished = _unfinished(runs)
    return [*lines, f"Not finished: {unfinished}."] if unfinished else lines


def _speed_up_findings(series: ScalingSeries) -> list[str]:
    base, last = series.points[0], series.points[-1]
    ends = _ends(last.speed_up, times) or " (a single run of one of them, so no interval)"
    text = f"{series.label}: {last.workers} workers are {times(last.speed_up.value)} as fast as {base.workers}{ends}"
    verdict = sections.group_verdict(last.group, training=True)
    found = [f"{text}, an efficiency of {percent(last.efficiency.value)}."]
    return [*found, f"Its {last.workers} workers are {verdict}."] if verdict else found


def _return_findings(task: TaskResults, comparison: Comparison, *, with_verdict: bool) -> list[str]:
    best = max(comparison.results, key=lambda result: result.score.value)
    alone = len(comparison.results) == 1
    who = f"{best.label} returns" if alone else f"{best.label} has the highest return,"
    others = [other.label for other in comparison.results if other is not best]
    unsure = [label for label in others if not _surely_better(comparison, best.label, label)]
    doubt = f"; whether it is better than {listed(unsure, 3)} is not certain" if unsure else ""
    if others and not unsure and min(one.score.runs for one in comparison.results) < FEW_RUNS:
        doubt = f"; with fewer than {FEW_RUNS} runs in a group that is a hint, not a proof"
    found = [f"{task.name}: {who} {number(best.score.value)}{task.at_horizon}{_ends(best.score)}{doubt}."]
    verdict = sections.group_verdict(next(one for one in task.groups if one.label == best.label))
    return [*found, f"Its speed is {verdict}."] if verdict and alone and with_verdict else found


def _ends(estimate: Estimate, form: Callable[[float | None], str] = number) -> str:
    """` (95 %: 1.7 to 1.9)`; empty without an interval."""
    ends = interval(estimate.low, estimate.high, form)
    return f" (95 %: {ends})" if ends else ""


def _surely_better(comparison: Comparison, label: str, over: str) -> bool:
    """As the table of probabilities says it: the whole interval is on one side of one half."""
    for one in comparison.improvements:
        if (one.label, one.over) == (label, over):
            return one.low is not None and one.low > 0.5
        if (one.label, one.over) == (over, label):
            return one.high is not None and one.high < 0.5
    return False


def tiles(tasks: Sequence[TaskResults], runs: Sequence[RunData]) -> list[Tile]:
    finished = [run for run in runs if run.state == FINISHED]
    shown = [Tile("runs finished", f"{len(finished)} of {len(runs)}", _unfinished(runs))]
    moving = [run for run in finished if run.steps_per_second > 0]
    if moving:
        fastest = max(moving, key=lambda run: run.steps_per_second)
        shown.append(Tile("fastest run, steps/s", number(round(fastest.steps_per_second)), fastest.name))
    largest = [series.points[-1] for task in tasks for series in task.series]
    if largest:
        point = max(largest, key=lambda one: one.speed_up.value)
        shown.append(Tile("best speed-up", times(point.speed_up.value), f"{point.workers} workers"))
    scored = [(task, task.by_steps) for task in tasks if task.by_steps is not None]
    if len(scored) == 1:
        ((task, comparison),) = scored
        best = max(comparison.results, key=lambda result: result.score.value)
        shown.append(Tile(f"best return{task.at_horizon}", number(best.score.value), best.label))
    spent = sum(run.wall_seconds for run in runs if run.wall_seconds > 0)
    steps = sum(run.env_steps for run in runs)
    return [*shown, Tile("time of all runs", seconds(spent), f"{number(steps)} steps")]


def _unfinished(runs: Sequence[RunData]) -> str:
    """`3 failed, 1 interrupted`."""
    return counts(dict(Counter(run.state for run in runs if run.state != FINISHED)))


def find_timelines(paths: Sequence[Path], runs: Sequence[RunData], given: Sequence[Path]) -> dict[str, list[Tree]]:
    """The given timelines, and those beside and in the runs, each once."""
    beside = [each for path in paths for each in (path, path / "launch", *sorted(path.glob("launch/*")))]
    every = [(folder.resolve().name, read_timeline(folder, [])) for folder in (*given, *beside)]
    every += [(run.name, run.timeline) for run in runs]
    found: dict[str, tuple[str, list[Tree]]] = {}
    for name, rows in every:
        if rows:
            found.setdefault(json.dumps(rows[0]), (name, rows))
    return {
        f"{name} ({index})" if index > 1 else name: rows for index, (name, rows) in enumerate(found.values(), start=1)
    }


def render_html(page: Page) -> str:
    packed = base64.b64encode(gzip.compress(assets.plotly_path().read_bytes(), 9, mtime=0)).decode()
    charts = {chart.id: chart.data for section in page.sections for chart in charts_of(section)}
    return assets.render(
        "report.html.j2",
        page=page,
        generator=f"paceline {version('paceline')}",
        nonce=secrets.token_urlsafe(16),
        style=assets.read("style.css"),
        script=assets.read("charts.js") + assets.read("report.js"),
        # Inside a script element only `<` could end it.
        charts=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=packed,
    )


def charts_of(section: PageSection) -> list[Chart]:
    found: list[Chart] = []
    for block in section.blocks:
        found += [block] if isinstance(block, Chart) else block.charts if isinstance(block, ChartPair) else []
    return found
