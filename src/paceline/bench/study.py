"""Run directories → what compare, the scaling study, the report and the dashboard show. Reads files, writes none.

    runs = load_runs([Path("runs")])     every run below these folders; a UserError if there is none
    run = load_run(Path("runs/a"))       one of them, however damaged: `run.problems` says what is wrong with it
    groups = group(runs)                 `bench/groups.py`: runs that differ in their seed alone, together
    result = compare(groups)             `bench/comparison.py`: statistics

Figures come from `metrics.jsonl`. What cannot be read is left out and named in `problems`; nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench import files
from paceline.bench.files import FAILED, FINISHED, MISSING, RUNNING, Floats, Tree, one_line
from paceline.config import SECTIONS, UserError
from paceline.run.directory import RunDirectory

STUDIES = ("suite.json", "scaling.json")
"""What `paceline bench` leaves beside its runs: the failures that left no directory are in there."""
_TASK = ("id", "kwargs", "wrappers", "max_episode_steps")
KEYS = ("env", "algo", "engine", "nodes", "workers", "device")
"""What a run is told from others by, before its settings."""
# What figures are made of, file by file.
_NUMBER, _MAPPING, _LIST = "a number", "a mapping", "a list"
_CONFIG = {"seed": _NUMBER, **dict.fromkeys(("env", "engine", "stop", "model", *SECTIONS), _MAPPING)}
_SUMMARY = {
    **dict.fromkeys(("workers", "nodes", "resumed", "env_steps", "bytes_moved", "optimizer_steps"), _NUMBER),
    **{"cpu_percent": _NUMBER, "straggling_seconds": _NUMBER, "actor_time_split": _MAPPING, "hosts": _LIST},
}
_HOST = dict.fromkeys(("workers", "cores", "env_steps", "memory_bytes", "cpu_seconds"), _NUMBER)
_PROVENANCE = {"cores": _NUMBER, "argv": _LIST, "packages": _MAPPING}


@dataclass(frozen=True)
class Curve:
    """One value per row of `metrics.jsonl`, in its order; NaN where a row has none."""

    steps: Floats
    """Environment steps so far."""
    seconds: Floats
    """Wall time so far, start and all: what a user waits."""
    returns: Floats
    """Mean of the last 100 training episodes."""


@dataclass(frozen=True)
class RunData:
    path: Path
    name: str
    """Of the directory; with its folder before it where two runs have the same."""
    state: str
    """`finished`, `failed`, `running`, `interrupted` or `missing`, see `bench/files.py`."""
    reason: str
    """Why it ended, in one line; empty while it runs."""
    config: Tree = field(default_factory=dict, repr=False)
    summary: Tree = field(default_factory=dict, repr=False)
    provenance: Tree = field(default_factory=dict, repr=False)
    metrics: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    """Column by column; NaN where a row lacks it."""
    evaluations: list[Tree] = field(default_factory=list, repr=False)
    """Rows of `eval.jsonl`."""
    timeline: list[Tree] = field(default_factory=list, repr=False)
    """Of the launcher: `seconds, host, phase, detail, timestamp`; empty where there was none."""
    events: list[str] = field(default_factory=list, repr=False)
    """Lines of `logs/events.log`: what happened to workers."""
    problems: list[str] = field(default_factory=list, repr=False)
    """What is wrong with its files, for a reader, without the run's name."""
    resumed: int = 0

    @property
    def usable(self) -> bool:
        """It has rows to take figures from."""
        return self.rows > 0

    @property
    def rows(self) -> int:
        return len(self.metrics["env_steps"]) if self.metrics else 0

    @property
    def algo(self) -> str:
        return str(self.summary.get("algo") or self.config.get("algo") or "?")

    @property
    def env(self) -> str:
        return str(self.summary.get("env") or _section(self.config, "env").get("id") or "?")

    @property
    def engine(self) -> str:
        return str(self.summary.get("engine") or _section(self.config, "engine").get("name") or "?")

    @property
    def workers(self) -> int:
        return int(self.summary.get("workers") or _section(self.config, "engine").get("workers") or 1)

    @property
    def nodes(self) -> int:
        return int(self.summary.get("nodes") or 1)

    @property
    def device(self) -> str:
        return str(self.summary.get("device") or "cpu")

    @property
    def seed(self) -> int:
        return int(self.config.get("seed") or 0)

    @property
    def version(self) -> str | None:
        found = self.provenance.get("paceline")
        return None if found is None else str(found)

    @property
    def task(self) -> str:
        """What is played, with all that changes the scale of its return: different tasks have no common unit."""
        env = _section(self.config, "env")
        more = [f"{key}={_compact(env[key])}" for key in _TASK[1:] if env.get(key)]
        return " ".join([self.env, *more])

    @property
    def curve(self) -> Curve:
        return Curve(self.column("env_steps"), self.column("wall_seconds"), self.column("return_mean"))

    def column(self, name: str) -> Floats:
        """Of `metrics`; all NaN if no row has it."""
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
        """Over the whole training time: all but the start. NaN if nothing was trained."""
        return self.env_steps / self.train_seconds if self.usable and self.train_seconds > 0 else math.nan

    @property
    def steady_steps_per_second(self) -> float:
        """From the end of the first iteration on, without evaluations and checkpoints; NaN with fewer than two."""
        if self.rows < 2:
            return math.nan
        aside = sum(np.nan_to_num(self.column(f"time_{part}_seconds")) for part in ("eval", "save"))
        seconds = self.column("train_seconds") - aside
        spent = float(seconds[-1] - seconds[0])
        return float(self.metrics["env_steps"][-1] - self.metrics["env_steps"][0]) / spent if spent > 0 else math.nan

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds by part; they add up to the wall time of the last row. Empty if it has none."""
        names = [name for name in self.metrics if name.startswith("time_") and name.endswith("_seconds")]
        return {name[5:-8]: value for name in names if math.isfinite(value := self.last(name))}

    @property
    def verdict(self) -> str:
        return str(self.summary.get("verdict") or "")

    @property
    def command(self) -> list[str]:
        """As it was started."""
        return [str(word) for word in self.provenance.get("argv") or []]

    def value(self, key: str) -> Any:
        """Of a grouping key: `env algo engine nodes workers device seed folder run`, or a dotted setting."""
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


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories that these are, or that lie below them, each once; a UserError for a path without any."""
    found: dict[Path, Path] = {}
    for given in paths:
        path = Path(given).expanduser()
        if not _is(path.exists):
            RunDirectory.open(path)  # says which runs are near
        closed: list[Path] = []
        below = list(_below(path, closed))
        if not below and closed:
            raise UserError(f"{closed[0]} cannot be read, and there is no other run; ask its owner, or copy the runs")
        if not below:
            raise UserError(
                f"{path}: no run in it (a run is a folder with config.yaml); give a run or a folder of runs"
            )
        for one in below:
            found.setdefault(one.resolve(), one)  # by a link it is still the same run
    return list(found.values())


