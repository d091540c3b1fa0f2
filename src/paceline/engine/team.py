"""Workers that learn together: one group of all members, and the promise that they learn all or nothing.

They learn in one attempt; only when all have reported is it settled. If one is lost on the way, the others take back
what they have learned and form a group without it. The driver keeps (a reference to) the algorithm's state after the
last settled attempt: replacements begin with it, and even the loss of all members loses no more than that attempt.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from typing import Any

import ray

from paceline.collective import Membership, serve_store
from paceline.engine.base import TrainingError
from paceline.engine.crew import ASK_SECONDS, Crew, Member, first_result
from paceline.engine.messages import Report

MAX_COLLECTIVE_SECONDS = 60.0
MAX_ATTEMPTS = 5  # in a row, without anybody being lost

Start = Callable[[Member, int, bool], Any]
"""Member, rank and whether a backup is wanted → the references to report, state and weights."""


class Team:
    def __init__(self, crew: Crew, address: str, *, silence: float, start_timeout: float) -> None:
        """`address`: of the driver."""
        self.crew, self._address = crew, address
        self._limit = min(MAX_COLLECTIVE_SECONDS, silence)
        self._start_timeout = start_timeout
        self._grouped: list[Member] = []
        self._generations = itertools.count(1)
        self._store: tuple[Any, tuple[str, int]] | None = None
        self._backup: Any = None
        self._attempts = 0
        self.weights: Any = None
        """Reference to the weights after the last settled attempt, where `learn` gives them."""

    # -- the state ------------------------------------------------------------------------------------------------

    def begin(self, algorithm: dict[str, Any] | None, collectors: list[Any] | None) -> list[bool]:
        """All members take over a state; whether their environments came back exactly."""
        given = ray.put(algorithm) if algorithm is not None else None
        calls = {
            member: member.handle.begin.remote(given, collectors[member.slot] if collectors else None)
            for member in self.crew.members
        }
        results, losses = self.crew.call(calls)
        if losses:
            raise TrainingError(losses[0].trace or f"{losses[0].member.name} {losses[0].reason}")
        state = first_result(self.crew, lambda member: member.handle.algorithm_state.remote())
        self._backup = ray.put(state)
        return list(results.values())

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = ray.get(self._backup, timeout=ASK_SECONDS)
        return state

    def admit(self) -> None:
        """Replacements that are ready take over the state of the run."""
        for member in self.crew.admit():
            self._take_over(member)

    def someone(self) -> None:
        """There is a member, or an error is raised."""
        while not self.crew.members:
            self.crew.await_members(self._start_timeout)
            for member in list(self.crew.members):
                self._take_over(member)

    def _take_over(self, member: Member) -> None:
        _, losses = self.crew.call({member: member.handle.begin.remote(self._backup, None)})
        if not losses:
            self.crew.messages.append(f"{member.name} has taken the place of the one that was lost")

    # -- learning -------------------------------------------------------------------------------------------------

    def learn(self, start: Start, others: Any = None) -> dict[Member, Report] | None:
        """One attempt of all members; None: it failed, and those that are left are where they were before it."""
        before = self.crew.lost
        reports = self._learn(start, others)
        self._attempts = 0 if reports is not None or self.crew.lost > before else self._attempts + 1
        if self._attempts >= MAX_ATTEMPTS:
            hosts = sorted({_address(member) for member in self.crew.members})
            raise TrainingError(
                f"the workers could not exchange gradients in {self._attempts} attempts, though none was lost: can "
                f"{', '.join(hosts)} reach each other?"
            )
        return reports

    def _learn(self, start: Start, others: Any) -> dict[Member, Report] | None:
        if self._grouped != self.crew.members and not self._form_group():
            return None
        members = list(self._grouped)
        started = {member: start(member, rank, rank == 0) for rank, member in enumerate(members)}
        calls = {member: references[0] for member, references in started.items()}
        results, _ = self.crew.call(calls, together=True, others=others)
        if len(results) < len(members):
            self._grouped = []
            self.crew.call({m: m.handle.rollback.remote() for m in self.crew.members}, limit=ASK_SECONDS)
            return None
        if len({report.fingerprint for report in results.values()}) > 1:
            raise TrainingError("the workers' weights differ from each other; this should not be possible")
        first = members[0]
        if results[first].metrics:
            _, self._backup, self.weights = started[first]
        return results

    def _form_group(self) -> bool:
        """All members in a new group, those of a host side by side. False: somebody was lost meanwhile."""
        by_host: dict[str, list[Member]] = {}
        for member in sorted(self.crew.members, key=self._nearest_first):
            by_host.setdefault(_address(member), []).append(member)
        ordered = [member for group in by_host.values() for member in group]
        ranks = {member: rank for rank, member in enumerate(ordered)}
        several = len(by_host) > 1
        if several and self._store is None:
            server, port = serve_store(self._address)
            self._store = server, (self._address, port)
        generation = next(self._generations)
        segment = f"{os.getpid()}-{secrets.token_hex(4)}-{generation}"
        calls = {}
        for member in ordered:
            assert member.facts is not None
            membership = Membership(
                generation=generation,
                rank=ranks[member],
                hosts=tuple(tuple(ranks[m] for m in group) for group in by_host.values()),
                segment=segment,
                store=self._store[1] if several and self._store is not None else None,
                address=member.facts.address,
                capacity_bytes=member.facts.capacity_bytes,
                timeout_seconds=self._limit,
            )
            calls[member] = member.handle.join.remote(membership)
        results, _ = self.crew.call(calls, together=True)
        self._grouped = ordered if len(results) == len(ordered) else []
        if self._grouped:
            self.crew.members[:] = ordered
        return bool(self._grouped)

    def _nearest_first(self, member: Member) -> tuple[bool, int]:
        """The first one's state is the run's: best beside the driver."""
        return _address(member) != self._address, member.slot


def _address(member: Member) -> str:
    assert member.facts is not None
    return member.facts.address
