"""A laboratory: policies of every kind, batches with every kind of row, and the losses written plainly in torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Categorical, Normal

from paceline.collective.group import Group
from paceline.config import ModelConfig
from paceline.models.policy import Policy
from paceline.rollout.batch import Batch
from paceline.spaces import ActionCodec, ObservationCodec

OWN_NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.first, self.norm = nn.Linear(shape[0], 12), nn.LayerNorm(12)
        self.policy, self.critic = nn.Linear(12, outputs), nn.Linear(12, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = torch.nn.functional.silu(self.norm(self.first(x)))
        return self.policy(h), self.critic(h).squeeze(1)
"""
VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (9, 8, 2), np.uint8)
OBSERVATIONS: dict[str, Any] = {
    "mlp": VECTOR,
    "shared": VECTOR,
    "cnn": IMAGE,
    "mixed": spaces.Dict({"camera": IMAGE, "state": VECTOR, "mode": spaces.Discrete(3)}),
    "own": VECTOR,
}
ACTIONS: dict[str, Any] = {
    "discrete": spaces.Discrete(4),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
    "gaussian": spaces.Box(-2.0, 2.0, (2,)),
    "squashed": spaces.Box(-2.0, 2.0, (2,)),
}


@dataclass
class Plain:
    """The network in torch with autograd, apart from the one under test; double where it can be."""

    net: Any
    log_std: Tensor
    dtype: torch.dtype

    @property
    def parameters(self) -> list[Tensor]:
        return [self.log_std, *self.net.parameters()]


