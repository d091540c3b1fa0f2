"""SAC and TD3: what one optimizer step does, by numbers worked out independently."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import paceline
from paceline.algorithms.continuous import Transitions
from paceline.algorithms.sac import sample
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.models.actor_critics import GaussianActor, uniform
from paceline.spaces import ActionCodec, ObservationCodec

CASES = [(1, 3, 1, [5]), (64, 17, 6, [32, 16]), (400, 4, 2, [128, 128]), (37, 5, 3, [7, 9, 11])]


def make(algo: str, case: tuple[int, int, int, list[int]], **model: Any) -> Any:
    _, observations, actions, hidden = case
    config = validate({"algo": algo, "env": {"id": "Pendulum-v1"}, "model": {"hidden": hidden, **model}})
    box = spaces.Box(-1, 1, (observations,), np.float32), spaces.Box(-1, 1, (actions,), np.float32)
    policy = config.algorithm.make_policy(config, ObservationCodec(box[0]), ActionCodec(box[1]), seed=3)
    algorithm: Any = config.algorithm(policy, config.hyper, rng=np.random.default_rng(0))
    moved = np.random.default_rng(5).normal(0, 0.05, policy.target_parameters.numel())  # type: ignore[attr-defined]
    policy.target_parameters.add_(torch.from_numpy(moved.astype(np.float32)))  # type: ignore[attr-defined]
    return algorithm


def rows_of(case: tuple[int, int, int, list[int]], seed: int = 1) -> Transitions:
    count, observations, actions, _ = case
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    discount = np.where(rng.random(count) < 0.2, 0, 0.99).astype(np.float32)
    return Transitions(
        normal(count, observations),
        np.tanh(normal(count, actions)),
        normal(count),
        normal(count, observations),
        discount,
        normal(count, actions),
        normal(count, actions),
    )


@pytest.mark.parametrize("algo", ["sac", "td3"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "elu"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_accelerator_gives_the_gradient_of_the_loss(algo: str, activation: str, case: Any, threads: int) -> None:
    found = []
    for accelerate in (True, False):
        algorithm = make(algo, case, activation=activation, accelerate=accelerate)
        algorithm.optimizer_steps = 1  # a step of TD3's actor, too
        if threads == 2:
            algorithm.policy.use_threads(2, 10**9)
        work = algorithm.accelerator.gradients if accelerate else algorithm._gradients
        for _ in range(threads):  # two threads are tried in the second step
            statistics = work(rows_of(case))
        assert not accelerate or algorithm.accelerator._in_two == (threads == 2)
        found.append((algorithm.policy.gradient.numpy(), statistics))
    (by_hand, statistics), (by_autograd, same) = found
    np.testing.assert_allclose(by_hand, by_autograd, rtol=1e-3, atol=1e-5 * np.abs(by_autograd).max())
    assert set(statistics) == set(same)
    for name, value in same.items():
        assert statistics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_each_part_of_sacs_loss_moves_its_own_network_only() -> None:
    """One backward pass gives the gradients that three separate ones give, with the others' parameters frozen."""
    case = CASES[1]
    algorithm = make("sac", case, accelerate=False)
    policy, rows = algorithm.policy, rows_of(case).tensors()
    algorithm._gradients(rows_of(case))
    together = policy.gradient.clone()
    temperature = algorithm.temperature()
    with torch.no_grad():
        action, log_prob = sample(policy.actor(rows.next_obs), rows.next_noise)
        target = rows.reward + rows.discount * (policy.target_q(rows.next_obs, action).amin(0) - temperature * log_prob)
    policy.gradient.zero_()
    q = policy.q(rows.obs, rows.action)
    (0.5 * ((q[0] - target) ** 2).mean() + 0.5 * ((q[1] - target) ** 2).mean()).backward()
    critics = policy.gradient[policy.critic_slice].clone()
    policy.gradient.zero_()
    action, log_prob = sample(policy.actor(rows.obs), rows.noise)
    (temperature * log_prob - policy.q(rows.obs, action).amin(0)).mean().backward()
    actor = policy.gradient[policy.actor_slice].clone()
    torch.testing.assert_close(together[policy.critic_slice], critics)
    torch.testing.assert_close(together[policy.actor_slice], actor)
    entropy = -float(log_prob.mean().detach())
    assert float(together[-1]) == pytest.approx(entropy - algorithm.target_entropy, rel=1e-4)  # 0 at the target
    assert algorithm.target_entropy == -6.0


