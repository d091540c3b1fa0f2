"""`paceline report`: one page about runs, as a file that needs nothing else, or as Markdown."""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from paceline.bench import files
from paceline.bench.files import FAILED, FINISHED, Tree
from paceline.bench.groups import Group, group, relabel
from paceline.bench.study import STUDIES, RunData, load_runs, unreadable
from paceline.config import UserError
from paceline.report import assets, markdown, origins, sections
from paceline.report.blocks import (
    Chart,
    Page,
    Pair,
    Section,
    Tile,
    count,
    file_names,
    interval,
    listed,
    number,
    percent,
    seconds,
    times,
)
from paceline.report.sections import Task
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
    """The file that was written; None where it was printed."""
    printed = out == "-"
    target = Path(out or f"report.{form or 'html'}").expanduser()
    meant = "md" if printed else ENDINGS.get(target.suffix.lower(), form)
    form = form or meant
    if form is None:
        raise UserError(f"--out {out}: a report ends in .html or .md, or give --format")
    if form != meant:
        raise UserError(
            f"--out {out} and --format {form} do not agree: leave --format out, or give the file its ending"
        )
    if form == "html":
        assets.check()
    for folder in timelines:
        if not (folder / "timeline.jsonl").is_file():
            raise UserError(f"--timeline {folder}: there is no timeline.jsonl in it; give the folder of `launch --log`")
    page = build(paths, load_runs(paths), title=title, timelines=timelines)
    text = render_html(page) if form == "html" else markdown.render(page)
    if printed:
        sys.stdout.write(text)
        return None
    try:
        write_text(target, text, sync=False)
    except OSError as error:
        raise UserError(f"--out {target}: it cannot be written ({error.strerror}); choose another path") from None
    return target


def build(
    paths: Sequence[Path], runs: list[RunData], *, title: str | None = None, timelines: Sequence[Path] = ()
) -> Page:
    groups = group(runs)
    names = list(dict.fromkeys(run.task for run in runs))
    called = file_names(names)
    tasks = [Task(called[name], _of_task(groups, name), index) for index, name in enumerate(names)]
    found = find_timelines(paths, runs, timelines)
    parts = [
        sections.results(tasks),
        sections.missing(runs, unreadable(paths)),
        sections.learning(tasks),
        sections.scaling(tasks),
        sections.time_split(groups),
        sections.load(groups),
        sections.timelines(found),
        origins.configuration(groups),
        origins.provenance(runs),
        origins.reproduce(runs, study_commands(paths), paths),
    ]
    headline, because = verdict(tasks, runs)
    folder = Path(paths[0]).expanduser().resolve().name
    return Page(
        title=title or (folder if len(paths) == 1 else f"{folder} and {len(paths) - 1} more"),
        lead=lead(runs, groups),
        made=f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC",
        headline=headline,
        because=because,
        tiles=tiles(tasks, runs),
        sections=[part for part in parts if part is not None],
    )


def lead(runs: Sequence[RunData], groups: Sequence[Group]) -> str:
    def all_of(values: Sequence[str]) -> str:
        return listed(list(dict.fromkeys(values)), 4)

    envs = file_names(list(dict.fromkeys(run.env for run in runs)))
    what = f"{all_of([run.algo.upper() for run in runs])} on {all_of(list(envs.values()))}"
    sizes = sorted({run.workers for run in runs})
    workers = f" with {', '.join(map(str, sizes))} worker{'' if sizes == [1] else 's'}" if sizes else ""
    return f"{what}{workers}: {count(len(runs), 'run')} in {count(len(groups), 'group')}."


def verdict(tasks: Sequence[Task], runs: Sequence[RunData]) -> tuple[str, list[str]]:
    """The answer first: what more workers brought, else what was reached; then why, and what is missing."""
    lines: list[str] = []
    scaled = [family for task in tasks for family in task.families]
    for family in scaled:
        last = family.points[-1]
        sure = interval(last.speed_up.low, last.speed_up.high, times)
        text = f"{family.label}: {last.workers} workers are {times(last.speed_up.value)} as fast as "
        text += f"{family.points[0].workers}"
        text += f" (95 %: {sure})" if sure else " (a run alone of either, so no interval)"
        lines.append(f"{text}, an efficiency of {percent(last.efficiency.value)}.")
        if bound := sections.verdict_of(last.group, training=True):
            lines.append(f"Its {last.workers} workers are {bound}.")
    for task in tasks:
        if task.by_steps is None:
            lines.append(f"{task.name}: no run has finished{'' if _ended(task.runs) else ' yet'}.")
            continue
        best = max(task.by_steps.results, key=lambda result: result.score.value)
        sure = interval(best.score.low, best.score.high)
        who = (
            f"{best.label} returns"
            if len(task.by_steps.results) == 1
            else f"the highest return is that of {best.label},"
        )
        text = f"{task.name}: {who} {number(best.score.value)}{task.cut}" + (f" (95 %: {sure})" if sure else "")
        close = [
            other.label
            for other in task.by_steps.results
            if other is not best and _overlap(best.score.low, other.score.high, best.score.value, other.score.value)
        ]
        text += f"; not told apart from {listed(close, 3)}" if close else ""
        lines.append(f"{text}.")
        if not scaled and len(task.by_steps.results) == 1:
            bound = sections.verdict_of(next(one for one in task.groups if one.label == best.label))
            lines += [f"Its speed is {bound}."] if bound else []
    states = Counter(run.state for run in runs if run.state != FINISHED)
    if states:
        lines.append("Not finished: " + ", ".join(f"{many} {state}" for state, many in states.items()) + ".")
    return lines[0], lines[1:]


