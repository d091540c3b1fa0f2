"""Whole sequences in one call give what a plain loop gives, step by step and with its resets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.config import ModelConfig
from paceline.models.recurrent import Sequences
from paceline.models.recurrent_policy import RecurrentPolicy
from paceline.spaces import ActionCodec, ObservationCodec

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (9, 8, 2), np.uint8)
SPACES: dict[str, Any] = {
    "vector": VECTOR,
    "image": IMAGE,
    "mixed": spaces.Dict({"camera": IMAGE, "state": VECTOR, "mode": spaces.Discrete(3)}),
}
STEPS, ENVS = 11, 4


def make_policy(kind: str = "lstm", space: str = "vector", *, length: int = 64, **options: Any) -> RecurrentPolicy:
    config = ModelConfig(memory=kind, memory_size=5, sequence_length=length, hidden=[7], **options)
    policy = RecurrentPolicy(ObservationCodec(SPACES[space]), ActionCodec(spaces.Discrete(3)), config, seed=2)
    noise = torch.randn(policy.parameters.shape, generator=torch.Generator().manual_seed(1))
    policy.parameters.add_(0.3 * noise)
    return policy


def make_rollout(policy: RecurrentPolicy, seed: int = 0) -> tuple[Any, Any, Any]:
    """Observations `[T+1, N, …]`, which rows are valid, and which of the ends are terminations `[T, N]`."""
    rng = np.random.default_rng(seed)
    codec = policy.observation
    obs = np.zeros((STEPS + 1, ENVS, *codec.shape), codec.dtype)
    codec.space.seed(seed)
    for row in obs.reshape(-1, *codec.shape):
        codec.encode_one(codec.space.sample(), row)
    ended = np.zeros((STEPS, ENVS), bool)
    done = np.array([True, False, False, False])  # one rollout begins with a reset row
    valid = np.zeros((STEPS, ENVS), bool)
    for t in range(STEPS):
        valid[t] = ~done
        ended[t] = (rng.random(ENVS) < 0.3) & ~done
        done = ended[t]
    return obs, valid, ended & (rng.random(ended.shape) < 0.5)


def loop(policy: RecurrentPolicy, obs: Any, valid: Any, start: Any, length: int) -> tuple[Any, Any, Any]:
    """Outputs `[T+1, N, K]`, values `[T+1, N]` and the memory before each step, one step at a time. Gradients end where
    a sequence begins."""
    memory, outs, values, before = torch.from_numpy(start), [], [], []
    for t in range(STEPS + 1):
        if t % length == 0 and t < STEPS:
            memory = memory.detach()
        before.append(memory.detach().clone().numpy())
        out, value, memory = policy.net.step(torch.from_numpy(obs[t]), memory)
        outs.append(out)
        values.append(value)
        if t < STEPS:
            memory = torch.where(torch.from_numpy(valid[t])[:, None], memory, torch.zeros(()))
    return torch.stack(outs), torch.stack(values), np.stack(before)


@pytest.mark.parametrize("which", ["valid", "needed"])
@pytest.mark.parametrize("length", [1, 3, 11, 64])
@pytest.mark.parametrize(
    ("kind", "space"), [("lstm", "vector"), ("gru", "vector"), ("lstm", "mixed"), ("gru", "image")]
)
def test_sequences_are_the_loop(kind: str, space: str, length: int, which: str) -> None:
    policy = make_policy(kind, space, length=length)
    obs, valid, terminated = make_rollout(policy)
    start = np.random.default_rng(3).normal(size=(ENVS, policy.memory_width)).astype(np.float32)
    outs, values, before = loop(policy, obs, valid, start, length)
    mask = valid
    if which == "needed":  # as V-trace: also the successors of rows that do not terminate, the last ones included
        mask = np.concatenate([valid, np.zeros_like(valid[:1])])
        mask[1:] |= valid & ~terminated
        assert mask[-1].any()
    x = Sequences.cut(obs[: len(mask)][mask], mask, valid, before[:STEPS:length], length)
    assert x.step.max() < length + (which == "needed")
    out, value = policy.net(x)
    np.testing.assert_allclose(out.detach(), outs[: len(mask)][mask].detach(), atol=1e-5)
    np.testing.assert_allclose(value.detach(), values[: len(mask)][mask].detach(), atol=1e-5)

    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(5)) for t in (out, value)]
    gradients = []
    for pair in ((out, value), (outs[: len(mask)][mask], values[: len(mask)][mask])):
        loss = sum((t * w).sum() for t, w in zip(pair, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, list(policy.net.parameters()), allow_unused=True))  # type: ignore[arg-type]
    for name, mine, theirs in zip(dict(policy.net.named_parameters()), *gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4, rtol=1e-3, err_msg=name)


def test_rows_in_any_order_and_some_of_the_sequences() -> None:
    policy = make_policy(length=4)
    obs, valid, _ = make_rollout(policy)
    memory = np.random.default_rng(0).normal(size=(3, ENVS, policy.memory_width)).astype(np.float32)
    x = Sequences.cut(obs[:-1][valid], valid, valid, memory, 4)
    out = policy.net(x)[0].detach().numpy()
    order = np.random.default_rng(1).permutation(len(x))
    np.testing.assert_allclose(policy.net(x[order])[0].detach(), out[order], atol=1e-6)
    some = np.flatnonzero(x.sequence % 2)
    np.testing.assert_allclose(policy.net(x[some])[0].detach(), out[some], atol=1e-6)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("space", ["vector", "mixed"])
def test_acting_is_a_step_of_the_network(kind: str, space: str) -> None:
    fast, plain = (make_policy(kind, space, accelerate=accelerate) for accelerate in (True, False))
    obs, _, _ = make_rollout(fast)
    memories = [policy.start_memory(ENVS) for policy in (fast, plain)]
    assert memories[0] is not None and not memories[0].any()
    for t in range(STEPS):
        wanted = plain.net.step(torch.from_numpy(obs[t]), torch.from_numpy(memories[1]))
        results = [policy.outputs(obs[t], memory) for policy, memory in zip((fast, plain), memories, strict=True)]
        for (out, value), memory in zip(results, memories, strict=True):
            np.testing.assert_allclose(out.T, wanted[0].detach(), atol=1e-5)
            np.testing.assert_allclose(value, wanted[1].detach(), atol=1e-5)
            np.testing.assert_allclose(memory, wanted[2].detach(), atol=1e-5)
    kept = memories[0].copy()
    fast.value(obs[0], memories[0])
    np.testing.assert_array_equal(memories[0], kept)  # a bootstrap does not change it


def test_a_last_observation_that_is_no_number_harms_nobody() -> None:
    policy = make_policy()
    obs, valid, _ = make_rollout(policy)
    obs[:-1][~valid] = np.nan
    memory = np.zeros((1, ENVS, policy.memory_width), np.float32)
    x = Sequences.cut(obs[:-1][valid], valid, valid, memory, 64)
    out, value = policy.net(x)
    (out.sum() + value.sum()).backward()
    assert torch.isfinite(out).all() and torch.isfinite(policy.gradient).all()


def test_images_in_parts_have_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("lstm", "mixed")
    obs, valid, _ = make_rollout(policy)
    memory = np.zeros((1, ENVS, policy.memory_width), np.float32)
    x = Sequences.cut(obs[:-1][valid], valid, valid, memory, 64)
    found = []
    for limit in (1e9, 4 * policy.net.images.row_bytes):  # type: ignore[union-attr]
        monkeypatch.setattr("paceline.models.recurrent.PASS_BYTES", limit)
        policy.gradient.zero_()
        out, value = policy.net(x)
        (out.square().sum() + value.square().sum()).backward()
        found.append(policy.gradient.clone())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_first_policy_is_nearly_uniform_and_reacts_to_the_past() -> None:
    config = ModelConfig(memory="lstm")
    policy = RecurrentPolicy(ObservationCodec(VECTOR), ActionCodec(spaces.Discrete(3)), config, seed=2)
    memory = np.random.default_rng(0).normal(size=(2, policy.memory_width)).astype(np.float32)
    out, value = policy.outputs(np.zeros((2, 3), np.float32), memory)
    assert np.abs(out).max() < 0.1 and abs(value[0] - value[1]) > 1e-3
