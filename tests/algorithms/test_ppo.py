from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.ppo import PPO
from paceline.algorithms.rows import Minibatches, Rows
from paceline.collective.group import Group
from paceline.models.normalizer import CLIP
from paceline.run.state_tree import pack, unpack

NETS = ["mlp", "shared", "cnn", "mixed", "own"]
ACTIONS = ["discrete", "multidiscrete", "multibinary", "gaussian", "squashed"]


def make(
    policy: Any, *, seed: int = 0, group: Group | None = None, normalize_reward: bool = False, **hyper: Any
) -> PPO:
    rng = np.random.default_rng(seed)
    return PPO(policy, PPO.Settings(**hyper), rng=rng, group=group, normalize_reward=normalize_reward)


def plain_loss(
    lab: Any, plain: Any, policy: Any, rows: Rows, hyper: PPO.Settings, clip: float
) -> tuple[Any, dict[str, Any]]:
    """Schulman et al. 2017, equation 9, with the value clipped as in their code."""
    old_logp, old_value, advantage, target = (torch.from_numpy(f.copy()).to(plain.dtype) for f in rows.fields)
    log_prob, entropy, value = lab.evaluate(plain, policy, rows.obs, rows.action)
    ratio = torch.exp(log_prob - old_logp)
    clipped = torch.clamp(ratio, 1 - clip, 1 + clip)
    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    errors = (value - target) ** 2
    near = old_value + torch.clamp(value - old_value, -(hyper.value_clip or 0), hyper.value_clip or 0)
    if hyper.value_clip is not None:
        errors = torch.max(errors, (near - target) ** 2)
    total = policy_loss + hyper.value_coef * errors.mean() - hyper.entropy_coef * entropy.mean()
    statistics = {
        "policy_loss": policy_loss,
        "value_loss": errors.mean(),
        "entropy": entropy.mean(),
        "total_loss": total,
        "approx_kl": (ratio - 1 - torch.log(ratio)).mean(),
        "clip_fraction": (ratio != clipped).double().mean(),
    }
    found = {
        "up, wanted": (ratio > 1 + clip) & (advantage > 0),
        "up, unwanted": (ratio > 1 + clip) & (advantage < 0),
        "down, wanted": (ratio < 1 - clip) & (advantage < 0),
        "down, unwanted": (ratio < 1 - clip) & (advantage > 0),
        "near": ratio == clipped,
        "value flat": ((value - old_value).abs() > (hyper.value_clip or 0))
        & ((near - target) ** 2 > (value - target) ** 2),
        "value far but not flat": ((value - old_value).abs() > (hyper.value_clip or 0))
        & ((near - target) ** 2 < (value - target) ** 2),
    }
    return total, {name: float(value.detach()) for name, value in statistics.items()} | {
        name: bool(rows.any()) for name, rows in found.items()
    }


# -- the gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("value_clip", "entropy_coef"), [(None, 0.0), (0.3, 0.05)])
@pytest.mark.parametrize("accelerate", [True, False])
def test_the_gradient_is_that_of_the_loss(
    lab: Any, net: str, action: str, value_clip: float | None, entropy_coef: float, accelerate: bool
) -> None:
    policy = lab.policy(net, action, accelerate=accelerate)
    algorithm = make(policy, value_clip=value_clip, entropy_coef=entropy_coef, value_coef=0.7, gamma=0.9)
    batch = lab.batch(policy, 30, 8)
    rows = algorithm.rows(batch)
    lab.shake(policy, 0.15, seed=1)  # now the policy is not the one that acted
    plain = lab.plain(policy)
    total, wanted = plain_loss(lab, plain, policy, rows, algorithm.hyper, 0.2)
    for regime in ("up, wanted", "up, unwanted", "down, wanted", "down, unwanted", "near"):
        assert wanted[regime], regime  # every branch is in it
    assert value_clip is None or (wanted["value flat"] and wanted["value far but not flat"])
    expected = torch.autograd.grad(total, plain.parameters, allow_unused=True)
    policy.gradient.fill_(77.0)
    statistics = algorithm.gradients(rows, len(rows))
    lab.assert_gradient(policy, expected)
    assert statistics == pytest.approx({name: wanted[name] for name in PPO.statistics}, rel=1e-3, abs=1e-5)


