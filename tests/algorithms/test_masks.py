"""Invalid actions have no probability, no gradient and no entropy; no maximum and no random choice finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import masked_envs
import paceline
from paceline.algorithms.a2c import A2C
from paceline.algorithms.dqn import DQN
from paceline.algorithms.impala import IMPALA
from paceline.algorithms.ppo import PPO
from paceline.config import EnvConfig, ModelConfig
from paceline.config.resolve import validate
from paceline.envs.make import make_vector
from paceline.models.gpu import GpuPolicy, find_device
from paceline.models.masking import INVALID
from paceline.models.policy import Policy
from paceline.models.q import QPolicy
from paceline.models.recurrent_policy import RecurrentPolicy
from paceline.rollout.batch import Batch
from paceline.rollout.collector import Collector, MemoryCollector
from paceline.rollout.gpu_collector import GpuCollector
from paceline.rollout.replay import Sample
from paceline.spaces import ActionCodec, ObservationCodec

FILE = str(Path(masked_envs.__file__))
NVEC = (3, 4)
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTION = ActionCodec(spaces.MultiDiscrete(NVEC))
OBSERVATION = ObservationCodec(BOX, mask=NVEC)


def rows(count: int, seed: int = 0, nvec: tuple[int, ...] = NVEC) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4 + sum(nvec))).astype(np.float32)
    x[:, 4:] = rng.random((count, sum(nvec))) < 0.4
    for start, n in zip(np.cumsum((0, *nvec[:-1])), nvec, strict=True):
        x[np.arange(count), 4 + start + rng.integers(n, size=count)] = 1
    return x


def shaken(policy: Any, seed: int = 1) -> Any:
    policy.parameters.add_(0.5 * torch.randn(policy.parameters.shape, generator=torch.Generator().manual_seed(seed)))
    return policy


def plain_log_probs(policy: Policy, x: Any) -> list[Any]:
    """The slow way: for each row a softmax over the logits of the valid values alone; NaN for the others."""
    logits, _ = policy.net(torch.from_numpy(x[:, :4]))
    parts, at = [], 0
    for n in NVEC:
        log_p = torch.full((len(x), n), torch.nan)
        for row in range(len(x)):
            valid = np.flatnonzero(x[row, 4 + at : 4 + at + n])
            log_p[row, valid] = torch.log_softmax(logits[row, at + valid], 0)
        parts.append(log_p)
        at += n
    return parts


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("model", [{}, {"shared": True}, {"accelerate": False}])
def test_probabilities_and_entropy_are_those_of_the_valid_actions(model: Any, normalized: bool) -> None:
    policy = shaken(Policy(OBSERVATION, ACTION, ModelConfig(**model), normalize_observation=normalized))
    x = rows(200)
    if policy.moments is not None:
        policy.moments.merge(policy.moments.sums(3 * x + 1))
        policy.normalizer_changed()
        prepared = policy.prepare(x)
        np.testing.assert_array_equal(prepared[:, 4:], x[:, 4:])
        assert np.abs(prepared[:, :4] - x[:, :4]).max() > 0.1
    prepared = policy.prepare(x)
    noise = policy.head.noise(np.random.default_rng(0), (200,))
    action = policy.act(x, noise)[0]
    parts = plain_log_probs(policy, prepared)
    chosen = sum(p[torch.arange(200), torch.from_numpy(action[:, k])] for k, p in enumerate(parts))
    entropy = sum(-(p.exp() * p).nansum(1) for p in parts)
    assert torch.isfinite(chosen).all()  # all of them valid
    np.testing.assert_allclose(policy.evaluate_actions(x, action)[0], chosen.detach(), rtol=1e-4, atol=1e-5)
    out = policy.forward(prepared)
    np.testing.assert_allclose(out.entropy().detach(), entropy.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.head.evaluate(policy.outputs(x)[0], action)[1], entropy.detach(), atol=1e-5)
    best = policy.greedy(x)
    for k, part in enumerate(parts):
        np.testing.assert_array_equal(best[:, k], np.nanargmax(part.detach().numpy(), axis=1))


def test_no_noise_makes_an_action_valid() -> None:
    """A generator of float32 draws a zero now and then, whose negative logarithm is infinite."""

    class Zeros:
        def standard_exponential(self, shape: Any, dtype: Any) -> Any:
            return np.zeros(shape, dtype)

    policy, x = shaken(Policy(OBSERVATION, ACTION, ModelConfig())), rows(20)
    noise = policy.head.noise(Zeros(), (20,))
    assert np.isfinite(noise).all()
    noise[:, ::2] = 0.0
    action = policy.act(x, noise)[0]
    assert x[np.arange(20), 4 + action[:, 0]].all() and x[np.arange(20), 7 + action[:, 1]].all()


def test_the_network_does_not_see_the_mask() -> None:
    policy, x = shaken(Policy(OBSERVATION, ACTION, ModelConfig())), rows(20)
    free = x.copy()
    free[:, 4:] = 1
    np.testing.assert_array_equal(policy.value(x), policy.value(free))
    out, valid = policy.outputs(x)[0].copy(), x[:, 4:].T != 0
    np.testing.assert_array_equal(out[valid], policy.outputs(free)[0][valid])
    assert policy.net.policy[0].in_features == 4


@pytest.mark.parametrize("algo", ["ppo", "a2c", "impala"])
@pytest.mark.parametrize("accelerate", [True, False])
def test_an_action_that_is_never_valid_is_never_learned(algo: str, accelerate: bool) -> None:
    config = validate({"algo": algo, "model": {"accelerate": accelerate}, algo: {"entropy_coef": 0.1}})
    policy = config.algorithm.make_policy(config, OBSERVATION, ACTION)
    batch = Batch.empty(8, 4, OBSERVATION, ACTION)
    x = rows(9 * 4).reshape(9, 4, -1)
    x[..., 4 + 3] = 0  # the first value of the second choice
    x[..., 4 + 4] = 1
    batch.obs[...] = x
    flat = x[:-1].reshape(32, -1)
    batch.action[...] = policy.act(flat, policy.head.noise(np.random.default_rng(0), (32,)))[0].reshape(8, 4, 2)
    batch.reward[...] = np.random.default_rng(1).normal(size=(8, 4))
    batch.valid[...] = True
    logp, value = policy.evaluate_actions(flat, batch.action.reshape(32, 2))
    batch.logp[...], batch.value[:-1] = logp.reshape(8, 4), value.reshape(8, 4)
    algorithm = config.algorithm(policy, config.hyper, rng=np.random.default_rng(0))
    seen: list[Any] = []
    apply = algorithm.apply
    algorithm.apply = lambda rate: (seen.append(policy.net.policy[-1].weight.grad.clone()), apply(rate))[1]
    metrics = algorithm.update(batch, 1.0)
    assert seen and all((gradient[3] == 0).all() and gradient.abs().max() > 0 for gradient in seen)
    assert 0 < metrics["entropy"] < np.log(3) + np.log(4)


@pytest.mark.parametrize("kind", [PPO, A2C, IMPALA])
def test_masks_with_memory_in_the_loss(kind: Any) -> None:
    """What acted is what learns: log-probabilities are equal, and the accelerator's gradient is that of autograd."""
    env, _ = make_vector(EnvConfig(id=f"{FILE}:ByInfo", vector="sync"), 3, seed=3)
    model = ModelConfig(hidden=[8], memory="lstm", memory_size=4, sequence_length=5)
    policy = RecurrentPolicy(env.observation, env.action, model, seed=1)
    collector = MemoryCollector([env], policy, steps=16, rng=np.random.default_rng(5))
    collector.start()
    batch = collector.collect()
    mask = np.ones((17, 3), np.bool_)
    mask[:-1], mask[-1] = batch.valid, False
    out = policy.forward(policy.sequences(policy.prepare(batch.states(mask)), mask, batch.valid, batch.memory))
    action = torch.from_numpy(batch.action[batch.valid])
    np.testing.assert_allclose(out.log_prob(action).detach(), batch.logp[batch.valid], rtol=1e-4, atol=1e-5)
    allowed = env.observation.split(batch.obs[:-1][batch.valid])[1].sum(1)
    assert (out.entropy().detach().numpy() <= np.log(allowed) + 1e-5).all()

    start, gradients = policy.parameters.clone(), []
    for accelerate in (True, False):
        policy.parameters.copy_(start)
        algorithm = kind(policy, kind.Settings(entropy_coef=0.02), rng=np.random.default_rng(0))
        assert algorithm.accelerator is not None
        if not accelerate:
            algorithm.accelerator = None
        seen: list[Any] = []
        algorithm.apply = lambda rate, seen=seen: seen.append(policy.gradient.clone()) or 0.0
        algorithm.update(batch, 1.0)
        gradients.append(seen[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


# -- values ---------------------------------------------------------------------------------------------------------


def table_policy(**hyper: Any) -> tuple[QPolicy, DQN]:
    """Three actions, two states: networks that are tables."""
    settings = DQN.Settings(batch_size=2, gamma=0.9, target_update_every=99, learning_starts=0, **hyper)
    observation = ObservationCodec(spaces.Box(-1, 1, (2,), np.float32), mask=(3,))
    policy = QPolicy(observation, ActionCodec(spaces.Discrete(3)), ModelConfig(hidden=[]), settings)
    tables = ([[1.0, 9.0], [2.0, 8.0], [3.0, 99.0]], [[0.0, 3.0], [0.0, 7.0], [50.0, 60.0]])
    for function, table in zip((policy.online, policy.target), tables, strict=True):
        (linear,) = (m for m in function.net.modules() if isinstance(m, torch.nn.Linear))
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(table))
            linear.bias.zero_()
    return policy, DQN(policy, settings, rng=np.random.default_rng(0))


def states(*numbers: int, mask: tuple[int, ...] = (1, 1, 0)) -> Any:
    return np.concatenate([np.eye(2)[list(numbers)], np.tile(mask, (len(numbers), 1))], axis=1).astype(np.float32)


@pytest.mark.parametrize("accelerate", [True, False])
@pytest.mark.parametrize(("double", "best"), [(False, 7.0), (True, 3.0)])
def test_targets_by_hand(double: bool, best: float, accelerate: bool) -> None:
    """The third action, which the networks like best, is invalid in the state that follows."""
    _, algorithm = table_policy(double=double)
    if not accelerate:
        algorithm.accelerator = None
    ended = states(0, mask=(1, 1, 1))  # the state after an end, where all values count as valid
    sample = Sample(
        np.arange(2),
        states(0, 0),
        np.asarray([1, 0]),
        np.asarray([1, -1], np.float32),
        np.concatenate([states(1), ended]),
        np.asarray([0.9, 0.0], np.float32),
        None,
    )
    error = algorithm._learn_from(sample, 1, 1e-3)
    np.testing.assert_allclose(error, np.asarray([2.0, 1.0]) - [1 + 0.9 * best, -1.0], rtol=1e-6)


def test_dqn_acts_and_explores_with_valid_actions() -> None:
    policy, _ = table_policy()
    x, noise = states(1, 0), policy.head.noise(np.random.default_rng(0), (2,))
    policy.head.epsilon = 0.0
    np.testing.assert_array_equal(policy.greedy(x)[:, 0], [0, 1])
    np.testing.assert_array_equal(policy.act(x, noise)[0][:, 0], [0, 1])
    np.testing.assert_array_equal(policy.value(x), [9.0, 2.0])
    np.testing.assert_array_equal(policy.outputs(x)[1], [9.0, 2.0])
    many = np.repeat(states(1, mask=(1, 0, 1)), 4000, axis=0)
    noise = policy.head.noise(np.random.default_rng(0), (4000,))
    for epsilon in (1.0, 0.5):  # blind, and with the values
        policy.head.epsilon = epsilon
        drawn = policy.act(many, noise)[0][:, 0]
        assert set(drawn) == {0, 2}
        assert abs((drawn == 0).mean() - epsilon / 2) < 0.03
    log_prob, entropy = policy.head.evaluate(policy.outputs(many)[0], np.full((4000, 1), 2))
    assert np.exp(log_prob[0]) == pytest.approx(0.75) and entropy[0] == pytest.approx(0.5623, abs=1e-3)
    policy.keeps_values = True  # prioritised replay
    policy.head.epsilon = 0.0
    action, chosen, best = policy.act(x, noise[:2])
    np.testing.assert_array_equal(np.stack([chosen, best]), [[9, 2], [9, 2]])  # type: ignore[list-item]
    np.testing.assert_array_equal(policy.evaluate_actions(x, 1 - action), [[8, 1], [9, 2]])


# -- images, GPU ----------------------------------------------------------------------------------------------------


def pictures(device: str | None) -> Collector:
    env, _ = make_vector(EnvConfig(id=f"{FILE}:Picture", vector="sync"), 4, seed=3)
    model, rng = ModelConfig(hidden=[16], activation="relu"), np.random.default_rng(5)
    if device is None:
        return Collector([env], Policy(env.observation, env.action, model, seed=1), steps=12, rng=rng)
    return GpuCollector([env], GpuPolicy(env.observation, env.action, model, device=device, seed=1), steps=12, rng=rng)


@pytest.mark.parametrize("kind", [PPO, IMPALA])
def test_images_learn_the_same_on_a_device(kind: Any) -> None:
    plain, other = pictures(None), pictures("cpu")
    assert find_device("auto", plain.envs[0].observation, plain.envs[0].action) in ("cpu", "cuda")
    plain.start()
    other.start()
    weights = []
    for made in (plain, other):
        settings = kind.Settings(rollout_steps=12, entropy_coef=0.02)
        algorithm = kind(made.policy, settings, rng=np.random.default_rng(2))
        for _ in range(3):  # the environments refuse invalid actions
            metrics = algorithm.update(made.collect(), 1.0)
            if isinstance(made, GpuCollector):
                made.publish()
        assert 0 < metrics["entropy"] < np.log(5)
        weights.append(made.policy.parameters.clone())
    torch.testing.assert_close(weights[1], weights[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("function", ["online", "target"])
def test_values_of_invalid_actions_are_lowest_for_images(function: str) -> None:
    """Convolutions take another way than the networks above, in acting and in targets."""
    env, _ = make_vector(EnvConfig(id=f"{FILE}:Picture", vector="sync"), 4, seed=3)
    model = ModelConfig(hidden=[16], activation="relu")
    policy = QPolicy(env.observation, env.action, model, DQN.Settings())
    x = policy.prepare(env.reset())
    mask = env.observation.split(x)[1]
    assert mask is not None and 0 < (mask == 0).mean() < 1
    np.testing.assert_array_equal(getattr(policy, function).values(x).T == INVALID, mask == 0)


# -- whole runs -----------------------------------------------------------------------------------------------------


def tree(algo: str, name: str, **env: Any) -> dict[str, Any]:
    hyper = {"ppo": {"epochs": 2}, "dqn": {"learning_starts": 20, "rounds": 20}}.get(algo, {})
    return {
        "algo": algo,
        "env": {"id": f"{FILE}:{name}", "envs_per_worker": 4, **env},
        "eval": {"episodes": 3, "every_steps": 40},
        algo: hyper,
    }


@pytest.mark.parametrize("algo", ["ppo", "a2c", "a3c", "impala", "dqn"])
def test_a_run_trains_resumes_exactly_evaluates_and_acts(algo: str, tmp_path: Path) -> None:
    """The environments refuse an invalid action."""
    from paceline.evaluate import evaluate
    from paceline.run import checkpoint

    name = "ByInfo" if algo == "dqn" else "ByTuple"
    kwargs: dict[str, Any] = {} if algo == "dqn" else {"nvec": [2, 4, 3]}
    whole, cut = (tree(algo, name, kwargs=kwargs, normalize_observation=True) | {"out": str(tmp_path)} for _ in "12")
    run = paceline.train(whole | {"name": "whole", "stop": {"iterations": 4}})
    paceline.train(cut | {"name": "cut", "stop": {"iterations": 2}})
    resumed = paceline.train({"stop": {"iterations": 4}}, resume=tmp_path / "cut")
    assert json.loads((resumed / "resume.json").read_text())["level"] == "exact"
    arrays = [checkpoint.load(checkpoint.find(path, "last"))[0] for path in (run, resumed)]
    compared = [key for key in arrays[0] if "policy" in key]
    assert compared and all(np.array_equal(arrays[0][key], arrays[1][key]) for key in compared)
    for options in ({}, {"stochastic": True}, {"random": True}):
        [row] = evaluate(run, episodes=5, **options)
        assert row["episodes"] == 5
    agent = paceline.load(run)
    env = agent.make_env()
    observation, info = env.reset(seed=3)
    for _ in range(masked_envs.LENGTH):
        action = agent.act(observation, mask=info["action_mask"], deterministic=False)
        observation, _, _, _, info = env.step(action)
    with pytest.raises(paceline.UserError, match="needs one"):
        agent.act(observation)
    with pytest.raises(paceline.UserError, match="mask has shape"):
        agent.act(observation, mask=np.ones(2))
    with pytest.raises(paceline.UserError, match="mask allows no"):
        agent.act(observation, mask=np.zeros(sum(agent.policy.action.nvec)))


@pytest.mark.parametrize(("algo", "name"), [("ppo", "ByKey"), ("dqn", "ByKey"), ("ppo", "Picture")])
def test_an_export_takes_the_mask(algo: str, name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from paceline.export import export

    run = paceline.train(tree(algo, name) | {"out": str(tmp_path), "stop": {"iterations": 2}})
    done = export(run)
    assert done.inputs[-1].name == "action_mask" and "the same actions" in done.checked
    session, agent = onnxruntime.InferenceSession(str(done.path)), paceline.load(run)
    env = agent.make_env()
    observation, info = env.reset(seed=1)
    for _ in range(masked_envs.LENGTH):
        mask = agent.mask_of(env, observation, info)
        inputs = {done.inputs[0].name: np.asarray(observation["observation"] if name == "ByKey" else observation)[None]}
        inputs["action_mask"] = np.asarray(mask, np.int8)[None]
        [action] = session.run(["action"], inputs)
        assert action[0] == agent.act(observation, mask=mask)
        observation, _, _, _, info = env.step(int(action[0]))


def test_a_policy_without_masks_says_so(tmp_path: Path) -> None:
    run = paceline.train({"env": "CartPole-v1", "out": str(tmp_path), "stop": {"iterations": 1}})
    agent = paceline.load(run)
    with pytest.raises(paceline.UserError, match="trained without action masks"):
        agent.act(np.zeros(4, np.float32), mask=np.ones(2))
