"""Environments stepped by the threads of a C++ library: many as one vector, or one as a `gymnasium.Env`.

A `Pool` adapts such a library (`procgen.py`, `atari.py`) and uses NEXT_STEP autoreset. A single environment is a pool
of one, so that videos and wrapped environments get the same preprocessing as training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.envs.vector import StepResult, VectorEnv, VectorOptions
from paceline.spaces import Array


class Pool(ABC):
    """N environments in threads. It never writes again to an array that it has returned."""

    observation_space: spaces.Box
    action_space: Any  # spaces.Discrete
    frames_per_second = 15

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Array:
        """Start all environments; equal seeds give equal episodes."""

    @abstractmethod
    def send(self, action: Array) -> None:
        """Start a step: `action [N]`."""

    @abstractmethod
    def receive(self) -> StepResult:
        """Wait for all environments."""

    @abstractmethod
    def frame(self) -> NDArray[np.uint8]:
        """A picture of the first environment for people, `[H, W, 3]`. Needs `render=True` in the constructor."""

    @abstractmethod
    def close(self) -> None: ...


class PoolVector(VectorEnv):
    def __init__(self, pool: Pool, num_envs: int, **options: Unpack[VectorOptions]) -> None:
        super().__init__(num_envs, pool.observation_space, pool.action_space, **options)
        self.pool: Pool | None = pool
        self._in_flight = False

    def reset(self) -> Array:
        assert self.pool is not None, "these environments are closed"
        self._finish_step()
        return self._encoded(self.pool.reset(env_seeds(self._entropy, self.num_envs, self._first_env)))

    def send(self, action: Array) -> None:
        assert self.pool is not None, "these environments are closed"
        self.pool.send(action[:, 0])
        self._in_flight = True

    def receive(self) -> StepResult:
        assert self.pool is not None and self._in_flight, "nothing was sent"
        self._in_flight = False
        observation, reward, terminated, truncated = self.pool.receive()
        return self._encoded(observation), reward, terminated, truncated

    def close(self) -> None:
        if self.pool is not None:
            self._finish_step()
            self.pool.close()
            self.pool = None

    def _encoded(self, observation: Array) -> Array:
        if observation.shape == self._obs.shape:
            return observation
        self.observation.encode(observation, self._obs)  # stacked colour frames
        return self._obs

    def _finish_step(self) -> None:
        if self._in_flight:
            self.receive()


class PoolEnv(gymnasium.Env[Array, np.int64]):
    """One environment. `make(render)` returns a pool of one."""

    def __init__(self, make: Callable[[bool], Pool], render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._pool = make(render_mode == "rgb_array")
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": self._pool.frames_per_second}
        self.observation_space: spaces.Box = self._pool.observation_space
        self.action_space = self._pool.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self._pool.reset([int(self.np_random.integers(2**31))])[0], {}

    def step(self, action: np.int64 | int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._pool.send(np.array([action], np.int64))
        observation, reward, terminated, truncated = self._pool.receive()
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        return self._pool.frame() if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._pool.close()


def env_seeds(entropy: tuple[int, ...], num_envs: int, first_env: int = 0) -> list[int]:
    """One seed per environment, the same whether they are in one vector or in several (`first_env`)."""
    words = np.random.SeedSequence(entropy).generate_state(first_env + num_envs)
    return [int(word) for word in words[first_env:] >> 1]
