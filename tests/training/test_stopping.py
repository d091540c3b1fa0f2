from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest

from paceline.config import StopConfig, UserError
from paceline.training.stopping import DEADLINE, DEADLINE_SECONDS, RETRY_SHARE, Counters, Deadline, Stopping


def never(episodes: int) -> float:
    raise AssertionError("nothing to confirm")


def reason(stopping: Stopping, *, iteration: int = 0, env_steps: int = 0, seconds: float = 0.0, row: Any = None,
           returns: Any = (), confirm: Any = never) -> str | None:  # fmt: skip
    return stopping.reason(Counters(iteration, env_steps), seconds, row or {}, returns, confirm)


# -- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "before", "at"),
    [
        ({"total_steps": 1000}, {"env_steps": 999}, {"env_steps": 1000}),
        ({"iterations": 5}, {"iteration": 4}, {"iteration": 5}),
        ({"max_time": 2.0}, {"seconds": 1.99}, {"seconds": 2.0}),
        ({"metric": "loss<=0.5"}, {"row": {"loss": 0.51}}, {"row": {"loss": 0.5}}),
        ({"metric": "loss<0.5"}, {"row": {"loss": 0.5}}, {"row": {"loss": 0.49}}),
        ({"metric": "env/utility>=-1e-3"}, {"row": {"env/utility": -0.002}}, {"row": {"env/utility": -0.001}}),
        ({"metric": "x>3"}, {"row": {"x": 3.0}}, {"row": {"x": 3.1}}),
    ],
    ids=str,
)
def test_each_rule_stops_where_it_is_reached_and_not_before(
    config: dict[str, Any], before: dict[str, Any], at: dict[str, Any]
) -> None:
    assert reason(Stopping(StopConfig(**config)), **before) is None
    assert reason(Stopping(StopConfig(**config)), **at)


def test_the_first_one_reached_stops() -> None:
    stopping = Stopping(StopConfig(total_steps=100, iterations=10, max_time=60))
    assert reason(stopping, env_steps=99, iteration=9, seconds=59) is None
    said = reason(stopping, env_steps=50, iteration=10, seconds=1)
    assert said is not None and "iterations" in said


def test_a_metric_that_is_not_there_or_no_number_does_not_stop() -> None:
    stopping = Stopping(StopConfig(metric="utility>=1"))
    for row in ({}, {"other": 5.0}, {"utility": None}, {"utility": math.nan}):
        assert reason(stopping, row=row) is None


def test_without_a_rule_nothing_stops() -> None:
    assert reason(Stopping(StopConfig()), iteration=10**9, env_steps=10**12, seconds=1e9, returns=[1e9] * 50) is None


# -- how much is used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"total_steps": 200}, 0.25),
        ({"iterations": 20}, 0.5),
        ({"max_time": 40.0}, 0.75),
        ({"total_steps": 200, "iterations": 20, "max_time": 40.0}, 0.75),
        ({"total_steps": 10}, 1.0),  # an iteration may go past the budget
        ({"return_mean": 5.0}, 0.0),
    ],
    ids=str,
)
def test_progress_is_that_of_the_budget_used_most(config: dict[str, Any], expected: float) -> None:
    assert Stopping(StopConfig(**config)).progress(Counters(iteration=10, env_steps=50), 30.0) == expected


# -- the return -----------------------------------------------------------------------------------------------------


def solved(**options: Any) -> Stopping:
    return Stopping(StopConfig(return_mean=10.0, return_window=4, **options))


def test_the_mean_of_the_window_counts_and_only_a_full_one() -> None:
    stopping = solved(confirm_episodes=0)
    assert reason(stopping, returns=[50.0] * 3) is None
    assert reason(stopping, returns=[10.0, 10.0, 10.0, 9.9]) is None
    assert reason(stopping, returns=[-100.0, 10.0, 10.0, 10.0, 10.0])  # the last four
    assert reason(stopping, returns=[100.0, 10.0, 10.0, 10.0, 9.0]) is None


