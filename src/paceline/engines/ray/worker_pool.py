"""The driver's view of its workers: calls, waits with limits, losses and replacements.

A worker is lost when its process or node dies, when a call raises, or when it makes no progress for too long. A
replacement is started at once and joins when it is ready; nobody waits for it. Where workers are lost again and again
before they have done any work, the pauses between replacements grow. The pool gives up if that happens in every place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from paceline.collective.group import CollectiveError
from paceline.config import RunConfig, UserError
from paceline.engines.ray.messages import Report, WorkerInfo, WorkerSpec, role
from paceline.engines.ray.ray_cluster import RayCluster
from paceline.training.engine import TimeSplit, TrainingError

if TYPE_CHECKING:
    from paceline.engines.ray.rollout_queue import RolloutQueue

ASK_SECONDS = 60.0  # limit of calls that take no time: a state, a folder
POLL_SECONDS = 1.0  # how often a busy worker is asked for a heartbeat
GRACE_SECONDS = 15.0  # for members of a broken group to notice
TRIES = 4  # workers in a row that are lost before doing any work, until a place pauses or the pool gives up
PAUSE_SECONDS = 10.0  # the first pause; doubled each time
MAX_PAUSE_SECONDS = 600.0
ASYNC_GRACE_SECONDS = 10.0  # for env.vector=async to end a process that exceeds the time limit itself


@dataclass(eq=False)
class WorkerHandle:
    """One worker process, and what the driver knows about it."""

    slot: int
    actor: Any
    spec: WorkerSpec
    info: WorkerInfo | None = None
    time_split: TimeSplit = field(default_factory=dict)
    env_steps: int = 0
    latest: Report = field(default_factory=Report)
    heartbeat: Any = None  # reference to a pending one
    ticks: int = -1
    alive_at: float = 0.0
    began_at: float = 0.0
    lost: str = ""  # why, once it is lost
    trace: str | None = None  # traceback, if the user's code raised

    @property
    def name(self) -> str:
        where = f" on {self.info.host} (pid {self.info.pid})" if self.info is not None else ""
        return f"{role(self.slot)}{where}"

    def account(self, report: Report) -> None:
        for part, seconds in report.seconds.items():
            self.time_split[part] = self.time_split.get(part, 0.0) + seconds
        self.latest = report

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)


class WorkerPool:
    """Workers that do the same job."""

    def __init__(
        self,
        cluster: RayCluster,
        config: RunConfig,
        make_spec: Callable[[int, int], WorkerSpec],
        places: Mapping[int, int],
    ) -> None:
        """`make_spec(slot, restarts)` describes a worker; `places`: index of the reserved CPU share of each slot."""
        self._cluster, self._make_spec = cluster, make_spec
        self._places: dict[int, int | None] = dict(places)
        self._silence = config.env.step_timeout_seconds
        self._patience = self._silence + (ASYNC_GRACE_SECONDS if config.env.vector == "async" else 0.0)
        self._has_processes = config.env.vector == "async"
        self._restarts_left = config.engine.max_restarts
        self._start_timeout = config.engine.start_timeout_seconds
        self.workers: list[WorkerHandle] = []
        self._starting: dict[Any, WorkerHandle] = {}  # by the reference to its info
        self._pausing: dict[int, tuple[float, int]] = {}  # slot → when to replace its worker, number of the replacement
        self.past_hosts: dict[str, dict[str, Any]] = {}
        """Hosts of lost workers by address, with the steps of these workers."""
        self.lost = self.restarted = 0
        self.messages: list[str] = []
        self._shown = 0  # messages already returned by `new_messages`
        self._failures: dict[int, int] = {}  # slot → workers in a row that were lost before doing any work
        self._first_trace: str | None = None

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers; raises if one fails or is late."""
        for slot, place in self._places.items():
            self._spawn(slot, 0, place)
        deadline = time.monotonic() + self._start_timeout
        while self._starting and time.monotonic() < deadline:
            self.admit(wait=0.5)
            if self._failures:
                raise TrainingError(self._first_trace or self.messages[-1])
        if self._starting:
            late = ", ".join(role(worker.slot) for worker in self._starting.values())
            raise TrainingError(f"{late} did not start within engine.start_timeout_seconds={self._start_timeout:g}")
        self.workers.sort(key=lambda worker: worker.slot)

    def _spawn(self, slot: int, restarts: int, place: int | None) -> None:
        spec = self._make_spec(slot, restarts)
        actor = self._cluster.spawn(place)
        self._starting[actor.setup.remote(spec)] = WorkerHandle(slot, actor, spec)

    def admit(self, wait: float = 0.0) -> list[WorkerHandle]:
        """Take in the workers that have become ready, and return them."""
        for slot, (due, restarts) in list(self._pausing.items()):
            if time.monotonic() >= due:
                del self._pausing[slot]
                self._spawn(slot, restarts, self._places[slot])
        if not self._starting:
            time.sleep(wait if self._pausing else 0.0)
            return []
        self._cluster.check()
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=wait, fetch_local=False)
        admitted = []
        for reference in ready:
            worker = self._starting.pop(reference)
            try:
                info: WorkerInfo = ray.get(reference, timeout=GRACE_SECONDS)
            except RayError as error:
                self.lose(worker, error)
                continue
            if info.problem is not None:
                raise UserError(info.problem)
            worker.info = replace(info, address=self._cluster.address_of(info.node))
            self.workers.append(worker)
            self.restarted += worker.spec.restarts > 0
            admitted.append(worker)
        return admitted

    def require_workers(self) -> None:
        """If no worker is left, wait for a replacement; raises if none is on its way."""
        deadline = time.monotonic() + self._start_timeout
        while not self.workers:
            if not (self._starting or self._pausing) or time.monotonic() > deadline:
                raise TrainingError(f"all workers are lost; {self._cause()}")
            self._move_stranded()
            self.admit(wait=0.5)

    def _move_stranded(self) -> None:
        """Restart replacements whose reserved place was on a dead node elsewhere: one per core, but at least one."""
        lost = self._cluster.lost_places()
        stranded = [(ref, worker) for ref, worker in self._starting.items() if self._places[worker.slot] in lost]
        moved = sum(place is None for place in self._places.values())
        for reference, worker in stranded[: max(1, int(self._cluster.cpus)) - moved]:
            del self._starting[reference]
            worker.kill()
            self._places[worker.slot] = None
            self._spawn(worker.slot, worker.spec.restarts, None)
            self.messages.append(f"{role(worker.slot)} starts on another node: its own is gone")

    # -- calling ----------------------------------------------------------------------------------------------------

    def call(
        self,
        calls: dict[WorkerHandle, Any],
        *,
        together: bool = False,
        on_result: Callable[[WorkerHandle, Any], None] = lambda worker, result: None,
        queue: RolloutQueue | None = None,
        limit: float | None = None,
    ) -> dict[WorkerHandle, Any]:
        """Wait for all `calls` (worker → reference); returns the results in the order of `calls`, without lost workers.

        `together`: the workers wait for each other. If one fails, the others are released and there are no results.
        `queue` is served meanwhile. `limit`: seconds for the whole.
        """
        results: dict[WorkerHandle, Any] = {}
        lost: list[tuple[WorkerHandle, str | RayError]] = []
        failed = False
        waiting = {reference: worker for worker, reference in calls.items()}
        now = time.monotonic()
        for worker in calls:
            worker.alive_at, worker.ticks, worker.heartbeat = now, -1, None
        until = now + limit if limit is not None else None
        while waiting:
            ready = wait_any([*waiting, *(queue.references if queue is not None else ())])
            if queue is not None:
                queue.receive([reference for reference in ready if reference not in waiting])
            for reference in ready:
                if reference not in waiting:
                    continue
                worker = waiting.pop(reference)
                try:
                    results[worker] = ray.get(reference, timeout=GRACE_SECONDS)
                    on_result(worker, results[worker])
                except RayError as error:
                    if isinstance(error, RayTaskError) and isinstance(error.cause, CollectiveError):
                        failed = True
                    else:
                        lost.append((worker, error))
            if not ready:
                for worker in self.find_silent(list(waiting.values())):
                    del waiting[calls[worker]]
                    lost.append((worker, self.silence_text))
            now = time.monotonic()
            if until is not None and now > until:
                lost += [(waiting.pop(reference), "did not answer in time") for reference in list(waiting)]
            if together and (failed or lost) and waiting:
                failed = True
                for worker in waiting.values():
                    worker.actor.abort.remote()
                until = min(until or now + GRACE_SECONDS, now + GRACE_SECONDS)
        for worker, reason in lost:
            self.lose(worker, reason)
        if together and (failed or lost):
            return {}
        return {worker: results[worker] for worker in calls if worker in results}

    def ask(self, call: Callable[[WorkerHandle], Any], queue: RolloutQueue | None = None) -> Any:
        """The answer of the first worker that gives one. `call(worker)` returns a reference."""
        while True:
            self.require_workers()
            worker = self.workers[0]
            results = self.call({worker: call(worker)}, queue=queue)
            if worker in results:
                return results[worker]

    @property
    def silence_text(self) -> str:
        return f"showed no progress for {self._silence:g} s (env.step_timeout_seconds)"

    def find_silent(self, workers: list[WorkerHandle]) -> list[WorkerHandle]:
        """Ask busy workers for a heartbeat; returns those that have made no progress for too long."""
        self._cluster.check()
        now, silent = time.monotonic(), []
        for worker in workers:
            if worker.heartbeat is None:
                worker.heartbeat = worker.actor.heartbeat.remote()
            if ray.wait([worker.heartbeat], timeout=0)[0]:
                try:
                    ticks, waits = ray.get(worker.heartbeat, timeout=GRACE_SECONDS)
                    if ticks != worker.ticks or waits:
                        worker.ticks, worker.alive_at = ticks, now
                except RayError:
                    pass  # the pending call raises a more specific error
                worker.heartbeat = None
            if now - worker.alive_at > self._patience:
                silent.append(worker)
        return silent

    # -- losing -----------------------------------------------------------------------------------------------------

    def lose(self, worker: WorkerHandle, reason: str | RayError) -> None:
        """End a worker and start a replacement, if the limits allow one."""
        if worker.lost:
            return  # two of its calls failed
        self._cluster.check()  # then all are lost, for one reason
        if isinstance(reason, RayTaskError) and isinstance(reason.cause, UserError):
            raise reason.cause  # bad input that only its steps showed, and a replacement's would again
        worker.lost, worker.trace = (reason, None) if isinstance(reason, str) else _explain(reason)
        if worker in self.workers:
            self.workers.remove(worker)
        worker.kill()
        self.lost += 1
        if worker.info is not None:
            past = self.past_hosts.setdefault(worker.info.address, {"host": worker.info.host, "env_steps": 0})
            past["env_steps"] += worker.env_steps
        useless = worker.env_steps == 0 and not worker.time_split
        failures = self._failures[worker.slot] = self._failures.get(worker.slot, 0) + 1 if useless else 0
        self._first_trace = self._first_trace or worker.trace
        text = f"{worker.name} {worker.lost}"
        if self._restarts_left <= 0:
            self.messages.append(f"{text}; it will not be replaced (engine.max_restarts)")
            return
        if failures >= TRIES and all(self._failures.get(slot, 0) >= TRIES for slot in self._places):
            self.messages.append(text)
            raise TrainingError(f"in every place {TRIES} workers in a row were lost before any work; {self._cause()}")
        self._restarts_left -= 1
        restarts, pause = worker.spec.restarts + 1, 0.0
        if failures >= TRIES:
            pause = min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2.0 ** (failures - TRIES))
            self._pausing[worker.slot] = time.monotonic() + pause, restarts
        else:
            self._spawn(worker.slot, restarts, self._places[worker.slot])
        self.messages.append(f"{text}; a replacement {f'starts in {pause:.0f} s' if pause else 'is starting'}")

    def _cause(self) -> str:
        if self._first_trace is not None:
            return f"the first error was:\n{self._first_trace}"
        hint = ""
        if not self._has_processes and any(spec.envs for spec in (self._make_spec(s, 0) for s in self._places)):
            hint = " (if the simulator ends the process, env.vector=async steps it in processes of its own)"
        return f"the last message was: {self.messages[-1] if self.messages else 'none'}{hint}"

    def new_messages(self) -> list[str]:
        """Messages since the last call."""
        found, self._shown = self.messages[self._shown :], len(self.messages)
        return found

    def close(self) -> None:
        """Ask all workers to stop, wait a moment, then kill them."""
        stops = [worker.actor.stop.remote() for worker in self.workers]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=5.0, fetch_local=False)
        for worker in [*self.workers, *self._starting.values()]:
            worker.kill()


def wait_any(references: list[Any]) -> list[Any]:
    """All references that are ready, as soon as one is; empty after `POLL_SECONDS`."""
    ready, rest = ray.wait(references, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
    if ready and rest:
        ready += ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
    return ready


def _explain(error: RayError) -> tuple[str, str | None]:
    """Why a worker was lost, and the traceback if its code raised."""
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return f"failed: {type(cause).__name__}: {_one_line(cause)}", str(error)
    if isinstance(error, RayActorError):
        return "died", None
    if isinstance(error, GetTimeoutError):
        return "did not answer in time", None
    return f"was lost: {type(error).__name__}: {_one_line(error)}", None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
