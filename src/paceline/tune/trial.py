"""One trial: `paceline.train` in a process of its own, which tells Ray Tune how it goes and stops when Tune says so."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.train._internal.session import get_session, shutdown_session
from ray.tune.trainable.function_trainable import FunctionTrainable

from paceline.api import train
from paceline.config import UserError
from paceline.engine.base import TrainingError
from paceline.engine.loop import Loop
from paceline.resolve import resolve_tree, to_yaml
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory, write_text
from paceline.ship import Parcel, clean
from paceline.tune.courier import Courier
from paceline.tune.plan import DONE, FAILED, STOPPED, Sweep, Trial

REPORT_SECONDS = 1.0  # between two reports where the scheduler need not look
PATIENCE_SECONDS = 120  # for the iteration under way and the save, when a trial is told to stop
MARK = ".tune"
"""The file in the sweep's folder by which a host knows that it sees the same one."""
TRIAL = "trial"
"""The key of a trial's name in what Tune calls its config; the others are settings that Tune may change."""
_ORIGIN = "origin"


@dataclass(frozen=True)
class Job:
    """What all trials are told."""

    sweep: Sweep
    mark: str
    parcel: Parcel
    threads: int
    gpus: float
    desk: Any
    argv: list[str]


class TrialActor(FunctionTrainable):
    """Tune's, except that a trial which is stopped may finish its iteration and save."""

    def setup(self, config: dict[str, Any], job: Job | None = None) -> None:
        assert job is not None  # Tune's signature has it not
        self._job = job
        # The process takes the next trial when this one's thread has ended, and Tune would not wait for that.
        os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(PATIENCE_SECONDS)
        super().setup(config)  # type: ignore[no-untyped-call]

    def _trainable_func(self, config: dict[str, Any]) -> None:
        run_trial(self._job, self.trial_name, {key: value for key, value in config.items() if key != TRIAL})

    def cleanup(self) -> None:
        session = get_session()
        try:
            if session is not None:
                session.finish(timeout=PATIENCE_SECONDS)
        finally:
            shutdown_session()  # type: ignore[no-untyped-call]
            clean(self._job.parcel)


def sees(folder: str, mark: str) -> bool:
    """Whether this host has the sweep's folder itself."""
    try:
        return (Path(folder) / MARK).read_text() == mark
    except OSError:
        return False


def run_trial(job: Job, name: str, changed: dict[str, Any]) -> None:
    sys.argv = job.argv  # of the user's command, for the run's provenance
    trial = next(trial for trial in job.sweep.trials if trial.name == name)
    here = sees(str(job.sweep.folder), job.mark)
    folder = job.sweep.folder if here else Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        courier = None if here else Courier(job.desk, name, folder)
        if courier is not None:
            courier.fetch()
        _run(job, trial, {**trial.values, **changed}, folder, courier)
    finally:
        if not here:
            shutil.rmtree(folder, ignore_errors=True)


def _run(job: Job, trial: Trial, values: dict[str, Any], folder: Path, courier: Courier | None) -> None:
    sweep = job.sweep
    tree = sweep.tree(trial, values)
    tree |= {"out": str(folder), "name": trial.name}
    tree["engine"] = {**(tree.get("engine") or {}), "name": "local", "threads": job.threads}
    if not job.gpus:
        tree["engine"]["device"] = "cpu"  # `auto` would take one that nobody has shared out
    reporter = Reporter(sweep, folder / trial.name, values, courier)
    try:
        _await_end(RunDirectory(folder / trial.name))
        if sweep.search == "pbt":
            _exploit(sweep, trial, tree, folder)
        run = train(tree, preset=sweep.preset, resume="auto", watch=reporter, parcel=job.parcel)
        rows = run.read_metrics()
        last = reporter.facts(rows[-1] if rows else {})
        last["status"] = DONE if run.outcome.status == "done" else STOPPED
    except Exception as error:  # an environment may raise anything; it is this trial's end and no other's
        last = {"status": FAILED, "error": _first_line(error), "traceback": traceback.format_exc()}
    if courier is not None:
        courier.send(now=True)
    if reporter.told_to_stop:
        raise SystemExit(0)  # as Tune does where it does not wait
    tune.report({**last, "done": True})


class Reporter:
    """Called by the loop after each iteration."""

    def __init__(self, sweep: Sweep, path: Path, values: dict[str, Any], courier: Courier | None) -> None:
        self._sweep, self._path, self._values, self._courier = sweep, path, values, courier
        self._milestones = sweep.milestones
        self._passed = 0
        self._next = 0.0
        self.told_to_stop = False

    def __call__(self, loop: Loop) -> str | None:
        passed = bisect_right(self._milestones, loop.row["env_steps"])
        at_milestone, self._passed = passed > self._passed, passed
        if not at_milestone and time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + REPORT_SECONDS
        if self._courier is not None:
            self._courier.send()
        facts = self.facts(loop.row)
        try:
            if self._sweep.search == "pbt" and at_milestone:
                loop.save()
                self._report_with_checkpoint(facts)
            else:
                tune.report(facts)
        except SystemExit:
            self.told_to_stop = True
            return "stopped by the search"
        return None

    def facts(self, row: dict[str, Any]) -> dict[str, Any]:
        score = row.get(self._sweep.metric)
        facts = {
            "env_steps": row.get("env_steps", 0),
            "iteration": row.get("iteration", 0),
            "seconds": row.get("wall_seconds", 0.0),
            "return_mean": row.get("return_mean"),
            "values": self._values,
        }
        return facts | ({"score": float(score)} if score is not None and math.isfinite(score) else {})

    def _report_with_checkpoint(self, facts: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            target = Path(folder)
            shutil.copytree(checkpoint.find(self._path, "last"), target / "state")
            (target / _ORIGIN).write_text(self._path.name)
            tune.report(facts, checkpoint=tune.Checkpoint.from_directory(folder))


def _exploit(sweep: Sweep, trial: Trial, tree: dict[str, Any], folder: Path) -> None:
    """With the weights of another member and other settings: its checkpoint takes the place of ours, and the run goes
    on from there. Rows of ours after that iteration are cut, as at every resume."""
    given = tune.get_checkpoint()
    if given is None:
        return
    config, _ = resolve_tree(tree, preset=sweep.preset)
    directory = RunDirectory(folder / trial.name)
    with given.as_directory() as content:
        origin = (Path(content) / _ORIGIN).read_text()
        if origin == trial.name:
            return
        arrays, state = checkpoint.load(Path(content) / "state")
    shutil.rmtree(directory.path / "replay", ignore_errors=True)  # the rows of that checkpoint are not in ours
    for old in directory.checkpoints_path.iterdir():
        with suppress(OSError):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    checkpoint.save(directory, state["loop"]["counters"]["env_steps"], arrays, state, keep=config.checkpoint.keep)
    write_text(directory.config_path, to_yaml(config))
    directory.log(f"weights of {origin} from step {state['loop']['counters']['env_steps']:,}")


def _await_end(directory: RunDirectory) -> None:
    """Of a process that may still be saving this run; beyond the limit training says who it is."""
    until = time.monotonic() + PATIENCE_SECONDS
    while directory.path.is_dir() and time.monotonic() < until:
        try:
            directory.lock()
        except UserError:
            time.sleep(0.2)
            continue
        directory.unlock()
        return


def _first_line(error: Exception) -> str:
    name = "" if isinstance(error, UserError | TrainingError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or ["no reason given"])[0]