class Table:
    """Where the members of a group in one process, each in a thread, lay down what they have."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20.0)
        self._laid: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._laid[rank] = value
        self._barrier.wait()
        laid = list(self._laid)
        self._barrier.wait()  # before anybody lays down the next
        return laid

    def leave(self) -> None:
        self._barrier.abort()


class Member(Group):
    def __init__(self, table: Table, rank: int, size: int) -> None:
        self.table, self.rank, self.size = table, rank, size
        self.calls: list[tuple[int, ...]] = []

    def mean_(self, tensor: Tensor) -> Tensor:
        self.calls.append(tuple(tensor.shape))
        return tensor.copy_(torch.stack(self.table.exchange(self.rank, tensor.clone())).sum(0) / self.size)

    def gather(self, value: float) -> list[float]:
        return self.table.exchange(self.rank, value)


def together(work: Sequence[Callable[[], Any]], table: Table) -> list[Any]:
    """One thread each; the first error of any ends the waiting of all."""

    def guarded(own: Callable[[], Any]) -> Any:
        try:
            return own()
        except BaseException:
            table.leave()
            raise

    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(guarded, own) for own in work]
    errors = [f.exception() for f in futures if f.exception() is not None]
    broken = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    for error in broken or errors:
        assert error is not None
        raise error
    return [f.result() for f in futures]


class Lab:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def policy(
        self,
        net: str = "mlp",
        action: str = "discrete",
        *,
        seed: int = 0,
        normalize: bool = False,
        accelerate: bool = True,
    ) -> Policy:
        options: dict[str, Any] = {"accelerate": accelerate}
        options |= {"log_std_init": -0.3} if action in ("gaussian", "squashed") else {}
        if net == "own":
            file = self._folder / "net.py"
            file.write_text(OWN_NET)
            options["class"] = f"{file}:Net"
        else:
            options |= {"hidden": [12], "shared": net == "shared"}
        observation = ObservationCodec(OBSERVATIONS[net])
        act = ActionCodec(ACTIONS[action], squash=action == "squashed")
        policy = Policy(observation, act, ModelConfig(**options), seed=seed, normalize_observation=normalize)
        return self.shake(policy, 0.3, seed=seed)

    def shake(self, policy: Policy, much: float, *, seed: int = 0) -> Policy:
        """As learning would: another policy, near by. Biases and the policy layer are no longer at their start."""
        noise = torch.randn(policy.parameters.shape, generator=torch.Generator().manual_seed(seed + 100))
        policy.parameters.add_(much * noise)
        return policy

    def batch(self, policy: Policy, steps: int = 16, num_envs: int = 5, *, seed: int = 0, ends: float = 0.15) -> Batch:
        """A rollout of a made-up world: episodes end in both ways, and each end is followed by a reset row."""
        rng = np.random.default_rng(seed)
        batch = Batch.empty(steps, num_envs, policy.observation, policy.action)
        policy.observation.space.seed(seed)
        for row in batch.obs.reshape(-1, *policy.observation.shape):
            policy.observation.encode_one(policy.observation.space.sample(), row)
        done = rng.random(num_envs) < 0.3  # some rollouts begin with a reset row
        for t in range(steps):
            batch.action[t] = policy.act(batch.obs[t], policy.head.noise(rng, (num_envs,)))[0]
            log_prob, value = policy.evaluate_actions(batch.obs[t], batch.action[t])
            batch.logp[t], batch.value[t] = log_prob, value
            batch.valid[t] = ~done
            batch.reward[t] = rng.normal(size=num_envs) * batch.valid[t]
            batch.terminated[t] = (rng.random(num_envs) < ends) & ~done
            batch.truncated[t] = (rng.random(num_envs) < ends) & ~done & ~batch.terminated[t]
            done = batch.terminated[t] | batch.truncated[t]
            batch.discounted[t] = rng.normal(size=num_envs)
        batch.value[steps] = policy.value(batch.obs[steps])
        return batch

    def split(self, batch: Batch, envs: Sequence[int]) -> list[Batch]:
        """One rollout as several, with so many of its environments each."""
        stops = np.cumsum(envs).tolist()
        names = ("obs", "action", "logp", "value", "reward", "discounted", "terminated", "truncated", "valid")
        spans = [slice(stop - n, stop) for n, stop in zip(envs, stops, strict=True)]
        return [Batch(**{name: getattr(batch, name)[:, span].copy() for name in names}) for span in spans]

    def members(self, size: int) -> tuple[Table, list[Member]]:
        table = Table(size)
        return table, [Member(table, rank, size) for rank in range(size)]

    def together(self, work: Sequence[Callable[[], Any]], table: Table) -> list[Any]:
        return together(work, table)

    def advantages(self, batch: Batch, gamma: float, gae_lambda: float, reward: Any = None) -> tuple[Any, Any]:
        """Advantages and targets of the valid rows, NaN elsewhere: one environment and one step at a time, as the
        weighted mean of all n-step returns, which is how they are defined (Sutton and Barto, 12.1)."""
        reward = np.asarray(batch.reward if reward is None else reward, np.float64)
        value = batch.value.astype(np.float64)
        steps, num_envs = reward.shape
        target = np.full((steps, num_envs), np.nan)
        for i in range(num_envs):
            for start in range(steps):
                if not batch.valid[start, i]:
                    continue
                n_step_returns, total, t = [], 0.0, start
                while True:
                    total += gamma ** (t - start) * reward[t, i]
                    after = 0.0 if batch.terminated[t, i] else value[t + 1, i]
                    n_step_returns.append(total + gamma ** (t - start + 1) * after)
                    if batch.terminated[t, i] or batch.truncated[t, i] or t == steps - 1:
                        break
                    t += 1
                last = len(n_step_returns) - 1
                weights = [(1 - gae_lambda) * gae_lambda**k for k in range(last)] + [gae_lambda**last]
                target[start, i] = float(np.dot(weights, n_step_returns))
        return target - value[:-1], target

    def plain(self, policy: Policy) -> Plain:
        net = copy.deepcopy(policy.net)
        dtype = torch.float32 if policy.observation.images else torch.float64
        log_std = policy.parameters[: policy.action.dim].clone()
        return Plain(net.to(dtype), log_std.to(dtype).requires_grad_(), dtype)

    def evaluate(self, plain: Plain, policy: Policy, obs: Any, action: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value of each row, by `torch.distributions`."""
        x = torch.from_numpy(obs)
        out, value = plain.net(x if obs.dtype == np.uint8 else x.to(plain.dtype))
        codec, chosen = policy.action, torch.from_numpy(np.array(action))
        if codec.is_continuous:
            normal: Any = Normal(out, plain.log_std.exp())
            log_prob, entropy = normal.log_prob(chosen.to(plain.dtype)).sum(1), normal.entropy().sum(1)
            if codec.squash:
                log_prob = log_prob - torch.log1p(-(torch.tanh(chosen.double()) ** 2)).sum(1)
            return log_prob, entropy, value
        parts: list[Any] = [Categorical(logits=part) for part in out.split(list(codec.nvec), 1)]
        log_prob = torch.stack([d.log_prob(chosen[:, k]) for k, d in enumerate(parts)]).sum(0)
        return log_prob, torch.stack([d.entropy() for d in parts]).sum(0), value

    def assert_gradient(self, policy: Policy, expected: Any) -> None:
        """Each parameter's, against one of `Plain.parameters`; None is none."""
        gradients = [policy.gradient[: policy.action.dim], *(p.grad for p in policy.net.parameters())]
        scale = max(float(g.abs().max()) for g in expected if g is not None and g.numel())
        names = ["log_std", *dict(policy.net.named_parameters())]
        for name, ours, theirs in zip(names, gradients, expected, strict=True):
            assert ours is not None
            wanted = np.zeros(ours.shape) if theirs is None else theirs.detach().numpy()
            np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-3, atol=2e-5 * scale, err_msg=name)

    def assert_weights(self, policy: Policy, plain: Plain, *, atol: float) -> None:
        ours = [policy.parameters[: policy.action.dim], *policy.net.parameters()]
        names = ["log_std", *dict(policy.net.named_parameters())]
        for name, mine, theirs in zip(names, ours, plain.parameters, strict=True):
            np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=1e-4, atol=atol, err_msg=name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small are slower with several, most of all where other work has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
