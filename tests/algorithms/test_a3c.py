from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.a2c import A2C
from paceline.algorithms.a3c import A3C
from paceline.run.state_tree import pack, unpack


def make(policy: Any, *, seed: int = 0, normalize_reward: bool = False, **hyper: Any) -> A3C:
    return A3C(policy, A3C.Settings(**hyper), rng=np.random.default_rng(seed), normalize_reward=normalize_reward)


def received(contribution: Any) -> Any:
    """As another process gets it: copies that cannot be written to."""
    arrays = {name: array.copy() for name, array in contribution.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("net", "action"), [("mlp", "gaussian"), ("mixed", "discrete"), ("own", "multidiscrete")])
def test_one_worker_is_a2c(lab: Any, net: str, action: str, normalize: bool, optimizer: str) -> None:
    """Bit for bit, with normalisers too: nobody else changes them in between."""
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "entropy_coef": 0.01,
        "max_grad_norm": 0.3,
        "learning_rate": 1e-2,
    }
    results = []
    for algorithm, config in ((A2C, A2C.Settings), (A3C, A3C.Settings)):
        policy = lab.policy(net, action, normalize=normalize)
        made: Any = algorithm(policy, config(**options), rng=np.random.default_rng(0), normalize_reward=normalize)
        metrics = [made.update(lab.batch(policy, seed=seed), 1.0) for seed in range(3)]
        results.append((metrics, policy, made))
    (metrics, policy, a2c), (same, other, a3c) = results
    assert metrics == same
    assert torch.equal(policy.parameters, other.parameters)
    for name, array in a2c.weights().items():
        np.testing.assert_array_equal(array, a3c.weights()[name])
    assert a3c.version == a3c.optimizer_steps == 3


def test_a_worker_s_gradient_is_applied_by_the_learner(lab: Any) -> None:
    """A worker with old weights: its gradient is of those, the step is made from the new ones."""
    learner, worker = (make(lab.policy(normalize=True), normalize_reward=True, max_grad_norm=0.5) for _ in range(2))
    worker.load_weights(learner.weights())
    for seed in range(3):  # others come first
        learner.update(lab.batch(learner.policy, seed=seed), 1.0)
    batch = lab.batch(worker.policy, seed=9)
    before, kept = worker.weights(), learner.weights()
    contribution = received(worker.contribution(batch))
    for name, array in worker.weights().items():
        np.testing.assert_array_equal(array, before[name])  # it changes nothing where it is made
    assert contribution["version"].tolist() == [0] and contribution["rows"].tolist() == [batch.env_steps]

    plain = make(lab.policy(normalize=True), normalize_reward=True)
    rows = plain.rows(batch)
    plain.gradients(rows, len(rows))
    np.testing.assert_array_equal(contribution["gradient"], plain.policy.gradient)  # not clipped
    norm = float(plain.policy.gradient.norm())
    assert norm > 0.5
    expected = np.ones_like(kept["parameters"])
    square, gradient = learner.state()["optimizer"]["0"]["square"].copy(), contribution["gradient"] * (0.5 / norm)
    square = 0.99 * square + 0.01 * gradient**2
    expected = kept["parameters"] - 7e-4 * gradient / np.sqrt(square + 1e-5)

    metrics = learner.apply_contribution(contribution, 1, 1.0)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5) and learner.version == 4
    np.testing.assert_allclose(learner.weights()["parameters"], expected, rtol=1e-4, atol=1e-6)
    assert learner.weights()["observation.count"][0] == kept["observation.count"][0] + batch.env_steps
    assert learner.weights()["reward.count"][0] == kept["reward.count"][0] + batch.env_steps


