"""The runs under a folder as they stand, read again and again. Of most runs the end of their files is enough; of those
whose curves are asked for, all rows are read once, and later what has been added since.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.bench.files import RUNNING, is_number, one_line, open_plain, state
from paceline.bench.study import find_runs
from paceline.config import UserError
from paceline.report.growing import TAIL, Curve, Growing, Row
from paceline.run.directory import plain
from paceline.verdict import ASIDE, TRAINING

Stamp = tuple[int, int, int]

PARTS = (*TRAINING, *ASIDE)
CURVE = ("env_steps", "wall_seconds", "return_mean", "iteration_steps_per_second")
DETAILS = (
    "verdict",
    "hosts",
    "worker_time_split",
    "workers_healthy",
    "workers_lost",
    "peak_memory_bytes",
    "cpu_percent",
    "resumed",
    "device",
    "nodes",
)
SCAN_SECONDS = 3.0
SETTLED_SECONDS = 5.0
"""How often a run that is not running is looked at."""
CURVES = 48
"""Of how many runs curves are kept: those that no page shows go when there are more."""
WALLS = 6
"""Rows by which a run is judged to be silent."""
DAMAGE = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError)
"""What comes of files that hold something else than they should."""
SUMMED = {"algo", "env", "engine", "workers", "seed"}
"""What the table needs of the settings."""
LOG_ENDINGS = (".log", ".jsonl", ".txt", ".out", ".err")


class LiveRun:
    """One run directory. `version` grows whenever something that is shown has changed; 0: not looked at yet. `wanted`:
    some page shows its curves."""

    def __init__(self, path: Path, name: str, *, wanted: bool = False) -> None:
        self.path, self.name, self.wanted = path, name, wanted
        self.version = 0
        self.curve, self.evaluations = Curve(), Curve()
        self.config: Row = {}
        self.status: Row = {}
        self.summary: Row = {}
        self.last: Row = {}
        self._metrics, self._evals = Growing(path / "metrics.jsonl"), Growing(path / "eval.jsonl")
        self._stamps: dict[str, Stamp] = {}
        self._looked = 0.0
        self._state = ("", "")
        self._damage = ""
        self._walls: list[float] = []
        self._followed = False

    def look(self, now: float) -> None:
        """Damage to this run is no reason to see nothing of the others."""
        try:
            self._look(now)
        except DAMAGE as error:
            self._stumble(error)

    def row(self) -> Row:
        """What the table of runs shows."""
        try:
            found: Row = plain(self._row())
        except DAMAGE as error:
            self._stumble(error)
            found = LiveRun(self.path, self.name)._row()
        return {**found, "state": self.state, "reason": self._damage or self._state[1]}

    def details(self) -> Row:
        """What is shown of the run that is looked at closely."""
        try:
            found: Row = plain(self._details())
        except DAMAGE as error:
            self._stumble(error)
            found = LiveRun(self.path, self.name)._details()
        return found

    def _stumble(self, error: Exception) -> None:
        text = f"its files are damaged: {one_line(error)}"
        self.version += text != self._damage
        self._damage = text

    @property
    def behind(self) -> bool:
        """Its curves are wanted and not all there."""
        return self.wanted and (not self._followed or self._metrics.behind or self._evals.behind)

    @property
    def followed(self) -> bool:
        """Its curves are held."""
        return self._followed

    def drop_curves(self) -> None:
        self._followed = False
        for file, curve in ((self._metrics, self.curve), (self._evals, self.evaluations)):
            file.forget()
            curve.clear()

    def _look(self, now: float) -> None:
        settled = self.state != RUNNING and self._looked and now - self._looked < SETTLED_SECONDS
        if settled and not self.behind:
            return
        self._looked, before = now, self._state
        changed = False
        if self._moved("status.json"):
            self.status, changed = _read_json(self.path / "status.json"), True
        if self._moved("summary.json"):
            self.summary, changed = _read_json(self.path / "summary.json"), True
        # YAML is slow to read, and a summary says the same of a run that is over.
        over = self.summary.keys() >= SUMMED and self.status.get("state") != "running"
        if not over and self._moved("config.yaml"):
            self.config, changed = _read_yaml(self.path / "config.yaml"), True
        if self._moved("metrics.jsonl"):
            rows = self._metrics.last(WALLS)
            self.last, changed = rows[-1] if rows else {}, True
            walls = (_number(row.get("wall_seconds")) for row in rows)
            self._walls = [wall for wall in walls if wall is not None]
        if self.wanted:
            changed |= self._follow(self._metrics, self.curve, CURVE)
            changed |= self._follow(self._evals, self.evaluations, ("env_steps", "return_mean"))
            self._followed = True
        self._state = state(self.status, {"wall_seconds": np.array(self._walls)})
        if changed or self._state != before:  # a run that falls silent changes no file
            self.version += 1
            self._damage = ""

    @property
    def state(self) -> str:
        return self._state[0]

    def _row(self) -> Row:
        about, last = self.summary, self.last
        env, engine = _section(self.config, "env"), _section(self.config, "engine")
        counted = (_number(tree.get("env_steps")) for tree in (last, about, self.status))
        steps = int(next((steps for steps in counted if steps), 0))
        goal = _section(self.config, "stop").get("total_steps")
        return {
            "name": self.name,
            "state": self.state,
            "reason": self._state[1],
            "algo": str(about.get("algo") or self.config.get("algo") or ""),
            "env": str(about.get("env") or env.get("id") or ""),
            "engine": str(about.get("engine") or engine.get("name") or ""),
            "workers": about.get("workers") or engine.get("workers") or 1,
            "seed": about.get("seed", self.config.get("seed")),
            "env_steps": steps,
            "progress": min(1.0, steps / goal) if isinstance(goal, int) and goal > 0 else None,
            "iteration": last.get("iteration") or about.get("iterations"),
            "return_mean": _number(last.get("return_mean", about.get("return_mean"))),
            "best_return": _number(about.get("best_return")),
            "steps_per_second": _number(last.get("steps_per_second", about.get("steps_per_second"))),
            "wall_seconds": _number(last.get("wall_seconds", about.get("wall_seconds"))),
            "updated_at": self.status.get("updated_at"),
            "split": {part: round(seconds, 3) for part, seconds in self._split().items() if seconds > 0},
        }

    def _details(self) -> Row:
        live = {name: self.last[name] for name in DETAILS if self.last.get(name) is not None}
        return {
            **{name: self.summary[name] for name in DETAILS if self.summary.get(name) is not None},
            **live,
            "memory_bytes": self.last.get("memory_bytes"),
            "host": self.status.get("host"),
            "pid": self.status.get("pid"),
            "logs": self.logs(),
        }

    def logs(self) -> list[str]:
        """Plain files alone: a link could lead out of the run."""
        with self._log_folder() as folder:
            if folder is None:
                return []
            with os.scandir(folder) as entries:
                names = [
                    entry.name
                    for entry in entries
                    if entry.name.endswith(LOG_ENDINGS) and entry.is_file(follow_symlinks=False)
                ]
        return sorted(names, key=lambda name: (name != "events.log", name))

    def read_log(self, name: str, start: int | None) -> tuple[str, int] | None:
        """The text from `start` (None: the end of the file) and where to go on; None if there is no such log."""
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
            last = max(0, about.st_size - TAIL)
            begin = last if start is None or not 0 <= start <= about.st_size else max(start, last)
            file.seek(begin)
            text = file.read(TAIL)
        return text.decode("utf-8", errors="replace"), begin + len(text)

    @contextlib.contextmanager
    def _log_folder(self) -> Iterator[int | None]:
        """Held open, so that it stays the one that was looked at; None if it is a link, or not there."""
        try:
            folder = os.open(self.path / "logs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            yield folder
        finally:
            os.close(folder)

    def _split(self) -> dict[str, float]:
        live = {part: self.last.get(f"time_{part}_seconds") for part in PARTS}
        split = live if any(live.values()) else _section(self.summary, "time_split")
        return {part: seconds for part in PARTS if (seconds := _number(split.get(part))) is not None}

    def _follow(self, file: Growing, curve: Curve, names: tuple[str, ...]) -> bool:
        rows, again = file.read()
        if again:
            curve.clear()
        for row in rows:
            if row.get("kind") in (None, "deterministic"):
                curve.add([_short(row.get(name)) for name in names])
        return again or bool(rows)

    def _moved(self, name: str) -> bool:
        """Whether a file has changed since it was last looked at."""
        try:
            about = (self.path / name).stat()
        except OSError:
            return False
        stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
        if self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        return True


class Watcher:
    """All runs under a folder, by their path in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, LiveRun] = {}
        self.wanted: frozenset[str] = frozenset()
        """The runs whose curves some page shows."""
        self._scanned = -SCAN_SECONDS

    def poll(self, seconds: float = math.inf) -> bool:
        """Look at all runs, or begin to, for so long; whether that was all."""
        now = time.monotonic()
        if now - self._scanned >= SCAN_SECONDS:
            self._scanned = now
            found = named_runs(self.folder)
            runs = {name: self.runs.get(name) or LiveRun(path, name) for name, path in found.items()}
            self.runs = runs  # in one step: another thread reads it
        wanted = self.wanted
        for name, run in self.runs.items():
            run.wanted = name in wanted
        idle = [run for run in self.runs.values() if run.followed and not run.wanted]
        for run in idle[: max(0, len(idle) + len(wanted) - CURVES)]:
            run.drop_curves()
        # New ones first, those that are at work before those that are not.
        for run in sorted(self.runs.values(), key=lambda run: (run.version > 0, run.state != RUNNING)):
            run.look(now)
            if time.monotonic() - now > seconds:
                break
        return not any(run.behind or not run.version for run in self.runs.values())


def named_runs(folder: Path) -> dict[str, Path]:
    """The runs below a folder by their path in it; none yet is no mistake here."""
    try:
        return {str(path.relative_to(folder)) if path != folder else path.name: path for path in find_runs([folder])}
    except UserError:
        return {}


def _read_json(path: Path) -> Row:
    try:
        with open_plain(path) as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_yaml(path: Path) -> Row:
    try:
        with open_plain(path) as file:
            value = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _section(tree: Row, name: str) -> Row:
    value = tree.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _short(value: Any) -> float | None:
    """Six digits are more than a screen shows."""
    number = _number(value)
    return None if number is None else float(f"{number:.6g}")
