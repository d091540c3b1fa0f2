"""Several agents on RLlib: its MultiAgentEnv, `policy_mapping_fn` and `policies_to_train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
import team_envs
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.engines.rllib.modules import Modules
from paceline.envs.make import make_env
from paceline.evaluate import evaluate

ray = pytest.importorskip("ray.rllib")
pytestmark = pytest.mark.timeout(180)
TEAMS = Path(team_envs.__file__)
MASKS = TEAMS.with_name("masked_envs.py")
SMALL: dict[str, Any] = {
    "ppo": {"rollout_steps": 24, "minibatch_size": 32, "epochs": 2},
    "model": {"hidden": [8]},
    "engine": {"name": "rllib", "workers": 1, "threads": 1},
    "stop": {"iterations": 2},
}


def agents_env(name: str, **kwargs: Any) -> Any:
    from paceline.engines.rllib.agents_env import RllibAgents

    return RllibAgents(make_env(validate({"env": {"id": f"{TEAMS}:{name}", "kwargs": kwargs}}).env), "auto", 1)  # type: ignore[arg-type]


def modules_of(env_id: str, **tree: Any) -> Modules:
    config = validate(tree | {"env": {"id": env_id, **tree.get("env", {})}, "engine": {"name": "rllib"}})
    return Modules(config, make_env(config.env))


# -- the environment, step by step ----------------------------------------------------------------------------------


def test_agents_die_come_and_are_cut() -> None:
    """In `Relay` b dies at step 3, c comes after step 2, and a and c are cut at step 6."""
    env = agents_env("Relay")
    seen, _ = env.reset(seed=0)
    assert list(seen) == ["a", "b"] and seen["b"].dtype == np.float32
    steps = []
    while env.agents:
        acted = list(env.agents)
        steps.append((acted, *env.step(dict.fromkeys(acted, 1))))
    assert [acted for acted, *_ in steps] == [["a", "b"]] * 2 + [["a", "b", "c"]] + [["a", "c"]] * 3
    observations, rewards, ends, cuts = zip(*(step[1:5] for step in steps), strict=True)
    assert list(observations[1]) == ["a", "b", "c"]  # c is shown, and acts next
    assert rewards[2] == {"a": 4.0, "b": 14.0, "c": 24.0}  # 10 x number + time + action
    assert [name for step in ends for name in step if step[name]] == ["b"]
    assert cuts[-1] == {"a": True, "c": True, "__all__": True} and not any(any(step.values()) for step in cuts[:-1])


def test_one_flag_for_all_and_nothing_seen_at_the_end() -> None:
    env = agents_env("InGymnasium", steps=2)
    env.reset(seed=0)
    before = env.step({"0": 0, "1": 2})[0]
    seen, _, ends, cuts, infos = env.step({"0": 0, "1": 2})
    assert all(cuts.values()) and not any(ends.values()) and env.agents == []
    np.testing.assert_array_equal(seen["1"], before["1"])  # the value after it is of the last observation
    assert infos == {"0": {"metrics": [{"load": 3.0}]}}


def test_an_agent_that_comes_back_is_refused() -> None:
    env = agents_env("Relay", again=1)
    env.reset(seed=0)
    with pytest.raises(UserError, match="came back, which RLlib does not support"):
        while env.agents:
            env.step(dict.fromkeys(env.agents, 0))


# -- policies ---------------------------------------------------------------------------------------------------------


def test_policies_are_mapped_as_on_other_engines() -> None:
    assert modules_of(f"{TEAMS}:Relay").policy_of == dict.fromkeys("abcd", "shared_policy")
    signal = f"{TEAMS}:Signal"
    assert modules_of(signal, multi_agent={"policies": "each"}).policy_of == {
        "speaker": "speaker",
        "listener": "listener",
    }
    named = modules_of(signal, multi_agent={"policies": {"one": "s*", "other": "l*"}})
    assert named.policy_of == {"speaker": "one", "listener": "other"} and named.learning == ["one", "other"]
    assert named.describe() == ["agents     2 in each env (speaker, listener), policies one of 1, other of 1"]
    free = {name: network["free_log_std"] for name, network in named.networks().items()}
    assert free == {"one": False, "other": True}


@pytest.mark.parametrize(
    ("env_id", "tree", "named"),
    [
        (f"{TEAMS}:Relay", {"algo": "dqn"}, "with ppo and impala, not dqn: use --engine local or ray"),
        (f"{TEAMS}:Relay", {"env": {"normalize_reward": True}}, "normalises only for a single agent"),
        (f"{TEAMS}:Relay", {"env": {"vector": "async"}}, "env.vector=async"),
        (f"{TEAMS}:Unequal", {}, "one policy needs equal spaces"),
        (f"{MASKS}:MaskedTeam", {}, "no action masks"),
        (f"{MASKS}:MaskedTeam", {"env": {"kwargs": {"way": "key"}}}, "no action masks"),
        ("CartPole-v1", {"multi_agent": {"policies": "each"}}, "has one"),
    ],
)
def test_what_is_refused(env_id: str, tree: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        modules_of(env_id, **tree)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_shared_policy_trains_resumes_and_is_evaluated(here: Path) -> None:
    tree = SMALL | {"env": {"id": f"{TEAMS}:Relay", "envs_per_worker": 2}, "name": "x"}
    run = paceline.train(tree, preset="none")
    rows = run.read_metrics()
    assert [row["env_steps"] for row in rows] == [48, 96]
    assert 96 < rows[-1]["agent_steps"] < 4 * 96 and rows[-1]["episodes"] > 8
    assert 2 < rows[-1]["return_mean"] / rows[-1]["return_per_agent_mean"] <= 3  # a, b and c took part
    assert rows[-1]["length_mean"] == 6
    again = paceline.train({"stop": {"iterations": 3}}, resume=run)
    assert [row["env_steps"] for row in again.read_metrics()] == [48, 96, 144]
    assert again.read_metrics()[-1]["agent_steps"] > rows[-1]["agent_steps"]
    [result] = evaluate(again, episodes=3)
    assert result["return_per_agent_mean"] > 0


def test_policies_of_their_own_and_a_frozen_one(here: Path) -> None:
    """The frozen one has the weights of a run of another engine, through RLlib and back."""
    env = {"id": f"{TEAMS}:Signal", "envs_per_worker": 2}
    policies = {"one": "speaker", "other": "l*"}
    local = {"engine": {"name": "local"}, "name": "local", "multi_agent": {"policies": policies}}
    source = paceline.train(SMALL | {"env": env} | local, preset="none")
    team = {"policies": policies, "frozen": {"other": str(source.path)}}
    run = paceline.train(SMALL | {"env": env, "multi_agent": team, "name": "x"}, preset="none")
    row = run.read_metrics()[-1]
    assert "policy/one/policy_loss" in row and "policy/other/policy_loss" not in row
    assert {"policy/one/return_mean", "policy/other/return_mean"} <= row.keys()
    before, after = (_weights(path) for path in (source.path, run.path))
    assert before.keys() == after.keys()
    for name in before:
        same = np.array_equal(before[name], after[name])
        assert same == name.startswith("other/"), name
    [result] = evaluate(run, episodes=2)
    assert result["episodes"] == 2


def _weights(run: Path) -> dict[str, Any]:
    return dict(paceline.load(run, "last").policy.state())
