from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.algorithms.dqn import DQN
from paceline.config import ModelConfig, UserError
from paceline.models.q import EpsilonGreedy, QFunction, QPolicy
from paceline.spaces import ActionCodec, ObservationCodec

VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 2), np.uint8)
ROWS = 6


def make(space: Any = VECTOR, *, shared: bool = False, normalize: bool = False, **hyper: Any) -> QPolicy:
    model = ModelConfig(hidden=[12, 9], activation="relu", shared=shared)
    policy = QPolicy(
        ObservationCodec(space),
        ActionCodec(spaces.Discrete(3)),
        model,
        DQN.Settings(**hyper),
        seed=1,
        normalize_observation=normalize,
    )
    noise = torch.randn(policy.parameters.shape, generator=torch.Generator().manual_seed(3))
    policy.parameters.add_(0.2 * noise)
    policy.online.refresh()
    return policy


def rows(policy: QPolicy) -> Any:
    rng, shape = np.random.default_rng(0), (ROWS, *policy.observation.shape)
    if policy.observation.dtype == np.uint8:
        return rng.integers(256, size=shape, dtype=np.uint8)
    return rng.normal(size=shape).astype(np.float32)


def plain_values(policy: QPolicy, net: Any, x: Any, dueling: bool) -> Any:
    """As the papers write it, in torch."""
    advantage, value = net(torch.from_numpy(x))
    return value[:, None] + advantage - advantage.mean(1, keepdim=True) if dueling else advantage


