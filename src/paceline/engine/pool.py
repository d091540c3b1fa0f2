"""Rollouts (or gradients) of actors, without a rendezvous: each actor works on its own, and what it brings waits in a
queue of limited length. When that is full, actors rest until the learner has taken something out.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.engine.base import TrainingError
from paceline.engine.crew import ASK_SECONDS, LOOK_SECONDS, Crew, Loss, Member, loss_of, ready_of
from paceline.engine.messages import Report

NEARLY = 0.9  # of a rollout: then the next one is asked for
SHORT_SECONDS = 0.05  # rollouts shorter than this are always asked for in advance


@dataclass(frozen=True)
class Arrival:
    member: Member
    report: Report
    payload: Any  # reference


class Pool:
    def __init__(self, crew: Crew, method: str, *, most: int, ahead: bool) -> None:
        """`method`: of the workers; `most`: arrivals that may wait; `ahead`: short ones may be asked for in advance."""
        self.crew, self._method, self.most, self._ahead = crew, method, most, ahead
        self.arrived: deque[Arrival] = deque()
        self.weights: tuple[int, Any] = (-1, None)
        self._out: dict[Any, tuple[Member, Any]] = {}  # reference to the report → who, reference to the payload
        self._looked_at = time.monotonic()

    @property
    def references(self) -> list[Any]:
        return list(self._out)

    @property
    def waiting_bytes(self) -> int:
        return sum(arrival.report.bytes_moved for arrival in self.arrived)

    def publish(self, version: int, weights: Any) -> None:
        """From now on rollouts begin with these; `weights` is a reference, which is only fetched where it is new."""
        self.weights = version, weights
        self.tend()

    def tend(self) -> None:
        """Give work to those that have none; look for those that do not get on; call replacements in."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self.crew.admit()
            for loss in self.crew.silent({report: member for report, (member, _) in self._out.items()}):
                self._lose(loss)
        at_work = Counter(id(member) for member, _ in self._out.values())
        for member in self.crew.members:
            if len(self.arrived) + len(self._out) >= self.most:
                return
            for _ in range(at_work[id(member)], 2 if self._ahead and self._nearly_done(member, now) else 1):
                self._send(member)

    def _nearly_done(self, member: Member, now: float) -> bool:
        """By the time the last one took. The next is asked for before this one is there, so that the actor does not
        wait for it, but not long before: it is to begin with new weights."""
        last = sum(seconds for part, seconds in member.latest.seconds.items() if part != "idle")
        return last > 0 and (last < SHORT_SECONDS or now - member.began_at > NEARLY * last)

    def _send(self, member: Member) -> None:
        version, weights = self.weights
        method = getattr(member.handle, self._method).options(num_returns=2)
        if all(other is not member for other, _ in self._out.values()):
            member.began_at = time.monotonic()
        report, payload = method.remote(version, [weights])
        self._out[report] = member, payload
        member.alive_at = time.monotonic()

    def handle(self, references: list[Any]) -> None:
        """Reports that are there. First of all their actors get new work: they are waiting."""
        done = []
        for reference in references:
            if reference in self._out:
                done.append((reference, *self._out.pop(reference)))
                done[-1][1].began_at = time.monotonic()  # with the next one, if it has it
        self.tend()
        for reference, member, payload in done:
            try:
                report: Report = ray.get(reference, timeout=ASK_SECONDS)
            except RayError as error:
                self._lose(loss_of(member, error))
                continue
            member.account(report)
            self.arrived.append(Arrival(member, report, payload))

    def take(self, count: int, timeout: float) -> list[Arrival]:
        """The oldest `count`; waits for them, but not for ever."""
        limit = time.monotonic() + timeout
        self.tend()
        while len(self.arrived) < count:
            ready: list[Any] = []
            if self._out:
                ready = ready_of(self.references)
            elif not self.crew.members:
                self.crew.await_members(max(1.0, limit - time.monotonic()))
            if ready:
                limit = time.monotonic() + timeout
            self.handle(ready)
            if time.monotonic() > limit:
                raise TrainingError(f"no worker brought anything for {timeout:g} s")
        taken = [self.arrived.popleft() for _ in range(count)]
        self.tend()
        return taken

    def _lose(self, loss: Loss) -> None:
        for reference, (member, _) in list(self._out.items()):
            if member is loss.member:
                del self._out[reference]
        self.crew.fail(loss)
