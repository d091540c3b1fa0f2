"""Training with several agents: every algorithm and engine, resume, evaluation, and what the files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.config import UserError
from paceline.evaluate import evaluate, record_video, render
from paceline.run import checkpoint

ROOT = Path(__file__).parents[2]
RELAY = f"{ROOT}/tests/team_envs.py:Relay"
MEADOW = f"{ROOT}/examples/meadow.py:Meadow"
ALGORITHMS = {
    "ppo": {"rollout_steps": 16, "minibatch_size": 64},
    "a2c": {},
    "a3c": {},
    "impala": {"batch_size": 64},
    "dqn": {"learning_starts": 50, "rounds": 4},
    "sac": {"learning_starts": 50, "rounds": 4},
    "td3": {"learning_starts": 50, "rounds": 4},
}


def tree(algo: str = "ppo", iterations: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "algo": algo,
        "env": {"id": RELAY, "envs_per_worker": 3, **more.pop("env", {})},
        algo: ALGORITHMS[algo],
        "stop": {"iterations": iterations},
        "engine": {"threads": 1, **more.pop("engine", {})},
        "checkpoint": {"every_iterations": 2},
        **more,
    }


def weights(run: Any, which: str = "last") -> dict[str, Any]:
    arrays, _ = checkpoint.load(checkpoint.find(Path(run), which))
    return {name: array for name, array in arrays.items() if "policy" in name}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_trains_and_counts_both_kinds_of_steps(here: Path, algo: str) -> None:
    kwargs = {"continuous": algo in ("sac", "td3")}
    run = paceline.train(tree(algo, env={"normalize_reward": True, "normalize_observation": True, "kwargs": kwargs}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["env_steps"] < row["agent_steps"] < 4 * row["env_steps"]
    last = rows[-1]
    assert last["length_mean"] == 6 and last["return_per_agent_mean"] == pytest.approx(last["return_mean"] / 3)
    assert run.summary["agent_steps"] == last["agent_steps"]
    [result] = evaluate(run, episodes=5)
    assert result["return_per_agent_mean"] == pytest.approx(result["return_mean"] / 3)
    assert "per agent" in render([result])


@pytest.mark.parametrize("algo", ["ppo", "impala", "dqn"])
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_a_resumed_run_ends_as_one_that_was_not_cut(here: Path, algo: str, vector: str) -> None:
    env = {"vector": vector, "processes": 2 if vector == "async" else 0}
    whole = paceline.train(tree(algo, iterations=6, env=env, name="whole"))
    part = paceline.train(tree(algo, iterations=3, env=env, name="part"))
    part = paceline.train({"stop": {"iterations": 6}}, resume=part.path)
    assert json.loads((part / "resume.json").read_text())["level"] == "exact"
    assert_equal(weights(whole), weights(part))
    assert whole.summary["agent_steps"] == part.summary["agent_steps"]
    assert whole.summary["return_per_agent_mean"] == part.summary["return_per_agent_mean"]


def test_sync_and_async_give_the_same_weights(here: Path) -> None:
    one = paceline.train(tree(name="sync"))
    other = paceline.train(tree(env={"vector": "async", "processes": 2}, name="async"))
    assert_equal(weights(one), weights(other))


def test_environments_that_fail_cost_only_their_episode(here: Path) -> None:
    run = paceline.train(tree(env={"restart_on_error": 3, "kwargs": {"fails": 40}}))
    assert run.summary["env_restarts"] > 0 and run.summary["status"] == "done"


def test_budgets_count_steps_of_environments(here: Path) -> None:
    run = paceline.train(tree() | {"stop": {"total_steps": 100}})
    assert 100 <= run.summary["env_steps"] < 100 + 3 * 16


def test_the_command_says_what_the_steps_are(here: Path, cli: Callable[..., Any]) -> None:
    result = cli("train", "--env", MEADOW, "--iterations", "2", "--name", "meadow")
    assert result.code == 0, result.err
    assert "agents     6 in each env (rabbit_0, rabbit_1, rabbit_2, rabbit_3, …), one policy for all" in result.out
    assert "agent steps)" in result.out and "per agent)" in result.out
    result = cli("evaluate", "runs/meadow", "--episodes", "3")
    assert result.code == 0 and "of all agents together; per agent" in result.out
    result = cli("compare", "runs/meadow", "runs/meadow")
    assert result.code in (0, 2)
    for verb in (["report", "runs/meadow", "-o", "page.html"], ["export", "runs/meadow", "--output", "meadow.onnx"]):
        assert cli(*verb).code == 0


def test_the_agent_acts_for_one_of_them(here: Path) -> None:
    run = paceline.train(tree(env={"id": MEADOW}))
    agent = paceline.load(run)
    env = agent.make_env()
    observations, _ = env.reset(seed=1)
    assert {agent.act(observation) for observation in observations.values()} <= {0, 1, 2}


def test_a_video_shows_all_agents(here: Path) -> None:
    config = tree(env={"id": "pettingzoo.mpe:simple_spread_v3", "kwargs": {"max_cycles": 6}})
    run = paceline.train(config)
    path, mean = record_video(run, "team.gif", which=None, episodes=1, stochastic=False, seed=0)
    assert path is not None and path.stat().st_size > 1000 and mean < 0


@pytest.mark.parametrize("way", ["info", "key"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_each_agent_has_its_mask(here: Path, way: str, algo: str) -> None:
    """The environment fails at an invalid action."""
    team = {"id": f"{ROOT}/tests/masked_envs.py:MaskedTeam", "kwargs": {"way": way}}
    run = paceline.train(tree(algo, env=team))
    for options in ({}, {"random": True}, {"stochastic": True}):
        [result] = evaluate(run, episodes=4, **options)
        assert result["return_mean"] == 9
    agent = paceline.load(run)
    env = agent.make_env()
    here_now, infos = env.reset(seed=0)
    assert env.step(agent.act_for(here_now, infos))[1] == {"a": 1.0, "b": 1.0}


def test_masks_of_several_policies_are_in_their_observations(here: Path) -> None:
    team = {"id": f"{ROOT}/tests/masked_envs.py:MaskedTeam", "kwargs": {"way": "key"}}
    run = paceline.train(tree(env=team, multi_agent={"policies": "each"}))
    [result] = evaluate(run, episodes=4)
    assert result["return_mean"] == 9
    with pytest.raises(UserError, match="several policies need masks in a Dict observation"):
        paceline.train(tree(env=team | {"kwargs": {"way": "info"}}, multi_agent={"policies": "each"}))


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_agents_have_memory(here: Path, algo: str) -> None:
    run = paceline.train(tree(algo, model={"memory": "gru"}))
    [result] = evaluate(run, episodes=4)
    assert result["length_mean"] == 6
    agent = paceline.load(run)
    observations, _ = agent.make_env().reset(seed=1)
    assert agent.act_for(observations).keys() == {"a", "b"}