@pytest.mark.parametrize(
    ("space", "dueling", "shared"),
    [(VECTOR, False, False), (VECTOR, True, False), (VECTOR, True, True), (IMAGE, False, False), (IMAGE, True, True)],
)
def test_values_and_gradient_are_those_of_autograd(space: Any, dueling: bool, shared: bool) -> None:
    policy = make(space, dueling=dueling, shared=shared)
    assert (policy.online.fast is None) is (space is IMAGE)
    x, wish = rows(policy), np.random.default_rng(1).normal(size=(3, ROWS)).astype(np.float32)
    net = copy.deepcopy(policy.net)
    expected = plain_values(policy, net, x, dueling)
    np.testing.assert_allclose(policy.online.values(x), expected.detach().numpy().T, rtol=1e-4, atol=1e-5)
    net.zero_grad()
    (expected * torch.from_numpy(wish.T)).sum().backward()
    policy.online.learn(x, lambda q: wish)
    for own, theirs in zip(policy.net.parameters(), net.parameters(), strict=True):
        assert own.grad is not None and theirs.grad is not None
        np.testing.assert_allclose(own.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_only_a_dueling_network_has_a_second_tower() -> None:
    sizes = [make(dueling=dueling).parameters.numel() for dueling in (False, True)]
    tower = 4 * 12 + 12 + 12 * 9 + 9
    assert sizes == [tower + 3 * 10, 2 * tower + 4 * 10]


# -- noise ----------------------------------------------------------------------------------------------------------


def test_noise_is_of_factors_and_its_gradient_that_of_autograd() -> None:
    policy = make(exploration="noisy", dueling=True)
    online = policy.online
    online.resample(np.random.default_rng(5))
    size = len(policy.parameters) // 2
    means, deviations = policy.parameters[:size].clone(), policy.parameters[size:].clone()
    weight = online.noise[: 12 * 4].reshape(12, 4)
    assert np.linalg.matrix_rank(weight.numpy()) == 1  # one number an input times one an output
    x, wish = rows(policy), np.random.default_rng(1).normal(size=(3, ROWS)).astype(np.float32)
    means.requires_grad_()
    deviations.requires_grad_()
    net = copy.deepcopy(policy.net)
    flat, named, begin = means + deviations * online.noise, {}, 0
    for name, parameter in net.named_parameters():
        named[name] = flat[begin : begin + parameter.numel()].reshape(parameter.shape)
        begin += parameter.numel()
    advantage, value = torch.func.functional_call(net, named, (torch.from_numpy(x),))
    expected = value[:, None] + advantage - advantage.mean(1, keepdim=True)
    np.testing.assert_allclose(online.noisy_values(x), expected.detach().numpy().T, rtol=1e-4, atol=1e-5)
    (expected * torch.from_numpy(wish.T)).sum().backward()
    online.learn(x, lambda q: wish)
    assert means.grad is not None and deviations.grad is not None
    np.testing.assert_allclose(policy.gradient, torch.cat([means.grad, deviations.grad]), rtol=1e-3, atol=1e-4)


def test_evaluation_is_without_noise_and_acting_goes_on_with_the_same() -> None:
    policy = make(exploration="noisy")
    policy.online.resample(np.random.default_rng(5))
    x, noise = rows(policy), np.ones((ROWS, 2), np.float32)
    noisy = policy.online.noisy_values(x).copy()
    policy.greedy(x)
    quiet = policy.online.values(x).copy()
    assert np.abs(quiet - noisy).max() > 1e-3
    policy.act(x, noise)
    np.testing.assert_array_equal(policy.online.values(x), noisy)
    again = make(exploration="noisy")
    again.load(policy.state())
    again.greedy(x)
    np.testing.assert_array_equal(again.online.values(x), quiet)
    np.testing.assert_array_equal(again.parameters, policy.parameters)


# -- acting ---------------------------------------------------------------------------------------------------------


def test_epsilon_greedy_takes_any_action_so_often() -> None:
    head, rng = EpsilonGreedy(4, 0.3), np.random.default_rng(0)
    out = np.tile(np.asarray([[0.0], [2.0], [1.0], [0.5]], np.float32), 40_000)
    action = head.sample(out, head.noise(rng, (40_000,)))
    share = np.bincount(action[:, 0], minlength=4) / 40_000
    np.testing.assert_allclose(share, [0.075, 0.775, 0.075, 0.075], atol=0.006)
    log_prob, entropy = head.evaluate(out[:, :4], np.arange(4)[:, None])
    np.testing.assert_allclose(np.exp(log_prob), [0.075, 0.775, 0.075, 0.075], rtol=1e-5)
    assert entropy[0] == pytest.approx(-float(np.sum(np.exp(log_prob) * log_prob)), rel=1e-4)
    head.epsilon = 0.0
    assert (head.sample(out, head.noise(rng, (40_000,))) == 1).all()
    head.epsilon = 1.0
    blind = head.blind(head.noise(rng, (40_000,)))
    assert blind is not None
    np.testing.assert_allclose(np.bincount(blind[:, 0], minlength=4) / 40_000, 0.25, atol=0.01)


def test_the_values_of_actions_are_kept_for_priorities() -> None:
    policy = make(prioritized=True)
    policy.head.epsilon = 0.5
    x = rows(policy)
    action, chosen, best = policy.act(x, policy.head.noise(np.random.default_rng(0), (ROWS,)))
    values = policy.online.values(x)
    assert chosen is not None and best is not None and (chosen < best).any()
    np.testing.assert_array_equal(chosen, values[action[:, 0], np.arange(ROWS)])
    np.testing.assert_array_equal(best, values.max(0))


def test_state_and_normaliser_come_back() -> None:
    policy, again = make(normalize=True), make(normalize=True)
    assert policy.moments is not None
    policy.moments.mean += 1.0
    policy.parameters.mul_(1.1)
    policy.head.epsilon = 0.25
    again.load(policy.state())
    x = rows(policy)
    np.testing.assert_array_equal(again.greedy(x), policy.greedy(x))
    np.testing.assert_array_equal(again.value(x), policy.value(x))
    np.testing.assert_array_equal(again.target.parameters, policy.parameters)
    assert again.head.epsilon == 0.25


def test_what_it_is_not_for() -> None:
    with pytest.raises(UserError, match="one discrete action"):
        QPolicy(ObservationCodec(VECTOR), ActionCodec(spaces.MultiDiscrete([2, 2])), ModelConfig(), DQN.Settings())
    with pytest.raises(UserError, match=r"model\.shared=true.*dqn\.dueling=true"):
        make(shared=True)
    assert isinstance(make().target, QFunction)
