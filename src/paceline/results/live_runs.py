"""Runs under a folder as they change, for the dashboard.

Reading the ends of the files is enough for most runs. If a page shows a run's curves, all its rows are read once, and
then only the rows added since.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import UserError, algorithm_name
from paceline.results.discovery import find_runs
from paceline.results.json_lines import TAIL_BYTES, GrowingFile, Row
from paceline.results.run_files import RUNNING, is_number, is_own_evaluation, run_state
from paceline.results.runs import RunDescription, read_config, read_status, read_summary
from paceline.run.directory import plain
from paceline.verdict import OVERHEAD, TRAINING

PARTS = (*TRAINING, *OVERHEAD)
TRAINING_CURVE = ("env_steps", "wall_seconds", "return_mean", "iteration_steps_per_second")
EVALUATION_CURVE = ("env_steps", "return_mean")
CURVE_POINTS = 800
"""Most points of a curve; above it, every second one is dropped."""
DETAILS = (
    *("verdict", "hosts", "worker_time_split", "workers_healthy", "workers_lost", "peak_memory_bytes", "cpu_percent"),
    *("resumed", "device", "nodes", "agent_steps", "return_per_agent_mean"),
)
SCAN_SECONDS = 3.0
IDLE_SECONDS = 5.0
"""How often a run that is not running is refreshed."""
MAX_CURVES = 48
"""Runs whose curves are kept; beyond it, those that no page shows are dropped."""
RECENT_ROWS = 6
"""Rows whose spacing tells when a run is silent."""
DESCRIBED = {"algo", "env", "engine", "workers", "seed"}
"""What the table needs; a summary with these makes reading config.yaml, which is slow, unnecessary."""
LOG_ENDINGS = (".log", ".jsonl", ".txt", ".out", ".err")


@dataclass
class LiveCurve:
    """Points of one run, thinned out when they are many. `epoch` changes when the points sent before are void."""

    epoch: int = 0
    points: list[list[float | None]] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def add(self, values: list[float | None]) -> None:
        self._skipped += 1
        if self.points and self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append(values)
        if len(self.points) > CURVE_POINTS:
            self.points = self.points[::2]
            self._stride *= 2
            self.epoch += 1

    def clear(self) -> None:
        self.points, self._stride, self._skipped = [], 1, 0
        self.epoch += 1


class LiveRun(RunDescription):
    """One run directory. `version` grows whenever something visible has changed; 0: not read yet. `show_curves`: a
    page shows its curves."""

    def __init__(self, path: Path, name: str, *, show_curves: bool = False) -> None:
        self.path, self.name, self.show_curves = path, name, show_curves
        self.version = 0
        self.curve, self.evaluations = LiveCurve(), LiveCurve()
        self.config: Row = {}
        self.status: Row = {}
        self.summary: Row = {}
        self.last: Row = {}
        self.state, self._reason = "", ""
        self.has_curves = False
        self._metrics, self._evals = GrowingFile(path / "metrics.jsonl"), GrowingFile(path / "eval.jsonl")
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._problems: dict[str, list[str]] = {}
        self._wall_seconds: list[float] = []
        self._refreshed = 0.0

    @property
    def reason(self) -> str:
        problems = [text for texts in self._problems.values() for text in texts]
        return f"its files are damaged: {'; '.join(problems)}" if problems else self._reason

    @property
    def is_behind(self) -> bool:
        """Its curves are shown, but not all of their rows have been read."""
        return self.show_curves and (not self.has_curves or self._metrics.has_more or self._evals.has_more)

    def drop_curves(self) -> None:
        self.has_curves = False
        for file, curve in ((self._metrics, self.curve), (self._evals, self.evaluations)):
            file.rewind()
            curve.clear()

    def refresh(self, now: float) -> None:
        """Read what has changed since the last call."""
        idle = self.state != RUNNING and self._refreshed and now - self._refreshed < IDLE_SECONDS
        if idle and not self.is_behind:
            return
        self._refreshed, before = now, (self.state, self._reason)
        changed = False
        if self._changed("status.json"):
            self.status, changed = read_status(self.path, self._problems_of("status.json")), True
        if self._changed("summary.json"):
            self.summary, changed = read_summary(self.path, self._problems_of("summary.json")), True
        described = self.summary.keys() >= DESCRIBED and self.status.get("state") != "running"
        if not described and self._changed("config.yaml"):
            self.config, changed = read_config(self.path, self._problems_of("config.yaml")), True
        if self._changed("metrics.jsonl"):
            rows = self._metrics.last_rows(RECENT_ROWS)
            self.last, changed = rows[-1] if rows else {}, True
            seconds = (_number(row.get("wall_seconds")) for row in rows)
            self._wall_seconds = [value for value in seconds if value is not None]
        if self.show_curves:
            changed |= _follow(self._metrics, self.curve, TRAINING_CURVE)
            changed |= _follow(self._evals, self.evaluations, EVALUATION_CURVE)
            self.has_curves = True
        self.state, self._reason = run_state(self.status, np.array(self._wall_seconds))
        if changed or (self.state, self._reason) != before:  # a run that falls silent changes no file
            self.version += 1

    def row(self) -> Row:
        """What the table of runs shows."""
        summary, last = self.summary, self.last
        counted = (_number(tree.get("env_steps")) for tree in (last, summary, self.status))
        steps = int(next((steps for steps in counted if steps), 0))
        goal = self.section("stop").get("total_steps")

        def latest(name: str) -> float | None:
            return _number(last.get(name, summary.get(name)))

        row: Row = plain(
            {
                "name": self.name,
                "state": self.state,
                "reason": self.reason,
                "algo": algorithm_name(self.algo),
                "env": self.env,
                "engine": self.engine,
                "workers": self.workers,
                "seed": self.seed,
                "env_steps": steps,
                "progress": min(1.0, steps / goal) if isinstance(goal, int) and goal > 0 else None,
                "iteration": last.get("iteration") or summary.get("iterations"),
                "return_mean": latest("return_mean"),
                "best_return": _number(summary.get("best_return")),
                "steps_per_second": latest("steps_per_second"),
                "wall_seconds": latest("wall_seconds"),
                "updated_at": self.status.get("updated_at"),
                "split": {part: round(seconds, 3) for part, seconds in self._time_split().items() if seconds > 0},
            }
        )
        return row

    def details(self) -> Row:
        """What the detailed view of one run shows."""
        known = {**self.summary, **{name: value for name, value in self.last.items() if value is not None}}
        details: Row = plain(
            {
                **{name: known[name] for name in DETAILS if known.get(name) is not None},
                "memory_bytes": self.last.get("memory_bytes"),
                "host": self.status.get("host"),
                "pid": self.status.get("pid"),
                "logs": self.logs(),
            }
        )
        return details

    def logs(self) -> list[str]:
        """Names of its log files. Only regular files: a link could lead out of the run."""
        with self._log_folder() as folder:
            if folder is None:
                return []
            with os.scandir(folder) as entries:
                files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        names = [entry.name for entry in files if entry.name.endswith(LOG_ENDINGS)]
        return sorted(names, key=lambda name: (name != "events.log", name))

    def read_log(self, name: str, start: int | None) -> tuple[str, int] | None:
        """The text from `start` (None: near the end of the file) and where it ends; None if there is no such log."""
        if name not in self.logs():
            return None
        with self._log_folder() as folder:
            if folder is None:
                return None
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                return None
        with os.fdopen(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                return None
            last = max(0, about.st_size - TAIL_BYTES)
            begin = last if start is None or not 0 <= start <= about.st_size else max(start, last)
            file.seek(begin)
            text = file.read(TAIL_BYTES)
        return text.decode("utf-8", errors="replace"), begin + len(text)

    @contextlib.contextmanager
    def _log_folder(self) -> Iterator[int | None]:
        """A descriptor of the folder, so that it cannot be exchanged meanwhile; None if it is a link or missing."""
        try:
            folder = os.open(self.path / "logs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            yield folder
        finally:
            os.close(folder)

    def _time_split(self) -> dict[str, float]:
        split: Any = {part: self.last.get(f"time_{part}_seconds") for part in PARTS}
        if not any(split.values()):
            split = self.summary.get("time_split")
            split = split if isinstance(split, dict) else {}
        return {part: seconds for part in PARTS if (seconds := _number(split.get(part))) is not None}

    def _problems_of(self, name: str) -> list[str]:
        """A new list for the problems of a file."""
        self._problems[name] = []
        return self._problems[name]

    def _changed(self, name: str) -> bool:
        """Whether a file has changed since the last call."""
        try:
            about = (self.path / name).stat()
        except OSError:
            return False
        stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
        if self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        return True


class RunWatcher:
    """All runs under a folder, by their path in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, LiveRun] = {}
        self.shown: frozenset[str] = frozenset()
        """The runs whose curves a page shows."""
        self._scanned = -SCAN_SECONDS

    def poll(self, seconds: float = math.inf) -> bool:
        """Refresh the runs for at most this long; whether all of them are up to date."""
        now = time.monotonic()
        if now - self._scanned >= SCAN_SECONDS:
            self._scanned = now
            found = named_runs(self.folder)
            runs = {name: self.runs.get(name) or LiveRun(path, name) for name, path in found.items()}
            self.runs = runs  # one assignment: another thread reads it
        shown = self.shown
        for name, run in self.runs.items():
            run.show_curves = name in shown
        unused = [run for run in self.runs.values() if run.has_curves and not run.show_curves]
        for run in unused[: max(0, len(unused) + len(shown) - MAX_CURVES)]:
            run.drop_curves()
        # Unread runs first, then running ones.
        for run in sorted(self.runs.values(), key=lambda run: (run.version > 0, run.state != RUNNING)):
            run.refresh(now)
            if time.monotonic() - now > seconds:
                break
        return not any(run.is_behind or not run.version for run in self.runs.values())


def named_runs(folder: Path) -> dict[str, Path]:
    """The runs below a folder by their path in it; there may be none yet."""
    try:
        return {str(path.relative_to(folder)) if path != folder else path.name: path for path in find_runs([folder])}
    except UserError:
        return {}


def _follow(file: GrowingFile, curve: LiveCurve, names: tuple[str, ...]) -> bool:
    """Append new rows to a curve; whether there were any."""
    rows, replaced = file.read()
    if replaced:
        curve.clear()
    for row in rows:
        if is_own_evaluation(row):
            curve.add([_rounded(row.get(name)) for name in names])
    return replaced or bool(rows)


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _rounded(value: Any) -> float | None:
    """Six digits are more than a screen shows."""
    number = _number(value)
    return None if number is None else float(f"{number:.6g}")
