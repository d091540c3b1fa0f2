"""When lost workers are replaced, and when a pool gives up. No Ray: workers here are only names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from paceline.config.resolve import validate
from paceline.engines.ray import ray_cluster, worker_pool
from paceline.engines.ray.messages import WorkerInfo
from paceline.engines.ray.worker_pool import TRIES, WorkerHandle, WorkerPool
from paceline.training.engine import TrainingError

SLOTS = 2


class Cluster:
    """Counts what it is asked to start."""

    cpus = 2.0

    def __init__(self) -> None:
        self.spawned: list[int] = []

    def spawn(self, place: int) -> Any:
        self.spawned.append(place)
        number = len(self.spawned)
        return SimpleNamespace(setup=SimpleNamespace(remote=lambda spec: f"info-{number}"))

    def check(self) -> None:
        return

    def lost_places(self) -> set[int]:
        return set()

    def address_of(self, node: str) -> str:
        return node


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker_pool, "time", clock)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: None)
    monkeypatch.setattr(ray, "wait", lambda references, **options: (list(references), []))
    monkeypatch.setattr(ray, "get", lambda reference, timeout: WorkerInfo(1, "h", "10.0.0.1", 1, {}))
    return clock


def started(**engine: Any) -> tuple[WorkerPool, Cluster]:
    config = validate({"engine": {"name": "ray", "workers": SLOTS, **engine}})
    cluster: Any = Cluster()

    def spec(slot: int, restarts: int) -> Any:
        return SimpleNamespace(slot=slot, restarts=restarts, envs=4)

    pool = WorkerPool(cluster, config, spec, {slot: slot for slot in range(SLOTS)})
    pool.start()
    return pool, cluster


def at(pool: WorkerPool, slot: int) -> WorkerHandle:
    return next(worker for worker in pool.workers if worker.slot == slot)


def error() -> Any:
    cause = RuntimeError("the simulator exploded")
    return ray.exceptions.RayTaskError("collect", "Traceback\nRuntimeError: the simulator exploded", cause)


def lose(pool: WorkerPool, slot: int, *, worked: bool) -> None:
    worker = at(pool, slot)
    worker.env_steps = 100 if worked else 0
    pool.lose(worker, error())


def test_workers_that_work_may_fail_as_often_as_they_are_replaced(clock: Clock) -> None:
    """Also all of them at once, many times in a minute."""
    pool, cluster = started()
    for _ in range(20):
        for slot in range(SLOTS):
            lose(pool, slot, worked=True)
        assert not pool.workers
        pool.require_workers()
        clock.now += 1
    assert len(cluster.spawned) == SLOTS * 21 and pool.restarted == pool.lost == SLOTS * 20
    assert pool.past_hosts["10.0.0.1"]["env_steps"] == SLOTS * 20 * 100


def test_workers_that_fail_before_any_work_everywhere_end_the_run(clock: Clock) -> None:
    pool, _ = started()
    with pytest.raises(TrainingError, match=r"4 workers in a row(.|\n)*first error(.|\n)*exploded"):
        for _ in range(TRIES + 1):
            for slot in range(SLOTS):
                lose(pool, slot, worked=False)
                pool.require_workers()
                pool.admit()
            clock.now += 10_000
    assert pool.lost == SLOTS * TRIES


def test_a_broken_place_pauses_longer_and_longer(clock: Clock) -> None:
    pool, cluster = started(max_restarts=1000)
    began, lost_at = clock.now, []
    while clock.now < began + 3600:
        if any(worker.slot == 1 for worker in pool.workers):
            lose(pool, 1, worked=False)
            lost_at.append(clock.now)
        pool.admit()
        clock.now += 1.0
    assert [w.slot for w in pool.workers] == [0] and TRIES + 5 < len(lost_at) < TRIES + 15
    assert pool.lost == len(lost_at) and pool.restarted >= pool.lost - 1
    assert "starts in 10 s" in "".join(pool.messages) and "starts in 20 s" in "".join(pool.messages)
    assert cluster.spawned.count(0) == 1


def test_a_replacement_counts_when_it_is_there(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a host that is gone does not."""
    pool, _ = started()
    monkeypatch.setattr(ray, "wait", lambda references, **options: ([], list(references)))
    lose(pool, 1, worked=True)
    pool.admit()
    assert (pool.lost, pool.restarted, len(pool.workers)) == (1, 0, 1)
    monkeypatch.setattr(ray, "wait", lambda references, **options: (list(references), []))
    pool.admit()
    assert (pool.lost, pool.restarted, len(pool.workers)) == (1, 1, 2)


def test_the_limit_of_replacements_holds(clock: Clock) -> None:
    pool, _ = started(max_restarts=1)
    lose(pool, 0, worked=True)
    pool.admit()
    lose(pool, 0, worked=True)
    lose(pool, 1, worked=True)
    with pytest.raises(TrainingError, match=r"all workers are lost(.|\n)*exploded"):
        pool.require_workers()
    assert "engine.max_restarts" in pool.messages[-1]


def test_a_host_lost_at_the_start_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, not 2: the same command can succeed later."""
    monkeypatch.setattr(ray_cluster, "placement_group", lambda *a, **b: SimpleNamespace(wait=lambda seconds: False))
    cluster = ray_cluster.RayCluster.__new__(ray_cluster.RayCluster)
    cluster.address, cluster.nodes = "10.0.0.1:6379", [SimpleNamespace(cpus=1.0, address=host) for host in "ab"]
    with pytest.raises(TrainingError, match="did not give 2 x 1 of its 2 CPUs within 60 s; has it lost a host"):
        cluster.reserve(2, 0)
