from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.algorithms.dqn import DQN
from paceline.algorithms.returns import n_step
from paceline.config import ModelConfig
from paceline.models.q import QPolicy
from paceline.rollout.batch import Batch
from paceline.rollout.replay import Sample
from paceline.spaces import ActionCodec, ObservationCodec

GAMMA = 0.9
ACTIONS = 3
OBSERVATION = ObservationCodec(spaces.Box(-np.inf, np.inf, (4,), np.float32))
ACTION = ActionCodec(spaces.Discrete(ACTIONS))


def make(*, seed: int = 0, normalize: bool = False, hidden: Sequence[int] = (16,), **hyper: Any) -> DQN:
    options: dict[str, Any] = {
        "batch_size": 16,
        "learning_starts": 0,
        "gamma": GAMMA,
        "replay_size": 500,
        "target_update_every": 1000,
        **hyper,
    }
    config = DQN.Settings(**options)
    model = ModelConfig(hidden=list(hidden), activation="relu")
    policy = QPolicy(OBSERVATION, ACTION, model, config, seed=seed, normalize_observation=normalize)
    for buffer, number in ((policy.parameters, 100), (policy.target.parameters, 200)):
        buffer.add_(0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed + number)))
    return DQN(policy, config, rng=np.random.default_rng(seed), normalize_reward=normalize)


def rollout(algorithm: DQN, steps: int = 12, num_envs: int = 4, *, seed: int = 0, ends: float = 0.15) -> Batch:
    rng, policy = np.random.default_rng(seed), algorithm.policy
    batch = Batch.empty(steps, num_envs, OBSERVATION, ACTION)
    batch.obs[...] = rng.normal(size=batch.obs.shape)
    done = np.zeros(num_envs, np.bool_)
    for t in range(steps):
        action, chosen, best = policy.act(batch.obs[t], policy.head.noise(rng, (num_envs,)))
        batch.action[t] = action
        if chosen is not None and best is not None:
            batch.logp[t], batch.value[t] = chosen, best
        batch.valid[t] = ~done
        batch.reward[t] = rng.normal(size=num_envs) * batch.valid[t]
        batch.terminated[t] = (rng.random(num_envs) < ends) & ~done
        batch.truncated[t] = (rng.random(num_envs) < ends) & ~done & ~batch.terminated[t]
        done = batch.terminated[t] | batch.truncated[t]
        batch.discounted[t] = rng.normal(size=num_envs)
    batch.value[steps] = policy.value(batch.obs[steps])
    return batch


def values(net: Any, x: Any) -> Any:
    return net(torch.from_numpy(x))[0]


# -- targets --------------------------------------------------------------------------------------------------------


def test_targets_by_hand() -> None:
    """Two actions, networks that are tables: what double and plain learning want, in numbers."""
    for double, wanted in ((False, [1 + 0.9 * 7.0, -1.0]), (True, [1 + 0.9 * 3.0, -1.0])):
        config = DQN.Settings(batch_size=2, gamma=0.9, double=double, learning_rate=1e-3, target_update_every=99)
        observation, action = ObservationCodec(spaces.Box(-1, 1, (2,), np.float32)), ActionCodec(spaces.Discrete(2))
        policy = QPolicy(observation, action, ModelConfig(hidden=[]), config)
        # A row of the identity as observation picks a column: the values of both actions there.
        for function, table in ((policy.online, [[1.0, 9.0], [2.0, 8.0]]), (policy.target, [[0.0, 3.0], [0.0, 7.0]])):
            (linear,) = (m for m in function.net.modules() if isinstance(m, torch.nn.Linear))
            with torch.no_grad():
                linear.weight.copy_(torch.tensor(table))
                linear.bias.zero_()
        algorithm = DQN(policy, config, rng=np.random.default_rng(0))
        eye = np.eye(2, dtype=np.float32)
        # Both begin in state 0; the first goes on to state 1, where the network that learns prefers action 0 (9 > 8),
        # which the target network says is worth 3, and the other 7. The second has ended.
        sample = Sample(
            np.arange(2),
            eye[[0, 0]],
            np.asarray([1, 0]),
            np.asarray([1, -1], np.float32),
            eye[[1, 0]],
            np.asarray([0.9, 0.0], np.float32),
            None,
        )
        error = algorithm._learn_from(sample, 1, 1e-3)
        np.testing.assert_allclose(error, np.asarray([2.0, 1.0]) - wanted, rtol=1e-6)
        # Beyond 1 the Huber loss has the slope 1, halved as the mean of two rows.
        (linear,) = (m for m in policy.net.modules() if isinstance(m, torch.nn.Linear))
        assert linear.weight.grad is not None
        np.testing.assert_allclose(linear.weight.grad, np.asarray([[0.5, 0], [-0.5, 0]]), atol=1e-6)