def test_the_log_probability_of_a_squashed_action_is_a_density() -> None:
    """It integrates to 1 over the actions, and equals the change of variables by hand."""
    out = torch.tensor([[0.3, -0.5]])  # mean, log of the deviation
    u = torch.linspace(-6, 6, 20_001)
    noise = ((u - 0.3) / math.exp(-0.5))[:, None]
    action, log_prob = sample(out.expand(len(u), 2), noise)
    assert float(torch.trapezoid(log_prob.exp(), action[:, 0])) == pytest.approx(1, abs=1e-4)
    by_hand = -0.5 * noise[:, 0] ** 2 + 0.5 - 0.5 * math.log(2 * math.pi) - torch.log(1 - torch.tanh(u.double()) ** 2)
    torch.testing.assert_close(log_prob.double(), by_hand.double(), atol=2e-3, rtol=0)
    far, log_far = sample(torch.tensor([[30.0, 0.0]]), torch.zeros(1, 1))
    assert float(far) == 1.0 and math.isfinite(float(log_far))


def test_the_actor_samples_what_the_loss_says() -> None:
    head, rng = GaussianActor(2), np.random.default_rng(0)
    out, noise = rng.normal(size=(4, 8)).astype(np.float32), head.noise(rng, (8,))
    wanted, _ = sample(torch.from_numpy(out.T.copy()), torch.from_numpy(noise))
    np.testing.assert_allclose(head.sample(out, noise), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head.mode(out), np.tanh(out[:2].T))


def test_actions_of_the_warm_up_are_uniform() -> None:
    values = np.sort(uniform(np.random.default_rng(0).standard_normal(20_000).astype(np.float32)))
    assert np.abs(values - np.linspace(-1, 1, 20_000)).max() < 0.03 and values[0] >= -1 and values[-1] <= 1


def test_td3_delays_the_actor_and_the_targets() -> None:
    case = CASES[1]
    algorithm = make("td3", case)
    algorithm.anneal(1.0)
    policy = algorithm.policy
    for step in range(4):
        before, targets = policy.parameters.clone(), policy.target_parameters.clone()
        algorithm._step(rows_of(case, seed=step))
        moved = (policy.parameters != before).numpy()
        assert moved[policy.critic_slice].mean() > 0.9
        assert moved[policy.actor_slice].any() == (step % 2 == 1)
        assert bool((policy.target_parameters != targets).any()) == (step % 2 == 1)
    assert algorithm.target_updates == 2


def test_the_target_of_td3_is_that_of_the_paper() -> None:
    case = CASES[1]
    algorithm = make("td3", case, accelerate=False)
    policy, rows = algorithm.policy, rows_of(case).tensors()
    _, statistics = algorithm.loss(rows, policy)
    noise = np.clip(0.2 * rows.next_noise.numpy(), -0.5, 0.5)
    with torch.no_grad():
        action = np.clip(np.tanh(policy.target_net(rows.next_obs)[0].numpy()) + noise, -1, 1)
        later = policy.target_q(rows.next_obs, torch.from_numpy(action)).numpy().min(axis=0)
        q = policy.q(rows.obs, rows.action).numpy()
    target = rows.reward.numpy() + rows.discount.numpy() * later
    assert float(statistics["critic_loss"]) == pytest.approx(0.5 * ((q - target) ** 2).mean(axis=1).sum(), rel=1e-5)


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_optimizer_steps_keep_their_ratio_to_env_steps(algo: str, tmp_path: Path) -> None:
    for envs, ratio in ((1, 1.0), (3, 0.25)):
        hyper = {"learning_starts": 50, "updates_per_step": ratio, "rounds": 10, "batch_size": 8}
        tree = {
            "algo": algo,
            "env": {"id": "Pendulum-v1", "envs_per_worker": envs},
            "preset": "none",
            "model": {"hidden": [8]},
            algo: hyper,
            "stop": {"total_steps": 400},
            "out": str(tmp_path),
        }
        run = paceline.train(tree)
        waited = 50 + 10 * envs  # at most: learning starts with the round that fills the replay
        low, high = (run.summary["env_steps"] - waited) * ratio - 1, run.summary["env_steps"] * ratio
        assert low <= run.summary["optimizer_steps"] <= high


@pytest.mark.parametrize(
    ("env", "model", "words"),
    [
        ("CartPole-v1", {}, "sac is for continuous actions"),
        ("Pendulum-v1", {"shared": True}, "model.shared=true is not for algo=sac"),
        ("Pendulum-v1", {"squash": True}, "model.squash is not for algo=sac"),
        ("Pendulum-v1", {"class": "examples/network.py:ResidualNet"}, "MLPs for vectors only"),
    ],
)
def test_what_it_cannot_do_is_refused(env: str, model: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        paceline.train({"algo": "sac", "env": env, "model": model, "preset": "none", "out": str(tmp_path / "runs")})
    assert not (tmp_path / "runs").exists()
