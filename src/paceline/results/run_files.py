"""Read the files of a run, which may be damaged, incomplete, or written by another version.

Functions append what is wrong to `problems`, as one line for the user.
"""

from __future__ import annotations

import json
import math
import socket
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import yaml

from paceline.config.yaml_text import load_yaml
from paceline.results.json_lines import Row, open_regular, scan

Floats = npt.NDArray[np.float64]
Tree = dict[str, Any]

FINISHED, FAILED, RUNNING, INTERRUPTED, MISSING = STATES = ("finished", "failed", "running", "interrupted", "missing")
"""`interrupted`: stopped early or killed, can be resumed. `missing`: planned by `paceline bench`, with no directory."""
REQUIRED_COLUMNS = ("env_steps", "wall_seconds", "train_seconds")
FRESH_SECONDS = 120.0
"""A run on another machine counts as running if its status is newer than this, or than five of its iterations."""
NUMBER, MAPPING, LIST = "a number", "a mapping", "a list"


def read_json(path: Path, problems: list[str]) -> Tree:
    """Empty if the file is missing or damaged."""
    return _read(path, problems, json.load, "JSON")


def read_yaml(path: Path, problems: list[str]) -> Tree:
    """Empty if the file is missing or damaged."""
    return _read(path, problems, lambda file: load_yaml(file.read().decode(), fast=True), "YAML")


def _read(path: Path, problems: list[str], parse: Callable[[Any], Any], form: str) -> Tree:
    try:
        with open_regular(path) as file:
            value = parse(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return {}
    except (ValueError, yaml.YAMLError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.name} is damaged: it does not hold a {form} mapping")
        return {}
    return value


def read_rows(path: Path, problems: list[str], take: Callable[[Row], None]) -> str:
    """Pass every complete row to `take`. Return a line about an incomplete last row, which is normal in a live run."""
    try:
        damaged, incomplete = scan(path, take)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
    if damaged:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        lines = ", ".join(map(str, damaged[:5])) + more
        problems.append(
            f"{path.name}: {f'line {lines} is' if len(damaged) == 1 else f'lines {lines} are'} damaged, skipped"
        )
    return f"{path.name}: line {incomplete}, the last one, is incomplete, skipped" if incomplete else ""


def number_rows(path: Path, names: Sequence[str], problems: list[str]) -> tuple[list[Row], str]:
    """The rows in which each of `names` is a number or absent, and the line about an incomplete last row."""
    rows: list[Row] = []
    incomplete = read_rows(path, problems, rows.append)
    kept = [row for row in rows if all(row.get(name) is None or is_number(row[name]) for name in names)]
    if len(kept) < len(rows):
        problems.append(f"{path.name}: {len(rows) - len(kept)} rows skipped: {' or '.join(names)} is not a number")
    return kept, incomplete


class Columns:
    """Collects rows as columns of numbers: a file of hundreds of megabytes would not fit in memory as rows."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._rows = 0

    def add(self, row: Row) -> None:
        for name, value in row.items():
            kind = type(value)
            if kind is not float and (kind is not int or abs(value) > 1e300):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            if len(column) < self._rows:
                column.extend([math.nan] * (self._rows - len(column)))
            column.append(value)
        self._rows += 1

    def arrays(self) -> dict[str, Floats]:
        """NaN where a row lacks the column, or has no finite number."""
        found = {}
        for name, column in self._columns.items():
            column.extend([math.nan] * (self._rows - len(column)))
            values = np.array(column, np.float64)
            found[name] = np.where(np.isfinite(values), values, math.nan)
        return found

    def checked(self, problems: list[str]) -> dict[str, Floats]:
        """The columns of `metrics.jsonl`; empty, with a problem, if their figures would be wrong."""
        if not self._rows:
            return {}
        found = self.arrays()
        problem = _wrong_figures(found)
        if problem:
            problems.append(f"metrics.jsonl: {problem}; no figures")
        return {} if problem else found


def _wrong_figures(columns: Mapping[str, Floats]) -> str:
    missing = [name for name in REQUIRED_COLUMNS if name not in columns or np.isnan(columns[name]).any()]
    if missing:
        return f"some rows have no valid {', '.join(missing)} (damaged, or written by another version?)"
    for name in REQUIRED_COLUMNS:
        if (np.diff(columns[name]) < 0).any():
            return f"{name} decreases from one row to the next (two runs in one file?)"
    parts = [column[-1] for name, column in columns.items() if name.startswith("time_") and name.endswith("_seconds")]
    total, wall = float(np.nansum(parts)), float(columns["wall_seconds"][-1])
    if parts and wall - total > 2.0 + 0.1 * wall:  # they add up by construction
        return f"the time split adds up to {total:,.0f} s of {wall:,.0f} s of wall time (did the clock jump?)"
    return ""


def is_own_evaluation(row: Row, kind: str = "deterministic") -> bool:
    """Whether a row of `eval.jsonl` is of the run's own environment and of this kind; training names no kind."""
    return row.get("kind") in (None, kind) and "env_settings" not in row


def is_number(value: Any) -> bool:
    """A finite number; booleans do not count."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def number_of(value: Any) -> float:
    """NaN for anything that is not a finite number."""
    return float(value) if is_number(value) else math.nan


_FITS: dict[str, Callable[[Any], bool]] = {
    NUMBER: is_number,
    MAPPING: lambda value: isinstance(value, dict),
    LIST: lambda value: isinstance(value, list),
}


def checked(tree: Tree, kinds: Mapping[str, str], name: str, problems: list[str]) -> Tree:
    """The tree without the values that are not of their kind (`NUMBER`, `MAPPING`, `LIST`)."""
    found = dict(tree)
    for key, kind in kinds.items():
        value = tree.get(key)
        if value is not None and not _FITS[kind](value):
            problems.append(f"{name}: {key} is {one_line(str(value))[:40]!r}, not {kind}; ignored")
            del found[key]
    return found


def run_state(status: Tree, wall_seconds: Floats) -> tuple[str, str]:
    """(state, reason) of a run, from its `status.json` and the wall times of its last rows."""
    written, reason = status.get("state"), one_line(status.get("reason"))
    if written == "done":
        return FINISHED, reason
    if written == "failed":
        return FAILED, reason or "no reason was written"
    if written == "running" and _is_alive(status, wall_seconds):
        return RUNNING, ""
    return INTERRUPTED, reason or ("its process is gone" if written else "it has no status.json")


def _is_alive(status: Tree, wall_seconds: Floats) -> bool:
    try:
        updated = datetime.fromisoformat(status["updated_at"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    if status.get("host") == socket.gethostname():
        try:
            process = psutil.Process(int(status["pid"]))
            # The process id may have been reused since, and a zombie keeps its own.
            return process.create_time() <= updated + 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
            return False
    recent = wall_seconds[-6:]
    iteration = float(np.diff(recent).max()) if recent.size > 1 else 0.0
    return time.time() - updated < max(FRESH_SECONDS, 5 * iteration)


def one_line(text: Any) -> str:
    """Without line breaks, and without characters that move a terminal's cursor or reverse the text."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(text or "")).split())
