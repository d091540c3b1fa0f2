"""A step in which an environment fails is not learned from, and nothing bootstraps across it."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.algorithms.returns import gae, vtrace
from paceline.config import EnvConfig, ModelConfig
from paceline.envs.make import make_scalar
from paceline.envs.restarts import EnvError
from paceline.envs.sync_vector import SyncVector
from paceline.models.policy import Policy
from paceline.rollout import episodes
from paceline.rollout.batch import Batch
from paceline.rollout.collector import Collector
from paceline.rollout.episodes import play
from paceline.rollout.replay import Replay

ODD = Path(__file__).parents[1] / "odd_envs.py"
GAMMA = 0.9
GOOD = 12  # steps before each failure: enough for the restarted env to count as running


def vector(*kinds: dict[str, Any], name: str = "Breaks", limit: int = 3) -> SyncVector:
    configs = [EnvConfig(id=f"{ODD}:{name}", kwargs=kwargs) for kwargs in kinds]
    return SyncVector([functools.partial(make_scalar, c) for c in configs], seed=4, restart_on_error=limit)


def collector(env: SyncVector, steps: int) -> Collector:
    policy = Policy(env.observation, env.action, ModelConfig(hidden=[16]), seed=3)
    return Collector([env], policy, steps=steps, discount=GAMMA, rng=np.random.default_rng(0))


def batches(how: str, steps: int, rollouts: int) -> list[Batch]:
    """One env fails or is truncated after 12 steps, another after 17; the third never is."""
    env = vector(*({"after": after, "how": how} for after in (GOOD, 17, 10_000)))
    made = collector(env, steps)
    made.start()
    return [copy.deepcopy(made.collect()) for _ in range(rollouts)]


@pytest.mark.parametrize("steps", [1, 4, 12, 13, 14, 40])
def test_a_failure_is_a_truncation_at_the_last_good_step(steps: int) -> None:
    """An env that fails in a step gives the batch of one that was truncated before it: the same observations, rewards,
    advantages and targets, whether the failure is inside a rollout or at its first or last step."""
    rollouts = -(-80 // steps)
    failing, truncated = batches("raise", steps, rollouts), batches("truncate", steps, rollouts)
    assert sum(batch.env_restarts for batch in failing) >= 8 and not any(batch.episodes for batch in failing)
    assert sum(batch.env_restarts for batch in truncated) == 0 and any(batch.episodes for batch in truncated)
    replays = [Replay(400, 3, made.observation, made.action) for made in [vector({}, {}, {})] * 2]
    for one, other in zip(failing, truncated, strict=True):
        for name in ("obs", "action", "reward", "terminated", "valid", "value", "logp"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        np.testing.assert_array_equal(one.truncated[:-1], other.truncated[:-1])  # a rollout does not see the next one
        valid = one.valid
        np.testing.assert_array_equal(one.discounted[valid], other.discounted[valid])
        estimates = [gae(*flags(b), gamma=GAMMA, gae_lambda=0.8) for b in (one, other)]
        ratio = np.random.default_rng(1).uniform(0.5, 1.5, one.reward.shape).astype(np.float32)
        estimates += [traced(b, ratio) for b in (one, other)]
        for left, right in (estimates[:2], estimates[2:]):
            for mine, theirs in zip(left, right, strict=True):
                np.testing.assert_array_equal(mine[valid], theirs[valid])
        for replay, batch in zip(replays, (one, other), strict=True):
            replay.add(batch, continues=True)
    assert len(replays[0]) == len(replays[1]) == sum(batch.env_steps for batch in failing)
    index = np.flatnonzero(replays[0]._flat_valid)
    for n_step in (1, 3):
        left, right = (vars(replay.gather(index, n_step=n_step, gamma=GAMMA)) for replay in replays)
        end = len(index) if steps > 1 else len(index) - 3  # the newest rows may not know yet that their env fails next
        for name in ("obs", "action", "reward", "next_obs", "discount"):
            np.testing.assert_array_equal(left[name][:end], right[name][:end], err_msg=name)


def flags(batch: Batch) -> Any:
    return batch.reward, batch.value, batch.terminated, batch.truncated


def traced(batch: Batch, ratio: Any) -> Any:
    return vtrace(
        batch.reward, batch.value, ratio, *flags(batch)[2:], gamma=GAMMA, trace_lambda=0.9, clip_rho=1.0, clip_c=1.0
    )


def test_an_evaluation_plays_the_episodes_of_failed_environments_again() -> None:
    env = vector({"rate": 0.05, "length": 20}, {"rate": 0.0, "length": 20}, name="Flaky")
    policy = Policy(env.observation, env.action, ModelConfig(hidden=[8]), seed=1)
    played = play(env, policy, 12)
    assert [(e.total, e.length) for e in played] == [(20.0, 20)] * 12 and env.env_restarts > 0


def test_an_evaluation_ends_though_no_episode_is_ever_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MAX_FAILURES", 3)
    env = vector({"after": GOOD}, {"after": 5, "how": "truncate"})
    policy = Policy(env.observation, env.action, ModelConfig(hidden=[8]), seed=1)
    played = play(env, policy, 4)
    assert [e.length for e in played] == [GOOD, GOOD, 5, 5]


def test_an_evaluation_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MAX_DOWN_SECONDS", 0.5)
    env = vector({"after": 0}, {"after": 10_000})
    policy = Policy(env.observation, env.action, ModelConfig(hidden=[8]), seed=1)
    with pytest.raises(EnvError, match=r"did not start again(.|\n)*exploded"):
        play(env, policy, 2)
