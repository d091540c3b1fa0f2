from __future__ import annotations

import time

import pytest

from paceline.training import clock as clock_module
from paceline.training.clock import PARTS, Clock


class Time:
    """A fake clock, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    own = Time()
    monkeypatch.setattr(clock_module, "time", own)
    return own


def test_the_parts_add_up_to_the_wall_time(clock_time: Time) -> None:
    clock = Clock(began=90.0)  # the command began ten seconds ago
    clock_time.now = 103.0
    clock.ready()
    clock.add("env", 2.0)
    clock.add("act", 1.0)
    with clock.measure("learn"):
        clock_time.now += 4.0
    with clock.measure("save"):
        clock_time.now += 0.5
    clock_time.now += 5.0
    split = clock.split()
    assert set(split) == set(PARTS)
    assert (split["start"], split["env"], split["act"], split["learn"], split["save"]) == (13.0, 2.0, 1.0, 4.0, 0.5)
    assert split["idle"] == 22.5 - 13.0 - 2.0 - 1.0 - 4.0 - 0.5  # the rest
    assert sum(split.values()) == clock.wall_seconds == 22.5
    assert clock.train_seconds == 22.5 - 13.0


def test_asking_changes_nothing(clock_time: Time) -> None:
    clock = Clock(began=95.0)
    clock.ready()
    clock_time.now += 7.0
    assert clock.split() == clock.split()
    assert clock.split()["idle"] == 7.0


def test_time_that_was_claimed_is_not_idle_as_well(clock_time: Time) -> None:
    """Idle is never negative, even if parts overlap by a rounding error."""
    clock = Clock(began=100.0)
    clock.ready()
    clock_time.now += 1.0
    clock.add("env", 1.0 + 1e-9)
    assert clock.split()["idle"] == 0.0


def test_a_resumed_run_counts_its_earlier_processes(clock_time: Time) -> None:
    first = Clock(began=90.0)
    first.ready()  # a start of 10 s
    first.add("learn", 3.0)
    clock_time.now = 108.0
    before = first.split()
    assert before["idle"] == 5.0

    clock_time.now = 1000.0
    second = Clock(998.0, before)
    second.ready()  # a start of 2 s more
    clock_time.now = 1006.0
    second.add("learn", 1.0)
    split = second.split()
    assert split["start"] == 12.0 and split["learn"] == 4.0
    assert split["idle"] == 5.0 + 5.0  # the earlier 5 s, and 6 s minus 1 s of learning
    assert sum(split.values()) == second.wall_seconds == 18.0 + 8.0
    assert second.train_seconds == 26.0 - 12.0


def test_a_part_that_fails_is_measured(clock_time: Time) -> None:
    clock = Clock(began=100.0)
    with pytest.raises(ValueError), clock.measure("eval"):
        clock_time.now += 2.0
        raise ValueError
    assert clock.split()["eval"] == 2.0


def test_an_unknown_part_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Clock(time.perf_counter()).add("lunch", 1.0)


def test_with_the_real_clock() -> None:
    clock = Clock(time.perf_counter())
    clock.ready()
    with clock.measure("learn"):
        time.sleep(0.02)
    assert clock.split()["learn"] >= 0.02
    assert sum(clock.split().values()) == pytest.approx(clock.wall_seconds, abs=1e-3)