def test_it_is_confirmed_by_evaluation() -> None:
    asked: list[int] = []

    def confirm(value: float) -> Any:
        def evaluate(episodes: int) -> float:
            asked.append(episodes)
            return value

        return evaluate

    good = [11.0] * 4
    assert reason(solved(confirm_episodes=7), returns=good, confirm=confirm(10.0))
    assert asked == [7]
    assert reason(solved(confirm_episodes=7), returns=good, confirm=confirm(9.99)) is None


def test_after_a_failed_confirmation_it_waits_a_share_longer() -> None:
    stopping, asked = solved(), []

    def confirm(episodes: int) -> float:
        asked.append(iteration)
        return 0.0

    for iteration in range(1, 1000):
        assert reason(stopping, iteration=iteration, returns=[11.0] * 4, confirm=confirm) is None
    assert asked[:3] == [1, 2, 3]
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert all(gap == max(1, round(RETRY_SHARE * at)) for gap, at in zip(gaps, asked, strict=False))
    assert max(gaps) > 5
    stopping.retry_at = 0
    assert reason(stopping, iteration=1000, returns=[11.0] * 4, confirm=lambda _: 10.0)


def test_a_budget_ends_the_run_without_asking_for_confirmation() -> None:
    stopping = solved(total_steps=10)
    assert reason(stopping, env_steps=10, returns=[11.0] * 4, confirm=never)


def test_a_goal_that_must_be_reached() -> None:
    rules = {"iterations": 3, "return_mean": 10.0, "return_window": 2, "must_reach": True}
    asked: list[int] = []

    def confirm(mean: float) -> Any:
        return lambda episodes: asked.append(episodes) or mean

    for returns, confirmed, missed in (
        ([9.0, 9.0], 99.0, True),
        ([11.0, 11.0], 9.0, True),
        ([11.0, 11.0], 12.0, False),
    ):
        stopping = Stopping(StopConfig(**rules))
        stopping.retry_at = 99  # after a failed confirmation: at the end there is no later try
        reason = stopping.reason(Counters(iteration=3), 1.0, {}, returns, confirm(confirmed))
        assert reason is not None and stopping.goal_missed == missed
        assert reason.endswith("; the goal was not reached") == missed
    assert asked == [20, 20]  # a return that is too low needs no evaluation
    assert Stopping(StopConfig(**rules)).reason(Counters(iteration=2), 1.0, {}, [9.0, 9.0], confirm(0.0)) is None
    with pytest.raises(ValueError, match="needs a goal"):
        StopConfig(must_reach=True)


def test_a_goal_of_zero_or_below_is_honoured() -> None:
    for goal in (0.0, -200.0):
        stopping = Stopping(StopConfig(return_mean=goal, return_window=2, confirm_episodes=0))
        assert reason(stopping, returns=[goal - 1, goal - 1]) is None
        assert reason(stopping, returns=[goal, goal])


# -- the end of the allocation --------------------------------------------------------------------------------------


def test_a_deadline_leaves_room_for_an_iteration_a_save_and_taking_down() -> None:
    def near(left: float, iteration: float = 0.0, save: float = 0.0) -> str | None:
        return Deadline({DEADLINE: str(time.time() + left)}).reason(iteration, save)

    assert near(DEADLINE_SECONDS + 5) is None and near(DEADLINE_SECONDS - 1)
    assert near(DEADLINE_SECONDS + 25, iteration=10.0) is None and near(DEADLINE_SECONDS + 15, iteration=10.0)
    assert near(DEADLINE_SECONDS + 25, save=10.0) is None and near(DEADLINE_SECONDS + 15, save=10.0)
    said = near(-100.0)
    assert said is not None and "ends in 0 s" in said


def test_without_a_deadline_there_is_none() -> None:
    assert Deadline({}).reason(1e6, 1e6) is None and Deadline({DEADLINE: ""}).reason(0.0, 0.0) is None
    with pytest.raises(UserError, match="tomorrow"):
        Deadline({DEADLINE: "tomorrow"})
