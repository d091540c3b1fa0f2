"""Agents with policies of their own: each learns from its own rows, and frozen ones do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.algorithms.ppo import PPO
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.engines.actor_learner import ActorLearner
from paceline.evaluate import evaluate, render
from paceline.run import checkpoint
from paceline.team_spaces import TeamSpaces, assign

ROOT = Path(__file__).parents[2]
TEAMS = f"{ROOT}/tests/team_envs.py"
OWN = {
    "ppo": {"rollout_steps": 16, "minibatch_size": 64},
    "a2c": {},
    "impala": {"batch_size": 64},
}


def tree(algo: str = "ppo", policies: Any = "each", iterations: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "algo": algo,
        "env": {"id": f"{TEAMS}:Signal", "envs_per_worker": 4, **more.pop("env", {})},
        "multi_agent": {"policies": policies, **more.pop("multi_agent", {})},
        algo: OWN.get(algo, {}),
        "stop": {"iterations": iterations},
        "engine": {"threads": 1, **more.pop("engine", {})},
        "checkpoint": {"every_iterations": 2},
        **more,
    }


def arrays(run: Any, part: str = "policy") -> dict[str, Any]:
    found, _ = checkpoint.load(checkpoint.find(Path(run), "last"))
    return {name: array for name, array in found.items() if part in name}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one and one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_agents_are_given_to_policies_by_pattern() -> None:
    names = ["walker_0", "walker_1", "drone", 3]
    assert assign(names, "each") == {"walker_0": [0], "walker_1": [1], "drone": [2], "3": [3]}
    assert assign(names, {"legs": "walker_*", "rest": "[!w]*"}) == {"legs": [0, 1], "rest": [2, 3]}
    for policies, text in (
        ({"legs": "walker_*"}, "agent drone matches none of them"),
        ({"legs": "*", "rest": "drone"}, "agent drone matches legs and rest"),
        ({"all": "*", "cars": "[!dw3]*"}, "no agent matches cars"),
    ):
        with pytest.raises(UserError, match=text):
            assign(names, policies)


@pytest.mark.parametrize("algo", OWN)
def test_every_policy_learns_and_has_its_metrics(here: Path, algo: str) -> None:
    run = paceline.train(tree(algo, env={"normalize_observation": True, "normalize_reward": True}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("speaker", "listener"):
        assert {f"policy/{name}/{kind}" for kind in ("return_mean", "total_loss", "entropy")} <= rows[-1].keys()
    mean = (rows[-1]["policy/speaker/entropy"] + rows[-1]["policy/listener/entropy"]) / 2
    assert rows[-1]["entropy"] == pytest.approx(mean)
    assert rows[-1]["agent_steps"] == 2 * rows[-1]["env_steps"]
    [result] = evaluate(run, episodes=5)
    assert result["policy/speaker/return_mean"] == result["return_per_agent_mean"]
    assert "per agent of listener" in render([result])
    agent = paceline.load(run)
    observations, _ = agent.make_env().reset(seed=0)
    assert agent.act(observations["speaker"], agent="speaker") in (0, 1, 2)
    assert agent.act(observations["listener"], agent="listener").shape == (1,)
    with pytest.raises(UserError, match="several policies; agents: speaker, listener"):
        agent.act(observations["speaker"])


def test_each_policy_learns_what_it_would_learn_alone(here: Path) -> None:
    """Its update is the algorithm's own, from the rows of its agents."""
    parts = ActorLearner(validate(tree()), envs=4)
    assert parts.collector is not None
    parts.collector.start()
    batch, _ = parts.collect()
    team = parts.policy.team
    alone = {}
    for index, part in enumerate(team.parts):
        own = parts.algorithm.rows_of(batch, index)
        assert own.obs.shape == (17, 4, *part.observation.shape) and own.action.dtype == part.action.dtype
        for env in range(4):
            row = 2 * env + part.agents[0]
            np.testing.assert_array_equal(own.reward[:, env], batch.reward[:, row])
            np.testing.assert_array_equal(own.obs[:, env], batch.obs[:, row, : part.observation.size])
        policy = PPO.make_policy(parts.config, part.observation, part.action)
        policy.load(parts.policy.members[part.name].state())
        logp, value = policy.evaluate_actions(
            own.obs[:-1].reshape(-1, part.observation.size), own.action.reshape(64, -1)
        )
        np.testing.assert_allclose(own.logp.ravel(), logp, rtol=1e-5)
        np.testing.assert_allclose(own.value[:-1].ravel(), value, rtol=1e-5)
        alone[part.name] = (policy, own)
    rng = np.random.default_rng(5)
    parts.algorithm.rng.bit_generator.state = rng.bit_generator.state
    parts.algorithm.update(batch, 1.0)
    for name, (policy, own) in alone.items():
        PPO(policy, parts.config.hyper, rng=rng).update(own, 1.0)
        assert_equal(policy.state(), parts.policy.members[name].state())
    parts.close()


