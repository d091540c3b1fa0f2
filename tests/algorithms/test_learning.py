"""Environments with known answers get solved, and values come out as they must. About a second each, seeds fixed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.resolve import validate
from paceline.engines.actor_learner import ActorLearner
from paceline.envs.probe import KnownReturn, TruncationOnly
from paceline.rollout.batch import Batch

ODD = Path(__file__).parents[1] / "odd_envs.py"
HYPER: dict[str, dict[str, Any]] = {
    "ppo": {"rollout_steps": 32, "epochs": 6, "minibatch_size": 64, "learning_rate": 5e-3, "gamma": 0.5},
    "a2c": {"rollout_steps": 8, "learning_rate": 1e-2, "gamma": 0.5, "optimizer": "adam", "max_grad_norm": 0.0},
    "a3c": {"rollout_steps": 8, "learning_rate": 1e-2, "gamma": 0.5, "optimizer": "adam", "max_grad_norm": 0.0},
    "impala": {"rollout_steps": 8, "learning_rate": 1e-2, "gamma": 0.5, "max_grad_norm": 0.0},
    "dqn": {"rollout_steps": 8, "gradient_steps": 8, "learning_rate": 5e-3, "gamma": 0.5, "learning_starts": 0}
    | {"replay_size": 4000, "target_update_every": 40, "epsilon_end": 0.01},
}
LAMBDA = {"ppo": "gae_lambda", "a2c": "gae_lambda", "impala": "trace_lambda"}


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
) -> ActorLearner:
    section = {**HYPER[algo], "learning_rate_schedule": "linear", **hyper}
    if algo == "ppo":
        section["minibatch_size"] = min(section["minibatch_size"], envs * section["rollout_steps"])
    tree = {
        "algo": algo,
        "seed": seed,
        "env": {"envs_per_worker": envs, **env},
        "model": {"hidden": [32], **(model or {})},
        "engine": {"threads": 1},
        algo: section,
    }
    replica = ActorLearner(validate(tree), envs=envs)
    assert replica.collector is not None
    replica.collector.start()
    for iteration in range(iterations):
        batch, _ = replica.collect()
        if change is not None:
            change(batch)
        replica.learn(batch, 1 - iteration / iterations)
    replica.close()
    return replica


def score(replica: ActorLearner) -> float:
    """Of sampled actions: a policy that is right but not sure of it has not learned much."""
    return float(np.mean([e.total for e in replica.evaluate(20, stochastic=True, number=0)]))


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
@pytest.mark.parametrize("algo", ["a2c", "a3c", "impala"])
def test_one_step_a_rollout_repeats_what_it_sees(algo: str, kind: str, least: float) -> None:
    model = {"log_std_init": -0.5} if kind == "box" else {}
    iterations = 250 if kind == "box" else 150
    assert score(train(algo, identity(kind), iterations, envs=16, model=model, normalize_advantage=True)) > least


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"double": False, "dueling": True},
        {"prioritized": True, "n_step": 3},
        {"target_update_every": 1, "target_tau": 0.05},
    ],
    ids=["double", "dueling", "prioritized", "soft"],
)
def test_dqn_repeats_what_it_sees(options: dict[str, Any]) -> None:
    assert score(train("dqn", identity("discrete"), 60, **options)) > 9.7


def test_dqn_with_noise_on_its_weights() -> None:
    """New noise for every other step: it is all that tries other actions."""
    options: dict[str, Any] = {"exploration": "noisy", "noisy_deviation": 1.0, "gamma": 0.0, "rollout_steps": 2}
    replica = train("dqn", identity("discrete"), 100, gradient_steps=4, learning_rate=2e-3, **options)
    assert np.mean([e.total for e in replica.evaluate(20, stochastic=False, number=0)]) > 9.7


def test_ppo_with_squashed_actions() -> None:
    assert score(train("ppo", identity("box"), 30, model={"log_std_init": -0.5, "squash": True})) > 8.5


def test_impala_with_a_surrogate_and_replay() -> None:
    options: dict[str, Any] = {"surrogate_clip": 0.2, "replay_ratio": 2.0, "replay_batches": 4}
    assert score(train("impala", identity("discrete"), 60, envs=16, **options)) > 9.7


def test_a2c_with_rmsprop() -> None:
    replica = train("a2c", identity("discrete"), 150, envs=16, optimizer="rmsprop", learning_rate=0.2)
    assert score(replica) > 8.0


@pytest.mark.parametrize(
    ("algo", "iterations"), [("ppo", 25), ("a2c", 100), ("a3c", 100), ("impala", 100), ("dqn", 60)]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_reward_that_comes_late(algo: str, iterations: int, normalize: bool) -> None:
    env = {
        "id": "paceline/DelayedReward-v0",
        "normalize_observation": normalize,
        "normalize_reward": normalize,
    }
    assert score(train(algo, env, iterations, envs=16, gamma=0.99, rollout_steps=16)) == 1.0


@pytest.mark.parametrize(
    ("algo", "iterations", "rate"),
    [("ppo", 10, 2e-3), ("a2c", 60, 3e-3), ("a3c", 60, 3e-3), ("impala", 60, 3e-3), ("dqn", 40, 1e-3)],
)
def test_images(algo: str, iterations: int, rate: float) -> None:
    env = {"id": "paceline/ImageSide-v0", "kwargs": {"size": 12}}
    epochs: dict[str, Any] = {"epochs": 4} if algo == "ppo" else {}
    assert score(train(algo, env, iterations, envs=16, learning_rate=rate, rollout_steps=16, **epochs)) > 7.6


@pytest.mark.parametrize(("cnn", "size"), [("nature", 36), ("impala", 12)])
def test_images_through_other_convolutions(cnn: str, size: int) -> None:
    env = {"id": "paceline/ImageSide-v0", "kwargs": {"size": size}}
    options: dict[str, Any] = {"learning_rate": 1e-3, "rollout_steps": 16, "epochs": 4}
    assert score(train("ppo", env, 14, envs=16, model={"cnn": cnn}, **options)) > 7.6


def test_the_same_seed_gives_the_same_weights() -> None:
    for algo in HYPER:
        kind = "discrete" if algo == "dqn" else "box"
        one, same, other = (train(algo, identity(kind), 4, seed=seed).policy.parameters for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)


# -- values ---------------------------------------------------------------------------------------------------------


def fold(batch: Batch) -> None:
    """The mistake: an episode that was cut is taken for one that ended."""
    batch.terminated |= batch.truncated
    batch.truncated[:] = False


@pytest.mark.parametrize("decay", [0.0, 0.95, 1.0])
@pytest.mark.parametrize(("algo", "iterations"), [("ppo", 50), ("a2c", 250), ("impala", 250)])
def test_the_value_of_an_endless_reward_seen_through_cut_episodes(algo: str, iterations: int, decay: float) -> None:
    env = {"id": "paceline/TruncationOnly-v0"}
    options: dict[str, Any] = {"gamma": 0.9, LAMBDA[algo]: decay, "rollout_steps": 16, "learning_rate": 1e-2}
    if algo == "ppo":
        options["max_grad_norm"] = 0.0
    seen = np.ones((1, 1), np.float32)
    value = float(train(algo, env, iterations, **options).policy.value(seen)[0])
    assert value == pytest.approx(TruncationOnly.value(0.9), rel=0.02)  # 10
    if decay == 0.95:
        wrong = float(train(algo, env, iterations, change=fold, **options).policy.value(seen)[0])
        assert wrong < 5.0  # no more than the five steps it sees


@pytest.mark.parametrize(("algo", "iterations"), [("ppo", 60), ("a2c", 300), ("impala", 300)])
def test_the_value_of_each_step_to_a_real_end(algo: str, iterations: int) -> None:
    env = {"id": "paceline/KnownReturn-v0", "kwargs": {"length": 5}}
    options: dict[str, Any] = {"gamma": 0.9, LAMBDA[algo]: 0.9, "rollout_steps": 16, "learning_rate": 1e-2}
    replica = train(algo, env, iterations, **options)
    values = replica.policy.value(np.eye(6, dtype=np.float32)[:5])
    expected = [KnownReturn.value(0.9, t, length=5) for t in range(5)]  # 4.10, 3.44, 2.71, 1.90, 1
    np.testing.assert_allclose(values, expected, atol=0.15)


@pytest.mark.parametrize("options", [{}, {"n_step": 3}, {"prioritized": True}], ids=["plain", "n_step", "prioritized"])
def test_the_values_of_dqn(options: dict[str, Any]) -> None:
    """Of an endless reward seen through cut episodes, and of each step to a real end."""
    common: dict[str, Any] = {"gamma": 0.9, "rollout_steps": 16, "target_update_every": 25, **options}
    common["huber"] = 100.0  # a square: the value is to be the mean of the returns, not nearer their median
    endless = {"id": "paceline/TruncationOnly-v0"}
    seen = np.ones((1, 1), np.float32)
    value = float(train("dqn", endless, 150, **common).policy.value(seen)[0])
    assert value == pytest.approx(TruncationOnly.value(0.9), rel=0.05)  # 10
    assert float(train("dqn", endless, 150, change=fold, **common).policy.value(seen)[0]) < 5.0
    replica = train("dqn", {"id": "paceline/KnownReturn-v0", "kwargs": {"length": 5}}, 150, **common)
    values = replica.policy.value(np.eye(6, dtype=np.float32)[:5])
    np.testing.assert_allclose(values, [KnownReturn.value(0.9, t, length=5) for t in range(5)], atol=0.2)


# -- the edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", HYPER)
def test_a_simulator_that_ends_in_no_number(algo: str) -> None:
    """Its last observation is NaN: never learned from, never bootstrapped from, never counted by the normaliser."""
    env = {"id": f"{ODD}:NanAtTheEnd", "normalize_observation": True, "normalize_reward": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        replica = train(algo, env, 5, rollout_steps=8)
    assert torch.isfinite(replica.policy.parameters).all()
    assert replica.policy.moments is not None and np.isfinite(replica.policy.moments.mean).all()


@pytest.mark.parametrize("algo", HYPER)
def test_rollouts_of_one_step(algo: str) -> None:
    """Episodes of five steps in step with each other: every sixth rollout holds resets alone."""
    steps: list[int] = []
    env = {"id": "paceline/TruncationOnly-v0", "normalize_observation": True, "normalize_reward": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replica = train(algo, env, 13, rollout_steps=1, change=lambda batch: steps.append(batch.env_steps))
    assert steps == [8, 8, 8, 8, 8, 0] * 2 + [8]
    assert torch.isfinite(replica.policy.parameters).all()
