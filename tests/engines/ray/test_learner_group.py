"""Which updates count when workers are lost. No Ray: workers here record what they are called for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config.resolve import validate
from paceline.engines.ray.learner_group import LearnerGroup
from paceline.engines.ray.messages import Report, WorkerInfo
from paceline.engines.ray.worker_pool import WorkerHandle


class Actor:
    """Answers each call by its name."""

    def __init__(self, slot: int) -> None:
        self.slot, self.calls = slot, list[str]()

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> str:
            self.calls.append(name)
            return f"{name} of {self.slot}"

        return SimpleNamespace(remote=remote)


class Group(LearnerGroup):
    """Three workers, of which `reporting` report an update and `lost` are lost in it."""

    def __init__(self, reporting: set[int], lost: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        config = validate({"engine": {"name": "ray", "workers": 3}})
        super().__init__(SimpleNamespace(own_address="h"), config, lambda slot, restarts: None, {})  # type: ignore[arg-type,return-value]
        info = WorkerInfo(1, "h", "h", 1, {}, address="h")
        self.workers = [WorkerHandle(slot, Actor(slot), None, info) for slot in range(3)]  # type: ignore[arg-type]
        self._joined, self._reporting, self._losing = list(self.workers), reporting, lost

    def call(self, calls: dict[WorkerHandle, Any], **options: Any) -> dict[WorkerHandle, Any]:
        if not options.get("together"):
            return {}
        for worker in calls:
            if worker.slot in self._reporting:
                options["on_result"](worker, Report(metrics={"loss": 1.0}, fingerprint=7, env_steps=30))
            if worker.slot in self._losing:
                self.workers.remove(worker)
                self.lost += 1
        return {}


def start(worker: WorkerHandle, rank: int, with_state: bool) -> Any:
    return "report", f"state of {worker.slot}" if with_state else None, None


def calls(group: LearnerGroup) -> list[list[str]]:
    return [worker.actor.calls for worker in group.workers]


def test_an_update_that_all_report() -> None:
    group = Group({0, 1, 2})
    reports = group.learn(start)
    assert reports is not None and len(reports) == 3 and group.state_reference == "state of 0"
    assert group.start_early(start) and calls(group) == [[], [], []]


def test_an_update_that_nobody_reports_is_undone() -> None:
    group = Group(set(), {1})
    assert group.learn(start) is None and calls(group) == [["rollback"], ["rollback"]]
    assert not group.start_early(start)  # they have no group


def test_an_update_that_one_reports_counts_for_all() -> None:
    group = Group({1}, {0})
    reports = group.learn(start)
    assert reports is not None and [report.metrics for report in reports.values()] == 3 * [{"loss": 1.0}]
    assert group.state_reference == "algorithm_state of 1"
    assert calls(group) == [["algorithm_state", "weights"], ["adopt"]]
    assert not group.start_early(start)


def test_updates_that_fail_again_and_again_end_the_run() -> None:
    group = Group(set())
    group._form_group = lambda: bool(setattr(group, "_joined", list(group.workers))) or True  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="could not exchange gradients in 5 attempts"):
        for _ in range(5):
            group.learn(start)