def test_a_resumed_run_of_impala_ends_as_one_that_was_not_cut(here: Path) -> None:
    whole = paceline.train(tree("impala", iterations=6, name="whole"))
    part = paceline.train(tree("impala", iterations=3, name="part"))
    part = paceline.train({"stop": {"iterations": 6}}, resume=part.path)
    assert json.loads((part / "resume.json").read_text())["level"] == "exact"
    assert_equal(arrays(whole, "algorithm"), arrays(part, "algorithm"))


def test_a_frozen_policy_keeps_the_weights_of_its_checkpoint(here: Path) -> None:
    first = paceline.train(tree(name="first"))
    frozen = {"frozen": {"speaker": str(first.path)}}
    second = paceline.train(tree(multi_agent=frozen, name="second"))
    before, after = arrays(first), arrays(second)
    speaker = {name for name in after if "speaker" in name and "policy" in name.split("members")[0]}
    assert speaker
    for name in speaker:
        np.testing.assert_array_equal(before[name], after[name])
    assert "policy/speaker/entropy" not in second.read_metrics()[-1]
    part = paceline.train(tree(multi_agent=frozen, iterations=2, name="third"))
    part = paceline.train({"stop": {"iterations": 4}}, resume=part.path)
    assert_equal(arrays(second), arrays(part))


def test_agents_of_one_pattern_share_a_policy(here: Path) -> None:
    config = tree(policies={"one": "[ac]", "other": "[bd]"}, env={"id": f"{TEAMS}:Relay"})
    run = paceline.train(config)
    last = run.read_metrics()[-1]
    assert {"policy/one/return_mean", "policy/other/return_mean"} <= last.keys()


REFUSED = {
    "dqn": (tree("dqn"), "dqn learns one policy for all agents"),
    "cuda": (tree(engine={"device": "cuda"}), "engine.device=cuda"),
    "memory": (tree(model={"memory": "gru"}), "agents with policies of their own"),
    "one agent": (tree(env={"id": "CartPole-v1"}), "is for environments of several agents"),
    "equal spaces": (tree(policies={"all": "*"}), "whose spaces differ"),
    "all shared": (tree(policies="shared"), "set multi_agent.policies=each"),
    "frozen stranger": (tree(multi_agent={"frozen": {"cat": "x"}}), "multi_agent.frozen=cat"),
    "frozen nothing": (tree(multi_agent={"frozen": {"speaker": "nowhere"}}), "nowhere"),
    "frozen shared": (tree(policies="shared", multi_agent={"frozen": {"a": "x"}}), "multi_agent.frozen needs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(here: Path, case: str) -> None:
    config, text = REFUSED[case]
    with pytest.raises(UserError, match=text) as error:
        paceline.train(config)
    assert "\n" not in str(error.value)
    assert not list(here.glob("runs/*"))


def test_team_spaces_survive_json() -> None:
    from gymnasium import spaces

    box, one = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)
    other, move = spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)
    team = TeamSpaces(["a", "b", "c"], [box, other, box], [one, move, one], {"x": "[ac]", "y": "b"})
    again = TeamSpaces.from_json(json.loads(json.dumps(team.to_json())), squash=False, channels="auto")
    assert [(p.name, p.agents) for p in again.parts] == [("x", (0, 2)), ("y", (1,))]
    assert again.observation.size == team.observation.size == 192 and again.action.shape == (2,)
    assert team.rows(0, 6).tolist() == [0, 2, 3, 5] and team.rows(1, 6).tolist() == [1, 4]
    action = np.array([[3, 0], [0.5, -0.5], [1, 0]], np.float32)
    split = again.split(action)
    assert split[0] == 3 and split[2] == 1 and split[1].tolist() == [0.5, -0.5]


def test_random_actions_are_a_baseline_for_several_policies(here: Path) -> None:
    run = paceline.train(tree())
    [result] = evaluate(run, episodes=4, random=True)
    assert 0 <= result["return_per_agent_mean"] <= 8
