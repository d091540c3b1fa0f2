from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.impala import CLIPPED, IMPALA
from paceline.algorithms.optimizers import Adam, RMSprop
from paceline.algorithms.returns import vtrace
from paceline.run.state_tree import pack, unpack

NETS = ["mlp", "shared", "cnn", "mixed", "own"]
ACTIONS = ["discrete", "multidiscrete", "multibinary", "gaussian", "squashed"]


def make(policy: Any, *, seed: int = 0, normalize_reward: bool = False, **hyper: Any) -> IMPALA:
    return IMPALA(policy, IMPALA.Settings(**hyper), rng=np.random.default_rng(seed), normalize_reward=normalize_reward)


def plain_loss(lab: Any, plain: Any, policy: Any, batch: Any, hyper: IMPALA.Settings) -> tuple[Any, dict[str, float]]:
    """Espeholt et al. 2018, section 4.2, the targets taken as constants; or PPO's surrogate of the same advantage."""
    valid = torch.from_numpy(batch.valid)
    steps, envs = batch.reward.shape
    flat = batch.obs.reshape(-1, *batch.obs.shape[2:])
    action = np.concatenate([batch.action, np.zeros_like(batch.action[:1])]).reshape(len(flat), -1)
    log_prob, entropy, value = (x.reshape(steps + 1, envs) for x in lab.evaluate(plain, policy, flat, action))
    log_prob, entropy = log_prob[:-1][valid], entropy[:-1][valid]
    ratio = torch.exp(log_prob - torch.from_numpy(batch.logp[batch.valid]))
    ratios = np.zeros(batch.reward.shape, np.float32)
    ratios[batch.valid] = ratio.detach()
    advantages, targets = vtrace(
        batch.reward,
        value.detach().numpy().astype(np.float32),
        ratios,
        batch.terminated,
        batch.truncated,
        gamma=hyper.gamma,
        trace_lambda=hyper.trace_lambda,
        clip_rho=hyper.clip_rho,
        clip_c=hyper.clip_c,
    )
    kept = advantages[batch.valid].astype(np.float64)
    if hyper.normalize_advantage:
        kept = (kept - kept.mean()) / (kept.std() + 1e-8)
    advantage = torch.from_numpy(kept).to(plain.dtype)
    if hyper.surrogate_clip is None:
        policy_loss = -(ratio.detach().clamp(max=hyper.clip_pg_rho) * advantage * log_prob).mean()
    else:
        clipped = ratio.clamp(1 - hyper.surrogate_clip, 1 + hyper.surrogate_clip)
        assert (ratio > clipped).any() and (ratio < clipped).any() and (ratio == clipped).any()
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    value_loss = ((value[:-1][valid] - torch.from_numpy(targets[batch.valid])) ** 2).mean()
    total = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * entropy.mean()
    return total, {
        "policy_loss": float(policy_loss.detach()),
        "value_loss": float(value_loss.detach()),
        "entropy": float(entropy.mean().detach()),
        "total_loss": float(total.detach()),
        "approx_kl": float((ratio - 1 - ratio.log()).mean().detach()),
        "importance_mean": float(ratio.mean().detach()),
        "clip_fraction": float((ratio > CLIPPED * hyper.clip_rho).double().mean()),
    }


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"surrogate_clip": 0.15, "entropy_coef": 0.05, "clip_rho": 0.7, "clip_c": 1.3},
        {"clip_pg_rho": 1.2, "normalize_advantage": True, "entropy_coef": 0.05, "trace_lambda": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("accelerate", [True, False])
def test_the_gradient_is_that_of_the_loss(
    lab: Any, net: str, action: str, options: dict[str, Any], accelerate: bool
) -> None:
    policy = lab.policy(net, action, accelerate=accelerate)
    algorithm = make(policy, value_coef=0.7, gamma=0.9, **options)
    batch = lab.batch(policy, 20, 6)
    lab.shake(policy, 0.15, seed=1)  # the policy that learns is not the one that acted
    plain = lab.plain(policy)
    total, wanted = plain_loss(lab, plain, policy, batch, algorithm.hyper)
    assert 0.1 < wanted["clip_fraction"] < 0.95
    expected = torch.autograd.grad(total, plain.parameters, allow_unused=True)
    policy.gradient.fill_(77.0)
    metrics, value, target = algorithm.gradients(batch, batch.reward)
    lab.assert_gradient(policy, expected)
    assert set(metrics) == set(IMPALA.statistics)
    assert metrics == pytest.approx(wanted, rel=2e-3, abs=1e-4)
    np.testing.assert_allclose(value, policy.value(batch.obs[:-1][batch.valid]), rtol=1e-4, atol=1e-5)
    assert value.shape == target.shape == (batch.env_steps,)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_an_update_is_the_one_written_in_torch(lab: Any, optimizer: str) -> None:
    """Three batches of a policy that stays behind, each one step of the whole."""
    policy, actor = lab.policy("mlp", "gaussian"), lab.policy("mlp", "gaussian")
    algorithm = make(policy, learning_rate=1e-2, entropy_coef=0.01, max_grad_norm=0.4, optimizer=optimizer)
    plain = lab.plain(policy)
    adam = torch.optim.Adam(plain.parameters, 1e-2, eps=1e-5)
    squares = [torch.ones_like(p) for p in plain.parameters]
    for seed in range(3):
        batch = lab.batch(actor, seed=seed)
        total, wanted = plain_loss(lab, plain, policy, batch, algorithm.hyper)
        adam.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters, 0.4)
        if optimizer == "adam":
            adam.step()
        else:
            with torch.no_grad():
                for p, s in zip(plain.parameters, squares, strict=True):
                    assert p.grad is not None
                    s.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    p -= 1e-2 * p.grad / (s + 1e-5).sqrt()
        metrics = algorithm.update(batch, 1.0)
        assert metrics["total_loss"] == pytest.approx(wanted["total_loss"], rel=1e-2, abs=1e-3)
        lab.assert_weights(policy, plain, atol=3e-4 if optimizer == "adam" else 1e-5)
    assert algorithm.optimizer_steps == algorithm.version == 3
    assert isinstance(algorithm.optimizer, Adam if optimizer == "adam" else RMSprop)


