"""A sweep from its beginning to its table: a Ray to run on, Tune to schedule, one process a trial, files that last.

What is done is in `tune.json` and in the run directories, so a sweep is continued from them; of Tune's own files
nothing is needed afterwards.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline import machine
from paceline.config import RunConfig, UserError
from paceline.engine import cluster_address
from paceline.engine.ray_cluster import Cluster
from paceline.engine.signals import StopSignals
from paceline.engine.stopping import Deadline
from paceline.env.make import make_scalar
from paceline.resolve import resolve_tree
from paceline.run.directory import RunDirectory, write_text
from paceline.ship import Parcel, pack
from paceline.tune.courier import Desk
from paceline.tune.plan import FAILED, FINAL, PENDING, Sweep, Trial
from paceline.tune.schedule import make_scheduler, param_space
from paceline.tune.scribe import Scribe
from paceline.tune.trial import MARK, PATIENCE_SECONDS, TRIAL, Job, TrialActor, sees

DEADLINE_SECONDS = 60.0  # for the trials to save before the end of the allocation
PROBE_SECONDS = 60.0  # for a node to say whether it sees the folder
LOSSES = 3  # of its process or its host, after which a trial has failed; an error of its own ends it at once
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run has its own files
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # no episode may have ended yet
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours also knows the others
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": f"{PATIENCE_SECONDS + 30:g}",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # an environment may open files by relative names
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run_sweep(
    sweep: Sweep,
    *,
    parallel: int | None = None,
    gpus: float = 0.0,
    max_seconds: float | None = None,
    retry: bool = False,
    new: bool = True,
) -> int:
    """Run what is not done yet, and return the exit status."""
    config, _ = resolve_tree(sweep.tree(sweep.trials[0]), preset=sweep.preset)
    _check(config, parallel, gpus)
    deadline = Deadline(os.environ)
    if new:
        make_scalar(config.env).close()  # type: ignore[no-untyped-call]  # what is wrong with it shows at once
        _make(sweep.folder)
    directory = RunDirectory(sweep.folder)
    directory.lock()
    try:
        for trial in sweep.trials:
            if trial.status not in FINAL or (retry and trial.status == FAILED):
                trial.status, trial.error = PENDING, ""
                _keep_values(sweep, trial)
        until = min(time.time() + (max_seconds or math.inf), deadline.at - DEADLINE_SECONDS)
        scribe = Scribe(sweep)
        scribe.begin()
        reason = None
        todo = [trial for trial in sweep.trials if trial.status == PENDING]
        if todo:
            reason = _run(sweep, config, todo, scribe, until, parallel, gpus)
        return scribe.finish(reason)
    except UserError:
        if new and all(trial.status == PENDING for trial in sweep.trials):  # of the cluster, before the first of them
            shutil.rmtree(sweep.folder, ignore_errors=True)
        raise
    finally:
        directory.unlock()


def _keep_values(sweep: Sweep, trial: Trial) -> None:
    """Of a member that took others over, and whose search was killed before it knew."""
    if sweep.search != "pbt":
        return
    with suppress(UserError):  # it has not begun; or it is damaged, which it will say itself
        own = RunDirectory(sweep.folder / trial.name).read_config()
        for key, value in trial.values.items():
            section, _, name = key.partition(".")  # no deeper: they are of the algorithm
            trial.values[key] = own.get(section, {}).get(name, value)


def _check(config: RunConfig, parallel: int | None, gpus: float) -> None:
    if parallel is not None and parallel < 1:
        raise UserError(f"--parallel {parallel}: a number of trials, from 1 up")
    if gpus < 0:
        raise UserError(f"--gpus {gpus:g}: the share of a GPU that each trial has, such as 0.25")
    if config.engine.device == "cuda" and not gpus:
        raise UserError("engine.device=cuda: give each trial its share with --gpus, such as --gpus 0.5")


def _make(folder: Path) -> None:
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} exists: choose another --name, or continue the search with --resume {folder}")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {folder}: {error.strerror}; choose a folder you can write to with --out"
        ) from None


def _run(
    sweep: Sweep,
    config: RunConfig,
    todo: list[Trial],
    scribe: Scribe,
    until: float,
    parallel: int | None,
    gpus: float,
) -> str | None:
    """Why it ended before its end, or None."""
    threads = config.engine.threads or 1
    mine = cluster_address(config.engine) is None
    places = min(parallel or max(1, machine.cores() // threads), len(todo))
    shutil.rmtree(_storage(sweep), ignore_errors=True)  # of a search that was killed
    mark = secrets.token_hex(16)
    write_text(sweep.folder / MARK, mark)
    cluster = Cluster(config.engine, places * threads, gpus=_gpus() if mine and gpus else 0)
    try:
        with _environment(ENVIRONMENT), _silence(), StopSignals() as signals:
            cluster.watch_over()
            if cluster.cpus < threads:
                raise UserError(f"engine.threads={threads}: the Ray cluster at {cluster.address} has {cluster.cpus:g}")
            desk = _desk(cluster, sweep, mark)
            parcel = Parcel() if mine else pack(config)
            job = Job(sweep, mark, parcel, threads, gpus, desk, sys.argv)
            scribe.where(cluster, places if mine else None)
            stopper = Ending(signals, until)
            # A population takes turns where there is no room for all; the other searches start one when one ends.
            limit = None if mine or sweep.search == "pbt" else parallel
            _tuner(sweep, job, todo, [scribe], stopper, limit, threads, gpus).fit()
            return stopper.reason()
    finally:
        cluster.close()
        shutil.rmtree(_storage(sweep), ignore_errors=True)
        (sweep.folder / MARK).unlink(missing_ok=True)


def _tuner(
    sweep: Sweep,
    job: Job,
    todo: list[Trial],
    callbacks: list[Any],
    stopper: Ending,
    limit: int | None,
    threads: int,
    gpus: float,
) -> tune.Tuner:
    share = {"CPU": float(threads), **({"GPU": gpus} if gpus else {})}
    return tune.Tuner(
        tune.with_resources(tune.with_parameters(TrialActor, job=job), share),
        param_space=param_space(sweep, todo),
        tune_config=tune.TuneConfig(
            scheduler=make_scheduler(sweep, job.sweep.trials[0].seed),
            max_concurrent_trials=limit,
            trial_name_creator=lambda trial: trial.config[TRIAL],
            trial_dirname_creator=lambda trial: trial.config[TRIAL],
            reuse_actors=True,  # the next trial need not wait for Python and torch
        ),
        run_config=tune.RunConfig(
            name="state",
            storage_path=str(_storage(sweep)),
            failure_config=tune.FailureConfig(max_failures=LOSSES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            callbacks=callbacks,
            stop=stopper,
            verbose=0,
        ),
    )


def _gpus() -> int:
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise UserError("--gpus: there is no CUDA GPU on this machine; leave it out")
    return count


def _storage(sweep: Sweep) -> Path:
    return sweep.folder.resolve() / ".ray"


def _desk(cluster: Cluster, sweep: Sweep, mark: str) -> Any:
    """Where some host does not see the folder; None where all do."""
    ray = cluster.ray
    others = [node for node in cluster.nodes[1:] if node.cpus > 0]
    probe = ray.remote(num_cpus=0)(sees)
    asked = [
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            str(sweep.folder.resolve()), mark
        )
        for node in others
    ]
    blind = [node.address for node, seen in zip(others, ray.get(asked, timeout=PROBE_SECONDS), strict=True) if not seen]
    if not blind:
        return None
    if sweep.search == "pbt":
        raise UserError(
            f"--search pbt hands checkpoints from host to host, and {', '.join(blind)} cannot see {sweep.folder}: put "
            "--out on a folder that all hosts share"
        )
    here = NodeAffinitySchedulingStrategy(cluster.nodes[0].id, soft=False)
    remote = ray.remote(num_cpus=0, max_restarts=0)(Desk)
    return remote.options(scheduling_strategy=here).remote(str(sweep.folder.resolve()))


class Ending(tune.Stopper):
    """Of the whole sweep, by a signal or by the clock."""

    def __init__(self, signals: StopSignals, until: float) -> None:
        self._signals, self._until = signals, until
        self._late = False

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: see the scribe."""
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        self._late = self._late or time.time() > self._until
        return self.reason() is not None

    def reason(self) -> str | None:
        return (
            f"{self._signals.received} received"
            if self._signals.received
            else "its time is over"
            if self._late
            else None
        )


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _silence() -> Iterator[None]:
    """Tune's advice is to those who call it."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
