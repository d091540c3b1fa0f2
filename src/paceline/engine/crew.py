"""The driver's side of a crew of workers: calls, waits with limits, losses and replacements.

A worker is lost when its process or node dies, when a call of it raises, or when it is silent for too long: it does
not answer, or answers that neither steps nor optimizer steps have gone on. It is replaced; a replacement is called in
once it is ready, and nobody waits for it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from paceline.collective import CollectiveError
from paceline.config import UserError
from paceline.engine.base import Lane, TrainingError
from paceline.engine.messages import Facts, Order, Report, role
from paceline.engine.ray_cluster import Cluster

ASK_SECONDS = 60.0  # for what takes no time: a state, a folder
LOOK_SECONDS = 1.0  # a busy worker is looked at this often
GRACE_SECONDS = 15.0  # for the members of a broken group to notice
TRIES = 3  # a worker that fails so often before it has done anything is not replaced again
LOOP_SECONDS = 120.0  # an environment that raises twice in every worker within this time is broken


@dataclass(eq=False)
class Member:
    """A worker as the driver knows it."""

    slot: int
    handle: Any
    order: Order
    facts: Facts | None = None
    lane: Lane = field(default_factory=dict)
    env_steps: int = 0
    latest: Report = field(default_factory=Report)
    pulse: Any = None
    ticks: int = -1
    alive_at: float = 0.0
    began_at: float = 0.0
    lost: bool = False

    @property
    def name(self) -> str:
        where = f" on {self.facts.host} (pid {self.facts.pid})" if self.facts is not None else ""
        return f"{role(self.slot)}{where}"

    def account(self, report: Report) -> None:
        for part, seconds in report.seconds.items():
            self.lane[part] = self.lane.get(part, 0.0) + seconds
        self.latest = report


@dataclass
class Loss:
    member: Member
    reason: str
    trace: str | None = None  # of an exception in the user's code


class Crew:
    """Workers of one kind."""

    def __init__(
        self,
        cluster: Cluster,
        order: Callable[[int, int], Order],
        places: Mapping[int, int],
        *,
        silence: float,
        restarts: int,
    ) -> None:
        """`order(slot, restarts)` says what a worker is to be; `places` where the worker of a slot is to be put."""
        self._cluster, self._order = cluster, order
        self._places: dict[int, int | None] = dict(places)
        self._silence = silence
        self._restarts_left = restarts
        self.members: list[Member] = []
        self.joining: dict[Any, Member] = {}  # by the reference to its facts
        self.lost = self.restarted = 0
        self.messages: list[str] = []
        self.told = 0  # of the messages
        self._failures: dict[int, int] = {}
        self._first_trace: str | None = None
        self._raised: list[tuple[int, float]] = []  # which slot's environment, and when

    # -- beginning ------------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """All of them, or an error that says what is wrong."""
        for slot, place in self._places.items():
            self._spawn(slot, 0, place)
        limit = time.monotonic() + timeout
        while self.joining and time.monotonic() < limit:
            self.admit(wait=0.5)
            if self._failures:
                raise TrainingError(self._first_trace or self.messages[-1])
        if self.joining:
            late = ", ".join(role(member.slot) for member in self.joining.values())
            raise TrainingError(f"{late} did not start within engine.start_timeout_seconds={timeout:g}")
        self.members.sort(key=lambda member: member.slot)

    def _spawn(self, slot: int, restarts: int, place: int | None) -> None:
        order = self._order(slot, restarts)
        handle = self._cluster.spawn(place)
        self.joining[handle.setup.remote(order)] = Member(slot, handle, order)

    def admit(self, wait: float = 0.0) -> list[Member]:
        """Those that have become ready; they are members from now on."""
        if not self.joining:
            return []
        ready, _ = ray.wait(list(self.joining), num_returns=len(self.joining), timeout=wait, fetch_local=False)
        admitted = []
        for reference in ready:
            member = self.joining.pop(reference)
            try:
                facts: Facts = ray.get(reference, timeout=GRACE_SECONDS)
            except RayError as error:
                self.fail(loss_of(member, error))
                continue
            if facts.problem is not None:
                raise UserError(facts.problem)
            member.facts = replace(facts, address=self._cluster.address_of(facts.node))
            self.members.append(member)
            admitted.append(member)
        return admitted

    # -- calling --------------------------------------------------------------------------------------------------

    def call(
        self,
        calls: dict[Member, Any],
        *,
        together: bool = False,
        on_result: Callable[[Member, Any], None] = lambda member, result: None,
        others: Any = None,
        limit: float | None = None,
    ) -> tuple[dict[Member, Any], list[Loss]]:
        """Wait for all `calls` (member → reference). Those that are lost are members no more.

        `together`: they wait for each other, so that when one fails the others are freed from waiting for it; they
        then count as failed, not as lost. `others` (a pool) is served meanwhile. `limit`: seconds for the whole.
        """
        results: dict[Member, Any] = {}
        losses: list[Loss] = []
        failed = False
        waiting = {reference: member for member, reference in calls.items()}
        now = time.monotonic()
        for member in calls:
            member.alive_at, member.ticks, member.pulse = now, -1, None
        until = now + limit if limit is not None else None
        while waiting:
            references = [*waiting, *(others.references if others is not None else ())]
            ready = ready_of(references)
            if others is not None:
                others.handle([reference for reference in ready if reference not in waiting])
            for reference in ready:
                if reference not in waiting:
                    continue
                member = waiting.pop(reference)
                try:
                    results[member] = ray.get(reference, timeout=GRACE_SECONDS)
                    on_result(member, results[member])
                except RayError as error:
                    if _is_collective(error):
                        failed = True
                    else:
                        losses.append(loss_of(member, error))
            if not ready:
                losses += self.silent(waiting)
            now = time.monotonic()
            if until is not None and now > until:
                losses += [Loss(waiting.pop(reference), "did not answer in time") for reference in list(waiting)]
            if together and (failed or losses) and waiting:
                failed = True
                for member in waiting.values():
                    member.handle.abort.remote()
                until = min(until or now + GRACE_SECONDS, now + GRACE_SECONDS)
        for loss in losses:
            self.fail(loss)
        return ({} if together and (failed or losses) else results), losses

    def silent(self, waiting: dict[Any, Member]) -> list[Loss]:
        """Look at those that are at work: who shows no progress for too long?"""
        now, losses = time.monotonic(), []
        for reference, member in list(waiting.items()):
            if member.pulse is None:
                member.pulse = member.handle.pulse.remote()
            done, _ = ray.wait([member.pulse], timeout=0)
            if done:
                try:
                    pulse = ray.get(member.pulse, timeout=GRACE_SECONDS)
                except RayError:
                    pulse = None  # its call will say more
                member.pulse = None
                if pulse is not None and (pulse.ticks != member.ticks or pulse.waiting):
                    member.ticks, member.alive_at = pulse.ticks, now
            if now - member.alive_at > self._silence:
                del waiting[reference]
                losses.append(Loss(member, f"showed no progress for {self._silence:g} s (env.step_timeout_seconds)"))
        return losses

    # -- losing ---------------------------------------------------------------------------------------------------

    def fail(self, loss: Loss) -> None:
        member = loss.member
        if member.lost:
            return  # two calls of it were on their way
        member.lost = True
        if member in self.members:
            self.members.remove(member)
        kill(member)
        self.lost += 1
        useless = member.env_steps == 0 and not member.lane
        failures = self._failures[member.slot] = self._failures.get(member.slot, 0) + 1 if useless else 1
        if loss.trace is not None:
            self._first_trace = self._first_trace or loss.trace
            now = time.monotonic()
            self._raised = [(slot, at) for slot, at in self._raised if now - at < LOOP_SECONDS] + [(member.slot, now)]
            slots = [slot for slot, _ in self._raised]
            if all(slots.count(slot) >= 2 for slot in self._places):
                raise TrainingError(f"the environment fails in every worker, again and again:\n{loss.trace}")
        text = f"{member.name} {loss.reason}"
        if self._restarts_left <= 0 or failures >= TRIES:
            self.messages.append(f"{text}; it is not replaced any more")
            return
        self._restarts_left -= 1
        self.restarted += 1
        self.messages.append(f"{text}; a replacement is on its way")
        self._spawn(member.slot, member.order.restarts + 1, self._places[member.slot])

    def await_members(self, timeout: float) -> None:
        """When nobody is left: the first of those that are on their way."""
        limit = time.monotonic() + timeout
        while not self.members:
            if not self.joining or time.monotonic() > limit:
                if self._first_trace is not None:
                    raise TrainingError(f"every worker failed; the first of them with:\n{self._first_trace}")
                raise TrainingError(f"all workers are lost, the last one: {self.messages[-1]}")
            self._move()
            self.admit(wait=0.5)

    def _move(self) -> None:
        """Those that cannot start, because their places went with a node, start on what is left of the cluster: a
        core for each, but one at least."""
        lost = self._cluster.lost_places()
        stranded = [(ref, member) for ref, member in self.joining.items() if self._places[member.slot] in lost]
        moved = sum(place is None for place in self._places.values())
        for reference, member in stranded[: max(1, int(self._cluster.cpus)) - moved]:
            del self.joining[reference]
            kill(member)
            self._places[member.slot] = None
            self._spawn(member.slot, member.order.restarts, None)
            self.messages.append(f"{role(member.slot)} starts on another node: its own is gone")

    def close(self) -> None:
        """Let them end by themselves, within a limit; then end them."""
        everyone = [*self.members, *self.joining.values()]
        stops = [member.handle.stop.remote() for member in self.members]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=5.0, fetch_local=False)
        for member in everyone:
            kill(member)


def ready_of(references: list[Any]) -> list[Any]:
    """Those that are there, as soon as one is; none after a while."""
    ready, rest = ray.wait(references, num_returns=1, timeout=LOOK_SECONDS, fetch_local=False)
    if ready and rest:
        ready += ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
    return ready


def kill(member: Member) -> None:
    ray.kill(member.handle, no_restart=True)


def first_result(crew: Crew, call: Callable[[Member], Any], **options: Any) -> Any:
    """The answer of one member, whichever can give it."""
    while crew.members:
        member = crew.members[0]
        results, _ = crew.call({member: call(member)}, **options)
        if member in results:
            return results[member]
    raise TrainingError(f"no worker is left to ask, the last one: {crew.messages[-1] if crew.messages else 'none'}")


def loss_of(member: Member, error: BaseException) -> Loss:
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return Loss(member, f"failed: {type(cause).__name__}: {_one_line(cause)}", trace=str(error))
    if isinstance(error, RayActorError):
        return Loss(member, "died")
    if isinstance(error, GetTimeoutError):
        return Loss(member, "did not answer in time")
    return Loss(member, f"was lost: {type(error).__name__}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _is_collective(error: BaseException) -> bool:
    return isinstance(error, RayTaskError) and isinstance(error.cause, CollectiveError)