def load_runs(paths: Iterable[Path]) -> list[RunData]:
    """All runs at or below `paths`, with those that a study planned and that left nothing; see `find_runs`."""
    paths = [Path(path).expanduser() for path in paths]
    runs = [load_run(path) for path in find_runs(paths)]
    planned = _planned(paths)
    runs = [_with_study(run, planned.pop(run.path.absolute(), None)) for run in runs]
    runs += [_never_begun(path, entry) for path, entry in planned.items()]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.absolute().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run in runs
    ]


def load_run(path: Path) -> RunData:
    """What there is of one run."""
    directory, problems = RunDirectory(Path(path)), []

    def attempt(read: Any) -> Tree:
        try:
            return dict(read())
        except UserError as error:
            problems.append(str(error))
            return {}

    config, summary, status = map(attempt, (directory.read_config, directory.read_summary, directory.read_status))
    provenance = attempt(directory.read_provenance)
    config, (summary, known) = _sound_config(config, problems), _sound_summary(summary, problems)
    status = files.sound(status, {"resumes": _NUMBER}, "status.json", problems)
    provenance = files.sound(provenance, _PROVENANCE, "provenance.json", problems)
    columns = files.Columns()
    torn = files.read(directory.metrics_path, problems, columns.add)
    metrics = columns.finish(problems)
    state, reason = files.state(status, metrics)
    if torn and state != RUNNING:  # else it is the row being written
        problems.append(torn)
    made_by, ours = provenance.get("paceline"), version("paceline")
    if made_by and made_by != ours:
        problems.append(f"made by paceline {made_by}, read by {ours}: names may have changed their meaning")
    if not known:
        problems.append("how many workers and nodes it had is not known: no figures")
        metrics = {}
    if state == FINISHED and metrics and summary.get("env_steps") not in (None, int(metrics["env_steps"][-1])):
        said, have = summary["env_steps"], int(metrics["env_steps"][-1])
        problems.append(f"summary.json counts {said:,} steps and metrics.jsonl {have:,}: rows are missing")
        metrics = {}
    if state == FINISHED and not metrics:
        problems.append("finished, and has no rows to take figures from")
    evaluations, torn = files.rows(directory.eval_path, problems)
    problems += [torn] if torn and state != RUNNING else []
    # The launcher keeps one by the name of the run, where a study started it.
    launched = directory.path.absolute().parent / "launch" / directory.path.absolute().name
    timelines = [folder / "timeline.jsonl" for folder in (directory.logs_path, launched)]
    timeline = next((rows for path in timelines if (rows := files.rows(path, problems)[0])), [])
    return RunData(
        path=directory.path,
        name=one_line(directory.path.absolute().name),
        state=state,
        reason=reason,
        config=config,
        summary=summary,
        provenance=provenance,
        metrics=metrics,
        evaluations=files.numbered(evaluations, ("env_steps", "return_mean"), "eval.jsonl", problems),
        timeline=files.numbered(timeline, ("seconds",), "timeline.jsonl", problems),
        events=files.lines(directory.logs_path / "events.log"),
        problems=problems,
        resumed=int(summary.get("resumed") or status.get("resumes") or 0),
    )


