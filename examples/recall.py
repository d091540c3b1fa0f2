"""Remember a cue: an environment of your own that shows what matters once, at the start.

paceline train --env examples/recall.py:Recall --total-steps 200k --set model.memory=lstm
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class Recall(gymnasium.Env[Observation, int]):
    """The first observation shows a cue, -1 or 1. `delay` steps later the agent is asked for it: the reward is 1 if
    the action names it (0 or 1), else 0. Without memory no policy is right more often than half of the time.

    An observation is the cue, at the first step only; noise; and 1 where the agent is asked.
    """

    def __init__(self, delay: int = 50) -> None:
        self.delay = delay
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._cue = 0, int(self.np_random.integers(2))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        asked = self._steps == self.delay
        reward = float(asked and int(action) == self._cue)
        self._steps += 1
        return self._observe(), reward, asked, False, {}

    def _observe(self) -> Observation:
        cue = 2.0 * self._cue - 1.0 if self._steps == 0 else 0.0
        noise = self.np_random.uniform(-1.0, 1.0)
        return np.array([cue, noise, self._steps == self.delay], np.float32)