def test_before_the_first_step_it_is_the_policy_gradient(lab: Any) -> None:
    policy = lab.policy()
    algorithm = make(policy)
    rows = algorithm.rows(lab.batch(policy))
    statistics = algorithm.gradients(rows, len(rows))
    assert statistics["approx_kl"] == pytest.approx(0.0, abs=1e-6) and statistics["clip_fraction"] == 0.0
    assert statistics["policy_loss"] == pytest.approx(-float(rows.fields[2].mean()), abs=1e-6)


# -- the update -----------------------------------------------------------------------------------------------------


def plain_update(lab: Any, policy: Any, batch: Any, hyper: PPO.Settings, seed: int) -> Any:
    """PPO as one would write it in torch, from the batch to the new weights."""
    plain = lab.plain(policy)
    advantage, target = lab.advantages(batch, hyper.gamma, hyper.gae_lambda)
    valid = batch.valid
    kept = advantage[valid]
    if hyper.normalize_advantage:
        kept = (kept - kept.mean()) / (kept.std() + 1e-8)
    fields = np.stack([batch.logp[valid], batch.value[:-1][valid], kept, target[valid]])
    obs, action, count = batch.obs[:-1][valid], batch.action[valid], int(valid.sum())
    optimizer = torch.optim.Adam(plain.parameters, hyper.learning_rate, eps=1e-5)
    rng, parts = np.random.default_rng(seed), -(-count // hyper.minibatch_size)
    for _ in range(hyper.epochs):
        order = rng.permutation(count)
        for k in range(parts):
            part = order[count * k // parts : count * (k + 1) // parts]
            total, _ = plain_loss(lab, plain, policy, Rows(obs[part], action[part], fields[:, part]), hyper, hyper.clip)
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_([p for p in plain.parameters if p.grad is not None], hyper.max_grad_norm)
            optimizer.step()
    return plain


@pytest.mark.parametrize(
    ("net", "action"), [*zip(NETS, ACTIONS, strict=True), ("mlp", "gaussian"), ("own", "discrete")]
)
@pytest.mark.parametrize("accelerate", [True, False])
def test_an_update_is_the_one_written_in_torch(lab: Any, net: str, action: str, accelerate: bool) -> None:
    policy = lab.policy(net, action, accelerate=accelerate)
    options: dict[str, Any] = {"epochs": 3, "minibatch_size": 25, "learning_rate": 1e-3, "entropy_coef": 0.01}
    algorithm = make(policy, seed=5, value_clip=0.2, max_grad_norm=0.3, gae_lambda=0.9, **options)
    batch = lab.batch(policy)
    plain = plain_update(lab, policy, batch, algorithm.hyper, 5)
    before = policy.parameters.clone()
    metrics = algorithm.update(batch, 1.0)
    moved = float((policy.parameters - before).abs().max())
    steps = 3 * -(-batch.env_steps // 25)
    assert moved > 2e-3 and algorithm.optimizer_steps == steps
    lab.assert_weights(policy, plain, atol=1e-4)
    assert metrics["epochs_done"] == 3 and metrics["learning_rate"] == 1e-3 and metrics["clip"] == 0.2


def test_every_valid_row_is_seen_once_an_epoch_and_no_other(lab: Any) -> None:
    seen: list[list[float]] = []

    class Spy(PPO):
        def gradients(self, rows: Rows, count: int, **options: Any) -> Any:
            seen.append(rows.obs[:, 0].tolist())
            return super().gradients(rows, count, **options)

    policy = lab.policy()
    batch = lab.batch(policy, 20, 6)
    batch.obs[:-1, :, 0] = np.arange(120).reshape(20, 6)
    rows = int(batch.valid.sum())
    assert 60 < rows < 110
    for size in (1, 7, 50, rows - 1, rows, 120):
        seen.clear()
        Spy(policy, PPO.Settings(epochs=3, minibatch_size=size), rng=np.random.default_rng(1)).update(batch, 1.0)
        parts = -(-rows // size)
        assert len(seen) == 3 * parts and max(map(len, seen)) <= size
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
        epochs = [list(itertools.chain(*seen[k * parts : (k + 1) * parts])) for k in range(3)]
        for epoch in epochs:
            assert sorted(epoch) == batch.obs[:-1, :, 0][batch.valid].tolist()
        if parts > 1:
            assert len({tuple(epoch) for epoch in epochs}) == 3  # shuffled anew


@pytest.mark.parametrize("rows", range(1, 40))
def test_the_minibatches_of_one_process(rows: int) -> None:
    for largest in range(1, 45):
        plan = Minibatches.of([rows], 0, largest)
        assert plan.counts == [part.stop - part.start for part in plan.parts]
        assert list(itertools.chain(*(range(part.start, part.stop) for part in plan.parts))) == list(range(rows))
        assert len(plan.parts) == -(-rows // largest)  # as few as fit
        assert min(plan.counts) >= 1 and max(plan.counts) <= largest and max(plan.counts) - min(plan.counts) <= 1


@pytest.mark.parametrize("rows", [[5, 5], [1, 1], [0, 7], [100, 1, 30], [33, 34, 35], [0, 0, 2]])
def test_the_minibatches_of_several_members(rows: list[int]) -> None:
    for largest in (1, 2, 5, 16, 1000):
        plans = [Minibatches.of(rows, rank, largest) for rank in range(len(rows))]
        assert all(plan.counts == plans[0].counts for plan in plans)
        for plan, own in zip(plans, rows, strict=True):
            assert list(itertools.chain(*(range(part.start, part.stop) for part in plan.parts))) == list(range(own))
        for k, count in enumerate(plans[0].counts):
            assert count == sum(plan.parts[k].stop - plan.parts[k].start for plan in plans) > 0
        assert len(plans[0].counts) <= -(-sum(rows) // largest)
        assert max(plans[0].counts) - min(plans[0].counts) <= len(rows)


def test_no_rows_no_minibatches() -> None:
    assert Minibatches.of([0], 0, 5) == Minibatches.of([0, 0], 1, 5) == Minibatches([], [])


# -- rows that are not valid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["discrete", "gaussian"])
@pytest.mark.parametrize("net", ["mlp", "cnn", "own"])
def test_invalid_rows_change_nothing(lab: Any, net: str, action: str) -> None:
    results = []
    for poisoned in (False, True):
        policy = lab.policy(net, action, normalize=net != "cnn")
        algorithm = make(policy, normalize_reward=True, epochs=2, minibatch_size=20, value_clip=0.2, entropy_coef=0.01)
        for seed in (0, 1):
            batch = lab.batch(policy, seed=seed)
            if poisoned:
                invalid = ~batch.valid
                assert invalid.any()
                for array in (batch.reward, batch.logp, batch.discounted):
                    array[invalid] = np.nan
                batch.value[1:][batch.terminated] = np.nan
                batch.action[invalid] = 10**6 if action == "discrete" else np.nan
                batch.obs[:-1][invalid] = 255 if net == "cnn" else np.nan
            metrics = algorithm.update(batch, 1.0)
        results.append((policy.parameters.clone(), metrics))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] and all(np.isfinite(value) for value in results[0][1].values())


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_rollout_without_a_valid_row(lab: Any, max_grad_norm: float) -> None:
    """One step of environments that all reset at once."""
    policy = lab.policy(normalize=True)
    algorithm = make(policy, normalize_reward=True, minibatch_size=4, max_grad_norm=max_grad_norm)
    batch = lab.batch(policy, 1, 4)
    batch.valid[:] = False
    before = policy.parameters.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = algorithm.update(batch, 1.0)
    assert torch.equal(policy.parameters, before) and algorithm.optimizer_steps == 0
    assert np.isfinite(metrics["total_loss"]) and np.isfinite(metrics["gradient_norm"])


# -- advantages and rewards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_and_targets_of_the_valid_rows(lab: Any, normalize: bool) -> None:
    policy = lab.policy()
    algorithm = make(policy, gamma=0.9, gae_lambda=0.8, normalize_advantage=normalize)
    batch = lab.batch(policy, 20, 6)
    rows = algorithm.rows(batch)
    advantage, target = lab.advantages(batch, 0.9, 0.8)
    wanted = advantage[batch.valid]
    if normalize:
        wanted = (wanted - wanted.mean()) / wanted.std()
        assert abs(rows.fields[2].mean()) < 1e-6 and rows.fields[2].std() == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose(rows.fields[2], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows.fields[3], target[batch.valid], rtol=1e-4, atol=1e-5)  # never normalised
    np.testing.assert_array_equal(rows.fields[0], batch.logp[batch.valid])
    np.testing.assert_array_equal(rows.fields[1], batch.value[:-1][batch.valid])
    np.testing.assert_array_equal(rows.action, batch.action[batch.valid])
    np.testing.assert_array_equal(rows.obs, batch.obs[:-1][batch.valid])


def test_advantages_that_are_all_the_same_become_zero(lab: Any) -> None:
    policy = lab.policy()
    batch = lab.batch(policy, 20, 6, ends=0.0)
    batch.valid[:] = True
    batch.value[:] = 0
    batch.reward[:] = 0.1
    rows = make(policy, gamma=0.0).rows(batch)
    np.testing.assert_array_equal(rows.fields[2], np.zeros(120))


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return(lab: Any) -> None:
    policy = lab.policy()
    algorithm = make(policy, normalize_reward=True, normalize_advantage=False, gamma=0.9, gae_lambda=0.8)
    seen = np.zeros(0)
    for seed in (0, 1, 2):
        batch = lab.batch(policy, 20, 6, seed=seed)
        batch.reward *= 50 if seed == 2 else 1
        raw = batch.reward.copy()
        seen = np.concatenate([seen, batch.discounted[batch.valid].astype(np.float64)])
        scaled = np.clip(raw / seen.std(), -CLIP, CLIP)
        rows = algorithm.rows(batch)
        advantage, _ = lab.advantages(batch, 0.9, 0.8, reward=scaled)
        np.testing.assert_allclose(rows.fields[2], advantage[batch.valid], rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(batch.reward, raw)
    assert (np.abs(scaled) == CLIP).any()


def test_the_observation_normaliser_learns_after_the_policy_has(lab: Any) -> None:
    seen: list[Any] = []

    class Spy(PPO):
        def gradients(self, rows: Rows, count: int, **options: Any) -> Any:
            seen.append(rows.obs.copy())
            return super().gradients(rows, count, **options)

    policy = lab.policy(normalize=True)
    algorithm = Spy(policy, PPO.Settings(epochs=1, minibatch_size=10_000), rng=np.random.default_rng(0))
    rows: list[Any] = []
    for seed in (0, 1):
        batch = lab.batch(policy, seed=seed)
        before = policy.prepare(batch.obs[:-1][batch.valid])
        algorithm.update(batch, 1.0)
        np.testing.assert_array_equal(seen[-1], before)  # as they were when the policy acted
        rows.append(batch.obs[:-1][batch.valid].astype(np.float64))
        everything = np.concatenate(rows)
        assert policy.moments is not None
        np.testing.assert_allclose(policy.moments.mean, everything.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(policy.moments.var, everything.var(0), rtol=1e-5)
        assert not np.array_equal(policy.prepare(batch.obs[:-1][batch.valid]), before)


# -- stopping early, schedules, saving ------------------------------------------------------------------------------


def test_the_passes_stop_when_the_policy_has_moved_too_far(lab: Any) -> None:
    """One minibatch a pass: the first has no divergence yet, the second has, and its gradient is not applied."""

    def trained(**hyper: Any) -> tuple[Any, PPO, dict[str, float]]:
        policy = lab.policy()
        algorithm = make(policy, learning_rate=0.05, minibatch_size=1000, **hyper)
        return policy.parameters, algorithm, algorithm.update(lab.batch(policy, 30, 8), 1.0)

    stopped, algorithm, metrics = trained(epochs=10, target_kl=1e-3)
    once, _, _ = trained(epochs=1)
    assert algorithm.optimizer_steps == 1 and metrics["epochs_done"] == 2
    assert torch.equal(stopped, once)
    assert metrics["approx_kl"] > 1.5e-3
    free, algorithm, metrics = trained(epochs=10, target_kl=1e9)
    unlimited, _, _ = trained(epochs=10)
    assert algorithm.optimizer_steps == 10 and metrics["epochs_done"] == 10
    assert torch.equal(free, unlimited)


def test_the_margin_is_one_and_a_half(lab: Any) -> None:
    policy = lab.policy()
    batch = lab.batch(policy, 30, 8)
    lab.shake(policy, 0.05, seed=4)
    algorithm = make(policy, minibatch_size=1000)
    rows = algorithm.rows(batch)
    kl = algorithm.gradients(rows, len(rows))["approx_kl"]
    for factor, steps in ((0.99, 1), (1.01, 0)):
        copy = lab.shake(lab.policy(), 0.05, seed=4)
        other = make(copy, minibatch_size=1000, epochs=1, target_kl=float(kl) / 1.5 / factor)
        other.update(batch, 1.0)
        assert other.optimizer_steps == steps


def test_metrics_of_passes_that_stopped_are_means_of_what_was_done(lab: Any) -> None:
    policy = lab.policy()
    batch = lab.batch(policy, 30, 8)
    metrics = make(policy, minibatch_size=20, learning_rate=0.3, target_kl=1e-2).update(batch, 1.0)
    head = policy.head.evaluate(np.zeros((4, 1), np.float32), np.zeros((1, 1), np.int64))[1]
    assert 0.5 * float(head[0]) < metrics["entropy"] <= float(head[0])  # log 4, not a fraction of it


def test_schedules(lab: Any) -> None:
    def trained(remaining: float, **hyper: Any) -> tuple[Any, dict[str, float]]:
        policy = lab.policy()
        algorithm = make(policy, epochs=2, minibatch_size=40, **hyper)
        metrics = algorithm.update(lab.batch(policy), remaining)
        return policy.parameters, metrics

    linear, metrics = trained(
        0.25, learning_rate=4e-3, learning_rate_schedule="linear", clip=0.4, clip_schedule="linear"
    )
    constant, same = trained(0.25, learning_rate=1e-3, clip=0.1)
    assert (metrics["learning_rate"], metrics["clip"]) == (same["learning_rate"], same["clip"]) == (1e-3, 0.1)
    assert torch.equal(linear, constant)
    assert not torch.equal(linear, trained(1.0, learning_rate=4e-3, clip=0.1)[0])
    assert torch.equal(trained(0.0, learning_rate=4e-3, learning_rate_schedule="linear")[0], lab.policy().parameters)


def test_saved_and_loaded_it_goes_on_exactly(lab: Any) -> None:
    def fresh(seed: int) -> tuple[Any, PPO]:
        policy = lab.policy("mlp", "gaussian", seed=seed, normalize=True)
        return policy, make(policy, seed=seed, normalize_reward=True, epochs=2, minibatch_size=30)

    policy, algorithm = fresh(1)
    batches = [lab.batch(policy, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        algorithm.update(batch, 1.0)
    arrays, tree = pack(algorithm.state())
    state = unpack({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(tree)))
    other_policy, other = fresh(2)
    other.load(state)
    for batch in batches[2:]:
        assert algorithm.update(batch, 0.5) == other.update(batch, 0.5)
    assert torch.equal(policy.parameters, other_policy.parameters)
    assert (algorithm.version, algorithm.optimizer_steps) == (other.version, other.optimizer_steps)
    for name, array in algorithm.state()["policy"].items():
        np.testing.assert_array_equal(array, other.state()["policy"][name])
