"""A survey rover on a windy grid: a Dict observation, MultiDiscrete actions, in one file of your own.

paceline envs check examples/grid_world.py:GridWorld
paceline train --env examples/grid_world.py:GridWorld --total-steps 100k --set env.max_episode_steps=60
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observation = dict[str, Any]
Action = NDArray[np.integer[Any]]


class GridWorld(gymnasium.Env[Observation, Action]):
    """Drive to the sample. Each step costs a little, the sample pays 1; the wind blows along one axis and is seen.

    The action is two choices at once: back, stay or forth in each of the two directions.
    """

    def __init__(self, size: int = 7, gusts: float = 0.3) -> None:
        self.size, self.gusts = size, gusts
        self.action_space = spaces.MultiDiscrete([3, 3])
        self.observation_space = spaces.Dict(
            {
                "rover": spaces.MultiDiscrete([size, size]),
                "sample": spaces.MultiDiscrete([size, size]),
                "wind": spaces.Box(-1.0, 1.0, (2,), np.float32),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        start, sample = self.np_random.choice(self.size**2, 2, replace=False)
        self._rover, self._sample = (np.array(divmod(int(cell), self.size)) for cell in (start, sample))
        self._turn_wind()
        return self._observe(), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        move = np.asarray(action) - 1
        if self.np_random.random() < self.gusts:
            move = move + self._wind
        self._rover = np.clip(self._rover + move, 0, self.size - 1)
        arrived = bool((self._rover == self._sample).all())
        self._turn_wind()
        return self._observe(), 1.0 if arrived else -0.02, arrived, False, {}

    def _turn_wind(self) -> None:
        self._wind = np.zeros(2, np.int64)
        self._wind[self.np_random.integers(2)] = self.np_random.choice((-1, 1))

    def _observe(self) -> Observation:
        return {"rover": self._rover.copy(), "sample": self._sample.copy(), "wind": self._wind.astype(np.float32)}
