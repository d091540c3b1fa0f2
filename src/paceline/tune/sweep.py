"""Runs a search: connects to Ray, lets Tune schedule the trials, one process each, and reports the result.

`tune.json` and the run directories hold all that is needed to continue. Tune's own restore is not used: trials that
were stopped with the search count as finished there, and its snapshots are pickled and up to 10 s old.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline import machine
from paceline.code_bundle import pack
from paceline.config import RunConfig, UserError
from paceline.config.resolve import resolve_tree, to_tree
from paceline.engines.ray.ray_cluster import RayCluster
from paceline.envs.make import make_env
from paceline.run.directory import RunDirectory, missing_folders, remove_empty, write_text
from paceline.training.placement import cluster_address
from paceline.training.signals import StopSignals
from paceline.training.stopping import Deadline
from paceline.tune.progress import SweepProgress
from paceline.tune.sweep_plan import FAILED, FINAL, PENDING, Sweep, Trial
from paceline.tune.transfer import RunStore
from paceline.tune.trial import MARKER, STOP_SECONDS, TRIAL, TrialActor, TrialContext, shares_folder
from paceline.tune.trial_scheduler import make_scheduler, param_space

DEADLINE_SECONDS = 60.0  # for the trials to save before the end of the allocation
PROBE_SECONDS = 60.0  # for a node to answer whether it shares the folder
MAX_LOSSES = 3  # of its process or its host; with one more a trial has failed. Its own error ends it at once.
TUNE_VARIABLES = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run has its own files
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # there is no score before the first episode ends
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # StopSignals handles it, among others
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": f"{STOP_SECONDS + 30:g}",
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
    """Run the trials that are not done yet, and return the exit code."""
    config, _ = resolve_tree(sweep.tree(sweep.trials[0]), preset=sweep.preset)
    if parallel is not None and parallel < 1:
        raise UserError(f"--parallel {parallel}: must be at least 1")
    if not 0 <= gpus < math.inf:
        raise UserError(f"--gpus {gpus:g}: expected the share of a GPU for each trial, such as 0.25")
    if config.engine.device == "cuda" and not gpus:
        raise UserError("engine.device=cuda: give each trial its share with --gpus, such as --gpus 0.5")
    deadline = Deadline(os.environ)
    made = missing_folders(sweep.folder)
    if new:
        make_env(config.env).close()  # a broken environment shows before any file
        _make_folder(sweep.folder)
    directory = RunDirectory(sweep.folder)
    directory.lock()
    try:
        for trial in sweep.trials:
            if trial.status not in FINAL or (retry and trial.status == FAILED):
                trial.status, trial.error = PENDING, ""
                if sweep.search == "pbt":
                    _read_values(sweep, trial)
        progress = SweepProgress(sweep)
        progress.begin()
        todo = [trial for trial in sweep.trials if trial.status == PENDING]
        until = min(time.time() + (max_seconds or math.inf), deadline.at - DEADLINE_SECONDS)
        reason = _run(sweep, config, todo, progress, until, parallel, gpus) if todo else None
        return progress.finish(reason)
    except UserError:
        if new and all(trial.status == PENDING for trial in sweep.trials):  # the cluster failed before the first trial
            shutil.rmtree(sweep.folder, ignore_errors=True)
            remove_empty(made)
        raise
    finally:
        directory.unlock()


def _read_values(sweep: Sweep, trial: Trial) -> None:
    """Settings that pbt gave to a member just before the search was killed are in its run only."""
    with suppress(UserError):  # the run has not begun; or it is damaged, which training will report
        config = RunDirectory(sweep.folder / trial.name).read_config()
        for key, value in trial.values.items():
            section, _, name = key.partition(".")  # pbt's keys are all ALGO.NAME
            trial.values[key] = config.get(section, {}).get(name, value)


def _make_folder(folder: Path) -> None:
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
    progress: SweepProgress,
    until: float,
    parallel: int | None,
    gpus: float,
) -> str | None:
    """Why the search was stopped, or None."""
    threads = config.engine.threads or 1
    is_own = cluster_address(config.engine) is None
    places = min(parallel or max(1, machine.cores() // threads), len(todo))
    storage, marker, token = sweep.folder.resolve() / ".ray", sweep.folder / MARKER, secrets.token_hex(16)
    shutil.rmtree(storage, ignore_errors=True)  # a killed search leaves it
    write_text(marker, token)
    cluster = RayCluster(config.engine, places * threads, gpus=_count_gpus() if is_own and gpus else 0)
    try:
        os.environ.update(TUNE_VARIABLES)
        logging.getLogger("ray").setLevel(logging.CRITICAL)  # Tune's advice is for those who call it
        with StopSignals() as signals:
            cluster.guard()
            if cluster.cpus < threads:
                raise UserError(f"engine.threads={threads}: the Ray cluster at {cluster.address} has {cluster.cpus:g}")
            store = _start_store(cluster, sweep, token)
            bundle = pack(to_tree(config), files_too=not is_own)
            context = TrialContext(sweep, token, bundle, threads, gpus, store, sys.argv)
            progress.connected(cluster, places)
            stopper = SweepStopper(signals, until)
            trainable = tune.with_parameters(TrialActor, context=context)
            tune.Tuner(
                tune.with_resources(trainable, {"CPU": float(threads)} | ({"GPU": gpus} if gpus else {})),
                param_space=param_space(sweep, todo),
                tune_config=tune.TuneConfig(
                    scheduler=make_scheduler(sweep),
                    # The members of a population take turns where there is no room for all of them.
                    max_concurrent_trials=None if is_own or sweep.search == "pbt" else parallel,
                    trial_name_creator=lambda trial: trial.config[TRIAL],
                    trial_dirname_creator=lambda trial: trial.config[TRIAL],
                    reuse_actors=True,  # the next trial need not wait for Python and torch to start
                ),
                run_config=tune.RunConfig(
                    name="state",
                    storage_path=str(storage),
                    failure_config=tune.FailureConfig(max_failures=MAX_LOSSES),
                    checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
                    callbacks=[progress],
                    stop=stopper,
                    verbose=0,
                ),
            ).fit()
            return stopper.reason()
    finally:
        cluster.close()
        shutil.rmtree(storage, ignore_errors=True)
        marker.unlink(missing_ok=True)


def _count_gpus() -> int:
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise UserError("--gpus: there is no CUDA GPU on this machine; leave it out")
    return count


def _start_store(cluster: RayCluster, sweep: Sweep, token: str) -> Any:
    """A `RunStore` for hosts that do not share the search's folder; None where all share it."""
    ray, folder = cluster.ray, str(sweep.folder.resolve())
    others = [node for node in cluster.nodes[1:] if node.cpus > 0]
    probe = ray.remote(num_cpus=0)(shares_folder)
    answers = ray.get([probe.options(**_on(node.id)).remote(folder, token) for node in others], timeout=PROBE_SECONDS)
    apart = [node.address for node, shares in zip(others, answers, strict=True) if not shares]
    if not apart:
        return None
    if sweep.search == "pbt":
        raise UserError(
            f"--search pbt passes checkpoints between hosts, but {', '.join(apart)} cannot see {sweep.folder}: set "
            "--out to a folder that all hosts share"
        )
    return ray.remote(num_cpus=0, max_restarts=0)(RunStore).options(**_on(cluster.nodes[0].id)).remote(folder)


def _on(node: str) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class SweepStopper(tune.Stopper):
    """Stops all trials after a signal or when the time is over."""

    def __init__(self, signals: StopSignals, until: float) -> None:
        self._signals, self._until = signals, until
        self._is_late = False

    def __getstate__(self) -> dict[str, Any]:
        """Empty, as that of SweepProgress."""
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        self._is_late = self._is_late or time.time() > self._until
        return self.reason() is not None

    def reason(self) -> str | None:
        if self._signals.received:
            return f"{self._signals.received} received"
        return "its time is over" if self._is_late else None
