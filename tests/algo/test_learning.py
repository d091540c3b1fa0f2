"""Environments with known answers get solved, and values come out as they must. About a second each, seeds fixed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.clock import Clock
from paceline.engine.local import LocalEngine
from paceline.env.probe import KnownReturn, TruncationOnly
from paceline.resolve import validate
from paceline.rollout.batch import Batch

ODD = Path(__file__).parents[1] / "odd_envs.py"
HYPER: dict[str, dict[str, Any]] = {
    "ppo": {"rollout_steps": 32, "epochs": 6, "minibatch_size": 64, "learning_rate": 5e-3, "gamma": 0.5},
    "a2c": {"rollout_steps": 8, "learning_rate": 1e-2, "gamma": 0.5, "optimizer": "adam", "max_grad_norm": 0.0},
}


def train(
    algo: str,
    env: dict[str, Any],
    iterations: int,
    *,
    envs: int = 8,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    change: Callable[[Batch], None] | None = None,
    **hyper: Any,
) -> LocalEngine:
    section = {**HYPER[algo], "learning_rate_schedule": "linear", **hyper}
    section["minibatch_size"] = min(section.get("minibatch_size", 1), envs * section["rollout_steps"])
    if algo == "a2c":
        del section["minibatch_size"]
    tree = {
        "algo": algo,
        "seed": seed,
        "env": {"envs_per_worker": envs, **env},
        "model": {"hidden": [32], **(model or {})},
        "engine": {"threads": 1},
        algo: section,
    }
    engine, clock = LocalEngine(validate(tree)), Clock(time.perf_counter())
    engine.start()
    for iteration in range(iterations):
        batch = engine.take(clock)
        if change is not None:
            change(batch)
        engine.learn(batch, 1 - iteration / iterations, clock)
    engine.close()
    return engine


def score(engine: LocalEngine) -> float:
    """Of sampled actions: a policy that is right but not sure of it has not learned much."""
    return float(np.mean([e.total for e in engine.evaluate(20, stochastic=True, number=0)]))


def identity(kind: str) -> dict[str, Any]:
    return {"id": "paceline/Identity-v0", "kwargs": {"space": kind}}


# -- solving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "least"), [("discrete", 9.7), ("multidiscrete", 9.5), ("multibinary", 9.5), ("box", 8.5)]
)
def test_ppo_repeats_what_it_sees(kind: str, least: float) -> None:
    model = {"log_std_init": -0.5} if kind == "box" else {}
    assert score(train("ppo", identity(kind), 25, model=model)) > least


@pytest.mark.parametrize(
    ("kind", "least"), [("discrete", 9.7), ("multidiscrete", 9.5), ("multibinary", 9.5), ("box", 8.5)]
)
def test_a2c_repeats_what_it_sees(kind: str, least: float) -> None:
    model = {"log_std_init": -0.5} if kind == "box" else {}
    iterations = 250 if kind == "box" else 150
    assert score(train("a2c", identity(kind), iterations, envs=16, model=model, normalize_advantage=True)) > least


def test_ppo_with_squashed_actions() -> None:
    assert score(train("ppo", identity("box"), 30, model={"log_std_init": -0.5, "squash": True})) > 8.5


def test_a2c_with_rmsprop() -> None:
    engine = train("a2c", identity("discrete"), 150, envs=16, optimizer="rmsprop", learning_rate=0.2)
    assert score(engine) > 8.0


@pytest.mark.parametrize(("algo", "iterations"), [("ppo", 25), ("a2c", 100)])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_reward_that_comes_late(algo: str, iterations: int, normalize: bool) -> None:
    env = {
        "id": "paceline/DelayedReward-v0",
        "normalize_observation": normalize,
        "normalize_reward": normalize,
    }
    assert score(train(algo, env, iterations, envs=16, gamma=0.99, rollout_steps=16)) == 1.0


@pytest.mark.parametrize(("algo", "iterations", "rate"), [("ppo", 10, 2e-3), ("a2c", 60, 3e-3)])
def test_images(algo: str, iterations: int, rate: float) -> None:
    env = {"id": "paceline/ImageSide-v0", "kwargs": {"size": 12}}
    epochs: dict[str, Any] = {"epochs": 4} if algo == "ppo" else {}
    assert score(train(algo, env, iterations, envs=16, learning_rate=rate, rollout_steps=16, **epochs)) > 7.6


def test_the_same_seed_gives_the_same_weights() -> None:
    for algo in ("ppo", "a2c"):
        one, same, other = (train(algo, identity("box"), 4, seed=seed).policy.parameters for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)


# -- values ---------------------------------------------------------------------------------------------------------


def fold(batch: Batch) -> None:
    """The mistake: an episode that was cut is taken for one that ended."""
    batch.terminated |= batch.truncated
    batch.truncated[:] = False


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize(("algo", "iterations"), [("ppo", 50), ("a2c", 250)])
def test_the_value_of_an_endless_reward_seen_through_cut_episodes(
    algo: str, iterations: int, gae_lambda: float
) -> None:
    env = {"id": "paceline/TruncationOnly-v0"}
    options: dict[str, Any] = {"gamma": 0.9, "gae_lambda": gae_lambda, "rollout_steps": 16, "learning_rate": 1e-2}
    if algo == "ppo":
        options["max_grad_norm"] = 0.0
    seen = np.ones((1, 1), np.float32)
    value = float(train(algo, env, iterations, **options).policy.value(seen)[0])
    assert value == pytest.approx(TruncationOnly.value(0.9), rel=0.02)  # 10
    if gae_lambda == 0.95:
        wrong = float(train(algo, env, iterations, change=fold, **options).policy.value(seen)[0])
        assert wrong < 5.0  # no more than the five steps it sees


@pytest.mark.parametrize(("algo", "iterations"), [("ppo", 60), ("a2c", 300)])
def test_the_value_of_each_step_to_a_real_end(algo: str, iterations: int) -> None:
    env = {"id": "paceline/KnownReturn-v0", "kwargs": {"length": 5}}
    options: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.9, "rollout_steps": 16, "learning_rate": 1e-2}
    engine = train(algo, env, iterations, **options)
    values = engine.policy.value(np.eye(6, dtype=np.float32)[:5])
    expected = [KnownReturn.value(0.9, t, length=5) for t in range(5)]  # 4.10, 3.44, 2.71, 1.90, 1
    np.testing.assert_allclose(values, expected, atol=0.15)


# -- the edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_a_simulator_that_ends_in_no_number(algo: str) -> None:
    """Its last observation is NaN: never learned from, never bootstrapped from, never counted by the normaliser."""
    env = {"id": f"{ODD}:NanAtTheEnd", "normalize_observation": True, "normalize_reward": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        engine = train(algo, env, 5, rollout_steps=8)
    assert torch.isfinite(engine.policy.parameters).all()
    assert engine.policy.moments is not None and np.isfinite(engine.policy.moments.mean).all()


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_rollouts_of_one_step(algo: str) -> None:
    """Episodes of five steps in step with each other: every sixth rollout holds resets alone."""
    steps: list[int] = []
    env = {"id": "paceline/TruncationOnly-v0", "normalize_observation": True, "normalize_reward": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = train(algo, env, 13, rollout_steps=1, change=lambda batch: steps.append(batch.env_steps))
    assert steps == [8, 8, 8, 8, 8, 0] * 2 + [8]
    assert torch.isfinite(engine.policy.parameters).all()
