"""Cooling a chemical reactor: continuous control of a small simulator, with metrics of its own and exact resume.

    paceline envs check examples/reactor.py:Reactor
    paceline train --config configs/reactor.yaml

A stirred tank in which A turns into B and gives off heat: the textbook's exothermic CSTR. Without control the wanted
state is unstable: the reaction either dies down or runs away.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Floats = NDArray[np.float32]

WANTED = (0.5, 350.0)  # mol/L, K; steady with the coolant at 300 K
MINUTES, SUBSTEPS = 0.05, 10
RUNAWAY_KELVIN = 400.0


class Reactor(gymnasium.Env[Floats, Floats]):
    """Set the coolant's temperature so that the tank stays where it should be.

    Observation: distance of concentration and temperature from what is wanted. Action: the coolant, 280 K to 320 K.
    Reward: 1 a step at the wanted state, less away from it. A runaway ends the episode.
    """

    def __init__(self, noise: float = 0.2) -> None:
        self.noise = noise
        """Deviation of the feed's temperature from step to step, in K."""
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(280.0, 320.0, (1,), np.float32)
        self._state = WANTED
        self._steps, self._squares = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random; draw from nothing else
        self._state = (self.np_random.uniform(0.4, 0.6), self.np_random.uniform(345.0, 355.0))
        self._steps, self._squares = 0, 0.0
        return self._observe(), {}

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        feed = 350.0 + self.noise * self.np_random.standard_normal()
        for _ in range(SUBSTEPS):
            self._state = _advance(*self._state, float(action[0]), feed, MINUTES / SUBSTEPS)
        concentration, temperature = self._state
        off = temperature - WANTED[1]
        self._steps, self._squares = self._steps + 1, self._squares + off * off
        runaway = temperature > RUNAWAY_KELVIN
        reward = 0.0 if runaway else math.exp(-((off / 5.0) ** 2) - ((concentration - WANTED[0]) / 0.1) ** 2)
        # Of the last step of an episode these are averaged into the run's files, as env/rms_kelvin and env/runaway.
        metrics = {"rms_kelvin": math.sqrt(self._squares / self._steps), "runaway": float(runaway)}
        return self._observe(), reward, runaway, False, {"metrics": metrics}

    # A run that is resumed continues the running episodes exactly with these two. All that the next step depends on
    # is in it, as JSON or arrays.

    def get_state(self) -> dict[str, Any]:
        rng = self.np_random.bit_generator.state
        return {"state": list(self._state), "steps": self._steps, "squares": self._squares, "rng": rng}

    def set_state(self, saved: dict[str, Any]) -> None:
        self._state = (saved["state"][0], saved["state"][1])
        self._steps, self._squares = saved["steps"], saved["squares"]
        self.np_random.bit_generator.state = saved["rng"]

    def _observe(self) -> Floats:
        concentration, temperature = self._state
        return np.array([(concentration - WANTED[0]) / 0.1, (temperature - WANTED[1]) / 10.0], np.float32)


def _advance(concentration: float, kelvin: float, coolant: float, feed: float, minutes: float) -> tuple[float, float]:
    """One explicit step of the balance of mass and heat."""
    rate = 7.2e10 * math.exp(-8750.0 / kelvin) * concentration
    d_concentration = 1.0 - concentration - rate
    d_kelvin = feed - kelvin + 209.2 * rate + 2.092 * (coolant - kelvin)
    return max(0.0, concentration + minutes * d_concentration), kelvin + minutes * d_kelvin
