"""What the Markdown pages of `bench suite` and `bench scaling` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.results.scaling_figures import QUEUED
from paceline.results.text import machine_lines

Entry = dict[str, Any]


def page(heading: str, tables: str, commands: Sequence[str]) -> str:
    """The whole page: its tables, and every command."""
    lines = "".join(f"{command}\n" for command in commands)
    return f"# {heading}\n\n{tables}\n## Every run\n\n```sh\n{lines}```\n"


def introduction(result: dict[str, Any]) -> list[str]:
    """What was measured, by which commands, on which machines."""
    about = result["about"].strip()
    machines = machine_lines(entry["machine"] for entry in result["runs"] if entry["state"] == "done")
    return [*([about] if about else []), "```sh\n" + "\n".join(result["commands"]) + "\n```", *machines]


def not_done(entries: Sequence[Entry]) -> list[str]:
    """A line for each run or state that is missing in the figures."""
    lines = [f"`{entry['name']}` failed: {entry['reason']}" for entry in entries if entry["state"] == "failed"]
    lines += [f"`{entry['name']}`: {entry['reason']}" for entry in entries if entry["state"] in QUEUED]
    for state in ("interrupted", "missing"):
        names = [f"`{entry['name']}`" for entry in entries if entry["state"] == state]
        lines += [f"{state}: {', '.join(names)}"] if names else []
    return lines


def runs_cell(done: int, runs: int, others: str) -> str:
    """`2 of 3 (1 failed)`."""
    return f"{done} of {runs}" + (f" ({others})" if others else "")
