"""Runs with Dict and Tuple actions: they train, resume, evaluate, export, and act in the env's own form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gymnasium import spaces

import paceline
import space_envs
from paceline.engines.rllib.env import with_rllib_spaces
from paceline.envs.check import check_env
from paceline.envs.native_vector import NativeVector
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.rollout.baselines import RandomPolicy
from paceline.rollout.episodes import play
from paceline.run import checkpoint
from paceline.spaces import ActionCodec

FILE = Path(__file__).parent / "space_envs.py"


def settings(out: Path, algo: str, kind: str, **kwargs: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"rollout_steps": 10} if algo == "ppo" else {"learning_starts": 12, "batch_size": 8}
    return {
        "algo": algo,
        "env": {"id": f"{FILE}:Nested", "kwargs": {"kind": kind} | kwargs, "envs_per_worker": 2},
        "out": str(out),
        "engine": {"threads": 1},
        "stop": {"iterations": 2},
        algo: sizes,
    }


RUNS = [
    ("ppo", "choices"),
    ("ppo", "numbers"),
    ("ppo", "mixed"),
    ("ppo", "by number"),
    ("dqn", "one choice"),
    ("sac", "bounded"),
]


@pytest.mark.parametrize(("algo", "kind"), RUNS)
def test_it_trains_resumes_evaluates_and_exports(algo: str, kind: str, tmp_path: Path) -> None:
    whole = paceline.train(settings(tmp_path / "whole", algo, kind) | {"stop": {"iterations": 4}})
    run = paceline.train(settings(tmp_path / "parts", algo, kind))
    run = paceline.train(settings(tmp_path / "parts", algo, kind) | {"stop": {"iterations": 4}}, resume=run.path)
    assert json.loads((run.path / "resume.json").read_text())["level"] == "exact"
    first, second = (checkpoint.load(checkpoint.find(path, "last"))[0] for path in (whole.path, run.path))
    weights = [name for name in first if "policy" in name]
    assert weights and all(np.array_equal(first[name], second[name]) for name in weights)
    [row] = evaluate(run.path, episodes=3)
    assert row["episodes"] == 3

    done = export(run.path)
    assert "on 64 observations of the environment: the same actions" in done.checked
    session, agent = onnxruntime.InferenceSession(str(done.path)), paceline.load(run.path)
    names = [port.name for port in done.outputs if port.name.startswith("action")]
    env = agent.make_env()
    observation, _ = env.reset(seed=3)
    for _ in range(space_envs.LENGTH):
        action = agent.act(observation)
        assert env.action_space.contains(action)
        parts = session.run(names, {"observation": observation[None]})
        numbers = [float(number) for part in parts for number in np.ravel(part)]
        np.testing.assert_allclose(numbers, space_envs.flat(action), rtol=1e-5, atol=1e-5)
        observation = env.step(action)[0]
    batch = agent.act(np.stack([observation, observation]), batch=True)
    assert len(batch) == 2 and all(env.action_space.contains(action) for action in batch)


def test_masks_are_over_all_parts(tmp_path: Path) -> None:
    tree = settings(tmp_path, "ppo", "choices", masked=True)
    run = paceline.train(tree)  # the env refuses an invalid action
    assert [row["episodes"] for row in evaluate(run.path, episodes=3)] == [3]
    assert "the same actions" in export(run.path).checked


def test_columns_of_choices_come_before_those_of_numbers() -> None:
    codec = ActionCodec(space_envs.ACTIONS["mixed"])
    assert codec.nvec == (2, 2, 3) and codec.shape == (6,) and codec.num_outputs == 10
    [action] = codec.split(np.array([[1, 0, 2, -1, 0.5, 1]], np.float32))  # grip (2), go; aim (2), power
    assert action["go"] == 3 and action["aim"][1].tolist() == [1, 0]
    np.testing.assert_allclose(action["aim"][0], [-2, 1.75])
    np.testing.assert_allclose(action["power"], [8])
    np.testing.assert_allclose(codec.encode(action), [1, 0, 2, -1, 0.5, 1])
    [again] = codec.unpack(codec.pack([action]))
    assert space_envs.flat(again) == space_envs.flat(action) and codec.space.contains(again)


def test_masks_are_for_the_choices_of_a_mixture(tmp_path: Path) -> None:
    run = paceline.train(settings(tmp_path, "ppo", "mixed", masked=True))  # the env refuses an invalid choice
    for is_random in (False, True):
        assert [row["episodes"] for row in evaluate(run.path, episodes=3, random=is_random)] == [3]
    assert "the same actions" in export(run.path).checked
    assert not check_env(lambda: space_envs.Nested("mixed", masked=True), "nested").problems


@pytest.mark.parametrize("kind", ["choices", "numbers", "mixed"])
def test_a_vector_env_gets_gymnasiums_batched_form(kind: str) -> None:
    env = NativeVector(space_envs.NestedVector(3, kind), seed=1)
    assert len(play(env, RandomPolicy(env, 2), 6)) == 6
    assert all(len(one.taken) >= 2 * space_envs.LENGTH for one in env.env.envs)


def test_rllib_sees_one_array() -> None:
    env = with_rllib_spaces(space_envs.Nested("choices"))
    assert env.action_space == spaces.MultiDiscrete([2, 2, 3, 2, 4])
    env.reset(seed=0)
    observation = env.step(np.array([1, 0, 2, 1, 3]))[0]
    np.testing.assert_array_equal(observation[:5], [1, 0, 3, 1, 2])
    with pytest.raises(paceline.UserError, match="choices or numbers"):
        with_rllib_spaces(space_envs.Nested("mixed"))
    numbers = with_rllib_spaces(space_envs.Nested("bounded"))
    assert numbers.action_space == spaces.Box(-1, 1, (4,), np.float32)
    numbers.reset(seed=0)
    np.testing.assert_allclose(numbers.step(np.array([-1, 0.5, 0, 1], np.float32))[0][:4], [-1, 2, 0.5, 1])


@pytest.mark.parametrize("kind", space_envs.ACTIONS)
def test_the_check_accepts_them(kind: str) -> None:
    report = check_env(lambda: space_envs.Nested(kind), "nested")
    assert not report.problems
    assert bool(report.warnings) == (kind == "numbers"), report.warnings


def test_the_check_takes_valid_actions() -> None:
    report = check_env(lambda: space_envs.Nested(masked=True), "nested")
    assert not report.problems and any("masks" in line for line in report.spaces)


@pytest.mark.parametrize(
    ("algo", "kind", "named"),
    [
        ("dqn", "choices", "one discrete action"),
        ("dqn", "mixed", "one discrete action"),
        ("sac", "choices", "continuous"),
        ("sac", "mixed", "continuous"),
        ("td3", "numbers", "finite"),
    ],
)
def test_an_algorithm_refuses_what_it_cannot(algo: str, kind: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(paceline.UserError, match=named):
        paceline.train(settings(tmp_path, algo, kind))
