"""CartPole as a user would write it: a plain Gymnasium class, one environment, Python floats, its own time limit.

Used by the `userenv` benchmark, because no side has a vector implementation of it. Dynamics and limits
are those of Barto, Sutton and Anderson (1983), as in CartPole-v1.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

GRAVITY = 9.8
POLE_MASS = 0.1
TOTAL_MASS = 1.0 + POLE_MASS
HALF_POLE = 0.5
FORCE = 10.0
SECONDS_PER_STEP = 0.02
MAX_POSITION = 2.4
MAX_ANGLE = math.radians(12)
MAX_STEPS = 500

Observation = NDArray[np.float32]


class CartPole(gymnasium.Env[Observation, int]):
    def __init__(self) -> None:
        bound = np.array([2 * MAX_POSITION, np.inf, 2 * MAX_ANGLE, np.inf], dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(-bound, bound, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.state = (0.0, 0.0, 0.0, 0.0)
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        x, speed, angle, spin = self.np_random.uniform(-0.05, 0.05, size=4).tolist()
        self.state = (x, speed, angle, spin)
        self.steps = 0
        return np.array(self.state, dtype=np.float32), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        x, speed, angle, spin = self.state
        force = FORCE if action == 1 else -FORCE
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + POLE_MASS * HALF_POLE * spin * spin * sine) / TOTAL_MASS
        spin_rate = (GRAVITY * sine - cosine * push) / (
            HALF_POLE * (4.0 / 3.0 - POLE_MASS * cosine * cosine / TOTAL_MASS)
        )
        acceleration = push - POLE_MASS * HALF_POLE * spin_rate * cosine / TOTAL_MASS
        # Positions first, with the old speeds: CartPole-v1's (explicit) Euler step.
        x += SECONDS_PER_STEP * speed
        speed += SECONDS_PER_STEP * acceleration
        angle += SECONDS_PER_STEP * spin
        spin += SECONDS_PER_STEP * spin_rate
        self.state = (x, speed, angle, spin)
        self.steps += 1
        terminated = abs(x) > MAX_POSITION or abs(angle) > MAX_ANGLE
        truncated = not terminated and self.steps >= MAX_STEPS
        return np.array(self.state, dtype=np.float32), 1.0, terminated, truncated, {}
