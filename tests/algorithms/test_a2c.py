from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.a2c import A2C
from paceline.algorithms.optimizers import Adam, RMSprop
from paceline.algorithms.rows import Rows
from paceline.collective.group import Group
from paceline.run.state_tree import pack, unpack

NETS = ["mlp", "shared", "cnn", "mixed", "own"]
ACTIONS = ["discrete", "multidiscrete", "multibinary", "gaussian", "squashed"]
PARTS = ("policy_loss", "value_loss", "entropy", "total_loss")


def make(
    policy: Any, *, seed: int = 0, group: Group | None = None, normalize_reward: bool = False, **hyper: Any
) -> A2C:
    rng = np.random.default_rng(seed)
    return A2C(policy, A2C.Settings(**hyper), rng=rng, group=group, normalize_reward=normalize_reward)


def plain_loss(lab: Any, plain: Any, policy: Any, rows: Rows, hyper: A2C.Settings) -> tuple[Any, dict[str, float]]:
    """Mnih et al. 2016: the log-probability of what was done times its advantage, taken as a constant."""
    _, _, advantage, target = (torch.from_numpy(f.copy()).to(plain.dtype) for f in rows.fields)
    log_prob, entropy, value = lab.evaluate(plain, policy, rows.obs, rows.action)
    policy_loss = -(log_prob * advantage).mean()
    value_loss = ((value - target) ** 2).mean()
    total = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * entropy.mean()
    parts = (policy_loss, value_loss, entropy.mean(), total)
    return total, {name: float(part.detach()) for name, part in zip(PARTS, parts, strict=True)}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("accelerate", [True, False])
def test_the_gradient_is_that_of_the_loss(
    lab: Any, net: str, action: str, entropy_coef: float, accelerate: bool
) -> None:
    policy = lab.policy(net, action, accelerate=accelerate)
    algorithm = make(policy, entropy_coef=entropy_coef, value_coef=0.7, gamma=0.9)
    rows = algorithm.rows(lab.batch(policy))
    plain = lab.plain(policy)
    total, wanted = plain_loss(lab, plain, policy, rows, algorithm.hyper)
    expected = torch.autograd.grad(total, plain.parameters, allow_unused=True)
    policy.gradient.fill_(77.0)
    metrics = algorithm.gradients(rows, len(rows))
    lab.assert_gradient(policy, expected)
    assert {name: metrics[name] for name in PARTS} == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-5)  # it is the policy that acted


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
@pytest.mark.parametrize(("net", "action"), list(zip(NETS, ACTIONS, strict=True)))
def test_an_update_is_the_one_written_in_torch(lab: Any, net: str, action: str, optimizer: str) -> None:
    """Three rollouts, each one step of the whole, with n-step returns."""
    policy = lab.policy(net, action)
    algorithm = make(policy, learning_rate=1e-2, entropy_coef=0.01, max_grad_norm=0.4, optimizer=optimizer)
    hyper, plain = algorithm.hyper, lab.plain(policy)
    assert hyper.gae_lambda == 1.0 and not hyper.normalize_advantage
    adam = torch.optim.Adam(plain.parameters, 1e-2, eps=1e-5)
    squares = [torch.ones_like(p) for p in plain.parameters]
    for seed in range(3):
        batch = lab.batch(policy, seed=seed)
        advantage, target = lab.advantages(batch, hyper.gamma, 1.0)
        valid = batch.valid
        fields = np.stack([batch.logp[valid], batch.value[:-1][valid], advantage[valid], target[valid]])
        total, _ = plain_loss(lab, plain, policy, Rows(batch.obs[:-1][valid], batch.action[valid], fields), hyper)
        adam.zero_grad()
        total.backward()
        live = [(p, s) for p, s in zip(plain.parameters, squares, strict=True) if p.grad is not None]
        torch.nn.utils.clip_grad_norm_([p for p, _ in live], 0.4)
        if optimizer == "adam":
            adam.step()
        else:
            with torch.no_grad():
                for p, s in live:
                    s.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    p -= 1e-2 * p.grad / (s + 1e-5).sqrt()
        metrics = algorithm.update(batch, 1.0)
        assert metrics["total_loss"] == pytest.approx(float(total.detach()), rel=1e-2, abs=1e-3)
        lab.assert_weights(policy, plain, atol=3e-4 if optimizer == "adam" else 1e-5)
    assert algorithm.optimizer_steps == 3 and metrics["epochs_done"] == 1
    assert isinstance(algorithm.optimizer, Adam if optimizer == "adam" else RMSprop)


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_invalid_rows_change_nothing(lab: Any, net: str) -> None:
    results = []
    for poisoned in (False, True):
        policy = lab.policy(net, normalize=net == "mlp")
        algorithm = make(policy, normalize_reward=True, normalize_advantage=True, entropy_coef=0.01)
        for seed in (0, 1):
            batch = lab.batch(policy, seed=seed)
            if poisoned:
                invalid = ~batch.valid
                for array in (batch.reward, batch.logp, batch.discounted):
                    array[invalid] = np.nan
                batch.value[1:][batch.terminated] = np.nan
                batch.action[invalid] = 10**6
                batch.obs[:-1][invalid] = 255 if net == "cnn" else np.nan
            metrics = algorithm.update(batch, 1.0)
        results.append((policy.parameters.clone(), metrics))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_a_rollout_without_a_valid_row(lab: Any, net: str) -> None:
    """One step of environments that all reset at once."""
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


def test_the_schedule_and_the_longest_gradient(lab: Any) -> None:
    def trained(remaining: float, **hyper: Any) -> tuple[Any, dict[str, float]]:
        policy = lab.policy()
        return policy.parameters, make(policy, **hyper).update(lab.batch(policy), remaining)

    linear, metrics = trained(0.25, learning_rate=4e-3, learning_rate_schedule="linear")
    constant, _ = trained(1.0, learning_rate=1e-3)
    assert torch.equal(linear, constant) and metrics["learning_rate"] == 1e-3
    _, unclipped = trained(1.0, max_grad_norm=0.0)
    _, clipped = trained(1.0, max_grad_norm=1e-3)
    assert unclipped["gradient_norm"] == clipped["gradient_norm"] > 0.1  # the length it had before
    start = lab.policy().parameters
    free, _ = trained(1.0, max_grad_norm=0.0, learning_rate=1e-3)
    short, _ = trained(1.0, max_grad_norm=1e-3, learning_rate=1e-3)
    assert 0 < float((short - start).norm()) < 0.1 * float((free - start).norm())


def test_saved_and_loaded_it_goes_on_exactly(lab: Any) -> None:
    for optimizer in ("rmsprop", "adam"):
        policy = lab.policy("mlp", "gaussian", normalize=True)
        algorithm = make(policy, normalize_reward=True, optimizer=optimizer)
        batches = [lab.batch(policy, seed=seed) for seed in range(4)]
        for batch in batches[:2]:
            algorithm.update(batch, 1.0)
        arrays, tree = pack(algorithm.state())
        state = unpack({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(tree)))
        other_policy = lab.policy("mlp", "gaussian", seed=3, normalize=True)
        other = make(other_policy, seed=3, normalize_reward=True, optimizer=optimizer)
        other.load(state)
        for batch in batches[2:]:
            assert algorithm.update(batch, 0.5) == other.update(batch, 0.5)
        assert torch.equal(policy.parameters, other_policy.parameters)
        assert (algorithm.version, algorithm.optimizer_steps) == (other.version, other.optimizer_steps) == (4, 4)
