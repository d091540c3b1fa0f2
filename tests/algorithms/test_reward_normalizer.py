"""Reward normalisation against that of the Procgen paper's code (VecNormalize of baselines), written out plainly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.algorithms.ppo import PPO
from paceline.config import EnvConfig, ModelConfig
from paceline.envs.make import make_vector
from paceline.models.policy import Policy
from paceline.rollout.collector import Collector

DISCOUNT, EPSILON, CLIP = 0.99, 1e-8, 10.0


class Plain:
    """One environment after the other, one step after the other; episodes follow each other without reset rows."""

    def __init__(self, num_envs: int) -> None:
        self.running = [0.0] * num_envs
        self.seen: list[float] = []

    def step(self, index: int, reward: float, *, ended: bool) -> None:
        self.running[index] = self.running[index] * DISCOUNT + reward
        self.seen.append(self.running[index])  # the last step of an episode too
        if ended:
            self.running[index] = 0.0

    def scaled(self, reward: float) -> float:
        mean = math.fsum(self.seen) / len(self.seen)
        variance = math.fsum((x - mean) ** 2 for x in self.seen) / len(self.seen)
        return min(max(reward / math.sqrt(variance + EPSILON), -CLIP), CLIP)  # the mean is not subtracted


@pytest.mark.parametrize(
    "env",
    [
        {"id": "CartPole-v1"},  # episodes terminate
        {"id": "Pendulum-v1", "max_episode_steps": 9},  # and are truncated; rewards of many sizes
    ],
    ids=lambda env: env["id"],
)
def test_rewards_are_scaled_as_baselines_does(env: dict[str, Any]) -> None:
    num_envs, steps = 3, 40
    vector, _ = make_vector(EnvConfig(**env), num_envs, seed=1)
    try:
        policy = Policy(vector.observation, vector.action, ModelConfig(hidden=[8]))
        algorithm = PPO(policy, PPO.Settings(gamma=0.999), rng=np.random.default_rng(0), normalize_reward=True)
        collector = Collector([vector], policy, steps=steps, rng=np.random.default_rng(0), discount=DISCOUNT)
        collector.start()
        plain, ends = Plain(num_envs), 0
        for _ in range(3):  # episodes run on from one rollout to the next
            batch = collector.collect()
            for t in range(steps):
                for i in np.flatnonzero(batch.valid[t]).tolist():
                    ended = bool(batch.terminated[t, i] or batch.truncated[t, i])
                    plain.step(i, float(batch.reward[t, i]), ended=ended)
                    ends += ended
            batch.reward[5, 0] = 1e6  # beyond the clip; the running return is of the reward as it was
            scaled = algorithm.rewards(batch)
            for t, i in zip(*np.nonzero(batch.valid), strict=True):
                assert float(scaled[t, i]) == pytest.approx(plain.scaled(float(batch.reward[t, i])), rel=1e-4)
            assert float(scaled.max()) == CLIP
        assert ends >= 6
    finally:
        vector.close()
