"""Rows of several agents against a slow, plain account of what happened."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.algorithms.returns import gae, vtrace
from paceline.config import EnvConfig, ModelConfig
from paceline.envs.make import make_vector
from paceline.models.policy import Policy
from paceline.models.recurrent_policy import RecurrentPolicy
from paceline.rollout.baselines import RandomPolicy
from paceline.rollout.batch import Batch
from paceline.rollout.collector import Collector, MemoryCollector
from paceline.rollout.episodes import play
from paceline.rollout.replay import Replay
from paceline.run.state_tree import pack, unpack

TEAMS = Path(__file__).parents[1] / "team_envs.py"
GAMMA, LAMBDA = 0.9, 0.8


def vector(name: str = "Relay", num_envs: int = 2, **kwargs: Any) -> Any:
    return make_vector(EnvConfig(id=f"{TEAMS}:{name}", kwargs=kwargs), num_envs, seed=0)[0]


def make(env: Any, steps: int, discount: float | None = GAMMA) -> Collector:
    policy = Policy(env.observation, env.action, ModelConfig(hidden=[16]), seed=3)
    return Collector([env], policy, steps=steps, discount=discount, rng=np.random.default_rng(0))


def collect(collector: Collector, rollouts: int) -> list[Batch]:
    return [copy.deepcopy(collector.collect()) for _ in range(rollouts)]


def lives(batches: list[Batch], column: int) -> list[list[dict[str, Any]]]:
    """The lives of one agent, from the valid rows of the batches."""
    found: list[list[dict[str, Any]]] = []
    running = False
    for batch in batches:
        for t in range(len(batch.reward)):
            if not batch.valid[t, column]:
                assert not running, "an agent that had not ended has no row"
                continue
            if not running:
                found.append([])
            terminated, truncated = bool(batch.terminated[t, column]), bool(batch.truncated[t, column])
            found[-1].append(
                {
                    "obs": batch.obs[t, column],
                    "after": batch.obs[t + 1, column],
                    "reward": float(batch.reward[t, column]),
                    "action": int(batch.action[t, column, 0]),
                    "ends": (terminated, truncated),
                }
            )
            running = not (terminated or truncated)
    return found


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("again", [0, 1, 2])
def test_rows_are_the_lives_of_the_agents(steps: int, again: int) -> None:
    env = vector(num_envs=3, again=again)
    collector = make(env, steps)
    collector.start()
    batches = collect(collector, 60 // steps)
    for column in range(env.rows):
        number = column % 4
        own = lives(batches, column)
        assert (number == 3) == (not own)
        for life in own:
            for row, following in itertools.pairwise(life):
                np.testing.assert_array_equal(row["after"], following["obs"])
            for row in life:
                obs, after = row["obs"], row["after"]
                assert (obs[0], after[0]) == (number, number)
                assert after[1] == obs[1] + 1 and after[2] == obs[2]
                assert row["reward"] == 10 * number + after[1] + row["action"]
        for life in own[:-1]:
            dies = number == 1 and life[-1]["after"][1] == 3
            assert life[-1]["ends"] == (dies, not dies)


def test_steps_and_returns_are_those_of_the_team() -> None:
    env = vector(num_envs=2)
    collector = make(env, 7)
    collector.start()
    [batch] = collect(collector, 1)
    assert batch.team_steps == batch.env_steps == 2 * 6  # and a reset each
    assert batch.agent_steps == batch.rows == 2 * (6 + 3 + 4)
    assert [(e.length, e.step, e.agents) for e in batch.episodes] == [(6, 5, 3)] * 2
    for index, episode in enumerate(batch.episodes):
        own = slice(4 * index, 4 * index + 4)
        assert episode.total == batch.reward[:, own].sum()


def test_the_state_in_the_middle_of_episodes_continues_exactly() -> None:
    one, other = make(vector(), 4), make(vector(), 4)
    one.start()
    collect(one, 2)
    state = unpack(*pack(copy.deepcopy(one.state())))
    assert other.restore(state)
    for a, b in zip(collect(one, 5), collect(other, 5), strict=True):
        assert a.episodes == b.episodes and a.team_steps == b.team_steps
        for name, array in a.arrays().items():
            np.testing.assert_array_equal(array, getattr(b, name), err_msg=name)


def slow_gae(life: list[dict[str, Any]], values: list[float]) -> list[float]:
    """`values`: of the observations of a life and of the one after it."""
    advantage, following = [0.0] * len(life), 0.0
    for t in reversed(range(len(life))):
        terminated, _ = life[t]["ends"]
        future = 0.0 if terminated else values[t + 1]
        delta = life[t]["reward"] + GAMMA * future - values[t]
        following = delta + GAMMA * LAMBDA * following
        advantage[t] = following
    return advantage


@pytest.mark.parametrize("name", ["Relay", "NanAtTheEnd"])
@pytest.mark.parametrize("again", [0, 1, 2])
def test_advantages_are_those_of_each_life_alone(name: str, again: int) -> None:
    env = vector(name, 2, again=again)
    collector = make(env, 30)
    collector.start()
    [batch] = collect(collector, 1)
    advantage, _ = gae(batch.reward, batch.value, batch.terminated, batch.truncated, gamma=GAMMA, gae_lambda=LAMBDA)
    ratio = np.where(batch.valid, np.float32(1), np.float32(0))
    traced, _ = vtrace(
        batch.reward,
        np.nan_to_num(batch.value),
        ratio,
        batch.terminated,
        batch.truncated,
        gamma=GAMMA,
        trace_lambda=1.0,
        clip_rho=1.0,
        clip_c=1.0,
    )
    assert np.isfinite(advantage[batch.valid]).all() and np.isfinite(traced[batch.valid]).all()
    policy = collector.policy
    for column in range(env.rows):
        rows = np.flatnonzero(batch.valid[:, column])
        expected: list[float] = []
        for life in lives([batch], column):
            seen = np.stack([*(row["obs"] for row in life), np.nan_to_num(life[-1]["after"])])
            expected += slow_gae(life, policy.value(seen).tolist())
        np.testing.assert_allclose(advantage[rows, column], expected, rtol=2e-5, atol=1e-4)


def test_failures_cut_the_lives_of_all_agents() -> None:
    env, _ = make_vector(EnvConfig(id=f"{TEAMS}:Relay", kwargs={"fails": 5}, restart_on_error=3), 1, seed=0)
    collector = make(env, 12)
    collector.start()
    [batch] = collect(collector, 1)
    assert not batch.valid[4].any() and batch.env_restarts == 2
    assert batch.truncated[3].tolist() == [True, False, True, False]
    assert batch.team_steps == 10
    assert not batch.episodes  # none came to its end


def test_replay_never_draws_an_absent_agent() -> None:
    env = vector(num_envs=2)
    collector = make(env, 9)
    collector.start()
    replay = Replay(400, env.rows, env.observation, env.action, setting="dqn.replay_size")
    for number, batch in enumerate(collect(collector, 4)):
        replay.add(batch, continues=number > 0)
    rng = np.random.default_rng(0)
    drawn = replay.sample(rng, 500, n_step=3, gamma=GAMMA)
    number, time, following = drawn.obs[:, 0], drawn.obs[:, 1], drawn.next_obs
    assert set(number.tolist()) == {0.0, 1.0, 2.0}
    bootstraps = drawn.discount > 0
    assert (following[bootstraps, 0] == number[bootstraps]).all()
    assert (following[bootstraps, 1] > time[bootstraps]).all()
    ends = (number == 1) & (time == 2)
    assert ends.any() and not bootstraps[ends].any()


def test_play_counts_episodes_of_environments() -> None:
    env = vector(num_envs=4)
    played = play(env, RandomPolicy(env, 0), 10)
    assert len(played) == 10 and {(e.length, e.agents) for e in played} == {(6, 3)}
    least = sum(range(1, 7)) + sum(10 + t for t in (1, 2, 3)) + sum(20 + t for t in (3, 4, 5, 6))
    assert all(least <= e.total <= least + 4 * 13 for e in played)


def test_memory_begins_with_each_life() -> None:
    """Replaying each life alone gives the values that the collector has stored."""
    env = vector(num_envs=2, again=2)
    config = ModelConfig(hidden=[8], memory="lstm", memory_size=4, sequence_length=5)
    policy = RecurrentPolicy(env.observation, env.action, config, seed=3)
    collector = MemoryCollector([env], policy, steps=12, discount=GAMMA, rng=np.random.default_rng(0))
    collector.start()
    batches = collect(collector, 3)
    seen = found = 0
    for column in range(env.rows):
        values = [b.value[t, column] for b in batches for t in range(12) if b.valid[t, column]]
        expected: list[float] = []
        for life in lives(batches, column):
            memory = policy.start_memory(1)
            noise = policy.head.noise(np.random.default_rng(0), (1,))
            expected += [float(policy.act(row["obs"][None], noise, memory)[2][0]) for row in life]
            found += 1
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
        seen += len(values)
    assert seen > 100 and found > 10


def test_memory_of_a_played_team_begins_with_each_life() -> None:
    env = vector(num_envs=2, again=2)
    config = ModelConfig(hidden=[8], memory="lstm", memory_size=4, sequence_length=5)
    policy = RecurrentPolicy(env.observation, env.action, config, seed=3)
    act, before, begun, went_on = policy.greedy, np.full((env.rows, 2), -1.0), 0, 0

    def greedy(observation: Any, memory: Any) -> Any:
        nonlocal begun, went_on
        for row, (_, time, life, _) in enumerate(observation):
            if life:  # it has a number for who is there
                is_new = life != before[row, 1] or time <= before[row, 0]
                assert memory[row].any() != is_new, (row, time, life)
                begun, went_on = begun + is_new, went_on + (not is_new)
            before[row] = time, life
        return act(observation, memory)

    policy.greedy = greedy  # type: ignore[method-assign]
    play(env, policy, 6)
    assert begun > 15 and went_on > 50
