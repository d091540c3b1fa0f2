"""A table of runs, from the ends of their files: for `paceline runs` and at the end of `paceline train --seeds`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.doctor.diagnosis import table
from paceline.results.discovery import find_runs
from paceline.results.live_runs import LiveRun
from paceline.results.text import UNKNOWN, number

Row = dict[str, Any]
FIELDS = ("algo", "env", "seed", "state", "reason", "env_steps", "return_mean", "best_return", "steps_per_second")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def run_rows(paths: Iterable[Path]) -> list[Row]:
    """One row for each run at or below `paths`, the most recent first."""
    rows = [_row(path) for path in find_runs(paths)]
    return sorted(rows, key=lambda row: row["age_seconds"])


def render(rows: Sequence[Row]) -> str:
    head = ["run", "algo", "env", "seed", "state", "steps", "return", "age"]
    return table([head, *(_cells(row) for row in rows)])


def _row(path: Path) -> Row:
    run = LiveRun(path, path.name)
    run.refresh(time.monotonic())
    row = run.row()
    return {"run": str(path), **{name: row[name] for name in FIELDS}, "age_seconds": _age(row["updated_at"], path)}


def _age(updated_at: Any, path: Path) -> float:
    """Seconds since the run last wrote its status."""
    try:
        written = datetime.fromisoformat(updated_at).timestamp()
    except (TypeError, ValueError, OverflowError):  # damaged, or none
        written = (path / "config.yaml").stat().st_mtime
    return max(0.0, round(time.time() - written, 1))


def _cells(row: Row) -> list[str]:
    returns = UNKNOWN if row["return_mean"] is None else f"{row['return_mean']:,.2f}"
    return [
        *(row["run"], row["algo"], row["env"], number(row["seed"]), row["state"]),
        *(number(row["env_steps"]), returns, _rough(row["age_seconds"])),
    ]


def _rough(seconds: float) -> str:
    """`3 min`, `2 d`."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), ("s", 1))
    return f"{seconds / size:.0f} {unit}"
