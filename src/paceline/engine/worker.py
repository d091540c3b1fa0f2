"""A worker's side of the Ray engine: one process with a replica in it.

Ray calls the methods one after the other in one thread; those of the `control` group in another, so that the driver
can look at a worker that is busy, hurry it up, or free it from a collective whose other members are gone.
"""

from __future__ import annotations

import copy
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray

from paceline import machine
from paceline.config import UserError
from paceline.engine.messages import Facts, Order, Pulse, Report

PACKAGES = ("paceline", "torch", "numpy", "gymnasium")  # what must be the same everywhere
SAMPLE_SECONDS = 2.0  # memory and CPU are read this often
FETCH_SECONDS = 30.0  # for one rollout or one set of weights to arrive


class Worker:
    def __init__(self) -> None:
        self._order: Order | None = None
        self._snapshot: dict[str, Any] | None = None
        self._batch: Any = None
        self._waits = False  # for others, within a limit of its own
        self._weights_version = -1
        self._begun, self._ended = False, 0.0  # the episodes of an actor, its last rollout
        self._sample_at = 0.0
        self._memory, self._cpu_seconds = 0, 0.0

    # -- set-up ---------------------------------------------------------------------------------------------------

    def setup(self, order: Order) -> Facts:
        """Not in `__init__`: that runs in another thread than all the rest, and torch keeps settings per thread."""
        self._order = order
        if order.log is not None:
            self.log_to(order.log, order.host)
        try:
            return self._setup(order)
        except UserError as error:
            return self._facts(problem=str(error))

    def _setup(self, order: Order) -> Facts:
        from paceline.engine.replica import Replica
        from paceline.ship import unpack

        config = unpack(order.parcel, order.config)
        self.replica = Replica(
            config,
            envs=order.envs,
            worker=order.slot,
            restarts=order.restarts,
            resumes=order.resumes,
            cores=order.cores,
            spaces=order.spaces,
            on_device=order.envs == 0,
        )
        if order.folder is not None:
            self.keep_in(order.folder, order.host)
        if order.envs:
            self.replica.algorithm.act_as(order.slot, order.workers)
        return self._facts()

    def _facts(self, problem: str | None = None) -> Facts:
        replica = None if problem else self.replica
        moments = 2 * replica.policy.observation.size + 1 if replica is not None else 0
        parameters = replica.policy.parameters.numel() if replica is not None else 0
        return Facts(
            pid=os.getpid(),
            host=platform.node(),
            node=ray.get_runtime_context().get_node_id(),
            cores=machine.cores(),
            versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
            stepping=replica.stepping if replica is not None else "",
            threads=replica.threads if replica is not None else 1,
            parameters=parameters,
            capacity_bytes=max(4 * parameters, 8 * moments, 4096),
            spaces=replica.spaces if replica is not None else {},
            lines=replica.describe() if replica is not None else [],
            device=replica.device_name if replica is not None else "cpu",
            problem=problem,
        )

    def log_to(self, path: str, host: str) -> None:
        """What the environment prints goes into a file of the run, if this is the host where it lies."""
        if host == platform.node():
            _print_to(Path(path))

    def keep_in(self, path: str, host: str) -> None:
        """A folder of the run, if this is the host where it lies; else one for as long as this process lives."""
        if host != platform.node():
            self._room = tempfile.TemporaryDirectory(prefix="paceline-")
            path = self._room.name
        self.replica.algorithm.keep_in(Path(path))

    def begin(self, algorithm: dict[str, Any] | None, collector: dict[str, Any] | None) -> bool:
        """Take over the state of a run; True if the environments are exactly where they were."""
        if algorithm is not None:
            assert self._order is not None
            own = self.replica.algorithm.rng.bit_generator.state
            self.replica.algorithm.load(algorithm)  # of the first worker, its random numbers included
            if collector is not None and "update_rng" in collector:
                self.replica.algorithm.rng.bit_generator.state = collector["update_rng"]
            elif self._order.slot or self._order.restarts:
                self.replica.algorithm.rng.bit_generator.state = own
        if self.replica.collector is None:
            return False
        if collector is None:
            self.replica.collector.start()
            return False
        return self.replica.collector.restore(collector)

    def load_policy(self, arrays: dict[str, Any]) -> str | None:
        try:
            self.replica.policy.load(arrays)
        except UserError as error:
            return str(error)
        return None

    def join(self, membership: Any) -> None:
        """Become a member of a new group; the old one is over."""
        from paceline.collective import join

        self.replica.algorithm.group.close()
        with self._waiting():
            self.replica.algorithm.group = join(membership, cores=machine.cores())

    # -- replicas: collect and learn ------------------------------------------------------------------------------

    def collect(self) -> Report:
        self._snapshot = None  # the iteration before is settled
        self._batch, seconds = self.replica.collect()
        batch = self._batch
        return self._report(
            env_steps=batch.env_steps, episodes=batch.episodes, env_metrics=batch.env_metrics, seconds=seconds
        )

    def learn(self, remaining: float, backup: bool) -> tuple[Report, Any, Any]:
        """Learn from the own rollout together with the group. Until the next `collect` it can be taken back."""
        return self._learn(lambda: self.replica.algorithm.update(self._batch, remaining), backup, weights=False)

    def learn_along(self, remaining: float) -> Report:
        """The same for those whose state is not asked for."""
        return self.learn(remaining, False)[0]

    def rollback(self) -> None:
        if self._snapshot is not None:
            self.replica.algorithm.load(self._snapshot)
            self._snapshot = None

    def _learn(self, work: Any, backup: bool, *, weights: bool) -> tuple[Report, Any, Any]:
        """The report, the state of the algorithm if a backup is asked for, and the weights for actors."""
        algorithm = self.replica.algorithm
        self._snapshot = copy.deepcopy(algorithm.snapshot())
        moved = algorithm.group.bytes_moved
        metrics, seconds = self.replica.timed(work)
        report = self._report(metrics=metrics, seconds=seconds)
        report.bytes_moved = algorithm.group.bytes_moved - moved
        report.fingerprint = algorithm.fingerprint()
        report.notes = algorithm.notes()
        state = algorithm.snapshot() if backup else None
        return report, state, algorithm.weights() if weights else None

    # -- learner: rollouts or gradients of actors -----------------------------------------------------------------

    def learn_from(
        self, payloads: list[Any], versions: list[int], remaining: float, backup: bool
    ) -> tuple[Report, Any, Any]:
        """`payloads`: references to rollouts. Those that cannot be had any more are left out, and named."""
        from paceline.rollout.batch import Batch

        began = time.perf_counter()
        found, missing = self._fetch(payloads)
        fetching = time.perf_counter() - began
        algorithm = self.replica.algorithm
        lags = [algorithm.version - versions[index] for index in found]
        if not all(algorithm.group.gather(float(bool(found)))):
            return Report(missing=list(range(len(payloads))), seconds={"sync": fetching}), None, algorithm.weights()
        batch = Batch.join(list(found.values()))
        algorithm.interrupted()
        report, state, weights = self._learn(lambda: algorithm.update(batch, remaining), backup, weights=True)
        report.seconds["sync"] += fetching
        report.lags, report.missing = lags, missing
        return report, state, weights

    def apply(
        self, payloads: list[Any], versions: list[int], slots: list[int], remaining: float, backup: bool
    ) -> tuple[Report, Any, Any]:
        """The same for gradients: one optimizer step for each, in the order in which they came."""
        began = time.perf_counter()
        found, missing = self._fetch(payloads)
        fetching = time.perf_counter() - began
        algorithm: Any = self.replica.algorithm
        lags: list[int] = []

        def work() -> dict[str, float]:
            rows: list[dict[str, float]] = []
            for index, contribution in found.items():
                lags.append(algorithm.version - versions[index])
                rows.append(algorithm.apply_contribution(contribution, slots[index], remaining))
            return _mean(rows)

        if not found:
            return Report(missing=missing, seconds={"sync": fetching}), None, algorithm.weights()
        report, state, weights = self._learn(work, backup, weights=True)
        report.seconds["sync"] += fetching
        report.lags, report.missing = lags, missing
        return report, state, weights

    # -- actors ---------------------------------------------------------------------------------------------------

    def rollout(self, version: int, weights: list[Any]) -> tuple[Report, Any]:
        """A rollout with the newest weights, and what the learner needs of it."""
        pulling = self._pull(version, weights)
        batch, seconds = self.replica.collect()
        payload = batch.copied_arrays()
        return self._actor_report(batch, seconds | pulling, payload), payload

    def contribution(self, version: int, weights: list[Any]) -> tuple[Report, Any]:
        """A rollout and the gradient of the loss on it."""
        pulling = self._pull(version, weights)
        batch, seconds = self.replica.collect()
        began = time.perf_counter()
        algorithm: Any = self.replica.algorithm
        payload = algorithm.contribution(batch)
        seconds["learn"] = time.perf_counter() - began
        return self._actor_report(batch, seconds | pulling, payload), payload

    def _pull(self, version: int, weights: list[Any]) -> dict[str, float]:
        began = time.perf_counter()
        idle = began - self._ended if self._begun else 0.0
        if not self._begun:
            assert self.replica.collector is not None
            self.replica.collector.start()
            self._begun = True
        if version != self._weights_version:
            with self._waiting():
                pulled = ray.get(weights[0], timeout=FETCH_SECONDS)
            self.replica.algorithm.load_weights(pulled)
            self._weights_version = version
        return {"sync": time.perf_counter() - began, "idle": idle}

    def _actor_report(self, batch: Any, seconds: dict[str, float], payload: dict[str, Any]) -> Report:
        report = self._report(
            env_steps=batch.env_steps, episodes=batch.episodes, env_metrics=batch.env_metrics, seconds=seconds
        )
        report.version = self._weights_version
        report.bytes_moved = sum(getattr(value, "nbytes", 8) for value in payload.values())
        self._ended = time.perf_counter()
        return report

    # -- for all --------------------------------------------------------------------------------------------------

    def evaluate(self, episodes: int, stochastic: bool, number: int, weights: Any = None) -> list[Any]:
        if weights is not None:
            self.replica.algorithm.load_weights(weights)
            self._weights_version = -1  # whatever comes next is pulled anew
        return self.replica.evaluate(episodes, stochastic=stochastic, number=number)

    def collector_state(self) -> dict[str, Any]:
        assert self.replica.collector is not None
        return self.replica.collector.state() | {"update_rng": self.replica.algorithm.rng.bit_generator.state}

    def algorithm_state(self) -> dict[str, Any]:
        return self.replica.algorithm.state()

    def weights(self) -> dict[str, Any]:
        return self.replica.algorithm.weights()

    def stop(self) -> None:
        from paceline.ship import clean

        if hasattr(self, "replica"):
            self.replica.close()
            self.replica.algorithm.group.close()
        if self._order is not None:
            clean(self._order.parcel)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _fetch(self, references: list[Any]) -> tuple[dict[int, Any], list[int]]:
        """What is there, by its index, and the indices of what is lost."""
        found: dict[int, Any] = {}
        missing: list[int] = []
        for index, reference in enumerate(references):
            try:
                with self._waiting():
                    found[index] = ray.get(reference, timeout=FETCH_SECONDS)
            except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
                missing.append(index)
        return found, missing

    def _report(self, **values: Any) -> Report:
        algorithm = self.replica.algorithm
        began = time.perf_counter()
        if began >= self._sample_at:
            self._memory, self._cpu_seconds = machine.memory_bytes(), machine.cpu_seconds()
            cost = time.perf_counter() - began
            self._sample_at = began + max(SAMPLE_SECONDS, 100 * cost)  # a hundredth of the time at most
        return Report(
            version=algorithm.version,
            optimizer_steps=algorithm.optimizer_steps,
            memory_bytes=self._memory,
            cpu_seconds=self._cpu_seconds,
            **values,
        )

    # -- control: in a thread of its own --------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def pulse(self) -> Pulse:
        replica = getattr(self, "replica", None)
        if replica is None:
            return Pulse(0, False)
        return Pulse(replica.ticks, self._waits or replica.algorithm.group.waiting)

    @ray.method(concurrency_group="control")
    def halt(self) -> None:
        """Collect no more than is needed."""
        collector = self.replica.collector
        if collector is not None:
            collector.halted = True

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        self.replica.algorithm.group.abort()


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[-1]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _print_to(path: Path) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return  # Ray's own log has it then
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
