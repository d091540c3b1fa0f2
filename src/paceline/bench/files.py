"""The files of a run as a reader finds them: being written, cut short, damaged, or of another version."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

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


def rows(path: Path, problems: list[str]) -> tuple[list[Tree], str]:
    """The rows that are whole, and a word on a last line that is not; damage elsewhere goes to `problems`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return [], ""
    rows, torn, damaged = [], "", []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and number < len(lines):
            rows.append(row)
        elif number == len(lines) or (number == len(lines) - 1 and not lines[-1]):
            torn = f"{path.name}: line {number}, the last, is half-written and left out"
        else:
            damaged.append(str(number))
    if damaged:
        problems.append(f"{path.name}: line {', '.join(damaged[:5])} is damaged and left out")
    return rows, torn


def columns(rows: list[Tree], problems: list[str]) -> dict[str, Floats]:
    """Empty, with a word, where figures would be wrong."""
    if not rows:
        return {}
    missing = [name for name in NEEDED if not all(is_number(row.get(name)) for row in rows)]
    if missing:
        words = f"metrics.jsonl has rows without {', '.join(missing)}, or with what is no number"
        problems.append(f"{words}: damaged, or made by another version? no figures")
        return {}
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([number_of(row.get(name)) for row in rows], np.float64) for name in names}
    for name in NEEDED:
        if (np.diff(columns[name]) < 0).any():
            problems.append(f"metrics.jsonl: {name} falls from one row to the next, two runs in one file? no figures")
            return {}
    return columns


def number_of(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def is_number(value: Any) -> bool:
    """One to calculate with: no text, no NaN."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
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
            # A process number may have been given to another since.
            return psutil.Process(int(status["pid"])).create_time() <= renewed + 1.0
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
    return " ".join(str(text or "").split())
