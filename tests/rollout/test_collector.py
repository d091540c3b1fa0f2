from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EnvConfig, ModelConfig
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.sync_vector import SyncVector
from paceline.models.policy import Policy
from paceline.rollout.batch import Batch
from paceline.rollout.collector import Collector
from paceline.run.state_tree import pack, unpack

ODD = Path(__file__).parents[1] / "odd_envs.py"
GAMMA = 0.9


def script(num_envs: int = 4, *, seed: int = 0, resumes: int = 0, **kwargs: Any) -> Any:
    config = EnvConfig(id=f"{ODD}:Script", kwargs=kwargs)
    return SyncVector([functools.partial(make_scalar, config)] * num_envs, seed=seed, resumes=resumes)


def make(env: Any, steps: int, *, seed: int = 0, discount: float | None = GAMMA, **model: Any) -> Collector:
    policy = Policy(env.observation, env.action, ModelConfig(hidden=[16], activation="relu", **model), seed=3)
    return Collector([env], policy, steps=steps, discount=discount, rng=np.random.default_rng(seed))


def collect(collector: Collector, rollouts: int) -> list[Batch]:
    """Copies: the collector fills the same batch each time."""
    return [copy.deepcopy(collector.collect()) for _ in range(rollouts)]


def joined(batches: list[Batch], name: str) -> Any:
    return np.concatenate([getattr(batch, name) for batch in batches])


@pytest.mark.parametrize("steps", [1, 2, 5, 16])
def test_episodes_are_whole_over_rollouts_that_cut_them(steps: int) -> None:
    env = script(5)
    collector = make(env, steps)
    collector.start()
    batches = collect(collector, 64 // steps)
    found = [(e.total, e.length) for batch in batches for e in batch.episodes]
    # Episodes are told in order of time, within a step in order of environment; the env knows the order of its own.
    true = [[(total, length) for total, length, _ in e.history] for e in env.envs]
    assert len(found) == sum(map(len, true)) > 40
    dones = joined(batches, "terminated") | joined(batches, "truncated")
    pointers = [iter(own) for own in true]
    expected = [next(pointers[i]) for t in range(len(dones)) for i in np.flatnonzero(dones[t])]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 7])
