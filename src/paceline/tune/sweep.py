"""A sweep from its beginning to its table: a Ray to run on, Tune to schedule, one process a trial, files that last.

What is done is in `tune.json` and in the run directories, so a sweep is continued from them; of Tune's own files
nothing is needed afterwards.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline import machine
from paceline.config import RunConfig, UserError
from paceline.engine import cluster_address
from paceline.engine.ray_cluster import Cluster
from paceline.engine.signals import STOPPED_EARLY, StopSignals
from paceline.engine.stopping import Deadline
from paceline.env.make import make_scalar
from paceline.resolve import resolve_tree
from paceline.run.console import PlainConsole, duration
from paceline.run.directory import RunDirectory, write_text
from paceline.ship import Parcel, pack
from paceline.tune import table
from paceline.tune.courier import Desk
from paceline.tune.plan import EARLY, FAILED, FINAL, PENDING, RUNNING, STOPPED, Sweep, Trial
from paceline.tune.schedule import make_scheduler, param_space
from paceline.tune.trial import MARK, PATIENCE_SECONDS, TRIAL, Job, TrialActor, sees

LINE_SECONDS = 30.0  # between two lines of progress
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
        until = min(time.time() + (max_seconds or math.inf), deadline.at - DEADLINE_SECONDS)
        scribe = Scribe(sweep)
        scribe.begin()
        reason = None
        todo = [trial for trial in sweep.trials if trial.status == PENDING]
        if todo:
            reason = _run(sweep, config, todo, scribe, until, parallel, gpus)
        return scribe.finish(reason)
    except UserError:
        if new:  # of the cluster, before the first trial
            shutil.rmtree(sweep.folder, ignore_errors=True)
        raise
    finally:
        directory.unlock()


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
        """Nothing, as of the scribe."""
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


class Scribe(tune.Callback):
    """What happens to the trials, on the terminal and in the files."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        inside = sweep.folder.is_relative_to(Path.cwd())
        self._shown = sweep.folder.relative_to(Path.cwd()) if inside else sweep.folder
        self._console = PlainConsole(sys.stdout)
        self._trials = {trial.name: trial for trial in sweep.trials}
        self._began = time.monotonic()
        self._next = self._began + LINE_SECONDS

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles what it is given, to restore it one day, and we do not ask it to."""
        return {}

    # -- beginning and end ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        sweep = self._sweep
        points = len({trial.point for trial in sweep.trials})
        left = sum(trial.status == PENDING for trial in sweep.trials)
        self._say(f"tune       {self._shown}")
        self._say(
            f"search     {sweep.search}, {points} point(s), {len(sweep.trials)} trial(s), {left} to run, "
            f"{sweep.mode} of {sweep.metric}"
        )
        for key, said in sweep.space.items():
            self._say(f"           {key}: {said}")
        self._write()

    def where(self, cluster: Cluster, places: int | None) -> None:
        if places is not None:
            self._say(f"trials     {places} at once, on a Ray of our own")
        else:
            hosts = ", ".join(node.address for node in cluster.nodes)
            self._say(f"trials     on {cluster.cpus:g} CPUs of the Ray cluster at {cluster.address}: {hosts}")

    def finish(self, reason: str | None) -> int:
        sweep = self._sweep
        for trial in sweep.trials:
            if trial.status == RUNNING:
                trial.status = STOPPED if reason else FAILED
                trial.error = "" if reason else "it ended without a word"
                self._refresh(trial)
        if reason is None and any(trial.status == STOPPED for trial in sweep.trials):
            reason = "the allocation ends"  # which trials notice, too
        self._write()
        judged = table.judge(sweep)
        self._say("")
        self._say(table.table(sweep))
        self._say(f"table      {self._shown / 'trials.csv'}")
        if judged:
            table.write_best(sweep, judged[0])
            best = judged[0]
            partly = "" if best.whole else ", and not all of its seeds ran to their end"
            self._say(f"best       {sweep.metric} {table.number(best.mean)}: {table.describe(best.values)}{partly}")
            self._say(f"train it   paceline train --config {shlex.quote(str(self._shown / 'best.yaml'))}")
            self._draw()
        failed = [trial.name for trial in sweep.trials if trial.status == FAILED]
        if failed:
            self._say(f"failed     {', '.join(failed)}: see {self._shown / 'logs'}; --retry tries them again")
        if reason is not None:
            self._say(f"stopped    {reason}")
            self._say(f"continue   paceline tune --resume {shlex.quote(str(self._shown))}")
            return STOPPED_EARLY
        self._say(f"tune       {self._shown}")
        return 0 if judged else 1

    # -- what Tune calls ------------------------------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        found = self._trials[str(trial)]
        if found.status != RUNNING:
            again = f" from step {found.steps:,}" if found.steps else ""
            self._say(f"{found.name}  starts{again}: {table.describe(found.values)}")
        found.status = RUNNING
        self._write()

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        found = self._trials[str(trial)]
        found.location = f"{result.get('hostname', '?')}:{result.get('pid', '?')}"
        if result.get("values") is not None and result["values"] != found.values:
            self._say(f"{found.name}  takes over weights, with {table.describe(result['values'])}")
            found.values = result["values"]
        if "env_steps" in result:
            found.steps, found.iteration = result["env_steps"], result["iteration"]
            found.seconds, found.return_mean = result["seconds"], result["return_mean"]
            found.score = result.get("score", found.score)
        if result.get("done") and "status" in result:
            found.status, found.error = result["status"], result.get("error", "")
            if "traceback" in result:
                write_text(self._sweep.folder / "logs" / f"{found.name}.txt", result["traceback"])
            self._ended(found)
        elif time.monotonic() > self._next:
            self._next = time.monotonic() + LINE_SECONDS
            self._progress()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Also of those that have said so themselves."""
        found = self._trials[str(trial)]
        if found.status == RUNNING:
            found.status = EARLY
            self._ended(found)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(f"{trial}  lost its process or its host, and starts again from its last checkpoint")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        found = self._trials[str(trial)]
        error = trial.get_pickled_error() or trial.get_error()
        said = str(error).strip().splitlines() or ["its process was lost"]
        found.status, found.error = FAILED, f"{type(error).__name__}: {said[0]}"
        write_text(self._sweep.folder / "logs" / f"{found.name}.txt", "\n".join(said) + "\n")
        self._refresh(found)
        self._ended(found)

    # -- the rest -------------------------------------------------------------------------------------------------

    def _ended(self, trial: Trial) -> None:
        over = sum(other.status in FINAL for other in self._sweep.trials)
        score = f", {self._sweep.metric} {table.number(trial.score)}" if trial.score is not None else ""
        error = f": {trial.error}" if trial.error else ""
        self._say(
            f"[{over}/{len(self._sweep.trials)}] {trial.name}  {trial.status}{error} after {trial.steps:,} steps, "
            f"{duration(trial.seconds)}{score}, on {trial.location or 'no host'}"
        )
        self._write()

    def _progress(self) -> None:
        counts = {s: sum(t.status == s for t in self._sweep.trials) for s in (RUNNING, *FINAL, PENDING)}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        steps = sum(trial.steps for trial in self._sweep.trials)
        self._say(f"{duration(time.monotonic() - self._began)}  {told}; {steps:,} steps")
        self._write()

    def _refresh(self, trial: Trial) -> None:
        """From the run itself, which has gone on since it last reported."""
        summary = RunDirectory(self._sweep.folder / trial.name).read_summary()
        trial.steps = summary.get("env_steps") or trial.steps
        trial.iteration = summary.get("iterations") or trial.iteration
        trial.seconds = summary.get("wall_seconds") or trial.seconds

    def _draw(self) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self._say("picture    none: matplotlib is not installed (pip install 'paceline[report]')")
            return
        from paceline.tune.figure import draw

        self._say(f"picture    {self._shown / draw(self._sweep).name}")

    def _write(self) -> None:
        self._sweep.save()
        table.write_tables(self._sweep)

    def _say(self, text: str) -> None:
        self._console.note(text)


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
