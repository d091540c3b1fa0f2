"""The sections of a report about the origin of runs: settings, machines, versions and commands."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.report.blocks import Block, Cell, CodeBlock, PageSection, Table, Text
from paceline.results.groups import RunGroup, differences, relevant_values
from paceline.results.runs import RunData
from paceline.results.text import UNKNOWN, count, listed, number, seconds

MAX_COLUMNS = 6
"""Groups side by side in a table; more are summarised by value."""
ORIGIN = ("paceline", "python", "platform", "cpu_model", "cores", "hostname")


def configuration(groups: Sequence[RunGroup]) -> PageSection:
    firsts = [group.runs[0] for group in groups]
    differing = {key: values for key, values in differences(firsts).items() if key != "seed"}
    blocks: list[Block] = []
    if len(groups) < 2:
        blocks.append(Text("One group: its runs differ only in their seed."))
    elif len(groups) <= MAX_COLUMNS:
        rows = [[Cell(key), *(Cell(_value(value)) for value in values)] for key, values in differing.items()]
        blocks.append(
            Table("Settings in which the groups differ", ["setting", *(group.label for group in groups)], rows)
        )
    else:
        rows = []
        for key, values in differing.items():
            by_value = Counter(_value(value) for value in relevant_values(key, values, firsts))
            rows.append([Cell(key), Cell(listed([f"{text} ({many})" for text, many in by_value.items()], 12))])
        blocks.append(Table("Settings in which the groups differ", ["setting", "values (groups with it)"], rows))
    known = next((run for run in firsts if run.config), None)
    if known is not None:
        text = yaml.safe_dump(known.config, sort_keys=False, allow_unicode=True).strip()
        blocks.append(CodeBlock([text], fold=f"All settings of {known.name}"))
    return PageSection("configuration", "Configuration", blocks)


def _value(value: Any) -> str:
    return UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def provenance(runs: Sequence[RunData]) -> PageSection:
    origins = [run.provenance for run in runs if run.provenance]
    if not origins:
        return PageSection("provenance", "Provenance", [Text("No run has provenance.json.", "notice")])
    rows = [[Cell(key.replace("_", " ")), Cell(_distinct(origin.get(key) for origin in origins))] for key in ORIGIN]
    sizes = (origin.get("memory_bytes") for origin in origins)
    memory = (f"{size / 2**30:.1f} GiB" for size in sizes if isinstance(size, int | float))
    rows.append([Cell("memory"), Cell(_distinct(memory))])
    rows.append([Cell("device"), Cell(_distinct(run.device for run in runs if run.summary))])
    rows.append([Cell("commit"), Cell(_distinct(_commit(origin.get("git")) for origin in origins))])
    dates = sorted(
        str(origin.get("started_at"))[:16].replace("T", " ") for origin in origins if origin.get("started_at")
    )
    started = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else UNKNOWN
    rows.append([Cell("started"), Cell(started, "UTC")])
    packages = [origin.get("packages") or {} for origin in origins]
    for name in dict.fromkeys(name for found in packages for name in found):
        rows.append([Cell(name), Cell(_distinct(found.get(name) for found in packages))])
    without = len(runs) - len(origins)
    more = [Text(f"{count(without, 'run')} without provenance.", "note")] if without else []
    return PageSection(
        "provenance",
        "Provenance",
        [Table(f"Where {count(len(origins), 'run')} were made", ["", "value (runs)"], rows), *more],
    )


def _commit(git: Any) -> str:
    if not isinstance(git, dict) or not git.get("commit"):
        return "not in a repository"
    return str(git["commit"])[:12] + (" with changes" if git.get("dirty") else "")


def _distinct(values: Iterable[Any]) -> str:
    """Each value once; if there are several, with the number of runs that have it."""
    found = Counter(UNKNOWN if value is None else str(value) for value in values)
    if len(found) == 1:
        return next(iter(found))
    return listed([f"{text} ({many})" for text, many in found.most_common()], 8) or UNKNOWN


def reproduce(runs: Sequence[RunData], bench: Sequence[str], paths: Sequence[Path]) -> PageSection:
    commands = list(dict.fromkeys(text for run in runs if (text := command_of(run))))
    blocks: list[Block] = []
    if bench:
        blocks += [Text("The benchmark:"), CodeBlock(list(bench))]
    blocks += [Text("This page:"), CodeBlock([shlex.join(["paceline", "report", *map(str, paths)])])]
    if commands:
        blocks.append(CodeBlock(commands, fold=f"The {count(len(commands), 'command')} of the runs"))
    rows = []
    for run in runs:
        agent_steps, each = run.last("agent_steps"), run.last("return_per_agent_mean")
        team = agent_steps == agent_steps  # not NaN: it has several agents
        steps = Cell(number(run.env_steps), f"{number(agent_steps)} of agents" if team else "")
        reward = Cell(number(run.last("return_mean")), f"{number(each)} per agent" if team else "")
        figures = [number(run.steps_per_second), seconds(run.wall_seconds), str(run.resumed or UNKNOWN)]
        about = [Cell(run.name, f"seed {run.seed}"), Cell(run.state, state=run.state)]
        rows.append([*about, steps, reward, *map(Cell, figures)])
    head = ["run", "state", "steps", "last return", "steps/s", "wall time", "resumed"]
    blocks.append(Table("Every run", head, rows, (2, 3, 4, 5, 6), fold=f"All {count(len(runs), 'run')}, one by one"))
    return PageSection("reproduce", "Reproduce", blocks)


def command_of(run: RunData) -> str:
    """The command as a user types it, without the path of the interpreter or script."""
    words = run.command
    if not words:
        return ""
    program = Path(words[0])
    if program.name in ("paceline", "__main__.py"):
        return shlex.join(["paceline", *words[1:]])
    return shlex.join(["python", *words])
