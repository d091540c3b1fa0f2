"""The hand-written network against the same network in torch, in double precision and with autograd."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.config import ModelConfig
from paceline.models import numpy_mlp as fast_module
from paceline.models.nets import MlpActorCritic
from paceline.models.numpy_mlp import NumpyMlp
from paceline.models.policy import Policy
from paceline.spaces import ActionCodec, ObservationCodec

HIDDEN: list[tuple[int, ...]] = [(), (1,), (16,), (64, 64), (7, 33), (40, 8, 24)]
ROWS = [1, 5, 64, 3, 130, 2, 64]  # growing and shrinking


def make(
    hidden: tuple[int, ...], activation: str = "tanh", *, shared: bool = False, inputs: int = 4, outputs: int = 3
) -> tuple[MlpActorCritic, NumpyMlp]:
    net = MlpActorCritic(inputs, hidden, activation, shared, outputs, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():  # biases too, and a policy layer that is not small
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)
            p.grad = torch.full_like(p, 77.0)  # to be written over
    return net, NumpyMlp(net)


def compare(net: MlpActorCritic, fast: NumpyMlp, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, last = net.policy[0], net.policy[-1]
    assert isinstance(first, torch.nn.Linear) and isinstance(last, torch.nn.Linear)
    outputs = last.out_features - net.shared
    x = rng.normal(size=(rows, first.in_features)).astype(np.float32)
    d_out = rng.normal(size=(outputs, rows)).astype(np.float32)
    d_value = rng.normal(size=rows).astype(np.float32)

    exact = copy.deepcopy(net).double()
    policy, value = exact(torch.from_numpy(x).double())
    loss = (policy * torch.from_numpy(d_out.T).double()).sum() + (value * torch.from_numpy(d_value).double()).sum()
    gradients = torch.autograd.grad(loss, list(exact.parameters()))

    np.testing.assert_allclose(fast.policy(x), policy.detach().T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fast.value(x), value.detach(), rtol=1e-4, atol=1e-5)
    seen: list[Any] = [None, None]

    def policy_loss(out: Any) -> Any:
        seen[0] = out.copy()
        return d_out

    def value_loss(values: Any) -> Any:
        seen[1] = values.copy()
        return d_value

    for jointly in (False, True):
        if jointly:
            fast.learn_jointly(x, lambda out, values: (policy_loss(out), value_loss(values)))
        else:
            fast.learn(x, policy_loss, value_loss)
        assert seen[0].shape == (outputs, rows) and seen[1].shape == (rows,)
        np.testing.assert_allclose(seen[0], policy.detach().T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(seen[1], value.detach(), rtol=1e-4, atol=1e-5)
        for (name, p), expected in zip(net.named_parameters(), gradients, strict=True):
            assert p.grad is not None
            scale = float(expected.abs().max()) + 1.0
            np.testing.assert_allclose(p.grad, expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
            p.grad.fill_(77.0)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
def test_forward_and_gradient(hidden: tuple[int, ...], shared: bool, activation: str) -> None:
    net, fast = make(hidden, activation, shared=shared)
    for seed, rows in enumerate(ROWS):
        compare(net, fast, rows, seed)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (300, 2), (3, 40)])
def test_widths_of_the_ends(inputs: int, outputs: int) -> None:
    for shared in (False, True):
        net, fast = make((12, 12), shared=shared, inputs=inputs, outputs=outputs)
        compare(net, fast, 17, 0)


def test_it_has_the_parameters_themselves() -> None:
    net, fast = make((8,))
    x = np.ones((2, 4), np.float32)
    before = fast.forward(x)[0].copy()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    assert not np.allclose(fast.forward(x)[0], before)
    compare(net, fast, 6, 0)


def test_backward_writes_over_what_was_there() -> None:
    net, fast = make((8, 8))
    compare(net, fast, 9, 0)
    compare(net, fast, 9, 0)  # added up, it would be twice as much


def test_a_smaller_forward_between_does_not_disturb_the_one_to_come() -> None:
    """Acting (few rows) and learning (many) take turns on the same storage."""
    net, fast = make((8, 8))
    rng = np.random.default_rng(0)
    for rows in (50, 4, 50, 4, 60, 50):
        fast.forward(rng.normal(size=(rows, 4)).astype(np.float32))
        compare(net, fast, rows, rows)


def test_more_row_counts_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "MAX_WORKSPACES", 6)
    net, fast = make((8, 8))
    for rows in itertools.chain(range(1, 30), range(30, 0, -1)):
        compare(net, fast, rows, rows)


def test_two_threads_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "MIN_PARALLEL_PRODUCTS", 0)
    (net, one), (twin_net, two) = make((32, 32)), make((32, 32))
    two.threads = 2
    threads: set[str] = set()

    def loss(out: Any) -> Any:
        threads.add(threading.current_thread().name)
        time.sleep(0.02)  # or the first to be done takes the work of the other
        return np.cos(out)

    for rows in (64, 3, 64, 200):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        one.learn(x, np.cos, np.cos)
        two.learn(x, loss, loss)
        for p, q in zip(net.parameters(), twin_net.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            np.testing.assert_array_equal(p.grad, q.grad)
    assert len(threads) == 2


def test_two_threads_meet_where_the_loss_needs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward in two, the loss in one, backward in two: what one thread gives, bit for bit."""
    (net, one), (twin_net, two) = make((32, 32)), make((32, 32))
    two.threads = 2
    threads: set[str] = set()
    forward = fast_module.Tower.forward

    def seen(tower: Any, x: Any) -> Any:
        threads.add(threading.current_thread().name)
        time.sleep(0.02)  # or the first to be done takes the work of the other
        return forward(tower, x)

    def loss(out: Any, value: Any) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return out * value, value - out.sum(0)

    monkeypatch.setattr(fast_module.Tower, "forward", seen)
    for rows in (64, 3, 64, 200):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        one.learn_jointly(x, loss)
        two.learn_jointly(x, loss)
        for p, q in zip(net.parameters(), twin_net.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            np.testing.assert_array_equal(p.grad, q.grad)
    assert len(threads) == 2


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_in_either_thread_comes_out_and_does_not_stay(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "MIN_PARALLEL_PRODUCTS", 0)
    net, fast = make((8,))
    fast.threads = 2

    def fail(out: Any) -> Any:
        raise FloatingPointError("no gradient")

    losses: list[Any] = [np.cos, np.cos]
    losses[which] = fail
    with pytest.raises(FloatingPointError):
        fast.learn(np.ones((5, 4), np.float32), losses[0], losses[1])
    compare(net, fast, 5, 0)


ACTION_SPACES: list[Any] = [
    spaces.Discrete(4, start=1),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiBinary(3),
    spaces.Box(-2.0, 1.0, (3,)),
]


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hidden", [[], [9], [16, 5]], ids=str)
def test_a_policy_of_every_action_space(space: Any, shared: bool, hidden: list[int]) -> None:
    """The whole way from the flat buffers through the network and the head and back, against autograd."""
    observation, action = ObservationCodec(spaces.Box(-1.0, 1.0, (5,))), ActionCodec(space)
    policy = Policy(observation, action, ModelConfig(hidden=hidden, shared=shared), seed=3)
    rng = np.random.default_rng(4)
    policy.parameters.add_(torch.from_numpy(rng.normal(scale=0.3, size=policy.parameters.numel())).float())
    x = rng.normal(size=(21, 5)).astype(np.float32)
    acts, _, _ = policy.act(x, policy.head.noise(rng, (21,)))
    d_log_prob, d_value = (rng.normal(size=21).astype(np.float32) for _ in range(2))

    exact = copy.deepcopy(policy.net).double()
    log_std = policy.parameters[: action.dim].double().clone().requires_grad_()
    out, value = exact(torch.from_numpy(x).double())
    if action.is_continuous:
        normal: Any = torch.distributions.Normal(out, log_std.exp())
        log_prob, entropy = normal.log_prob(torch.from_numpy(acts).double()).sum(1), normal.entropy().sum(1)
    else:
        parts: list[Any] = [torch.distributions.Categorical(logits=p) for p in out.split(list(action.nvec), 1)]
        log_prob = torch.stack([d.log_prob(torch.from_numpy(acts[:, k])) for k, d in enumerate(parts)]).sum(0)
        entropy = torch.stack([d.entropy() for d in parts]).sum(0)
    loss = (
        (log_prob * torch.from_numpy(d_log_prob)).sum()
        - 0.2 * entropy.sum()
        + (value @ torch.from_numpy(d_value).double())
    )
    wanted = torch.autograd.grad(loss, [log_std, *exact.parameters()], allow_unused=True)
    expected = torch.cat([g.ravel() for g in wanted if g is not None])

    policy.gradient.fill_(77.0)

    def policy_loss(out: Any) -> Any:
        ours, our_entropy = policy.head.evaluate(out, acts)
        np.testing.assert_allclose(ours, log_prob.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(our_entropy, entropy.detach(), rtol=1e-4, atol=1e-5)
        return policy.head.gradient(d_log_prob, -0.2)

    policy.learn(x, policy_loss, lambda _: d_value)
    np.testing.assert_allclose(policy.gradient, expected, rtol=2e-4, atol=5e-5)
