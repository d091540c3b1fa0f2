"""Runs with memory: every algorithm and kind of observation, agents that remember, ONNX with memory in and out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest

import paceline
from paceline.agent import Agent
from paceline.evaluate import evaluate, record_video
from paceline.export import export
from paceline.run import checkpoint

ROOT = Path(__file__).parents[1]
Cli = Callable[..., Any]
CARTPOLE = f"{ROOT}/examples/without_velocity.py:CartPole"
MODEL = {"memory": "lstm", "memory_size": 8, "sequence_length": 10}


def train(out: Path, tree: dict[str, Any], **model: Any) -> Path:
    algo = tree.get("algo", "ppo")
    sizes: dict[str, Any] = {"rollout_steps": 24} | ({"minibatch_size": 40, "epochs": 2} if algo == "ppo" else {})
    env = tree["env"] if isinstance(tree["env"], dict) else {"id": tree["env"]}
    tree = {"out": str(out), "stop": {"iterations": 2}, "engine": {"threads": 1}} | tree
    tree |= {"env": {"envs_per_worker": 3} | env, "model": MODEL | model, algo: sizes | tree.get(algo, {})}
    return paceline.train(tree, preset="none", quiet=True).path


RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"env": {"id": CARTPOLE, "normalize_observation": True, "normalize_reward": True}},
    "a2c": {"algo": "a2c", "env": CARTPOLE},
    "a3c": {"algo": "a3c", "env": CARTPOLE},
    "impala": {"algo": "impala", "env": CARTPOLE, "impala": {"batch_size": 150, "replay_ratio": 0.5}},
    "images": {"env": {"id": "paceline/ImageSide-v0", "kwargs": {"size": 36, "length": 7}}},
    "mixed": {"env": {"id": "paceline/Mixed-v0", "kwargs": {"size": 12, "length": 7}}},
    "continuous": {"env": f"{ROOT}/examples/without_velocity.py:Pendulum"},
}


@pytest.mark.parametrize("memory", ["lstm", "gru"])
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_evaluates_and_exports(name: str, memory: str, tmp_path: Path) -> None:
    run = train(tmp_path, RUNS[name], memory=memory)
    [row] = evaluate(run, episodes=3)
    assert row["episodes"] == 3
    exported = export(run)
    assert "the same actions" in exported.checked
    session = onnxruntime.InferenceSession(run / "policy.onnx")
    agent = paceline.load(run)
    env = agent.make_env()
    observation, _ = env.reset(seed=3)
    width = agent.policy.memory_width
    assert width == (16 if memory == "lstm" else 8)
    state = np.zeros((1, width), np.float32)
    types = {port.name: port.type for port in session.get_inputs()}
    for _ in range(40):
        parts = observation if isinstance(observation, dict) else {"": observation}
        feed = {f"observation.{key}".rstrip("."): np.asarray(value)[None] for key, value in parts.items()}
        assert feed.keys() | {"memory"} == types.keys()
        action, state = session.run(["action", "next_memory"], feed | {"memory": state})
        np.testing.assert_allclose(action[0], agent.act(observation), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(agent._memory[None], state, atol=1e-5)
        observation, _, terminated, truncated, _ = env.step(action[0])
        if terminated or truncated:
            observation, _ = env.reset()
            agent.reset()
            state[...] = 0


@pytest.mark.parametrize("accelerate", [True, False])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_masks_with_memory(algo: str, accelerate: bool, tmp_path: Path) -> None:
    """The environment raises an error for an invalid action."""
    run = train(tmp_path, {"algo": algo, "env": f"{ROOT}/examples/dispatcher.py:Dispatcher"}, accelerate=accelerate)
    [row] = evaluate(run, episodes=3)
    assert row["episodes"] == 3
    assert "the same actions" in export(run).checked
    agent = paceline.load(run)
    env = agent.make_env()
    observation, info = env.reset(seed=3)
    masks = [agent.mask_of(env, observation, info)] * 2
    batched = np.stack([observation] * 2)
    assert agent.act(batched, mask=masks, batch=True) == [agent_alone(run, observation, masks[0])] * 2


def agent_alone(run: Path, observation: Any, mask: Any) -> Any:
    return paceline.load(run).act(observation, mask=mask)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), {"env": CARTPOLE, "stop": {"total_steps": 2000}})


def logits(agent: Agent, observations: Any) -> Any:
    """Of the last of these observations, with the memory of the others."""
    memory = agent.policy.start_memory(1)
    for observation in observations:
        out, _ = agent.policy.outputs(np.asarray(observation, np.float32)[None], memory)
    return out.copy()


def test_an_agent_remembers_until_it_is_reset(cartpole: Path) -> None:
    agent, other = paceline.load(cartpole), paceline.load(cartpole)
    rng = np.random.default_rng(0)
    path = rng.normal(size=(6, 2)).astype(np.float32)
    assert not np.allclose(logits(agent, path), logits(agent, path[-1:]), atol=1e-4)
    for observation in path:
        agent.act(observation)
    other.act(path[0], deterministic=False)
    other.reset()
    for observation in path:
        other.act(observation)
    np.testing.assert_array_equal(agent._memory[None], other._memory[None])


def test_a_batch_remembers_each_environment(cartpole: Path) -> None:
    agent, single = paceline.load(cartpole), [paceline.load(cartpole) for _ in range(3)]
    rng = np.random.default_rng(1)
    for step in range(8):
        observations = rng.normal(size=(3, 2)).astype(np.float32)
        ended = np.array([step == 4, False, step in (2, 3)])
        agent.reset(ended)
        for one, over in zip(single, ended, strict=True):
            if over:
                one.reset()
        actions = agent.act(observations, batch=True)
        assert actions == [one.act(observation) for one, observation in zip(single, observations, strict=True)]
        np.testing.assert_allclose(
            agent._memory[None], np.concatenate([one._memory[None] for one in single]), atol=1e-6
        )
    with pytest.raises(ValueError, match=r"2 observations after 3, .* call agent.reset"):
        agent.act(observations[:2], batch=True)
    agent.reset()
    assert len(agent.act(observations[:2], batch=True)) == 2


def test_a_batch_of_a_vector_environment_without_memory(tmp_path: Path) -> None:
    run = train(tmp_path, {"env": "paceline/Mixed-v0"}, memory="none", memory_size=64, sequence_length=64)
    agent = paceline.load(run)
    envs = gymnasium.vector.SyncVectorEnv([agent.make_env] * 2)
    observations, _ = envs.reset(seed=1)
    actions = agent.act(observations, batch=True)
    alone = [agent.act({key: value[k] for key, value in observations.items()}) for k in range(2)]
    np.testing.assert_array_equal(actions, alone)
    envs.step(np.stack(actions))


def test_a_video_begins_each_episode_afresh(cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memories: list[Any] = []
    act = Agent.act

    def watched(self: Agent, observation: Any, **options: Any) -> Any:
        memories.append(not self._memory)
        return act(self, observation, **options)

    monkeypatch.setattr(Agent, "act", watched)
    record_video(cartpole, tmp_path / "v.gif", which="last", episodes=3, stochastic=False, seed=0)
    assert memories[0] and sum(memories) == 3


def test_the_same_seed_gives_the_same_weights(tmp_path: Path, content: Callable[..., dict[str, Any]]) -> None:
    runs = [train(tmp_path / name, RUNS["ppo"] | {"seed": 4}) for name in "ab"]
    assert content(runs[0]) == content(runs[1])


def test_a_longer_sequence_is_another_run(tmp_path: Path) -> None:
    arrays = [
        checkpoint.load(checkpoint.find(train(tmp_path / str(n), RUNS["a2c"], sequence_length=n)))[0] for n in (3, 24)
    ]
    name = next(name for name in arrays[0] if "layer.weight_hh" in name)
    assert not np.array_equal(arrays[0][name], arrays[1][name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--algo", "dqn", "model.memory=lstm"],
            "model.memory=lstm is not for --algo dqn: use ppo, a2c, a3c",
        ),
        (["--algo", "sac", "model.memory=gru"], "model.memory=gru is not for --algo sac"),
        (["--algo", "td3", "model.memory=gru"], "model.memory=gru is not for --algo td3"),
        (["model.memory=lstm", "engine.device=cuda"], "engine.device=cuda: a network with model.memory=lstm learns on"),
        (["model.memory_size=32"], "model.memory_size=32 needs model.memory=lstm or gru"),
        (["model.sequence_length=32"], "model.sequence_length=32 needs model.memory=lstm or gru"),
        (["model.memory=lstm", "model.class=x.py:Net"], "is for built-in networks, not for model.class=x.py:Net"),
        (["model.memory=lstm", "engine.name=rllib"], "model.memory=lstm is not supported by --engine rllib"),
        (["model.memory=rnn"], "model.memory"),
        (["model.memory=lstm", "model.memory_size=900k"], "model.memory_size needs at least"),
    ],
)
def test_what_is_refused_says_why(arguments: list[str], message: str, cli: Cli, here: Path) -> None:
    flags = [part for argument in arguments for part in (["--set", argument] if "=" in argument else [argument])]
    env = "Pendulum-v1" if {"sac", "td3"} & set(arguments) else "CartPole-v1"
    result = cli("train", "--env", env, "--total-steps", "100", *flags)
    assert result.code == 2 and message in result.err and len(result.err.splitlines()) == 1, result.err
