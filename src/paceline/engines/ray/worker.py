"""A worker process of the Ray engine.

Ray calls the methods one after the other in one thread. Methods of the `control` group run in another thread, so that
the driver can ask a busy worker for a heartbeat, shorten its rollout, or release it from a broken group.
"""

from __future__ import annotations

import copy
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from paceline import machine, ray_folder
from paceline.config import UserError
from paceline.engines.ray.messages import Report, WorkerInfo, WorkerSpec, installed_versions

SAMPLE_SECONDS = 2.0  # how often memory and CPU are read
FETCH_SECONDS = 30.0  # limit for one rollout or one set of weights to arrive


class Worker:
    def __init__(self) -> None:
        self._spec: WorkerSpec | None = None
        self._snapshot: dict[str, Any] | None = None  # the algorithm's state before the last update
        self._batch: Any = None
        self._undo = False  # an update has failed: `rollback` comes next
        self._before_ahead: dict[str, Any] | None = None  # the collector's state before a rollout ahead of time
        self._is_fetching = False
        self._weights_version, self._is_acting, self._rollout_ended = -1, False, 0.0
        self._told: list[str] = []  # notes about the environments
        self._sample_at = 0.0
        self._usage, self._start_usage = machine.Usage(), machine.Usage()  # the latter: imports and set-up

    # -- set-up -----------------------------------------------------------------------------------------------------

    def setup(self, spec: WorkerSpec) -> WorkerInfo:
        """Not in `__init__`, which runs in another thread: torch keeps settings per thread."""
        self._spec = spec
        if spec.log is not None:
            self.log_to(spec.log, spec.driver_host)
        info = WorkerInfo(
            pid=os.getpid(),
            host=platform.node(),
            node=ray.get_runtime_context().get_node_id(),
            cores=machine.cores(),
            versions=installed_versions(),
        )
        try:
            return self._setup(spec, info)
        except UserError as error:
            return replace(info, problem=str(error))
        finally:
            self._start_usage = machine.usage()

    def _setup(self, spec: WorkerSpec, info: WorkerInfo) -> WorkerInfo:
        from paceline.code_bundle import install, relocate
        from paceline.config.resolve import validate
        from paceline.engines.actor_learner import ActorLearner

        install(spec.code_bundle)  # first: the settings may name classes in it
        parts = self._parts = ActorLearner(
            validate(relocate(spec.settings, spec.code_bundle)),
            envs=spec.envs,
            worker=spec.slot,
            restarts=spec.restarts,
            resumes=spec.resumes,
            cores=spec.cores,
            spaces=spec.spaces,
            on_device=spec.envs == 0,
            in_worker=True,
        )
        self._algorithm, self._collector = parts.algorithm, parts.collector
        parts.change(spec.changes)
        if spec.scratch_dir is not None:
            self.set_scratch_dir(spec.scratch_dir, spec.driver_host)
        self._told = parts.notes()
        if spec.envs:
            self._algorithm.act_as(spec.slot, spec.workers)
        parameters, moments = math.prod(parts.policy.parameters.shape), 2 * parts.policy.observation.size + 1
        return replace(
            info,
            stepping=parts.stepping,
            threads=parts.threads,
            parameters=parameters,
            agents=len(parts.agents),
            capacity_bytes=max(4 * parameters, 8 * moments, 4096),
            spaces=parts.spaces,
            lines=parts.describe(),
            device=parts.device_name,
        )

    def log_to(self, path: str, driver_host: str) -> None:
        """Write all output to a file in the run directory, if that is on this host."""
        if driver_host == platform.node():
            _redirect_output(Path(path))

    def change(self, changes: dict[str, Any]) -> None:
        self._parts.change(changes)

    def set_scratch_dir(self, path: str, driver_host: str) -> None:
        """Use a folder in the run directory if that is on this host, else one that is removed with Ray."""
        if driver_host != platform.node():
            path = str(ray_folder.make_scratch())
        self._algorithm.set_scratch_dir(Path(path))

    def begin(self, algorithm: dict[str, Any] | None, collector: dict[str, Any] | None) -> dict[str, str]:
        """Take over the state of a run. Returns how its parts were restored."""
        from paceline.training.engine import restored

        if algorithm is not None:
            assert self._spec is not None
            own = self._algorithm.rng.bit_generator.state
            self._algorithm.load(algorithm)  # the state of worker 0, including its random numbers
            if collector is not None and "update_rng" in collector:
                self._algorithm.rng.bit_generator.state = collector["update_rng"]
            elif self._spec.slot or self._spec.restarts:
                self._algorithm.rng.bit_generator.state = own
        exact = False
        if self._collector is not None and collector is not None:
            exact = self._collector.restore(collector)
        elif self._collector is not None:
            self._collector.start()
        self._start_usage = machine.usage()
        return restored(exact, self._algorithm.restored())

    def load_policy(self, arrays: dict[str, Any]) -> str | None:
        """Returns what is wrong with the weights, if anything."""
        try:
            self._parts.policy.load(arrays)
        except UserError as error:
            return str(error)
        return None

    def join(self, spec: Any) -> None:
        """Leave the old group and join a new one."""
        from paceline.collective.process_group import join

        self._algorithm.group.close()
        with self._fetching():
            self._algorithm.group = join(spec, cores=machine.cores())

    # -- replicas: collect and learn --------------------------------------------------------------------------------

    def collect(self) -> Report:
        self._batch, seconds = self._parts.collect()
        return self._rollout_report(self._batch, seconds)

    def collect_ahead(self) -> Report | None:
        """Collect right after an update, while the driver takes in its results. The run may be saved before it learns
        from this rollout, so the state before it is kept. None if the update has failed."""
        if self._undo:
            return None
        began = time.perf_counter()
        before = copy.deepcopy(self.collector_state())  # a user's environment may return its live state
        kept = time.perf_counter() - began
        report = self.collect()
        report.keep_seconds, self._before_ahead = kept, before
        return report

    def learn(self, remaining: float, with_state: bool) -> tuple[Report, Any, Any]:
        """Learn from this worker's rollout, together with the group. `rollback` undoes it if it fails."""
        self._before_ahead, self._undo = None, True
        self._algorithm.group.meet()  # others may still be collecting
        env_steps = sum(self._algorithm.group.gather(float(self._batch.env_steps)))
        learned = self._learn(lambda: self._algorithm.update(self._batch, remaining), with_state, with_weights=False)
        learned[0].env_steps, self._undo = int(env_steps), False
        return learned

    def learn_report(self, remaining: float) -> Report:
        """`learn` for all ranks but the first, whose state is not needed."""
        return self.learn(remaining, False)[0]

    def rollback(self) -> None:
        if self._snapshot is not None:
            self._algorithm.load(self._snapshot)
            self._snapshot = None
        self._undo = False

    def adopt(self, algorithm: dict[str, Any]) -> None:
        """Take over the state after an update that this worker could not finish, but others did."""
        own = self._algorithm.rng.bit_generator.state
        self._algorithm.load(algorithm)
        self._algorithm.rng.bit_generator.state = own
        self._snapshot, self._undo = None, False

    def _learn(
        self, update: Callable[[], dict[str, float]], with_state: bool, *, with_weights: bool
    ) -> tuple[Report, Any, Any]:
        """The report, and the algorithm's state and weights if wanted."""
        algorithm = self._algorithm
        self._snapshot = copy.deepcopy(algorithm.snapshot())
        moved = algorithm.group.bytes_moved

        def update_together() -> dict[str, float]:
            metrics = update()
            algorithm.group.all_ok(True)  # so whoever reports the update knows that all have finished it
            return metrics

        metrics, seconds = self._parts.timed(update_together)
        self._snapshot = None  # it counts, even if another worker is lost before it can report
        report = self._report(metrics=metrics, seconds=seconds, bytes_moved=algorithm.group.bytes_moved - moved)
        report.fingerprint = algorithm.fingerprint()
        report.notes = algorithm.notes()
        return report, algorithm.snapshot() if with_state else None, algorithm.weights() if with_weights else None

    # -- learner: rollouts or gradients of actors -------------------------------------------------------------------

    def learn_from(
        self, payloads: list[Any], versions: list[int], slots: list[int], remaining: float, with_state: bool
    ) -> tuple[Report, Any, Any]:
        """Learn from rollouts or gradients of actors, given by reference. Lost ones are skipped and reported."""
        from paceline.rollout.batch import Batch

        algorithm: Any = self._algorithm
        found, missing, seconds = self._fetch(payloads)
        if not algorithm.group.all_ok(bool(found)):
            return Report(missing=list(range(len(payloads))), seconds={"sync": seconds}), None, algorithm.weights()
        lags: list[int] = []

        def apply_gradients() -> dict[str, float]:
            """One optimizer step for each, in the order of arrival."""
            rows: list[dict[str, float]] = []
            for index, contribution in found.items():
                lags.append(algorithm.version - versions[index])
                rows.append(algorithm.apply_contribution(contribution, slots[index], remaining))
            return {name: sum(row[name] for row in rows) / len(rows) for name in rows[-1]}

        if algorithm.sharing == "gradients":
            report, state, weights = self._learn(apply_gradients, with_state, with_weights=True)
        else:
            lags += [algorithm.version - versions[index] for index in found]
            batch = Batch.join(list(found.values()))
            algorithm.interrupted()
            report, state, weights = self._learn(
                lambda: algorithm.update(batch, remaining), with_state, with_weights=True
            )
        report.seconds["sync"] += seconds
        report.lags, report.missing = lags, missing
        return report, state, weights

    def _fetch(self, references: list[Any]) -> tuple[dict[int, Any], list[int], float]:
        """Payloads by index, the indices of lost ones, and the seconds it took."""
        began = time.perf_counter()
        found: dict[int, Any] = {}
        missing: list[int] = []
        for index, reference in enumerate(references):
            try:
                with self._fetching():
                    found[index] = ray.get(reference, timeout=FETCH_SECONDS)
            except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
                missing.append(index)
        return found, missing, time.perf_counter() - began

    # -- actors -----------------------------------------------------------------------------------------------------

    def rollout(self, version: int, weights: list[Any]) -> tuple[Report, Any]:
        """Collect with the newest weights. Returns the report, and the rollout or its gradient for the learner."""
        pull_seconds = self._pull(version, weights)
        batch, seconds = self._parts.collect()
        algorithm: Any = self._algorithm
        if algorithm.sharing == "gradients":
            began = time.perf_counter()
            payload = algorithm.contribution(batch)
            seconds["learn"] = time.perf_counter() - began
        else:
            payload = batch.copied_arrays()
        report = self._rollout_report(batch, seconds | pull_seconds)
        report.version = self._weights_version
        report.bytes_moved = sum(getattr(value, "nbytes", 8) for value in payload.values())
        self._rollout_ended = time.perf_counter()
        return report, payload

    def _pull(self, version: int, weights: list[Any]) -> dict[str, float]:
        """Load the weights if they are new. Returns the seconds this took, and those since the last rollout."""
        began = time.perf_counter()
        idle = began - self._rollout_ended if self._is_acting else 0.0
        if not self._is_acting:
            assert self._collector is not None
            self._collector.start()
            self._is_acting, self._start_usage = True, machine.usage()
        if version != self._weights_version:
            with self._fetching():
                pulled = ray.get(weights[0], timeout=FETCH_SECONDS)
            self._algorithm.load_weights(pulled)
            self._weights_version = version
        return {"sync": time.perf_counter() - began, "idle": idle}

    # -- any worker -------------------------------------------------------------------------------------------------

    def evaluate(self, episodes: int, stochastic: bool, number: int, weights: Any = None) -> list[Any]:
        if weights is not None:
            self._algorithm.load_weights(weights)
            self._weights_version = -1  # unknown: the next rollout pulls weights again
        return self._parts.evaluate(episodes, stochastic=stochastic, number=number)

    def collector_state(self) -> dict[str, Any]:
        """Before the rollout that the next update learns from."""
        assert self._collector is not None
        if self._before_ahead is not None:
            return self._before_ahead
        return self._collector.state() | {"update_rng": self._algorithm.rng.bit_generator.state}

    def algorithm_state(self) -> dict[str, Any]:
        return dict(self._algorithm.state())

    def weights(self) -> dict[str, Any]:
        return dict(self._algorithm.weights())

    def stop(self) -> None:
        from paceline.code_bundle import uninstall

        if hasattr(self, "_parts"):
            self._parts.close()
            self._algorithm.group.close()
        if self._spec is not None:
            uninstall(self._spec.code_bundle)

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Around waits for other processes, which have limits of their own."""
        self._is_fetching = True
        try:
            yield
        finally:
            self._is_fetching = False

    def _rollout_report(self, batch: Any, seconds: dict[str, float]) -> Report:
        return self._report(
            env_steps=batch.env_steps,
            agent_steps=batch.agent_steps,
            episodes=batch.episodes,
            env_metrics=batch.env_metrics,
            env_restarts=batch.env_restarts,
            env_error=batch.env_error,
            seconds=seconds,
            notes=self._new_notes(),
        )

    def _new_notes(self) -> list[str]:
        """Of the environments, from the first worker: what they told only when they were reset."""
        assert self._spec is not None
        new = [note for note in self._parts.notes() if note not in self._told]
        self._told += new
        return new if self._spec.slot == 0 and self._spec.restarts == 0 else []

    def _report(self, **values: Any) -> Report:
        began = time.perf_counter()
        if began >= self._sample_at:
            self._usage = machine.usage().since(self._start_usage)
            cost = time.perf_counter() - began
            self._sample_at = began + max(SAMPLE_SECONDS, 100 * cost)  # at most 1 % of the time
        return Report(
            version=self._algorithm.version,
            optimizer_steps=self._algorithm.optimizer_steps,
            usage=self._usage,
            **values,
        )

    # -- control, in a separate thread ------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def heartbeat(self) -> tuple[int, bool]:
        """A number that grows while the worker makes progress, and whether it waits for other processes."""
        parts = getattr(self, "_parts", None)
        if parts is None:
            return 0, False
        return parts.ticks, self._is_fetching or parts.algorithm.group.waiting

    @ray.method(concurrency_group="control")
    def shorten_rollout(self) -> None:
        """End the current rollout as soon as it is long enough."""
        if self._collector is not None:
            self._collector.stop_early = True

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        self._algorithm.group.abort()


def _redirect_output(path: Path) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return  # the output is in Ray's own log then
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
