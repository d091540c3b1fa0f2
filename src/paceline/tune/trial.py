"""One trial: `paceline.train` in a process that reports to Ray Tune and stops when Tune asks for it."""

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
from paceline.code_bundle import CodeBundle, install, uninstall
from paceline.config import UserError
from paceline.config.resolve import resolve_tree, to_yaml
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory, write_text
from paceline.training.engine import TrainingError
from paceline.training.loop import Loop
from paceline.tune.sweep_plan import DONE, FAILED, STOPPED, Sweep, Trial
from paceline.tune.transfer import RunTransfer

REPORT_SECONDS = 1.0  # between two reports, except at milestones of the scheduler
STOP_SECONDS = 120  # for a trial that is told to stop: its iteration, and the save
MARKER = ".tune"
"""A file in the search's folder. A host that can read its token there shares the folder."""
TRIAL = "trial"
"""The key of the trial's name in Tune's config; the other keys are settings that pbt may change."""
ORIGIN = "origin"
"""A file in a checkpoint given to Tune: the name of the trial that made it."""


@dataclass(frozen=True)
class TrialContext:
    """What all trials of a search have in common."""

    sweep: Sweep
    token: str
    code_bundle: CodeBundle
    threads: int
    gpus: float
    store: Any
    """The handle of a `RunStore`, for hosts that do not share the folder; None: all do."""
    argv: list[str]


class TrialActor(FunctionTrainable):
    """Tune's actor for functions, which also waits until a stopped trial has finished its iteration and saved."""

    def setup(self, config: dict[str, Any], context: TrialContext | None = None) -> None:
        assert context is not None  # `tune.with_parameters` gives it
        self._context = context
        # The actor is reused when this trial's thread has ended; Tune waits only two seconds for that by default.
        os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(STOP_SECONDS)
        super().setup(config)  # type: ignore[no-untyped-call]

    def _trainable_func(self, config: dict[str, Any]) -> None:
        run_trial(self._context, self.trial_name, {key: value for key, value in config.items() if key != TRIAL})

    def cleanup(self) -> None:
        session = get_session()
        try:
            if session is not None:
                session.finish(timeout=STOP_SECONDS)
        finally:
            shutdown_session()  # type: ignore[no-untyped-call]
            uninstall(self._context.code_bundle)


def shares_folder(folder: str, token: str) -> bool:
    """Whether this host sees the search's own folder."""
    try:
        return (Path(folder) / MARKER).read_text() == token
    except OSError:
        return False


def run_trial(context: TrialContext, name: str, changed: dict[str, Any]) -> None:
    """`changed`: settings that pbt has set for this trial."""
    sys.argv = context.argv  # the run's provenance has the user's command
    install(context.code_bundle)
    sweep = context.sweep
    trial = next(trial for trial in sweep.trials if trial.name == name)
    values = {**trial.values, **changed}
    if shares_folder(str(sweep.folder), context.token):
        _train(context, trial, values, sweep.folder, None)
        return
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        transfer = RunTransfer(context.store, Path(folder) / name)
        transfer.download()
        _train(context, trial, values, Path(folder), transfer)


def _train(
    context: TrialContext, trial: Trial, values: dict[str, Any], folder: Path, transfer: RunTransfer | None
) -> None:
    sweep, directory = context.sweep, RunDirectory(folder / trial.name)
    tree = sweep.tree(trial, values) | {"out": str(folder), "name": trial.name}
    tree["engine"] = {**(tree.get("engine") or {}), "name": "local", "threads": context.threads}
    if not context.gpus:
        tree["engine"]["device"] = "cpu"  # `auto` would take a GPU that Ray has not assigned
    reporter = Reporter(sweep, directory.path, values, transfer)
    try:
        _wait_until_free(directory)
        if sweep.search == "pbt":
            adopt_checkpoint(sweep, directory, tree)
        run = train(tree, preset=sweep.preset, resume="auto", watch=reporter, code_bundle=context.code_bundle)
        rows = run.read_metrics()
        last = reporter.metrics(rows[-1] if rows else {})
        last["status"] = DONE if run.outcome.status == "done" else STOPPED
    except Exception as error:  # an environment may raise anything; the other trials go on
        last = {"status": FAILED, "error": _first_line(error), "traceback": traceback.format_exc()}
    if transfer is not None:
        transfer.upload(now=True)
    if reporter.told_to_stop:
        raise SystemExit(0)  # Tune's own way to end the thread of a stopped trial
    tune.report({**last, "done": True})


class Reporter:
    """Reports to Tune after iterations of the training loop."""

    def __init__(self, sweep: Sweep, path: Path, values: dict[str, Any], transfer: RunTransfer | None) -> None:
        self._sweep, self._path, self._values, self._transfer = sweep, path, values, transfer
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
        if self._transfer is not None:
            self._transfer.upload()
        try:
            if self._sweep.search == "pbt" and at_milestone:
                loop.save()
                self._report_with_checkpoint(self.metrics(loop.row))
            else:
                tune.report(self.metrics(loop.row))
        except SystemExit:
            self.told_to_stop = True
            return "stopped by the search"
        return None

    def metrics(self, row: dict[str, Any]) -> dict[str, Any]:
        """The fields of a `Trial`, from a row of `metrics.jsonl`. No score: no episode has ended yet."""
        score = row.get(self._sweep.metric)
        metrics = {
            "steps": row.get("env_steps", 0),
            "iteration": row.get("iteration", 0),
            "seconds": row.get("wall_seconds", 0.0),
            "return_mean": row.get("return_mean"),
            "values": self._values,
        }
        return metrics | ({"score": float(score)} if score is not None and math.isfinite(score) else {})

    def _report_with_checkpoint(self, metrics: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            shutil.copytree(checkpoint.find(self._path, "last"), Path(folder) / "state")
            (Path(folder) / ORIGIN).write_text(self._path.name)
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def adopt_checkpoint(sweep: Sweep, directory: RunDirectory, tree: dict[str, Any]) -> None:
    """Continue from another member's checkpoint, if pbt has given one, with the settings in `tree`. The resume that
    follows cuts the rows of this run that are later than that checkpoint."""
    given = tune.get_checkpoint()
    if given is None:
        return
    config, _ = resolve_tree(tree, preset=sweep.preset)
    with given.as_directory() as content:
        origin = (Path(content) / ORIGIN).read_text()
        if origin == directory.path.name:
            return
        arrays, state = checkpoint.load(Path(content) / "state")
    shutil.rmtree(directory.path / "replay", ignore_errors=True)  # its rows do not belong to that checkpoint
    for old in directory.checkpoints_path.iterdir():
        with suppress(OSError):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    steps = state["loop"]["counters"]["env_steps"]
    checkpoint.save(directory, steps, arrays, state, keep=config.checkpoint.keep)
    write_text(directory.config_path, to_yaml(config))
    directory.log(f"weights of {origin} from step {steps:,}")


def _wait_until_free(directory: RunDirectory) -> None:
    """An earlier process of this trial may still be saving. After the limit training fails, and names that process."""
    until = time.monotonic() + STOP_SECONDS
    while directory.path.is_dir() and time.monotonic() < until:
        try:
            directory.lock()
        except UserError:
            time.sleep(0.2)
        else:
            directory.unlock()
            return


def _first_line(error: Exception) -> str:
    name = "" if isinstance(error, UserError | TrainingError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or ["no reason given"])[0]
