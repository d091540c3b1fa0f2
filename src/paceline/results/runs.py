"""Run directories as data for `compare`, `bench`, `report` and `dashboard`.

    runs = load_runs([Path("runs")])     every run below these folders; UserError if there is none
    run = load_run(Path("runs/a"))       one run; `run.problems` lists what is wrong with its files
    groups = group(runs)                 `groups.py`: runs that differ only in their seed
    result = compare(groups)             `comparison.py`: statistics

Figures come from `metrics.jsonl`. Unreadable parts are skipped and listed in `problems`; nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import ALGORITHMS
from paceline.results import run_files
from paceline.results.discovery import find_runs, planned_entries
from paceline.results.run_files import (
    FAILED,
    FINISHED,
    LIST,
    MAPPING,
    MISSING,
    NUMBER,
    RUNNING,
    Floats,
    Tree,
    one_line,
)

KEYS = ("env", "algo", "engine", "nodes", "workers", "device")
"""What tells runs apart before their other settings do."""
_TASK_SETTINGS = ("kwargs", "wrappers", "max_episode_steps")
_VERSIONS = ("torch", "numpy", "gymnasium", "envpool", "ale-py", "ray")
_CONFIG = {"seed": NUMBER, **dict.fromkeys(("env", "engine", "stop", "model", *ALGORITHMS), MAPPING)}
_SUMMARY = {
    **dict.fromkeys(("workers", "nodes", "seed", "resumed", "env_steps", "bytes_moved", "optimizer_steps"), NUMBER),
    **dict.fromkeys(("cpu_percent", "other_cpu_percent", "stepping_cpu_seconds", "waited_seconds"), NUMBER),
    **{"straggling_seconds": NUMBER, "driver_cpu_seconds": NUMBER, "actor_time_split": MAPPING, "hosts": LIST},
}
_HOST = dict.fromkeys(("workers", "cores", "env_steps", "memory_bytes", "cpu_seconds"), NUMBER)
_STATUS = {"resumes": NUMBER}
_PROVENANCE = {"cores": NUMBER, "argv": LIST, "packages": MAPPING, "git": MAPPING}


@dataclass(frozen=True)
class LearningCurve:
    """One value per row of `metrics.jsonl`; NaN where a row has none."""

    steps: Floats
    """Environment steps so far."""
    seconds: Floats
    """Wall time so far, including the start."""
    returns: Floats
    """Mean of the last 100 training episodes."""


class RunDescription:
    """What `config.yaml` and `summary.json` say about a run, finished or live."""

    config: Tree
    summary: Tree

    @property
    def algo(self) -> str:
        return str(self.summary.get("algo") or self.config.get("algo") or "?")

    @property
    def env(self) -> str:
        return str(self.summary.get("env") or self.section("env").get("id") or "?")

    @property
    def engine(self) -> str:
        return str(self.summary.get("engine") or self.section("engine").get("name") or "?")

    @property
    def workers(self) -> int:
        return int(self.summary.get("workers") or self.section("engine").get("workers") or 1)

    @property
    def nodes(self) -> int:
        return int(self.summary.get("nodes") or 1)

    @property
    def device(self) -> str:
        return str(self.summary.get("device") or "cpu")

    @property
    def seed(self) -> int:
        return int(self.summary.get("seed") or self.config.get("seed") or 0)

    @property
    def verdict(self) -> str:
        return str(self.summary.get("verdict") or "")

    def section(self, name: str) -> Tree:
        """A section of the settings; empty if there is none."""
        return self.config.get(name) or {}


@dataclass(frozen=True)
class RunData(RunDescription):
    path: Path
    name: str
    """Name of the directory, with its folder if another run has the same name."""
    state: str
    """`finished`, `failed`, `running`, `interrupted` or `missing`, see `run_files.STATES`."""
    reason: str
    """Why it ended, in one line; empty while it runs."""
    config: Tree = field(default_factory=dict, repr=False)
    summary: Tree = field(default_factory=dict, repr=False)
    provenance: Tree = field(default_factory=dict, repr=False)
    metrics: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    """Columns of `metrics.jsonl`; NaN where a row has no value."""
    evaluations: list[Tree] = field(default_factory=list, repr=False)
    """Rows of `eval.jsonl`."""
    timeline: list[Tree] = field(default_factory=list, repr=False)
    """Events of the launcher (`seconds, host, phase, detail, timestamp`); empty if it was not launched."""
    problems: list[str] = field(default_factory=list, repr=False)
    """What is wrong with its files, one line each, without the run's name."""
    resumed: int = 0

    @property
    def usable(self) -> bool:
        """Whether it has rows to take figures from."""
        return self.rows > 0

    @property
    def rows(self) -> int:
        return len(self.metrics["env_steps"]) if self.metrics else 0

    @property
    def version(self) -> str | None:
        found = self.provenance.get("paceline")
        return None if found is None else str(found)

    @property
    def task(self) -> str:
        """The environment with every setting that changes the scale of its return."""
        env = self.section("env")
        return " ".join([self.env, *(f"{key}={_compact(env[key])}" for key in _TASK_SETTINGS if env.get(key))])

    @property
    def curve(self) -> LearningCurve:
        return LearningCurve(self.column("env_steps"), self.column("wall_seconds"), self.column("return_mean"))

    def column(self, name: str) -> Floats:
        """A column of `metrics`; all NaN if no row has it."""
        found = self.metrics.get(name)
        return np.full(self.rows, math.nan) if found is None else found

    def last(self, name: str) -> float:
        """The last known value of a column; NaN if there is none."""
        known = self.column(name)
        known = known[np.isfinite(known)]
        return float(known[-1]) if known.size else math.nan

    @property
    def env_steps(self) -> int:
        return int(self.metrics["env_steps"][-1]) if self.usable else 0

    @property
    def wall_seconds(self) -> float:
        return self.last("wall_seconds")

    @property
    def train_seconds(self) -> float:
        return self.last("train_seconds")

    @property
    def steps_per_second(self) -> float:
        """Steps over the training time, which excludes the start. NaN if nothing was trained."""
        return self.env_steps / self.train_seconds if self.usable and self.train_seconds > 0 else math.nan

    @property
    def steady_steps_per_second(self) -> float:
        """Speed after the first iteration, without evaluations and checkpoints; NaN with fewer than two rows."""
        if self.rows < 2:
            return math.nan
        paused = sum(np.nan_to_num(self.column(f"time_{part}_seconds")) for part in ("eval", "save"))
        seconds = self.column("train_seconds") - paused
        spent = float(seconds[-1] - seconds[0])
        return float(self.metrics["env_steps"][-1] - self.metrics["env_steps"][0]) / spent if spent > 0 else math.nan

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds by part; they add up to the wall time of the last row."""
        names = [name for name in self.metrics if name.startswith("time_") and name.endswith("_seconds")]
        return {name[5:-8]: value for name in names if math.isfinite(value := self.last(name))}

    @property
    def command(self) -> list[str]:
        """The command line that started it."""
        return [str(word) for word in self.provenance.get("argv") or []]

    @property
    def machine(self) -> Tree:
        """When, where and with which versions it was made, without the names of the machine and its user."""
        origin = self.provenance
        packages, git = origin.get("packages") or {}, origin.get("git") or {}
        return {
            "date": str(origin.get("started_at") or "")[:10],
            "commit": str(git.get("commit") or "")[:12],
            "cpu": origin.get("cpu_model"),
            "cores": origin.get("cores"),
            "device": self.device,
            "versions": {
                "paceline": origin.get("paceline"),
                "python": origin.get("python"),
                **{name: packages[name] for name in _VERSIONS if name in packages},
            },
        }

    def value(self, key: str) -> Any:
        """The value of a grouping key: one of `KEYS`, `seed`, `task`, `folder`, `run`, or a dotted setting."""
        if key in (*KEYS, "seed", "task"):
            return getattr(self, key)
        if key == "folder":
            return self.path.absolute().parent.name
        if key == "run":
            return self.name
        tree: Any = self.config
        for part in key.split("."):
            tree = tree.get(part) if isinstance(tree, dict) else None
        return tree


def load_runs(paths: Iterable[Path]) -> list[RunData]:
    """All runs at or below `paths` (see `find_runs`), and the planned runs of `paceline bench` without a directory."""
    paths = [Path(path).expanduser() for path in paths]
    planned = planned_entries(paths)
    runs = [_with_entry(load_run(path), planned.pop(path.absolute(), None)) for path in find_runs(paths)]
    runs += [_without_directory(path, entry) for path, entry in planned.items()]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.absolute().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run in runs
    ]


def load_run(path: Path) -> RunData:
    """One run in any state, even with damaged files."""
    path, problems = Path(path), list[str]()
    config, status = read_config(path, problems), read_status(path, problems)
    summary, size_known = _read_summary(path, problems)
    provenance = run_files.read_json(path / "provenance.json", problems)
    provenance = run_files.checked(provenance, _PROVENANCE, "provenance.json", problems)
    columns = run_files.Columns()
    incomplete = run_files.read_rows(path / "metrics.jsonl", problems, columns.add)
    metrics = columns.checked(problems)
    state, reason = run_files.run_state(status, metrics.get("wall_seconds", np.zeros(0)))
    problems += [incomplete] if incomplete and state != RUNNING else []  # a live run is writing that row
    written_by, here = provenance.get("paceline"), version("paceline")
    if written_by and written_by != here:
        problems.append(f"written by paceline {written_by}, read by {here}: metrics may have changed their meaning")
    if not size_known:
        problems.append("its number of workers or nodes is unknown; no figures")
        metrics = {}
    if state == FINISHED and metrics and summary.get("env_steps") not in (None, int(metrics["env_steps"][-1])):
        total, last = summary["env_steps"], int(metrics["env_steps"][-1])
        problems.append(f"summary.json counts {total:,} steps and metrics.jsonl {last:,}: rows are missing")
        metrics = {}
    if state == FINISHED and not metrics:
        problems.append("it finished, but has no rows to take figures from")
    evaluations, incomplete = run_files.number_rows(path / "eval.jsonl", ("env_steps", "return_mean"), problems)
    problems += [incomplete] if incomplete and state != RUNNING else []
    # The launcher writes its timeline into a folder named after the run when `paceline bench` started it.
    launched = path.absolute().parent / "launch" / path.absolute().name
    timelines = (read_timeline(folder, problems) for folder in (path / "logs", launched))
    return RunData(
        path=path,
        name=one_line(path.absolute().name),
        state=state,
        reason=reason,
        config=config,
        summary=summary,
        provenance=provenance,
        metrics=metrics,
        evaluations=evaluations,
        timeline=next((rows for rows in timelines if rows), []),
        problems=problems,
        resumed=int(summary.get("resumed") or status.get("resumes") or 0),
    )


def read_config(path: Path, problems: list[str]) -> Tree:
    return _checked_config(run_files.read_yaml(path / "config.yaml", problems), problems)


def read_status(path: Path, problems: list[str]) -> Tree:
    return run_files.checked(run_files.read_json(path / "status.json", problems), _STATUS, "status.json", problems)


def read_summary(path: Path, problems: list[str]) -> Tree:
    return _read_summary(path, problems)[0]


def read_timeline(folder: Path, problems: list[str]) -> list[Tree]:
    return run_files.number_rows(folder / "timeline.jsonl", ("seconds",), problems)[0]


def _checked_config(config: Tree, problems: list[str]) -> Tree:
    config = run_files.checked(config, _CONFIG, "config.yaml", problems)
    if config.get("engine"):
        config["engine"] = run_files.checked(config["engine"], {"workers": NUMBER}, "config.yaml: engine", problems)
    return config


def _read_summary(path: Path, problems: list[str]) -> tuple[Tree, bool]:
    """And whether the number of workers and nodes is valid, if it is given."""
    summary = run_files.read_json(path / "summary.json", problems)
    found = run_files.checked(summary, _SUMMARY, "summary.json", problems)
    split, hosts = found.get("actor_time_split"), found.get("hosts")
    if split:
        numbers = dict.fromkeys(split, NUMBER)
        found["actor_time_split"] = run_files.checked(split, numbers, "summary.json: actor_time_split", problems)
    if hosts:
        named = [host for host in hosts if isinstance(host, dict)]
        found["hosts"] = [run_files.checked(host, _HOST, "summary.json: hosts", problems) for host in named]
    return found, all(found.get(key) == summary.get(key) for key in ("workers", "nodes"))


def problems_of(runs: Iterable[RunData]) -> list[str]:
    """One line for each problem of each run, and for each run that did not finish."""
    lines = []
    for run in runs:
        lines += [f"{run.name}: {text}" for text in run.problems]
        if run.state != FINISHED:
            lines.append(f"{run.name}: {run.state}" + (f": {run.reason}" if run.reason else ""))
    return lines


def _with_entry(run: RunData, entry: Tree | None) -> RunData:
    """A killed process leaves no reason in its directory, but `paceline bench` has recorded one."""
    if entry is None or run.state in (FINISHED, RUNNING) or entry.get("state") != "failed":
        return run
    return replace(run, state=FAILED, reason=one_line(entry.get("reason")))


def _without_directory(path: Path, entry: Tree) -> RunData:
    problems: list[str] = []
    config = {
        "algo": entry.get("algo"),
        "env": {"id": entry.get("env")},
        "engine": {"name": entry.get("engine"), "workers": entry.get("workers")},
        "seed": entry.get("seed"),
    }
    return RunData(
        path=path,
        name=path.name,
        state=FAILED if entry.get("state") == "failed" else MISSING,
        reason=one_line(entry.get("reason")) or "not run yet",  # the reason of a queued job is its state
        config=_checked_config(config, problems),
        problems=problems,
    )


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str).replace('"', "")