def _sound_config(config: Tree, problems: list[str]) -> Tree:
    config = files.sound(config, _CONFIG, "config.yaml", problems)
    if "engine" in config:
        config["engine"] = files.sound(config["engine"] or {}, {"workers": _NUMBER}, "config.yaml: engine", problems)
    return config


def _sound_summary(summary: Tree, problems: list[str]) -> tuple[Tree, bool]:
    """And whether it says of which size the run was, as far as it ought to."""
    found = files.sound(summary, _SUMMARY, "summary.json", problems)
    split, hosts = found.get("actor_time_split"), found.get("hosts")
    if split:
        numbers = dict.fromkeys(split, _NUMBER)
        found["actor_time_split"] = files.sound(split, numbers, "summary.json: actor_time_split", problems)
    if hosts:
        named = [host for host in hosts if isinstance(host, dict)]
        found["hosts"] = [files.sound(host, _HOST, "summary.json: hosts", problems) for host in named]
    return found, all(found.get(key) == summary.get(key) for key in ("workers", "nodes"))


def solved_at(env: str | None) -> float | None:
    """The return at which Gymnasium calls an environment solved, where it says so."""
    if not env or ":" in env:  # a user's own file or module is not run for the sake of a line
        return None
    import gymnasium

    try:
        return gymnasium.spec(env).reward_threshold
    except gymnasium.error.Error:
        return None


def problems_of(runs: Iterable[RunData]) -> list[str]:
    """What is wrong with any of them, a line each; runs that did not end well included."""
    lines = []
    for run in runs:
        lines += [f"{run.name}: {text}" for text in run.problems]
        if run.state != FINISHED:
            lines.append(f"{run.name}: {run.state}" + (f": {run.reason}" if run.reason else ""))
    return lines


def unreadable(paths: Iterable[Path]) -> list[str]:
    """A word on each folder below these that may not be looked into: it may hold a run."""
    closed: list[Path] = []
    for path in paths:
        for _ in _below(Path(path).expanduser(), closed):
            pass
    return [f"{path} cannot be read: what is in it is left out" for path in dict.fromkeys(closed)]


def _below(path: Path, closed: list[Path], depth: int = 5) -> Iterable[Path]:
    if _is((path / "config.yaml").is_file):
        yield path
    elif depth and _is(path.is_dir):
        try:
            inside = sorted(path.iterdir())
        except OSError:  # not ours to see
            closed.append(path)
            return
        for one in inside:
            if not one.name.startswith(".") and _is(one.is_dir):
                yield from _below(one, closed, depth - 1)


def _is(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError:  # one folder that is not ours to see must not hide the others
        return False


def _planned(paths: Iterable[Path]) -> dict[Path, Tree]:
    """The entries of studies in these folders, by the directory a run has or should have had."""
    found: dict[Path, Tree] = {}
    for folder in paths:
        for file in (one for name in STUDIES for one in (folder / name, *folder.glob(f"*/{name}"))):
            try:
                entries = json.loads(file.read_bytes())["runs"]
                found |= {(file.parent / entry["name"]).absolute(): entry for entry in entries}
            except (OSError, ValueError, KeyError, TypeError):  # not a study of ours
                continue
    return found


def _with_study(run: RunData, entry: Tree | None) -> RunData:
    """A process that was killed leaves no reason in its directory; the study that started it knows."""
    if entry is None or run.state in (FINISHED, RUNNING) or entry.get("state") != "failed":
        return run
    return replace(run, state=FAILED, reason=one_line(entry.get("reason")))


def _never_begun(path: Path, entry: Tree) -> RunData:
    failed = entry.get("state") == "failed"
    config = {
        "algo": entry.get("algo"),
        "env": {"id": entry.get("env")},
        "engine": {"name": entry.get("engine"), "workers": entry.get("workers")},
        "seed": entry.get("seed"),
    }
    state, reason = FAILED if failed else MISSING, one_line(entry.get("reason"))  # of a job in the queue: its state
    problems: list[str] = []
    config = _sound_config(config, problems)
    return RunData(
        path=path, name=path.name, state=state, reason=reason or "not made yet", config=config, problems=problems
    )


def _section(tree: Mapping[str, Any], name: str) -> Tree:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str).replace('"', "")
