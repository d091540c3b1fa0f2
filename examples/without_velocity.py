"""CartPole and Pendulum without their velocities: one observation does not tell where things are going, two do.

paceline train --env examples/without_velocity.py:CartPole --total-steps 100k --set model.memory=lstm
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class _WithoutVelocity(gymnasium.ObservationWrapper[Observation, Any, Observation]):
    env_id: str
    kept: tuple[int, ...]  # of the observations

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(gymnasium.make(self.env_id, **kwargs))
        space = self.env.observation_space
        assert isinstance(space, spaces.Box)
        kept = list(self.kept)
        self.observation_space = spaces.Box(space.low[kept], space.high[kept], dtype=np.float32)

    def observation(self, observation: Observation) -> Observation:
        return observation[list(self.kept)]


class CartPole(_WithoutVelocity):
    """The position of the cart and the angle of the pole."""

    env_id, kept = "CartPole-v1", (0, 2)


class Pendulum(_WithoutVelocity):
    """The direction of the pendulum, as cosine and sine."""

    env_id, kept = "Pendulum-v1", (0, 1)