def _ended(runs: Sequence[RunData]) -> bool:
    return all(run.state in (FINISHED, FAILED) for run in runs)


def _overlap(low: float | None, high: float | None, mine: float, theirs: float) -> bool:
    return (mine if low is None else low) <= (theirs if high is None else high)


def tiles(tasks: Sequence[Task], runs: Sequence[RunData]) -> list[Tile]:
    finished = [run for run in runs if run.state == FINISHED]
    shown = [Tile("runs finished", f"{len(finished)} of {len(runs)}", _states(runs))]
    speeds = [(run.steps_per_second, run) for run in finished if run.steps_per_second > 0]
    if speeds:
        fastest, run = max(speeds, key=lambda pair: pair[0])
        shown.append(Tile("fastest run, steps/s", number(round(fastest)), run.name))
    families = [family for task in tasks for family in task.families]
    if families:
        point = max((family.points[-1] for family in families), key=lambda one: one.speed_up.value)
        shown.append(Tile("best speed-up", times(point.speed_up.value), f"{point.workers} workers"))
    scored = [task for task in tasks if task.by_steps is not None]
    if len(scored) == 1 and scored[0].by_steps is not None:
        best = max(scored[0].by_steps.results, key=lambda result: result.score.value)
        shown.append(Tile(f"best return{scored[0].cut}", number(best.score.value), best.label))
    spent = sum(run.wall_seconds for run in runs if run.wall_seconds > 0)
    steps = sum(run.env_steps for run in runs)
    shown.append(Tile("time of all runs", seconds(spent), f"{number(steps)} steps"))
    return shown


def _states(runs: Sequence[RunData]) -> str:
    return ", ".join(
        f"{many} {state}" for state, many in Counter(run.state for run in runs).items() if state != FINISHED
    )


def find_timelines(paths: Sequence[Path], runs: Sequence[RunData], given: Sequence[Path]) -> dict[str, list[Tree]]:
    """Those given, those beside the runs and those in them, each once."""
    found: dict[str, list[Tree]] = {}
    beside = [each for path in paths for each in (path, path / "launch", *sorted(path.glob("launch/*")))]
    for folder in (*given, *beside):
        if rows := files.numbered(files.rows(folder / "timeline.jsonl", [])[0], ("seconds",), "", []):
            found.setdefault(json.dumps(rows[0]), [{"name": folder.resolve().name}, *rows])
    for run in runs:
        if run.timeline:
            found.setdefault(json.dumps(run.timeline[0]), [{"name": run.name}, *run.timeline])
    return {
        f"{rows[0]['name']} ({index})" if index > 1 else str(rows[0]["name"]): rows[1:]
        for index, rows in enumerate(found.values(), 1)
    }


def study_commands(paths: Sequence[Path]) -> list[str]:
    """What `paceline bench` was started with, where a study is in the folder."""
    found: list[str] = []
    for file in (path / name for path in paths for name in STUDIES):
        try:
            commands = json.loads(file.read_bytes()).get("commands") or []
        except (OSError, ValueError, AttributeError):
            continue
        found += [command for command in commands if isinstance(command, str)]
    return found


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
        # In a script nothing is unescaped but `<`, and that only matters before a tag.
        charts=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=packed,
    )


def charts_of(section: Section) -> list[Chart]:
    found: list[Chart] = []
    for block in section.blocks:
        found += [block] if isinstance(block, Chart) else block.charts if isinstance(block, Pair) else []
    return found


def _of_task(groups: Sequence[Group], task: str) -> list[Group]:
    held = [(one, [run for run in one.runs if run.task == task]) for one in groups]
    return relabel([Group(one.label, one.key, runs) for one, runs in held if runs])
