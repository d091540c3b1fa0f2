from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.algorithms.a2c import A2C
from paceline.config import ALGORITHMS, RunConfig, algorithm_class

ON_POLICY = ["ppo", "a2c", "a3c", "impala"]


def make(policy: Any, *, seed: int = 0, normalize_reward: bool = False) -> A2C:
    return A2C(policy, A2C.Settings(), rng=np.random.default_rng(seed), normalize_reward=normalize_reward)


def test_every_name_is_an_algorithm_and_says_how_it_shares_work(lab: Any) -> None:
    sharing = {name: algorithm_class(name).sharing for name in ALGORITHMS}
    known = {"ppo": "replicas", "a2c": "replicas", "a3c": "gradients", "impala": "rollouts",
             "dqn": "replay", "sac": "replay"}  # fmt: skip
    assert {name: sharing[name] for name in known} == known
    assert set(sharing.values()) <= {"replicas", "gradients", "rollouts", "replay"}
    for name in ON_POLICY:
        policy = lab.policy()
        made = algorithm_class(name)(policy, RunConfig(algo=name).hyper, rng=np.random.default_rng(0))
        metrics = made.update(lab.batch(policy), 1.0)
        assert made.version == 1 and {"total_loss", "gradient_norm", "learning_rate"} <= set(metrics)


@pytest.mark.parametrize("name", ON_POLICY)
def test_with_the_weights_of_another_it_acts_and_judges_alike(lab: Any, name: str) -> None:
    hyper = RunConfig(algo=name).hyper
    made = []
    for seed in (1, 2):
        policy = lab.policy("mlp", "gaussian", seed=seed, normalize=True)
        algorithm = algorithm_class(name)(policy, hyper, rng=np.random.default_rng(seed), normalize_reward=True)
        for turn in range(2 * seed):  # both have normalisers of their own by now
            algorithm.update(lab.batch(policy, seed=10 * seed + turn), 1.0)
        made.append(algorithm)
    one, other = made
    weights = one.weights()
    for array in weights.values():
        array.flags.writeable = False  # as they come out of a shared store
    assert one.fingerprint() != other.fingerprint()
    batch = lab.batch(one.policy, seed=99)
    other.policy.value(batch.obs[0])  # with its own normaliser, whose scale is kept for the next call
    other.load_weights(weights)
    assert one.fingerprint() == other.fingerprint() and other.version == one.version == 2
    noise = one.policy.head.noise(np.random.default_rng(0), (5,))
    for mine, theirs in zip(one.policy.act(batch.obs[0], noise), other.policy.act(batch.obs[0], noise), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(one.policy.value(batch.obs[0]), other.policy.value(batch.obs[0]))
    assert set(other.weights()) == set(weights)
    for key, array in other.weights().items():
        np.testing.assert_array_equal(array, weights[key])


def test_weights_are_copies(lab: Any) -> None:
    policy = lab.policy(normalize=True)
    algorithm = make(policy, normalize_reward=True)
    algorithm.update(lab.batch(policy), 1.0)
    weights = algorithm.weights()
    before = {name: array.copy() for name, array in weights.items()}
    algorithm.update(lab.batch(policy, seed=1), 1.0)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, before[name])
        assert not np.array_equal(array, algorithm.weights()[name]), name
    other = make(lab.policy(seed=3, normalize=True), normalize_reward=True)
    other.load_weights(weights)
    other.update(lab.batch(policy, seed=2), 1.0)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, before[name])


def test_buffers_of_a_network_of_the_user_s_go_with_the_weights(lab: Any) -> None:
    made = []
    for seed in (1, 2):
        policy = lab.policy("own", seed=seed)
        policy.net.register_buffer("scale", torch.full((3,), float(seed)))
        made.append(make(policy))
    made[1].load_weights(made[0].weights())
    net: nn.Module = made[1].policy.net
    assert dict(net.named_buffers())["scale"].tolist() == [1.0, 1.0, 1.0]


def test_a_fingerprint_sees_the_last_bit(lab: Any) -> None:
    policy = lab.policy()
    algorithm = make(policy)
    before = algorithm.fingerprint()
    flat = policy.parameters.numpy()
    kept = flat[-1]
    flat[-1] = np.nextafter(kept, np.float32(2))
    assert algorithm.fingerprint() != before
    flat[-1] = kept
    assert algorithm.fingerprint() == before