@pytest.mark.parametrize("prioritized", [False, True])
def test_normalised_rewards_are_clipped(prioritized: bool) -> None:
    """As those of the other algorithms: one step that pays a million must not become the only thing to learn."""
    algorithm = make(normalize=True, n_step=2, prioritized=prioritized, gradient_steps=4)
    batch = rollout(algorithm, ends=0.0)
    batch.reward[2:8] = 1e6
    assert algorithm.update(batch, 1.0)["td_error_mean"] < 10 * (1 + GAMMA) + 10


def test_n_step_returns_by_hand() -> None:
    reward = np.asarray([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]], np.float32)
    value = np.asarray([[0.0, 0.0], [10.0, 10.0], [20.0, 20.0], [30.0, 30.0], [40.0, 40.0]], np.float32)
    terminated, truncated = np.zeros((2, 4, 2), np.bool_)
    terminated[1, 0], truncated[1, 1] = True, True
    target = n_step(reward, value, terminated, truncated, gamma=0.5, n=2)
    # Of the first environment step 1 has no future; of the second it has that of the state it was cut in.
    np.testing.assert_allclose(target[0], [1 + 0.5 * 2, 1 + 0.5 * 2 + 0.25 * 20])
    np.testing.assert_allclose(target[1], [2, 2 + 0.5 * 20])
    np.testing.assert_allclose(target[2], [4 + 0.5 * 8 + 0.25 * 40] * 2)
    np.testing.assert_allclose(target[3], [8 + 0.5 * 40] * 2)  # the rollout ends: one step


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_weights_after_some_steps_are_those_of_torch(double: bool, prioritized: bool, n: int) -> None:
    algorithm = make(double=double, prioritized=prioritized, n_step=n, gradient_steps=5, max_grad_norm=0.5, huber=0.7)
    policy = algorithm.policy
    net, target = copy.deepcopy(policy.net), copy.deepcopy(policy.target.net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    drawn: list[Sample] = []
    learn_from = algorithm._learn_from

    def keep(sample: Sample, steps: int, learning_rate: float) -> Any:
        drawn.append(copy.deepcopy(sample))
        return learn_from(sample, steps, 1e-2)

    algorithm._learn_from = keep  # type: ignore[method-assign]
    metrics = algorithm.update(rollout(algorithm), 0.5)
    size, losses, errors = 16, [], []
    for sample in drawn:
        for k in range(len(sample.index) // size):
            part = slice(k * size, (k + 1) * size)
            with torch.no_grad():
                later = values(target, sample.next_obs[part])
                chooser = values(net, sample.next_obs[part]) if double else later
                best = later.gather(1, chooser.argmax(1, keepdim=True))[:, 0]
                wanted = torch.from_numpy(sample.reward[part]) + torch.from_numpy(sample.discount[part]) * best
            action = torch.from_numpy(sample.action[part])[:, None]
            taken = values(net, sample.obs[part]).gather(1, action)[:, 0]
            loss = torch.nn.functional.huber_loss(taken, wanted, reduction="none", delta=0.7)
            weight = torch.ones(size) if sample.weight is None else torch.from_numpy(sample.weight[part])
            optimizer.zero_grad()
            (loss * weight).mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            losses.append(float((loss * weight).mean().detach()))
            errors.append(float((taken - wanted).abs().mean().detach()))
    assert len(losses) == 5
    for own, theirs in zip(policy.net.parameters(), net.parameters(), strict=True):
        np.testing.assert_allclose(own.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)
    assert metrics["total_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["td_error_mean"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert (metrics["steps_sampled"], metrics["steps_trained"]) == (len(algorithm.replay or ()), 80)


def test_drawing_for_several_steps_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the random numbers either: there is no row that would have to be drawn again."""
    results = []
    for chunk in (1, 10_000_000):
        monkeypatch.setattr("paceline.algorithms.off_policy.CHUNK_BYTES", chunk)
        algorithm = make(gradient_steps=7, target_update_every=3)
        algorithm.update(rollout(algorithm, steps=30, ends=0.0), 0.5)
        results.append(algorithm.policy.parameters.clone())
        assert algorithm.target_updates == 2
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("double", [False, True])
def test_a_second_thread_changes_nothing(double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor how many rows the target network looks at together, but for the last digits."""
    results = []
    for threads, ahead_rows in ((1, 64), (2, 64), (2, 16), (1, 1)):
        monkeypatch.setattr("paceline.models.q.PREFETCH_ROWS", ahead_rows)
        monkeypatch.setattr("paceline.models.q.MIN_PARALLEL_PRODUCTS", 0)
        algorithm = make(gradient_steps=30, target_update_every=11, double=double, hidden=[32, 32])
        assert algorithm.policy.use_threads(threads, 16 * 11) == threads
        for seed in range(3):
            algorithm.update(rollout(algorithm, steps=30, seed=seed), 0.5)
        results.append(algorithm.policy.parameters.clone())
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[2], results[3])
    np.testing.assert_allclose(results[0], results[2], rtol=1e-3, atol=1e-4)


# -- the target network ---------------------------------------------------------------------------------------------


def test_the_target_network_is_copied_every_so_many_steps() -> None:
    algorithm = make(gradient_steps=2, target_update_every=3)
    policy = algorithm.policy
    first = policy.target.parameters.clone()
    algorithm.update(rollout(algorithm), 1.0)
    np.testing.assert_array_equal(policy.target.parameters, first)
    metrics = algorithm.update(rollout(algorithm), 1.0)  # steps 3 and 4
    assert metrics["target_updates"] == 1
    assert not np.array_equal(policy.target.parameters, first)
    assert not np.array_equal(policy.target.parameters, policy.parameters)  # which has gone a step further
    metrics = algorithm.update(rollout(algorithm), 1.0)
    assert metrics["target_updates"] == 2
    np.testing.assert_array_equal(policy.target.parameters, policy.parameters)


def test_or_follows_slowly() -> None:
    algorithm = make(target_update_every=1, target_tau=0.1)
    before = algorithm.policy.target.parameters.clone()
    algorithm.update(rollout(algorithm), 1.0)
    expected = before + 0.1 * (algorithm.policy.parameters - before)
    np.testing.assert_allclose(algorithm.policy.target.parameters, expected, rtol=1e-5, atol=1e-6)


# -- exploring, drawing ---------------------------------------------------------------------------------------------


def test_epsilon_falls_over_its_part_of_the_budget() -> None:
    algorithm = make(learning_starts=60, epsilon_start=0.8, epsilon_end=0.2, epsilon_fraction=0.5)
    head = algorithm.policy.head
    assert head.epsilon == 1.0
    metrics = algorithm.update(rollout(algorithm), 1.0)
    assert head.epsilon == 1.0 and metrics["steps_trained"] == 0 and "total_loss" not in metrics
    algorithm.update(rollout(algorithm), 1.0)
    assert metrics["steps_sampled"] < 60 and head.epsilon == pytest.approx(0.8)
    for remaining, expected in ((0.75, 0.5), (0.5, 0.2), (0.0, 0.2)):
        assert algorithm.update(rollout(algorithm), remaining)["epsilon"] == pytest.approx(expected)


def test_a_replay_smaller_than_what_is_collected_first() -> None:
    algorithm = make(learning_starts=100, replay_size=60)
    for k in range(6):
        metrics = algorithm.update(rollout(algorithm, seed=k), 1.0)
        assert (metrics["steps_trained"] > 0) is (metrics["steps_sampled"] >= 100) and metrics["replay_rows"] < 60
    assert algorithm.optimizer_steps > 0


def test_priorities_are_errors_of_those_who_acted_and_then_of_the_learner() -> None:
    algorithm = make(prioritized=True, n_step=2, priority_alpha=0.5, learning_starts=1000)
    batch = rollout(algorithm)
    algorithm.update(batch, 1.0)
    replay = algorithm.replay
    assert replay is not None and replay.tree is not None
    target = n_step(batch.reward, batch.value, batch.terminated, batch.truncated, gamma=GAMMA, n=2)
    expected = np.where(batch.valid, (np.abs(target - batch.logp) + 1e-6) ** 0.5, 0.0)
    np.testing.assert_allclose(replay.tree.leaves()[: batch.reward.size], expected.reshape(-1), rtol=1e-4)
    sample = replay.sample(algorithm.rng, 16, n_step=2, gamma=GAMMA, beta=0.4)
    replay.sample = lambda *_, **__: sample  # type: ignore[method-assign]
    error = algorithm._learn_from(copy.deepcopy(sample), 1, 1e-9)
    algorithm.annealed["learning_rate"] = 1e-9
    algorithm.learn(replay, 0)
    np.testing.assert_allclose(replay.tree[sample.index], (np.abs(error) + 1e-6) ** 0.5, rtol=1e-3)


def test_noise_is_drawn_anew_for_each_step() -> None:
    algorithm = make(exploration="noisy")
    assert algorithm.policy.head.epsilon == 0.0
    seen = [algorithm.policy.online.noise.clone()]
    for _ in range(2):
        algorithm.update(rollout(algorithm), 1.0)
        seen.append(algorithm.policy.online.noise.clone())
    assert all(float(noise.abs().max()) > 0 for noise in seen)
    assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])
    assert float(algorithm.policy.target.noise.abs().max()) > 0


