"""Environments for the crash matrix, one for each kind of run. Every step takes half a millisecond."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS = 50
STEP_SECONDS = 0.0005


class SlowPoint(gymnasium.Env[Any, Any]):
    """A point that is to stay near 0."""

    observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1.0, 1.0), 0
        return np.array([self.place], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_SECONDS)
        self.place = float(np.clip(self.place + 0.3 * float(action[0]) + self.np_random.normal(0.0, 0.1), -10.0, 10.0))
        self.steps += 1
        return np.array([self.place], np.float32), -abs(self.place), False, self.steps == STEPS, {}


class SlowMasks(gymnasium.Env[Any, Any]):
    """Five choices, of which a mask allows one or two. An invalid one is an error."""

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._see()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_SECONDS)
        assert self.mask[action], f"{action} is invalid"
        self.steps += 1
        observation, info = self._see()
        return observation, float(action), False, self.steps == STEPS, info

    def _see(self) -> tuple[Any, dict[str, Any]]:
        self.mask = np.zeros(5, np.int8)
        self.mask[self.np_random.integers(5, size=2)] = 1
        return self.np_random.random(3, np.float32), {"action_mask": self.mask}


class SlowTeam:
    """Two walkers and a drone. A walker that stands still in the rain is gone; another day begins with all of them.

    `action`: discrete, continuous, or mixed: then the drone has other spaces than the walkers."""

    def __init__(self, action: str = "discrete") -> None:
        self.possible_agents = ["walker_0", "walker_1", "drone"]
        number, choice = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)
        act = dict.fromkeys(self.possible_agents, number if action == "continuous" else choice)
        self.sizes = dict.fromkeys(self.possible_agents, 3)
        if action == "mixed":
            act["drone"], self.sizes["drone"] = number, 2
        self.action_spaces: dict[str, spaces.Space[Any]] = dict(act)
        self.observation_spaces = {name: spaces.Box(0.0, 1.0, (n,), np.float32) for name, n in self.sizes.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.rng, self.steps, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
        return self._see(), {}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        time.sleep(STEP_SECONDS)
        self.steps += 1
        over = self.steps == STEPS
        gone = {name: name != "drone" and float(np.ravel(actions[name])[0]) <= self.rain - 0.9 for name in actions}
        seen = self._see()
        self.agents = [name for name in actions if not gone[name] and not over]
        rewards = {name: float(np.ravel(action)[0]) for name, action in actions.items()}
        return seen, rewards, gone, {name: over and not gone[name] for name in actions}, {}

    def close(self) -> None:
        return

    def _see(self) -> dict[str, Any]:
        self.rain = float(self.rng.random())
        return {name: self.rng.random(self.sizes[name], np.float32) for name in self.agents}
