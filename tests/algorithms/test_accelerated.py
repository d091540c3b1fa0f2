"""Every accelerator gives the gradient that autograd gives through the one loss, for any network and space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.algorithms.accelerated import ACCELERATORS
from paceline.algorithms.dqn import DQN
from paceline.algorithms.impala import IMPALA
from paceline.algorithms.ppo import PPO
from paceline.config import ALGORITHMS, RunConfig, algorithm_class
from paceline.config.resolve import validate
from paceline.rollout.batch import Batch
from paceline.spaces import ActionCodec, ObservationCodec

ACTIONS: dict[str, Any] = {
    "discrete": lambda rng: spaces.Discrete(int(rng.integers(2, 9))),
    "multidiscrete": lambda rng: spaces.MultiDiscrete(rng.integers(1, 5, rng.integers(1, 4))),
    "multibinary": lambda rng: spaces.MultiBinary(int(rng.integers(1, 5))),
    "gaussian": lambda rng: spaces.Box(-2.0, 2.0, (int(rng.integers(1, 5)),)),
    "squashed": lambda rng: spaces.Box(-2.0, 2.0, (int(rng.integers(1, 5)),)),
    "masked discrete": lambda rng: spaces.Discrete(int(rng.integers(2, 9))),
    "masked multidiscrete": lambda rng: spaces.MultiDiscrete(rng.integers(1, 5, rng.integers(1, 4))),
    "mixed": lambda rng: mixture(rng),
    "squashed mixed": lambda rng: mixture(rng),
    "masked mixed": lambda rng: mixture(rng),
}
CASES = 6


def mixture(rng: np.random.Generator) -> spaces.Space[Any]:
    """Choices and numbers in one action."""
    numbers = spaces.Box(-2.0, 2.0, (int(rng.integers(1, 4)),))
    return spaces.Tuple([spaces.Discrete(3), numbers, spaces.MultiBinary(int(rng.integers(1, 3)))])


def draw_config(algo: str, kind: str, rng: np.random.Generator, accelerate: bool) -> RunConfig:
    """A network of any depth, width and activation, and settings that turn every branch of the losses on and off."""
    some = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    model = {
        "hidden": rng.integers(1, 40, rng.integers(1, 4)).tolist(),
        "activation": some("tanh", "relu", "elu"),
        "shared": bool(some(True, False)),
        "squash": kind.startswith("squashed"),
        "accelerate": accelerate,
    }
    hyper: dict[str, Any] = {}
    if algo == "dqn":
        hyper = {"dueling": model["shared"] or bool(some(True, False)), "double": bool(some(True, False))}
        hyper |= {"exploration": some("epsilon", "noisy"), "huber": some(0.3, 1.0)}
        hyper |= {"prioritized": bool(some(True, False)), "batch_size": int(rng.integers(1, 100))}
        hyper |= {"learning_starts": 0}
    else:
        hyper = {"entropy_coef": some(0.0, 0.03), "value_coef": some(0.5, 1.0)}
        hyper |= {"normalize_advantage": bool(some(True, False))}
    if algo == "ppo":
        hyper |= {"value_clip": some(None, 0.2), "clip": some(0.1, 0.3)}
    if algo == "impala":
        hyper |= {"surrogate_clip": some(None, 0.2), "clip_pg_rho": some(1.0, 1.3), "clip_c": some(1.0, 0.8)}
    return validate({"algo": algo, "model": model, algo: hyper})


def draw_batch(policy: Any, rng: np.random.Generator) -> Batch:
    """1 to 400 rows of a made-up world, some of them resets."""
    steps = int(rng.integers(1, 21))
    batch = Batch.empty(steps, int(rng.integers(1, 21)), policy.observation, policy.action)
    slots = batch.reward.shape
    batch.obs[...] = rng.normal(size=batch.obs.shape)
    if policy.observation.mask:
        masks = batch.obs[..., policy.observation.mask_columns]
        masks[...] = rng.random(masks.shape) < 0.4
        for first in np.cumsum((0, *policy.action.nvec[:-1])):
            masks[..., first] = 1
    flat = batch.obs[:-1].reshape(-1, batch.obs.shape[-1])
    action = policy.act(flat, policy.head.noise(rng, (len(flat),)))[0]
    batch.action[...] = action.reshape(batch.action.shape)
    log_prob, value = policy.evaluate_actions(flat, action)
    batch.logp[...] = log_prob.reshape(slots) + rng.normal(scale=0.3, size=slots)
    batch.value[:-1] = value.reshape(slots) + rng.normal(scale=0.3, size=slots)
    batch.reward[...] = rng.normal(size=slots)
    batch.terminated[...] = rng.random(slots) < 0.1
    batch.truncated[...] = (rng.random(slots) < 0.1) & ~batch.terminated
    batch.valid[1:] = ~(batch.terminated | batch.truncated)[:-1]
    batch.valid[0] = True
    return batch


def gradient(algo: str, kind: str, seed: int, accelerate: bool) -> tuple[Any, dict[str, float], bool]:
    """The gradient of the first step, the metrics, and whether an accelerator computed them."""
    rng = np.random.default_rng(seed)
    config = draw_config(algo, kind, rng, accelerate)
    space = spaces.Box(-np.inf, np.inf, (int(rng.integers(1, 20)),), np.float32)
    action = ActionCodec(ACTIONS[kind](rng), squash=config.model.squash)
    observation = ObservationCodec(space, mask=action.nvec if kind.startswith("masked") else ())
    policy = config.algorithm.make_policy(config, observation, action, seed=seed)
    shake = torch.randn(policy.parameters.shape, generator=torch.Generator().manual_seed(seed))
    policy.parameters.add_(0.2 * shake)
    if isinstance(config.algorithm, type) and issubclass(config.algorithm, DQN):
        policy.online.refresh()
    algorithm = config.algorithm(policy, config.hyper, rng=np.random.default_rng(seed))
    seen: list[Any] = []
    apply = algorithm.apply
    algorithm.apply = lambda rate: (seen.append(policy.gradient.clone()), apply(rate))[1]  # type: ignore[method-assign]
    metrics = algorithm.update(draw_batch(policy, rng), 1.0)
    return seen[0], metrics, algorithm.accelerator is not None


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("algo", ["ppo", "a2c", "a3c", "impala", "dqn"])
def test_an_accelerator_agrees_with_autograd_through_the_loss(algo: str, kind: str, case: int) -> None:
    if algo == "dqn" and kind not in ("discrete", "masked discrete"):
        kind, case = "discrete", case + CASES * list(ACTIONS).index(kind)  # the only actions it has: other networks
    seed = 1000 * list(ALGORITHMS).index(algo) + 100 * list(ACTIONS).index(kind) + case
    by_hand, metrics, accelerated = gradient(algo, kind, seed, True)
    by_autograd, same_metrics, plain = gradient(algo, kind, seed, False)
    assert accelerated and not plain
    scale = float(by_autograd.abs().max())
    np.testing.assert_allclose(by_hand, by_autograd, rtol=2e-3, atol=3e-5 * max(scale, 1e-3))
    first = ("policy_loss", "value_loss", "entropy") if algo in ("a2c", "a3c", "impala") else ()
    for name in first:
        assert metrics[name] == pytest.approx(same_metrics[name], rel=1e-3, abs=1e-4), name


def test_every_accelerator_is_found_by_the_class_that_writes_the_loss(lab: Any) -> None:
    losses = {algorithm_class(name) for name in ALGORITHMS if algorithm_class(name).native}
    owners = {next(c for c in cls.__mro__ if "loss" in vars(c)) for cls in losses}
    assert set(ACCELERATORS) <= {f"{cls.__module__}.{cls.__qualname__}" for cls in owners}
    for name in ("ppo", "a2c", "a3c", "impala"):
        assert algorithm_class(name)(lab.policy(), RunConfig(algo=name).hyper, rng=np.random.default_rng(0)).accelerator

    class Mine(PPO):
        def loss(self, rows: Any, out: Any) -> Any:
            total, statistics = super().loss(rows, out)
            return total * 2, statistics

    class Renamed(IMPALA):
        pass

    rng = np.random.default_rng(0)
    assert Mine(lab.policy(), PPO.Settings(), rng=rng).accelerator is None  # its loss is another one
    assert Renamed(lab.policy(), IMPALA.Settings(), rng=rng).accelerator is not None