# -- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hyper",
    [{}, {"prioritized": True, "n_step": 3}, {"exploration": "noisy", "dueling": True}, {"replay": "disk"}],
    ids=lambda hyper: "-".join(hyper) or "plain",
)
@pytest.mark.parametrize("normalize", [False, True])
def test_it_goes_on_as_if_it_had_not_been_saved(tmp_path: Path, hyper: dict[str, Any], normalize: bool) -> None:
    one, two = make(normalize=normalize, **hyper), make(normalize=normalize, seed=5, **hyper)
    one.set_scratch_dir(tmp_path)
    two.set_scratch_dir(tmp_path)
    for k in range(3):
        one.update(rollout(one, seed=k), 0.9)
    two.load(copy.deepcopy(one.state()))
    assert two.notes() == []
    if "replay" in hyper:  # they would write into one file
        one.replay = two.replay
        two.update(rollout(two, seed=7), 0.8)
        assert two.steps_sampled > one.steps_sampled
        return
    for k in range(3, 6):
        ours, theirs = (own.update(rollout(own, seed=k), 0.8) for own in (one, two))
        assert ours["target_updates"] == theirs["target_updates"]
    np.testing.assert_array_equal(one.policy.parameters, two.policy.parameters)
    np.testing.assert_array_equal(one.policy.target.parameters, two.policy.target.parameters)


