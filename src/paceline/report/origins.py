"""Where runs come from: their settings, machines, versions and commands, as sections of a report."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.bench.groups import Group, differences
from paceline.bench.study import RunData
from paceline.config import SECTIONS
from paceline.report.blocks import Block, Cell, Code, Section, Table, Text, count, listed, number, seconds

MOST_COLUMNS = 6
"""Groups side by side in a table."""
ORIGIN = ("paceline", "python", "platform", "cpu_model", "cores", "hostname")


def configuration(groups: Sequence[Group]) -> Section:
    firsts = [group.runs[0] for group in groups]
    differing = {key: values for key, values in differences(firsts).items() if key != "seed"}
    blocks: list[Block] = []
    if len(groups) < 2:
        blocks.append(Text("One group: its runs differ in nothing but their seed."))
    elif len(groups) <= MOST_COLUMNS:
        rows = [[Cell(key), *(Cell(_value(value)) for value in values)] for key, values in differing.items()]
        blocks.append(
            Table("Settings in which the groups differ", ["setting", *(group.label for group in groups)], rows)
        )
    else:
        rows = []
        for key, values in differing.items():
            section = key.partition(".")[0]
            own = [section not in SECTIONS or run.algo == section for run in firsts]
            held = [value for value, mine in zip(values, own, strict=True) if mine]
            by_value: dict[str, int] = Counter(_value(value) for value in held)
            rows.append([Cell(key), Cell(listed([f"{text} ({many})" for text, many in by_value.items()], 12))])
        blocks.append(Table("Settings in which the groups differ", ["setting", "values (groups with it)"], rows))
    known = next((run for run in firsts if run.config), None)
    if known is not None:
        text = yaml.safe_dump(known.config, sort_keys=False, allow_unicode=True).strip()
        blocks.append(Code([text], fold=f"All settings of {known.name}"))
    return Section("configuration", "Configuration", blocks)


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def provenance(runs: Sequence[RunData]) -> Section:
    origins = [run.provenance for run in runs if run.provenance]
    if not origins:
        return Section("provenance", "Provenance", [Text("No run says where it was made.", "notice")])
    rows = []
    for key in ORIGIN:
        rows.append([Cell(key.replace("_", " ")), Cell(_distinct(origin.get(key) for origin in origins))])
    sizes = (origin.get("memory_bytes") for origin in origins)
    memory = (f"{size / 2**30:.1f} GiB" for size in sizes if isinstance(size, int | float))
    rows.append([Cell("memory"), Cell(_distinct(memory))])
    rows.append([Cell("device"), Cell(_distinct(run.device for run in runs if run.summary))])
    rows.append([Cell("commit"), Cell(_distinct(_commit(origin.get("git")) for origin in origins))])
    dates = sorted(
        str(origin.get("started_at"))[:16].replace("T", " ") for origin in origins if origin.get("started_at")
    )
    rows.append(
        [
            Cell("started"),
            Cell("–" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}", "UTC"),
        ]
    )
    packages = [found if isinstance(found := origin.get("packages"), dict) else {} for origin in origins]
    for name in dict.fromkeys(name for found in packages for name in found):
        rows.append([Cell(name), Cell(_distinct(found.get(name) for found in packages))])
    lacking = len(runs) - len(origins)
    more = [Text(f"{count(lacking, 'run')} without provenance.", "note")] if lacking else []
    return Section(
        "provenance",
        "Provenance",
        [Table(f"Where {count(len(origins), 'run')} were made", ["", "value (runs)"], rows), *more],
    )


def _commit(git: Any) -> str:
    if not isinstance(git, dict) or not git.get("commit"):
        return "not in a repository"
    return str(git["commit"])[:12] + (" with changes" if git.get("dirty") else "")


def _distinct(values: Iterable[Any]) -> str:
    """Each value once, with how many runs have it where they differ."""
    found = Counter("–" if value is None else str(value) for value in values)
    if len(found) == 1:
        return next(iter(found))
    return listed([f"{text} ({many})" for text, many in found.most_common()], 8) or "–"


def reproduce(runs: Sequence[RunData], studies: Sequence[str], paths: Sequence[Path]) -> Section:
    commands = list(dict.fromkeys(text for run in runs if (text := command_of(run))))
    blocks: list[Block] = []
    if studies:
        blocks += [Text("The study:"), Code(list(studies))]
    blocks += [Text("This page:"), Code([shlex.join(["paceline", "report", *map(str, paths)])])]
    if commands:
        blocks.append(Code(commands, fold=f"The {count(len(commands), 'command')} of the runs"))
    rows = []
    for run in runs:
        figures = [number(run.env_steps), number(run.last("return_mean")), number(run.steps_per_second)]
        figures += [seconds(run.wall_seconds), str(run.resumed or "–")]
        rows.append([Cell(run.name, f"seed {run.seed}"), Cell(run.state, state=run.state), *map(Cell, figures)])
    head = ["run", "state", "steps", "last return", "steps/s", "wall time", "resumed"]
    blocks.append(Table("Every run", head, rows, (2, 3, 4, 5, 6), fold=f"All {count(len(runs), 'run')}, one by one"))
    return Section("reproduce", "Reproduce", blocks)


def command_of(run: RunData) -> str:
    """As a user would type it: without the path of the interpreter or of the script."""
    words = run.command
    if not words:
        return ""
    program = Path(words[0])
    if program.name in ("paceline", "__main__.py"):
        return shlex.join(["paceline", *words[1:]])
    return shlex.join(["python", *words])
