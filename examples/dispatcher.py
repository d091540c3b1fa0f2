"""A dispatcher sends jobs to machines, most of which are busy: an action mask, in one file of your own.

paceline envs check examples/dispatcher.py:Dispatcher
paceline train --env examples/dispatcher.py:Dispatcher --total-steps 50k
paceline train --env examples/dispatcher.py:Dispatcher --total-steps 50k --set env.kwargs='{masked: false}'
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

JOBS = 20
PENALTY = -1.0

Observation = NDArray[np.float32]


class Dispatcher(gymnasium.Env[Observation, int]):
    """Send each job to an idle machine; the reward is that machine's speed, which is not known beforehand.

    With `masked` the env says in `info["action_mask"]` which machines are idle, and never gets another. Without, a job
    for a busy machine is lost and costs a penalty.
    """

    def __init__(self, machines: int = 100, idle: int = 10, masked: bool = True) -> None:
        self.machines, self.idle, self.masked = machines, idle, masked
        self.speed = np.random.default_rng(0).permutation(machines) / (machines - 1)
        self.action_space = spaces.Discrete(machines)
        self.observation_space = spaces.Box(0.0, 1.0, (machines,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._jobs = 0
        return self._next_job()

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        is_idle = bool(self._idle[action])
        if self.masked and not is_idle:
            raise ValueError(f"machine {action} is busy")
        reward = float(self.speed[action]) if is_idle else PENALTY
        self._jobs += 1
        observation, info = self._next_job()
        return observation, reward, self._jobs == JOBS, False, info

    def _next_job(self) -> tuple[Observation, dict[str, Any]]:
        self._idle = np.zeros(self.machines, np.int8)
        self._idle[self.np_random.permutation(self.machines)[: self.idle]] = 1
        return self._idle.astype(np.float32), {"action_mask": self._idle} if self.masked else {}