def test_every_row_is_what_happened(steps: int) -> None:
    env = script(4)
    collector = make(env, steps)
    collector.start()
    batches = collect(collector, 60 // steps)
    done = np.zeros(4, bool)
    for before, batch in zip([None, *batches], batches, strict=False):
        if before is not None:
            np.testing.assert_array_equal(batch.obs[0], before.obs[-1])
        assert batch.env_steps == int(batch.valid.sum())
        for t in range(steps):
            np.testing.assert_array_equal(batch.valid[t], ~done)
            obs, after = batch.obs[t], batch.obs[t + 1]
            for i in range(4):
                if done[i]:
                    assert after[i, 0] != obs[i, 0] and after[i, 1] == 0 and batch.reward[t, i] == 0
                    assert not batch.terminated[t, i] and not batch.truncated[t, i]
                else:
                    assert (after[i, 0], after[i, 1]) == (obs[i, 0], obs[i, 1] + 1)
                    assert after[i, 2] == batch.action[t, i, 0]  # the env echoes what it was given
            done = batch.terminated[t] | batch.truncated[t]
    assert {True, False} <= set(joined(batches, "terminated").ravel().tolist())
    assert joined(batches, "truncated").any()
    total = sum(batch.env_steps for batch in batches)
    assert total == sum(len(e.actions) for e in env.envs)  # steps that the simulators really made


def test_values_and_log_probabilities_are_of_the_policy_that_acted() -> None:
    for model in ({}, {"shared": True}):
        env = script(3)
        collector = make(env, 6, **model)
        collector.start()
        policy: Any = collector.policy
        for _ in range(3):
            batch = collect(collector, 1)[0]
            for t in range(6):
                log_prob, value = policy.evaluate_actions(batch.obs[t], batch.action[t])
                np.testing.assert_allclose(batch.logp[t], log_prob, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(batch.value[t], value, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(batch.value[6], policy.value(batch.obs[6]), rtol=1e-4, atol=1e-4)
            assert len(np.unique(batch.value)) > 15
            policy.parameters.mul_(1.3)  # learning, between the rollouts


def test_an_image_policy_fills_the_same_batch() -> None:
    env, _ = make_vector(EnvConfig(id="paceline/ImageSide-v0", kwargs={"size": 8, "length": 3}), 3, seed=0)
    collector = make(env, 7)
    collector.start()
    policy: Any = collector.policy
    batch = collect(collector, 2)[1]
    assert batch.obs.dtype == np.uint8
    for t in range(7):
        log_prob, value = policy.evaluate_actions(batch.obs[t], batch.action[t])
        np.testing.assert_allclose(batch.logp[t], log_prob, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch.value[t], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch.value[7], policy.value(batch.obs[7]), rtol=1e-4, atol=1e-5)


def test_the_discounted_return_runs_through_an_episode_and_starts_anew() -> None:
    collector = make(script(4), 5)
    collector.start()
    batches = collect(collector, 10)
    reward, got = joined(batches, "reward").astype(np.float64), joined(batches, "discounted")
    done = joined(batches, "terminated") | joined(batches, "truncated")
    running = np.zeros(4)
    for t in range(50):
        running = GAMMA * running + reward[t]
        np.testing.assert_allclose(got[t], running, rtol=1e-4, atol=1e-4)
        running[done[t]] = 0


def test_metrics_of_the_envs_arrive_with_their_rollout() -> None:
    env = script(3)
    collector = make(env, 8)
    collector.start()
    batches = collect(collector, 6)
    assert sum(len(batch.env_metrics) for batch in batches) > 20
    for batch in batches:
        assert [m["length"] for m in batch.env_metrics] == [e.length for e in batch.episodes]
        assert all(m["mark"] >= 1 for m in batch.env_metrics)


def test_known_numbers() -> None:
    """KnownReturn with length 3 takes four slots an episode, so that 10 slots hold two and a half."""
    env, _ = make_vector(EnvConfig(id="paceline/KnownReturn-v0", kwargs={"length": 3}), 2, seed=0)
    collector = make(env, 10)
    collector.start()
    first, second = collect(collector, 2)
    row = [True, True, True, False]
    assert first.valid[:, 0].tolist() == [*row, *row, True, True] and first.env_steps == 16
    assert second.valid[:, 1].tolist() == [True, False, *row, *row]
    assert first.terminated[:, 0].tolist() == [False, False, True, False, False, False, True, False, False, False]
    assert not first.truncated.any()
    assert [(e.total, e.length) for e in first.episodes] == [(3.0, 3)] * 4
    assert [(e.total, e.length) for e in second.episodes] == [(3.0, 3)] * 6
    assert first.env_metrics == [{"utility": 1 / 3}] * 4
    np.testing.assert_allclose(first.discounted[:5, 0], [1, 1.9, 2.71, 0, 1], rtol=1e-6)


def test_a_start_forgets_what_was_running() -> None:
    collector = make(script(3), 4)
    collector.start()
    collect(collector, 1)
    collector.start()
    batch = collect(collector, 1)[0]
    assert batch.valid[0].all() and (batch.obs[0][:, 1] == 0).all()
    assert all(e.length <= 4 for e in batch.episodes)


def test_the_same_seed_collects_the_same() -> None:
    runs = []
    for seed in (1, 1, 2):
        collector = make(script(3, seed=4), 9, seed=seed)
        collector.start()
        runs.append(joined(collect(collector, 2), "action"))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


# -- saving and restoring -------------------------------------------------------------------------------------------


def through_a_checkpoint(state: Any) -> Any:
    arrays, tree = pack(state)
    return unpack({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(tree)))


FIELDS = ("obs", "action", "logp", "value", "reward", "discounted", "terminated", "truncated", "valid")


@pytest.mark.parametrize("continuous", [False, True])
def test_a_restored_collector_goes_on_exactly(continuous: bool) -> None:
    for rollouts in range(5):  # the cut falls on ends, resets and middles of episodes
        one = make(script(4, continuous=continuous), 3)
        one.start()
        collect(one, rollouts)
        state = through_a_checkpoint(one.state())
        expected = collect(one, 4)
        other = make(script(4, seed=9, resumes=1, continuous=continuous), 3, seed=5)
        assert other.restore(state) is True
        for a, b in zip(expected, collect(other, 4), strict=True):
            for name in FIELDS:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
            assert a.episodes == b.episodes


def test_what_cannot_be_restored_starts_afresh_and_drops_the_unfinished() -> None:
    one = make(script(3, seeded=False, longest=50), 5)
    one.start()
    collect(one, 1)
    state = through_a_checkpoint(one.state())
    other = make(script(3, resumes=1, seeded=False, longest=4), 5)
    assert other.restore(state) is False
    batch = collect(other, 1)[0]
    assert batch.valid[0].all()
    assert all(e.length <= 4 for e in batch.episodes)  # none holds steps of before
    assert other.rng.bit_generator.state != np.random.default_rng(0).bit_generator.state


def test_another_number_of_envs_starts_afresh() -> None:
    one = make(script(3), 5)
    one.start()
    collect(one, 1)
    other = make(script(4), 5)
    assert other.restore(through_a_checkpoint(one.state())) is False
    assert collect(other, 1)[0].valid[0].all()
