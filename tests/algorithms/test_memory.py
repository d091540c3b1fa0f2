"""Learning with memory: minibatches of whole sequences, and the same gradient however it is computed and shared."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from paceline.algorithms.a2c import A2C
from paceline.algorithms.impala import IMPALA
from paceline.algorithms.ppo import PPO
from paceline.algorithms.rows import Minibatches
from paceline.collective.group import Group
from paceline.config import ModelConfig
from paceline.models.recurrent_policy import RecurrentPolicy
from paceline.rollout.batch import Batch
from paceline.spaces import ActionCodec, ObservationCodec

ALGORITHMS: list[Any] = [PPO, A2C, IMPALA]
ENVS, STEPS, LENGTH = 6, 17, 7


def make_policy(action: str = "discrete", **options: Any) -> RecurrentPolicy:
    space: Any = {"discrete": spaces.Discrete(3), "gaussian": spaces.Box(-1.0, 1.0, (2,))}[action]
    observation = ObservationCodec(spaces.Box(-np.inf, np.inf, (4,), np.float32))
    config = ModelConfig(**({"memory": "lstm", "memory_size": 5, "sequence_length": LENGTH, "hidden": [9]} | options))
    return RecurrentPolicy(observation, ActionCodec(space), config, seed=1)


def make_batch(policy: RecurrentPolicy, seed: int = 0) -> Batch:
    """Of an actor with slightly other weights, in a made-up world."""
    rng = np.random.default_rng(seed)
    batch = Batch.empty(STEPS, ENVS, policy.observation, policy.action)
    batch.obs[...] = rng.normal(size=batch.obs.shape)
    memory = rng.normal(size=(ENVS, policy.memory_width)).astype(np.float32)
    batch.memory = np.zeros((-(-STEPS // LENGTH), *memory.shape), np.float32)
    done = rng.random(ENVS) < 0.3
    for t in range(STEPS):
        if t % LENGTH == 0:
            batch.memory[t // LENGTH] = memory
        batch.action[t], logp, value = policy.act(batch.obs[t], policy.head.noise(rng, (ENVS,)), memory)
        batch.logp[t] = logp + rng.normal(scale=0.2, size=ENVS)
        batch.value[t] = value
        batch.valid[t] = ~done
        memory[done] = 0
        batch.reward[t] = rng.normal(size=ENVS) * batch.valid[t]
        batch.terminated[t] = (rng.random(ENVS) < 0.1) & ~done
        batch.truncated[t] = (rng.random(ENVS) < 0.1) & ~done & ~batch.terminated[t]
        done = batch.terminated[t] | batch.truncated[t]
    batch.value[-1] = policy.value(batch.obs[-1], memory)
    return batch


def make(kind: Any, policy: RecurrentPolicy, group: Group | None = None, **settings: Any) -> Any:
    return kind(policy, kind.Settings(**settings), rng=np.random.default_rng(0), group=group)


def compute(algorithm: Any, batch: Batch) -> Any:
    """The gradient of the whole batch, by a copy of its array, and the statistics."""
    if isinstance(algorithm, IMPALA):
        metrics = algorithm.gradients(batch, batch.reward)[0]
    else:
        rows = algorithm.rows(batch)
        metrics = algorithm.gradients(rows, sum(algorithm.row_counts(len(rows))))
    return algorithm.policy.gradient.numpy().copy(), metrics


@pytest.mark.parametrize("action", ["discrete", "gaussian"])
@pytest.mark.parametrize("options", [{}, {"memory": "gru", "shared": True}, {"hidden": []}], ids=str)
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_by_hand_and_by_autograd(kind: Any, options: dict[str, Any], action: str) -> None:
    settings = {"entropy_coef": 0.03}
    fast, plain = (make_policy(action, accelerate=accelerate, **options) for accelerate in (True, False))
    batch = make_batch(fast)
    algorithms = [make(kind, policy, **settings) for policy in (fast, plain)]
    assert algorithms[0].accelerator is not None and algorithms[1].accelerator is None
    (mine, found), (theirs, wanted) = (compute(algorithm, batch) for algorithm in algorithms)
    assert np.abs(theirs).max() > 1e-3
    np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-5 * np.abs(theirs).max())
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_the_value_of_a_truncated_end_has_the_memory_of_its_episode() -> None:
    """V-trace runs the network over the last observations of episodes too: with the same weights they get the values
    that the collector found."""
    policy = make_policy()
    batch = make_batch(policy)
    algorithm = make(IMPALA, policy)
    seen = []
    vtrace = algorithm.vtrace
    algorithm.vtrace = lambda rows, value, ratio: (seen.append(rows), vtrace(rows, value, ratio))[1]
    algorithm.gradients(batch, batch.reward)
    [rows] = seen
    used = rows.needed
    assert used[1:][batch.truncated].all() and used[-1].any() and not used[1:][batch.terminated].any()
    np.testing.assert_allclose(rows.value[used], batch.value[used], atol=1e-4)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_members_of_a_group_learn_as_one(kind: Any, lab: Any) -> None:
    settings = {"epochs": 1, "minibatch_size": 1000} if kind is PPO else {}
    policy = make_policy()
    batch = make_batch(policy)
    single = make(kind, policy, **settings)
    expected = single.update(batch, 1.0)
    table, members = lab.members(2)
    spans = [slice(0, 2), slice(2, ENVS)]
    parts = [Batch(**{name: array[:, span].copy() for name, array in batch.arrays().items()}) for span in spans]
    algorithms = [make(kind, make_policy(), member, **settings) for member in members]
    work = [functools.partial(a.update, part, 1.0) for a, part in zip(algorithms, parts, strict=True)]
    results = lab.together(work, table)
    for algorithm, result in zip(algorithms, results, strict=True):
        np.testing.assert_allclose(algorithm.policy.parameters, policy.parameters, rtol=1e-3, atol=1e-5)
        assert result["total_loss"] == pytest.approx(expected["total_loss"], rel=1e-3)


def test_members_agree_on_minibatches_of_whole_sequences(lab: Any) -> None:
    """Each cuts its own sequences; a minibatch that is empty for all is left out, and all know its rows."""
    table, members = lab.members(3)
    sequences = [np.repeat(np.arange(9), 5), np.repeat(np.arange(2), 4), np.zeros(0, np.int64)]
    work = [functools.partial(Minibatches.of_sequences, own, 4, m) for own, m in zip(sequences, members, strict=True)]
    found = lab.together(work, table)
    assert all(one.counts == found[0].counts for one in found) and sum(found[0].counts) == 53
    for own, plan in zip(sequences, found, strict=True):
        covered = [row for part in plan.parts for row in range(part.start, part.stop)]
        assert covered == list(range(len(own)))
        for part in plan.parts:
            assert not set(own[part]) & set(own[: part.start]) and not set(own[part]) & set(own[part.stop :])


def test_every_pass_learns_from_every_row_once_in_whole_sequences() -> None:
    policy = make_policy()
    batch = make_batch(policy)
    algorithm = make(PPO, policy, epochs=3, minibatch_size=25)
    seen: list[list[tuple[int, ...]]] = []
    gradients = algorithm.gradients

    def watched(rows: Any, count: int, **options: Any) -> Any:
        assert len(rows) == count > 5
        for number in np.unique(rows.obs.sequence):
            steps = rows.obs.step[rows.obs.sequence == number]
            assert steps.tolist() == list(range(len(steps)))
        seen.append([tuple(row) for row in rows.obs.x])
        return gradients(rows, count, **options)

    algorithm.gradients = watched
    algorithm.update(batch, 1.0)
    each = -(-batch.env_steps // 25)
    assert len(seen) == 3 * each
    everything = sorted(tuple(row) for row in batch.obs[:-1][batch.valid])
    for start in range(0, len(seen), each):
        assert sorted(row for minibatch in seen[start : start + each] for row in minibatch) == everything
    assert seen[:each] != seen[each : 2 * each]  # in another order


def test_replayed_batches_keep_their_memory() -> None:
    policy = make_policy()
    algorithm = make(IMPALA, policy, replay_ratio=2.0, replay_batches=2)
    for seed in range(3):
        algorithm.update(make_batch(policy, seed), 1.0)
    state = copy.deepcopy(algorithm.state())
    assert state["earlier"][0]["memory"].any()
    again = make(IMPALA, make_policy(), replay_ratio=2.0, replay_batches=2)
    again.load(state)
    last = make_batch(policy, 9)
    for one in (algorithm, again):
        one.update(last, 1.0)
    np.testing.assert_array_equal(algorithm.policy.parameters, again.policy.parameters)
