"""The files of a run as a reader finds them: being written, cut short, damaged, or of another version."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import stat
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import psutil

Floats = npt.NDArray[np.float64]
Tree = dict[str, Any]

FINISHED, FAILED, RUNNING, INTERRUPTED, MISSING = STATES = ("finished", "failed", "running", "interrupted", "missing")
"""`interrupted`: stopped early or killed, can be resumed. `missing`: a study planned it and there is nothing of it."""
NEEDED = ("env_steps", "wall_seconds", "train_seconds")
FRESH_SECONDS = 120.0
"""A status of another machine that was renewed within this time, or five iterations, is that of a run at work."""


def open_plain(path: Path) -> BinaryIO:
    """For reading; an OSError where it is no plain file: one would wait for ever for what a pipe has to say."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file")
    return os.fdopen(fd, "rb")


def read(path: Path, problems: list[str], take: Callable[[Tree], None]) -> str:
    """Gives `take` the rows that are whole; a word on a last line that is not. Damage elsewhere goes to `problems`."""
    damaged: list[int] = []
    number = 0
    try:
        with open_plain(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = json.loads(line) if line.strip() else None
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict) and line.endswith(b"\n"):
                    take(row)
                elif line.strip():
                    damaged.append(number)
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
    torn = bool(damaged) and damaged[-1] == number
    if inside := damaged[: len(damaged) - torn]:
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        text = ", ".join(map(str, inside[:5]))
        are = "line {} is" if len(inside) == 1 else "lines {} are"
        problems.append(f"{path.name}: {are.format(text + more)} damaged and left out")
    return f"{path.name}: line {number}, the last, is half-written and left out" if torn else ""


def rows(path: Path, problems: list[str]) -> tuple[list[Tree], str]:
    """All that `read` gives, and its word."""
    found: list[Tree] = []
    return found, read(path, problems, found.append)


class Columns:
    """Rows as columns of numbers while they are read: a file of hundreds of megabytes would not fit as rows."""

    def __init__(self) -> None:
        self._held: dict[str, array[float]] = {}
        self._rows = 0

    def add(self, row: Tree) -> None:
        for name, value in row.items():
            kind = type(value)
            if kind is not float and (kind is not int or abs(value) > 1e300):
                continue
            column = self._held.get(name)
            if column is None:
                column = self._held[name] = array("d")
            if len(column) < self._rows:
                column.extend([math.nan] * (self._rows - len(column)))
            column.append(value)
        self._rows += 1

    def finish(self, problems: list[str]) -> dict[str, Floats]:
        """Empty, with a word, where figures would be wrong."""
        if not self._rows:
            return {}
        found = {}
        for name, column in self._held.items():
            column.extend([math.nan] * (self._rows - len(column)))
            values = np.array(column, np.float64)
            found[name] = np.where(np.isfinite(values), values, math.nan)
        missing = [name for name in NEEDED if name not in found or np.isnan(found[name]).any()]
        if missing:
            words = f"metrics.jsonl has rows without {', '.join(missing)}, or with what is no number"
            problems.append(f"{words}: damaged, or made by another version? no figures")
            return {}
        for name in NEEDED:
            if (np.diff(found[name]) < 0).any():
                problems.append(
                    f"metrics.jsonl: {name} falls from one row to the next, two runs in one file? no figures"
                )
                return {}
        parts = [column[-1] for name, column in found.items() if name.startswith("time_") and name.endswith("_seconds")]
        spent, wall = float(np.nansum(parts)), float(found["wall_seconds"][-1])
        if parts and wall - spent > 2.0 + 0.1 * wall:  # they add up, by the way they are taken
            problems.append(
                f"metrics.jsonl: the parts of the time are {spent:,.0f} s together, and the wall time {wall:,.0f} s: "
                "a clock that jumped? no figures"
            )
            return {}
        return found


def number_of(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def is_number(value: Any) -> bool:
    """One to calculate with: no text, no NaN, no yes or no."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # more digits than a number of the machine has
        return False


def sound(tree: Tree, kinds: Mapping[str, str], name: str, problems: list[str]) -> Tree:
    """Without the values that are not of their kind (a number, a mapping, a list), which are named."""
    fits: dict[str, Callable[[Any], bool]] = {
        "a number": is_number,
        "a mapping": lambda value: isinstance(value, dict),
        "a list": lambda value: isinstance(value, list),
    }
    found = dict(tree)
    for key, kind in kinds.items():
        value = tree.get(key)
        if value is not None and not fits[kind](value):
            problems.append(f"{name}: {key} is {one_line(str(value))[:40]!r}, not {kind}, and left out")
            del found[key]
    return found


def numbered(rows: list[Tree], names: Sequence[str], name: str, problems: list[str]) -> list[Tree]:
    """The rows where these are numbers, or not there."""
    kept = [row for row in rows if all(row.get(each) is None or is_number(row[each]) for each in names)]
    if len(kept) < len(rows):
        problems.append(f"{name}: {len(rows) - len(kept)} rows left out: no number for {' or '.join(names)}")
    return kept


def state(status: Tree, metrics: Mapping[str, Floats]) -> tuple[str, str]:
    said, reason = status.get("state"), one_line(status.get("reason"))
    if said == "done":
        return FINISHED, reason
    if said == "failed":
        return FAILED, reason or "no reason was written"
    if said == "running" and _alive(status, metrics):
        return RUNNING, ""
    return INTERRUPTED, reason or ("its process is gone" if said else "it left no status")


def _alive(status: Tree, metrics: Mapping[str, Floats]) -> bool:
    try:
        renewed = datetime.fromisoformat(status["updated_at"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return False
    if status.get("host") == socket.gethostname():
        try:
            process = psutil.Process(int(status["pid"]))
            # A process number may have been given to another since; one that nobody has waited for still has its own.
            return process.create_time() <= renewed + 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
            return False
    walls = metrics["wall_seconds"][-6:] if metrics else np.zeros(0)
    iteration = float(np.diff(walls).max()) if walls.size > 1 else 0.0
    return time.time() - renewed < max(FRESH_SECONDS, 5 * iteration)


def lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def one_line(text: Any) -> str:
    """Without what would move the cursor of a terminal or turn the text around."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(text or "")).split())
