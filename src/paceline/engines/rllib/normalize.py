"""`env.normalize_observation` and `env.normalize_reward` for RLlib: one set of statistics for all environments.

The driver has them, so they are saved with the policy and used by evaluation and export. It sends them to the env
runners before each iteration and merges afterwards what their environments have seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.config import EnvConfig, RunConfig
from paceline.envs.vector import Env
from paceline.models.normalizer import CLIP, RunningMoments
from paceline.models.policy import Policy
from paceline.spaces import Array

RAW_RETURN = "paceline_return"
"""Key in the last info of an episode: its return before the rewards were scaled."""
EXCHANGE_SECONDS = 60.0


class Normalized(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Applies the statistics of the last `set_scaling` and counts what it sees until `take_sums`."""

    def __init__(self, env: Env, config: EnvConfig, gamma: float) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self._observations, self._rewards = config.normalize_observation, config.normalize_reward
        self._size = int(np.prod(space.shape)) if self._observations else 0
        self._discount = gamma if config.reward_discount is None else config.reward_discount
        self._mean, self._scale = np.zeros(self._size, np.float32), np.ones(self._size, np.float32)
        self._reward_scale = 1.0
        self._return = self._discounted = 0.0
        self._clear()
        if self._observations:
            self.observation_space = spaces.Box(-CLIP, CLIP, space.shape, np.float32)

    def _clear(self) -> None:
        self._observation_sums, self._reward_sums = np.zeros(1 + 2 * self._size), np.zeros(3)

    def set_scaling(self, observation: tuple[Array, Array] | None, reward: float) -> None:
        if observation is not None:
            self._mean, self._scale = observation
        self._reward_scale = reward

    def take_sums(self) -> tuple[Array, Array]:
        """For `RunningMoments.merge`: of observations, and of discounted returns."""
        sums = self._observation_sums, self._reward_sums
        self._clear()
        return sums

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._return = self._discounted = 0.0
        return self._normalized(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._rewards:
            self._return += float(reward)
            self._discounted = self._discounted * self._discount + float(reward)
            self._reward_sums += RunningMoments.sums(np.array([[self._discounted]], np.float32))
            reward = float(np.clip(float(reward) * self._reward_scale, -CLIP, CLIP))
            if terminated or truncated:
                info = {**info, RAW_RETURN: self._return}
        return self._normalized(observation), reward, terminated, truncated, info

    def _normalized(self, observation: Any) -> Any:
        if not self._observations:
            return observation
        self._observation_sums += RunningMoments.sums(observation[None])
        return np.clip((observation - self._mean) * self._scale, -CLIP, CLIP)


class Statistics:
    """Those of the driver: of observations in its copy of the policy, of rewards here."""

    def __init__(self, config: RunConfig, policy: Policy, algorithm: Any, *, local: bool) -> None:
        """`local`: the only env runner is in this process."""
        self._policy, self._algorithm, self._local = policy, algorithm, local
        self.rewards = RunningMoments(1) if config.env.normalize_reward else None

    def send(self) -> None:
        reward = 1.0 if self.rewards is None else float(1.0 / self.rewards.deviation[0])
        self._call("set_scaling", self._policy.scaling(), reward)

    def take(self) -> None:
        for observation, reward in self._call("take_sums"):
            if self._policy.moments is not None:
                self._policy.moments.merge(observation)
            if self.rewards is not None:
                self.rewards.merge(reward)
        self._policy.normalizer_changed()

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """The answers of all environments. Env runners that do not answer are RLlib's to replace."""
        answers = self._algorithm.env_runner_group.foreach_env_runner(
            functools.partial(_call_envs, name, arguments),
            local_env_runner=self._local,
            timeout_seconds=EXCHANGE_SECONDS,
        )
        return [answer for runner in answers for answer in runner]


def _call_envs(name: str, arguments: Sequence[Any], runner: Any) -> list[Any]:
    return list(runner.env.unwrapped.call(name, *arguments))