def test_a_rollout_from_elsewhere_breaks_episodes_off() -> None:
    algorithm = make(learning_starts=1000)
    for k in range(2):
        algorithm.update(rollout(algorithm, seed=k, ends=0.0), 1.0)
    replay = algorithm.replay
    assert replay is not None
    assert not replay._ended[:24].any()
    algorithm.interrupted()
    algorithm.update(rollout(algorithm, seed=2, ends=0.0), 1.0)
    assert list(np.flatnonzero(replay._ended[:, 0])) == [23]
    assert not replay._valid[24].any() and replay._valid[25:37].all()


def test_actors_take_over_weights_and_have_an_epsilon_of_their_own() -> None:
    learner = make(prioritized=True, epsilon_start=0.4, epsilon_end=0.4, epsilon_power=7.0)
    learner.update(rollout(learner), 0.5)
    epsilons = []
    for index in range(3):
        actor = make(seed=4, prioritized=True, epsilon_power=7.0)
        actor.act_as(index, 3)
        actor.load_weights(learner.weights())
        np.testing.assert_array_equal(actor.policy.parameters, learner.policy.parameters)
        assert actor.version == 1
        epsilons.append(actor.policy.head.epsilon)
    np.testing.assert_allclose(epsilons, [0.4, 0.4**4.5, 0.4**8])


def test_an_attempt_is_taken_back_but_for_the_replay() -> None:
    algorithm = make(prioritized=True)
    algorithm.update(rollout(algorithm), 0.5)
    before = copy.deepcopy(algorithm.snapshot())
    assert "replay" not in before
    algorithm.update(rollout(algorithm, seed=1), 0.5)
    held = len(algorithm.replay or ())
    algorithm.load(before)
    np.testing.assert_array_equal(algorithm.snapshot()["optimizer"]["first"], before["optimizer"]["first"])
    assert len(algorithm.replay or ()) == held and algorithm.notes() == []
    other = make(prioritized=True, seed=3)  # which takes the place of a learner that was lost
    other.load(before)
    assert other.notes() == ["the replay is empty: it was lost with the process that had it"]


def test_rollouts_of_several_actors_side_by_side() -> None:
    algorithm = make(learning_starts=1000)
    algorithm.update(rollout(algorithm, num_envs=2), 1.0)
    algorithm.interrupted()
    algorithm.update(rollout(algorithm, num_envs=6, seed=1), 1.0)
    assert algorithm.replay is not None and algorithm.replay.num_envs == 2
    assert len(algorithm.replay) == algorithm.steps_sampled
