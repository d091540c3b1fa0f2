"""Workers that learn together, all of them or none.

A worker reports an update when all have finished it, so an update counts once one worker has reported it. If one is
lost before that, the others undo the update and form a group without it. The driver keeps a reference to the
algorithm's state after the last complete update: replacements start from it, so that even the loss of all workers costs
no more than one update.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from paceline.collective.gloo import serve_store
from paceline.collective.group import GroupSpec
from paceline.config import RunConfig, UserError
from paceline.engines.ray.messages import Report, WorkerSpec
from paceline.engines.ray.ray_cluster import RayCluster
from paceline.engines.ray.rollout_queue import RolloutQueue
from paceline.engines.ray.worker_pool import ASK_SECONDS, WorkerHandle, WorkerPool
from paceline.training.engine import EXACT, Levels, TrainingError

MAX_COLLECTIVE_SECONDS = 60.0
MAX_ATTEMPTS = 5  # failed updates in a row without a lost worker

StartUpdate = Callable[[WorkerHandle, int, bool], Any]
"""(worker, rank, whether its state is wanted) → references to the report, the state and the weights."""


class LearnerGroup(WorkerPool):
    """Holds the state of the run: it survives the loss of workers."""

    def __init__(
        self,
        cluster: RayCluster,
        config: RunConfig,
        make_spec: Callable[[int, int], WorkerSpec],
        places: Mapping[int, int],
    ) -> None:
        super().__init__(cluster, config, make_spec, places)
        self._limit = min(MAX_COLLECTIVE_SECONDS, self._silence)
        self._joined: list[WorkerHandle] = []  # workers of the current group, by rank
        self._generations = itertools.count(1)
        self._store: tuple[Any, tuple[str, int]] | None = None  # server, and its host and port
        self.state_reference: Any = None
        """To the algorithm's state after the last complete update."""
        self._attempts = 0
        self._started: dict[WorkerHandle, Any] = {}  # references of an update that was started early
        self.weights: Any = None
        """Reference to the weights after the last complete update, where `learn` returns them."""

    # -- state ------------------------------------------------------------------------------------------------------

    def load_policy(self, arrays: dict[str, Any]) -> None:
        given = ray.put(arrays)
        for problem in self._call_all(lambda worker: worker.actor.load_policy.remote(given), ASK_SECONDS):
            if problem is not None:
                raise UserError(problem)

    def begin(self, algorithm: dict[str, Any] | None, collectors: list[Any] | None) -> Levels:
        """All workers take over a state. Returns how its parts were restored, in the worst of them."""
        given = ray.put(algorithm) if algorithm is not None else None
        levels = self._call_all(
            lambda worker: worker.actor.begin.remote(given, collectors[worker.slot] if collectors else None)
        )
        self.state_reference = ray.put(self.ask(lambda worker: worker.actor.algorithm_state.remote()))
        return {part: next((each[part] for each in levels if each[part] != EXACT), EXACT) for part in levels[0]}

    def _call_all(self, call: Callable[[WorkerHandle], Any], limit: float | None = None) -> list[Any]:
        """The answers of all workers; raises if one is lost."""
        calls = {worker: call(worker) for worker in self.workers}
        results = self.call(calls, limit=limit)
        for worker in calls:
            if worker.lost:
                raise TrainingError(worker.trace or f"{worker.name} {worker.lost}")
        return list(results.values())

    def state(self) -> dict[str, Any]:
        """The algorithm's state after the last complete update."""
        return fetch_state(self.state_reference)

    def take_in_replacements(self) -> None:
        """Replacements that are ready take over the state of the run."""
        for worker in self.admit():
            self._take_over(worker)

    def require_workers(self) -> None:
        while not self.workers:
            super().require_workers()
            for worker in list(self.workers):
                self._take_over(worker)

    def _take_over(self, worker: WorkerHandle) -> None:
        self.call({worker: worker.actor.begin.remote(self.state_reference, None)})
        if not worker.lost:
            self.messages.append(f"{worker.name} replaces the one that was lost")

    # -- learning ---------------------------------------------------------------------------------------------------

    def start_early(self, start: StartUpdate) -> bool:
        """Send the workers an update that they begin once all of them have collected. False: they cannot wait for each
        other, since no group is formed yet, or one over several hosts, whose waits have a limit."""
        if self._joined != self.workers or len({_address(worker) for worker in self.workers}) > 1:
            return False
        self._started = self._start(start)
        return True

    def _start(self, start: StartUpdate) -> dict[WorkerHandle, Any]:
        return {worker: start(worker, rank, rank == 0) for rank, worker in enumerate(self._joined)}

    def learn(self, start: StartUpdate, queue: RolloutQueue | None = None) -> dict[WorkerHandle, Report] | None:
        """One update by all workers, by rank, or the one started early. None: it failed, and the remaining workers are
        where they were before."""
        lost_before = self.lost
        reports = self._learn(start, queue)
        self._attempts = 0 if reports is not None or self.lost > lost_before else self._attempts + 1
        if self._attempts >= MAX_ATTEMPTS:
            hosts = sorted({_address(worker) for worker in self.workers})
            raise TrainingError(
                f"the workers could not exchange gradients in {self._attempts} attempts, though none was lost: can "
                f"{', '.join(hosts)} reach each other?"
            )
        return reports

    def _learn(self, start: StartUpdate, queue: RolloutQueue | None) -> dict[WorkerHandle, Report] | None:
        started, self._started = self._started, {}
        if not started:
            if self._joined != self.workers and not self._form_group():
                return None
            started = self._start(start)
        workers = list(started)
        calls = {worker: references[0] for worker, references in started.items()}
        reports: dict[WorkerHandle, Report] = {}
        self.call(calls, together=True, queue=queue, on_result=reports.__setitem__)
        if not reports:
            self._joined = []
            self.call({worker: worker.actor.rollback.remote() for worker in self.workers}, limit=ASK_SECONDS)
            return None
        if len({report.fingerprint for report in reports.values()}) > 1:
            raise TrainingError("the workers' weights differ from each other, which should never happen")
        first = next(worker for worker in workers if worker in reports)
        if first is not workers[0]:
            self.state_reference, self.weights = first.actor.algorithm_state.remote(), first.actor.weights.remote()
        elif reports[first].metrics:
            _, self.state_reference, self.weights = started[first]
        if len(reports) < len(workers):  # lost on the last metres: what it learned from counts
            self._joined = []
            late = [worker for worker in workers if worker in self.workers and worker not in reports]
            self.call({worker: worker.actor.adopt.remote(self.state_reference) for worker in late}, limit=ASK_SECONDS)
        same = replace(reports[first], seconds={}, bytes_moved=0, notes=[], lags=[], missing=[])
        return {worker: reports.get(worker, same) for worker in workers}

    def _form_group(self) -> bool:
        """Have all workers join a new group, ranked host by host. False if one was lost meanwhile."""
        by_host: dict[str, list[WorkerHandle]] = {}
        for worker in sorted(self.workers, key=self._nearest_first):
            by_host.setdefault(_address(worker), []).append(worker)
        ordered = [worker for workers in by_host.values() for worker in workers]
        ranks = {worker: rank for rank, worker in enumerate(ordered)}
        if len(by_host) > 1 and self._store is None:
            server, port = serve_store(self._cluster.own_address)
            self._store = server, (self._cluster.own_address, port)
        generation = next(self._generations)
        segment = f"{os.getpid()}-{secrets.token_hex(4)}-{generation}"
        calls = {}
        for worker in ordered:
            assert worker.info is not None
            spec = GroupSpec(
                generation=generation,
                rank=ranks[worker],
                hosts=tuple(tuple(ranks[w] for w in workers) for workers in by_host.values()),
                segment=segment,
                store=self._store[1] if len(by_host) > 1 and self._store is not None else None,
                address=worker.info.address,
                capacity_bytes=worker.info.capacity_bytes,
                timeout_seconds=self._limit,
            )
            calls[worker] = worker.actor.join.remote(spec)
        if not self.call(calls, together=True):
            self._joined = []
            return False
        self.workers[:] = self._joined = ordered
        return True

    def _nearest_first(self, worker: WorkerHandle) -> tuple[bool, int]:
        """Rank 0 sends its state to the driver, so it should be on the driver's host."""
        return _address(worker) != self._cluster.own_address, worker.slot


def fetch_state(reference: Any) -> dict[str, Any]:
    state: dict[str, Any] = ray.get(reference, timeout=ASK_SECONDS)
    return state


def _address(worker: WorkerHandle) -> str:
    assert worker.info is not None
    return worker.info.address