def test_without_lag_nothing_is_clipped(lab: Any) -> None:
    policy = lab.policy()
    metrics = make(policy).update(lab.batch(policy), 1.0)
    assert metrics["clip_fraction"] == 0.0 and metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["importance_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("action", ["discrete", "gaussian"])
@pytest.mark.parametrize("net", ["mlp", "shared", "cnn", "own"])
def test_invalid_rows_change_nothing(lab: Any, net: str, action: str) -> None:
    """Nor do values at collection, which are another policy's; what comes after an end may be no number."""
    results = []
    for poisoned in (False, True):
        policy = lab.policy(net, action, normalize=net in ("mlp", "own"))
        algorithm = make(policy, normalize_reward=True, normalize_advantage=True, entropy_coef=0.01, replay_ratio=1.0)
        for seed in (0, 1):
            batch = lab.batch(policy, seed=seed)
            if poisoned:
                invalid = ~batch.valid
                for array in (batch.reward, batch.logp, batch.discounted):
                    array[invalid] = np.nan
                batch.value[:] = np.nan
                batch.action[invalid] = 10**6 if action == "discrete" else np.nan
                batch.obs[1:][batch.terminated] = 255 if net == "cnn" else np.nan
                batch.obs[0][invalid[0]] = 255 if net == "cnn" else np.nan
            metrics = algorithm.update(batch, 1.0)
        results.append((policy.parameters.clone(), metrics))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert all(np.isfinite(value) for value in results[0][1].values())


def test_a_cut_episode_is_worth_what_follows(lab: Any) -> None:
    """The successor of a truncated step is no row of its own, but its value counts."""
    policy = lab.policy()
    batch = lab.batch(policy, 12, 6)
    first, _, target = make(policy).gradients(batch, batch.reward)
    moved = batch.obs.copy()
    batch.obs[1:][batch.truncated] += 1.0
    second, _, other = make(policy).gradients(batch, batch.reward)
    changed = np.zeros(batch.valid.shape, np.bool_)
    changed[batch.valid] = target != other
    assert changed[batch.truncated].all() and not changed[batch.terminated].any()
    assert first["value_loss"] != second["value_loss"] and not np.array_equal(moved, batch.obs)


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_a_rollout_without_a_valid_row(lab: Any, net: str) -> None:
    policy = lab.policy(net)
    algorithm = make(policy, normalize_reward=True, normalize_advantage=True)
    batch = lab.batch(policy, 1, 4)
    batch.valid[:] = False
    before = policy.parameters.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = algorithm.update(batch, 1.0)
    assert torch.equal(policy.parameters, before)
    assert np.isfinite(metrics["total_loss"]) and metrics["gradient_norm"] == 0.0


def test_normalisers_learn_from_new_data_and_the_rewards_are_scaled(lab: Any) -> None:
    policy = lab.policy(normalize=True)
    algorithm = make(policy, normalize_reward=True, replay_ratio=3.0, learning_rate=1e-9)
    returns = []
    for seed in range(3):
        batch = lab.batch(policy, seed=seed)
        plain = lab.policy(normalize=True)
        plain.load({name: array.copy() for name, array in policy.state().items()})
        returns.append(batch.discounted[batch.valid].astype(np.float64))
        scale = np.concatenate(returns).std()
        wanted, _, _ = make(plain).gradients(batch, (batch.reward / scale).astype(np.float32))
        metrics = algorithm.update(batch, 1.0)
        assert metrics["value_loss"] == pytest.approx(wanted["value_loss"], rel=1e-3)
    weights = algorithm.weights()
    assert weights["observation.count"].tolist() == weights["reward.count"].tolist() == [sum(map(len, returns))]
    assert algorithm.optimizer_steps == 12 and algorithm.version == 3


# -- replay ---------------------------------------------------------------------------------------------------------


def test_replays_are_of_earlier_batches(lab: Any) -> None:
    seen: list[float] = []

    class Spy(IMPALA):
        def gradients(self, batch: Any, reward: Any) -> Any:
            seen.append(float(batch.reward[0, 0]))
            return super().gradients(batch, reward)

    policy = lab.policy()
    algorithm = Spy(policy, IMPALA.Settings(replay_ratio=2.0, replay_batches=3), rng=np.random.default_rng(0))
    batch = lab.batch(policy)  # the same memory each time, as a collector's
    for number in range(12):
        batch.reward[0, 0] = number
        seen.clear()
        algorithm.update(batch, 1.0)
        assert seen[0] == number and len(seen) == 3
        if number:
            assert all(max(0, number - 3) <= earlier < number for earlier in seen[1:])
    assert algorithm.optimizer_steps == 36


@pytest.mark.parametrize(("ratio", "steps"), [(0.0, 20), (0.25, 25), (0.5, 30), (1.5, 50)])
def test_a_part_of_a_replay_comes_as_often(lab: Any, ratio: float, steps: int) -> None:
    policy = lab.policy()
    algorithm = make(policy, replay_ratio=ratio)
    batch = lab.batch(policy, 4, 2)
    for _ in range(20):
        algorithm.update(batch, 1.0)
    assert algorithm.optimizer_steps == steps and algorithm.version == 20


# -- schedules, saving ----------------------------------------------------------------------------------------------


def test_the_schedule_and_the_longest_gradient(lab: Any) -> None:
    def trained(remaining: float, **hyper: Any) -> tuple[Any, dict[str, float]]:
        policy = lab.policy()
        return policy.parameters, make(policy, **hyper).update(lab.batch(policy), remaining)

    linear, metrics = trained(0.25, learning_rate=4e-3, learning_rate_schedule="linear")
    constant, _ = trained(1.0, learning_rate=1e-3)
    assert torch.equal(linear, constant) and metrics["learning_rate"] == 1e-3
    _, unclipped = trained(1.0, max_grad_norm=0.0)
    short, clipped = trained(1.0, max_grad_norm=1e-3, optimizer="rmsprop")
    assert unclipped["gradient_norm"] == clipped["gradient_norm"] > 0.1  # the length it had before
    assert float((short - lab.policy().parameters).norm()) < 1e-6


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_saved_and_loaded_it_goes_on_exactly(lab: Any, optimizer: str) -> None:
    def fresh(seed: int) -> IMPALA:
        policy = lab.policy("mlp", "gaussian", seed=seed, normalize=True)
        return make(policy, seed=seed, normalize_reward=True, optimizer=optimizer, replay_ratio=1.5, replay_batches=2)

    algorithm, other = fresh(1), fresh(2)
    batches = [lab.batch(algorithm.policy, seed=seed) for seed in range(6)]
    for batch in batches[:3]:
        algorithm.update(batch, 1.0)
    other.update(batches[5], 1.0)
    arrays, tree = pack(algorithm.state())
    state = unpack({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(tree)))
    other.load(state)
    for batch in batches[3:]:
        assert algorithm.update(batch, 0.5) == other.update(batch, 0.5)
    assert torch.equal(algorithm.policy.parameters, other.policy.parameters)
    assert (algorithm.version, algorithm.optimizer_steps) == (other.version, other.optimizer_steps)
