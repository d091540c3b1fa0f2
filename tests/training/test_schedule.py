"""What a resume with another budget does to the settings that change over the budget, and `--keep-schedule`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import UserError

SMALL = {"env": {"id": "CartPole-v1", "envs_per_worker": 8}}
SIZES = {"rollout_steps": 8, "minibatch_size": 64, "epochs": 1}
LINEAR = {"learning_rate_schedule": "linear"}
DQN = {"rollout_steps": 4, "rounds": 4, "learning_starts": 50, "prioritized": True, "epsilon_fraction": 0.5, **LINEAR}
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ppo": ({"ppo": {**SIZES, **LINEAR, "clip_schedule": "linear"}}, ("learning_rate", "clip")),
    "a2c": ({"a2c": {"rollout_steps": 8, **LINEAR}}, ("learning_rate",)),
    "a3c": ({"a3c": {"rollout_steps": 8, **LINEAR}}, ("learning_rate",)),
    "impala": ({"impala": {"rollout_steps": 8, "batch_size": 64, **LINEAR}}, ("learning_rate",)),
    "dqn": ({"dqn": DQN}, ("learning_rate", "epsilon", "priority_beta")),
}


def tree(kind: str, iterations: int) -> dict[str, Any]:
    return {**SMALL, "algo": kind, "name": kind, "stop": {"iterations": iterations}, **KINDS[kind][0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_budget_moves_them_back_or_keeps_them(kind: str, here: Path, cli: Callable[..., Any]) -> None:
    names = KINDS[kind][1]
    run = paceline.train(tree(kind, 8), preset="none")
    *_, last = run.read_metrics()
    result = cli("train", "--resume", run.path, "--iterations", 16, "--keep-schedule")
    assert result.code == 0 and "schedules" not in result.out
    kept = run.read_metrics()
    assert len(kept) == 16
    for row in kept[8:]:
        assert {name: row[name] for name in names} == {name: last[name] for name in names}

    result = cli("train", "--resume", run.path, "--iterations", 32)
    (line,) = [line for line in result.out.splitlines() if line.startswith("schedules")]
    after = run.read_metrics()[16]
    for name in names:
        if after[name] != last[name]:
            assert f"{name} {last[name]:.3g} → {after[name]:.3g}" in line, line
    assert "--keep-schedule" in line and after["learning_rate"] == pytest.approx(last["learning_rate"] * 8 / 2)


def test_kept_until_the_old_budget_ends_and_through_every_resume(here: Path) -> None:
    """In a job script the same command comes again, with and without the flag."""
    whole = paceline.train(tree("ppo", 8) | {"name": "whole"}, preset="none").read_metrics()
    stop: list[int] = [3]

    def watch(loop: Any) -> str | None:
        return "enough" if loop.counters.iteration == stop[0] else None

    run = paceline.train(tree("ppo", 8), preset="none", watch=watch)
    stop[0] = 5
    paceline.train({"stop": {"iterations": 20}}, resume=run.path, keep_schedule=True, watch=watch)
    stop[0] = 12
    paceline.train({}, resume=run.path, watch=watch)  # the budget is the same: nothing moves
    paceline.train({"stop": {"iterations": 14}}, resume=run.path, keep_schedule=True)
    rates = [row["learning_rate"] for row in run.read_metrics()]
    before = [row["learning_rate"] for row in whole]
    assert rates == [*before, *[before[-1]] * 6]


def test_without_schedules_there_is_nothing_to_say(here: Path, cli: Callable[..., Any]) -> None:
    run = paceline.train({**SMALL, "ppo": SIZES, "stop": {"iterations": 2}}, preset="none")
    assert "schedules" not in cli("train", "--resume", run.path, "--iterations", 4).out


def test_a_run_of_an_earlier_version(here: Path) -> None:
    """Its checkpoints do not say which share of the budget the last iteration had."""
    from paceline.run import checkpoint

    run = paceline.train(tree("ppo", 8), preset="none")
    arrays, state = checkpoint.load(checkpoint.find(run.path))
    del state["loop"]["schedule"], state["loop"]["best_kind"]
    checkpoint.save(run, state["loop"]["counters"]["env_steps"], arrays, state, keep=3)
    paceline.train({"stop": {"iterations": 10}}, resume=run.path, keep_schedule=True)
    rates = [row["learning_rate"] for row in run.read_metrics()]
    assert rates[8:] == pytest.approx([rates[7]] * 2)


def test_the_flag_is_for_a_resume(here: Path) -> None:
    with pytest.raises(UserError, match="keep_schedule is for a run that is continued"):
        paceline.train({**SMALL, "stop": {"iterations": 1}}, keep_schedule=True)
    paceline.train({**SMALL, "stop": {"iterations": 1}, "name": "x"}, resume="auto", keep_schedule=True)