def test_the_normalisers_see_the_rows_of_all_workers(lab: Any) -> None:
    learner, *workers = (make(lab.policy(normalize=True), normalize_reward=True) for _ in range(3))
    seen, returns = [], []
    for turn in range(4):
        worker = workers[turn % 2]
        if turn < 3:  # the last one is late and has not seen the newest weights
            worker.load_weights(learner.weights())
        batch = lab.batch(worker.policy, seed=turn)
        learner.apply_contribution(received(worker.contribution(batch)), turn % 2, 1.0)
        seen.append(batch.obs[:-1][batch.valid].astype(np.float64))
        returns.append(batch.discounted[batch.valid].astype(np.float64))
    weights, rows = learner.weights(), np.concatenate(seen)
    np.testing.assert_allclose(weights["observation.mean"], rows.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(weights["observation.var"], rows.var(0), rtol=1e-6)
    np.testing.assert_allclose(weights["reward.var"], [np.concatenate(returns).var()], rtol=1e-6)
    batch = lab.batch(learner.policy, seed=50)
    x = (batch.obs[0] - rows.mean(0)) / rows.std(0)
    np.testing.assert_allclose(learner.policy.prepare(batch.obs[0]), x.clip(-10, 10), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_statistics_of_each_worker(lab: Any, optimizer: str) -> None:
    """A worker's steps are then those it would make if there were no other; shared, they are not."""

    def steps(statistics: str, *workers: int) -> Any:
        """Of worker 1, when those have their turn three times; worker 0 has other gradients."""
        policy = lab.policy()
        learner = make(policy, statistics=statistics, optimizer=optimizer, max_grad_norm=0.0, learning_rate=1e-2)
        gradients = [learner.contribution(lab.batch(policy, seed=seed)) for seed in range(2)]
        changes = []
        for worker in workers * 3:
            before = policy.parameters.clone()
            learner.apply_contribution(gradients[worker], worker, 1.0)
            changes.append((worker, (policy.parameters - before).numpy()))
        return np.stack([change for worker, change in changes if worker == 1])

    alone = steps("worker", 1)
    np.testing.assert_array_equal(alone, steps("shared", 1))
    np.testing.assert_allclose(steps("worker", 0, 1), alone, atol=1e-6)
    assert np.abs(steps("shared", 0, 1) - alone).max() > 2e-5


def test_a_rollout_without_a_valid_row_is_skipped(lab: Any) -> None:
    policy = lab.policy(normalize=True)
    learner = make(policy, normalize_reward=True, normalize_advantage=True, optimizer="adam")
    learner.update(lab.batch(policy), 1.0)
    batch = lab.batch(policy, 1, 4)
    batch.valid[:] = False
    before = learner.weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = learner.update(batch, 1.0)
    assert np.isfinite(metrics["total_loss"]) and metrics["gradient_norm"] == 0.0
    assert learner.optimizer_steps == learner.version == 1
    for name, array in learner.weights().items():
        np.testing.assert_array_equal(array, before[name])


def test_the_schedule(lab: Any) -> None:
    ends = []
    for remaining, hyper in (
        (0.25, {"learning_rate": 4e-3, "learning_rate_schedule": "linear"}),
        (1.0, {"learning_rate": 1e-3}),
    ):
        policy = lab.policy()
        metrics = make(policy, **hyper).update(lab.batch(policy), remaining)
        assert metrics["learning_rate"] == 1e-3
        ends.append(policy.parameters)
    assert torch.equal(*ends)


@pytest.mark.parametrize("statistics", ["shared", "worker"])
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_saved_and_loaded_it_goes_on_exactly(lab: Any, optimizer: str, statistics: str) -> None:
    def fresh(seed: int) -> A3C:
        policy = lab.policy("mlp", "gaussian", seed=seed, normalize=True)
        return make(policy, seed=seed, normalize_reward=True, optimizer=optimizer, statistics=statistics)

    learner, worker = fresh(1), fresh(5)
    contributions = []
    for seed in range(6):
        contributions.append(received(worker.contribution(lab.batch(worker.policy, seed=seed))))
    for turn in range(3):
        learner.apply_contribution(contributions[turn], turn + 4, 1.0)
    arrays, tree = pack(learner.state())
    state = unpack({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(tree)))
    other = fresh(2)
    other.load(state)
    for turn in range(3, 6):
        one = learner.apply_contribution(contributions[turn], turn + 1, 0.5)
        assert one == other.apply_contribution(contributions[turn], turn + 1, 0.5)
    assert torch.equal(learner.policy.parameters, other.policy.parameters)
    assert (learner.version, learner.optimizer_steps) == (other.version, other.optimizer_steps) == (6, 6)
