"""The memory of a policy is zero exactly at the start of each episode, and goes on everywhere else."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EnvConfig, ModelConfig
from paceline.envs.make import make_scalar
from paceline.envs.sync_vector import SyncVector
from paceline.models.recurrent_policy import RecurrentPolicy
from paceline.rollout.batch import Batch
from paceline.rollout.collector import MemoryCollector
from paceline.rollout.episodes import play

ODD = Path(__file__).parents[1] / "odd_envs.py"


def vector(name: str, *kinds: dict[str, Any], restarts: int = 0) -> SyncVector:
    makers = [functools.partial(make_scalar, EnvConfig(id=f"{ODD}:{name}", kwargs=kwargs)) for kwargs in kinds]
    return SyncVector(makers, seed=4, restart_on_error=restarts)


def make_policy(env: Any, kind: str = "lstm", length: int = 5) -> RecurrentPolicy:
    config = ModelConfig(memory=kind, memory_size=6, sequence_length=length, hidden=[8])
    policy = RecurrentPolicy(env.observation, env.action, config, seed=3)
    policy.net.layer.weight_ih_l0.data.mul_(0.01)  # the observations of these envs are large
    return policy


def make(env: Any, steps: int, **options: Any) -> MemoryCollector:
    policy = make_policy(env, **options)
    return MemoryCollector([env], policy, steps=steps, rng=np.random.default_rng(0))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("steps", [1, 4, 5, 13])
def test_the_rollout_is_that_of_a_plain_loop(kind: str, steps: int) -> None:
    """One environment at a time, with a memory that is made anew for each episode."""
    collector = make(vector("Script", {}, {}, {}), steps, kind=kind)
    collector.start()
    batches = [copy.deepcopy(collector.collect()) for _ in range(40 // steps + 1)]
    assert sum(len(batch.episodes) for batch in batches) > 10
    check(collector.policy, batches)


def check(policy: RecurrentPolicy, batches: list[Batch]) -> None:
    length = policy.sequence_length
    for i in range(batches[0].reward.shape[1]):
        memory = np.zeros((1, policy.memory_width), np.float32)
        for batch in batches:
            steps = len(batch.reward)
            for t in range(steps + 1):
                if t % length == 0 and t < steps:
                    np.testing.assert_allclose(batch.memory[t // length, i], memory[0], atol=1e-5)
                if t == steps:  # the value that the end of a rollout bootstraps from; the next one begins here
                    value = policy.value(batch.obs[t, [i]], memory)
                else:
                    out, value = policy.outputs(batch.obs[t, [i]], memory)
                    logp = policy.head.evaluate(out, batch.action[t, [i]])[0]
                    np.testing.assert_allclose(batch.logp[t, i], logp[0], atol=1e-4)
                    if not batch.valid[t, i]:  # the environment was reset: what follows is another episode
                        memory = np.zeros_like(memory)
                np.testing.assert_allclose(batch.value[t, i], value[0], atol=1e-4)


@pytest.mark.parametrize("steps", [1, 4, 12, 13, 40])
def test_an_environment_that_fails_starts_with_an_empty_memory(steps: int) -> None:
    """As one that was truncated at its last good step."""
    runs = []
    for how in ("raise", "truncate"):
        env = vector("Breaks", *({"after": after, "how": how} for after in (12, 17, 10_000)), restarts=3)
        collector = make(env, steps)
        collector.start()
        runs.append([copy.deepcopy(collector.collect()) for _ in range(-(-80 // steps))])
        check(collector.policy, runs[-1])
    assert sum(batch.env_restarts for batch in runs[0]) >= 8
    for one, other in zip(*runs, strict=True):
        for name in ("obs", "action", "valid", "value", "logp", "memory"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_a_rollout_that_stops_early_goes_on_where_it_stopped() -> None:
    collector = make(vector("Script", {}, {}), 20)
    collector.start()
    batches, act = [], collector.policy.act

    def stopping(*args: Any) -> Any:
        collector.stop_early = True
        return act(*args)

    for replacement in (stopping, act, stopping, act):
        collector.policy.act = replacement  # type: ignore[method-assign]
        batches.append(copy.deepcopy(collector.collect()))
    assert [len(batch.reward) for batch in batches] == [5, 20, 5, 20]
    check(collector.policy, batches)


@pytest.mark.parametrize("stochastic", [False, True])
def test_evaluation_resets_the_memory_with_the_episode(stochastic: bool) -> None:
    env = vector("Script", *([{}] * 3))
    policy = make_policy(env)
    seen: list[tuple[Any, Any]] = []
    outputs = policy.outputs

    def watched(observation: Any, memory: Any = None) -> Any:
        seen.append((observation.copy(), memory.copy()))
        return outputs(observation, memory)

    policy.outputs = watched  # type: ignore[method-assign]
    play(env, policy, 12, rng=np.random.default_rng(0) if stochastic else None)
    fresh = after = 0
    for observation, memory in seen:
        begins = observation[:, 1] == 0  # Script shows the step of the episode
        assert not memory[begins].any()
        assert memory[~begins].any(axis=1).all()
        fresh, after = fresh + int(begins.sum()), after + int((~begins).sum())
    assert fresh > 10 and after > 20
