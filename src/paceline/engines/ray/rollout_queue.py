"""Rollouts (or gradients) of actors that do not wait for each other.

Results wait for the learner in a queue of limited length. While it is full, actors rest.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.engines.ray.messages import Report
from paceline.engines.ray.worker_pool import ASK_SECONDS, POLL_SECONDS, WorkerHandle, WorkerPool, wait_any
from paceline.training.engine import TrainingError

NEARLY = 0.9  # share of a rollout after which the next one is requested
SHORT_SECONDS = 0.05  # rollouts shorter than this are always requested in advance


@dataclass(frozen=True)
class QueuedRollout:
    """A rollout, or its gradient, that an actor has finished."""

    worker: WorkerHandle
    report: Report
    payload: Any  # reference


class RolloutQueue:
    def __init__(self, actors: WorkerPool, *, max_length: int, in_advance: bool) -> None:
        """`max_length`: limit of finished and pending rollouts. `in_advance`: request the next rollout shortly before
        the last one is finished."""
        self._actors, self._max_length, self._in_advance = actors, max_length, in_advance
        self.rollouts: deque[QueuedRollout] = deque()
        self._weights: tuple[int, Any] = (-1, None)
        self._pending: dict[Any, tuple[WorkerHandle, Any]] = {}  # reference to the report → actor, payload
        self._polled_at = time.monotonic()

    @property
    def references(self) -> list[Any]:
        """Reports that the queue waits for."""
        return list(self._pending)

    @property
    def waiting_bytes(self) -> int:
        return sum(rollout.report.bytes_moved for rollout in self.rollouts)

    def publish(self, version: int, weights: Any) -> None:
        """Use these weights for new rollouts. Actors fetch `weights`, a reference, only if the version is new."""
        self._weights = version, weights
        self._request()

    def receive(self, references: list[Any]) -> None:
        """Take in finished reports. Their actors, which are waiting, get new work first."""
        done = []
        for reference in references:
            if reference in self._pending:
                worker, payload = self._pending.pop(reference)
                worker.began_at = time.monotonic()  # of its next rollout, if that was requested in advance
                done.append((reference, worker, payload))
        self._request()
        for reference, worker, payload in done:
            try:
                report: Report = ray.get(reference, timeout=ASK_SECONDS)
            except RayError as error:
                self._lose(worker, error)
                continue
            worker.account(report)
            self.rollouts.append(QueuedRollout(worker, report, payload))

    def take(self, count: int, timeout: float) -> list[QueuedRollout]:
        """The oldest `count`; waits for them. Raises if nothing arrives for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._request()
        while len(self.rollouts) < count:
            ready: list[Any] = []
            if self._pending:
                ready = wait_any(self.references)
            elif not self._actors.workers:
                self._actors.require_workers()
            if ready:
                deadline = time.monotonic() + timeout
            self.receive(ready)
            if time.monotonic() > deadline:
                raise TrainingError(f"no worker finished a rollout for {timeout:g} s")
        taken = [self.rollouts.popleft() for _ in range(count)]
        self._request()
        return taken

    def _request(self) -> None:
        """Give work to idle actors; now and then, give up silent ones and take in replacements."""
        now = time.monotonic()
        if now - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            self._actors.admit()
            busy = dict.fromkeys(worker for worker, _ in self._pending.values())
            for worker in self._actors.find_silent(list(busy)):
                self._lose(worker, self._actors.silence_text)
        requests = Counter(worker for worker, _ in self._pending.values())
        for worker in self._actors.workers:
            if len(self.rollouts) + len(self._pending) >= self._max_length:
                return
            wanted = 2 if self._in_advance and self._is_nearly_done(worker, now) else 1
            for _ in range(requests[worker], wanted):
                self._send(worker)

    def _is_nearly_done(self, worker: WorkerHandle, now: float) -> bool:
        """Judged by the time of its last rollout. A request in advance keeps the actor busy, but a rollout should start
        with recent weights, so the request must not be early."""
        last = sum(seconds for part, seconds in worker.latest.seconds.items() if part != "idle")
        return last > 0 and (last < SHORT_SECONDS or now - worker.began_at > NEARLY * last)

    def _send(self, worker: WorkerHandle) -> None:
        version, weights = self._weights
        if all(other is not worker for other, _ in self._pending.values()):
            worker.began_at = time.monotonic()
        report, payload = worker.actor.rollout.options(num_returns=2).remote(version, [weights])
        self._pending[report] = worker, payload
        worker.alive_at = time.monotonic()

    def _lose(self, worker: WorkerHandle, reason: str | RayError) -> None:
        self._pending = {ref: pending for ref, pending in self._pending.items() if pending[0] is not worker}
        self._actors.lose(worker, reason)
