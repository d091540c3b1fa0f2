"""Rabbits in a meadow: several agents that die and come later, as a class of your own with five dictionaries.

paceline train --env examples/meadow.py:Meadow --total-steps 60k --name meadow
paceline evaluate runs/meadow
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observations = dict[str, NDArray[np.float32]]
Flags = dict[str, bool]


class Meadow:
    """A hawk's shadow falls on a cell, and one step later the hawk takes every rabbit there, and now and then one
    beside it. Living a step pays 1. Young rabbits come later. The evening, after `steps` steps, ends the episode.

    `reset` and `step` name those that are there: a rabbit that was taken is terminated and not seen again.
    """

    def __init__(self, rabbits: int = 6, young: int = 2, cells: int = 5, steps: int = 40) -> None:
        self.possible_agents = [f"rabbit_{number}" for number in range(rabbits)]
        self.old, self.cells, self.steps = rabbits - young, cells, steps
        self.observation_spaces = {a: spaces.Box(0.0, 1.0, (2 * cells + 1,), np.float32) for a in self.possible_agents}
        self.action_spaces = {a: spaces.Discrete(3) for a in self.possible_agents}  # left, stay, right

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observations, Any]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._time, self._cell = 0, {}
        self._shadow = int(self._rng.integers(self.cells))
        self.agents: list[str] = []
        for rabbit in self.possible_agents[: self.old]:
            self._come(rabbit)
        return self._observe(self.agents), {}

    def step(self, actions: dict[str, int]) -> tuple[Observations, dict[str, float], Flags, Flags, Any]:
        self._time += 1
        acted = list(actions)
        for rabbit, action in actions.items():
            self._cell[rabbit] = int(np.clip(self._cell[rabbit] + action - 1, 0, self.cells - 1))
        taken = {r: self._cell[r] == self._shadow or self._rng.random() < 0.002 for r in acted}
        self._shadow = int(self._rng.integers(self.cells))
        evening = self._time >= self.steps
        self.agents = [] if evening else [rabbit for rabbit in acted if not taken[rabbit]]
        if not evening and self._time % 10 == 0:
            young = [r for r in self.possible_agents[self.old :] if r not in self._cell]
            for rabbit in young[:1]:
                self._come(rabbit)
        rewards = {rabbit: 0.0 if taken[rabbit] else 1.0 for rabbit in acted}
        cut = {rabbit: evening and not taken[rabbit] for rabbit in acted}
        return self._observe(dict.fromkeys([*acted, *self.agents])), rewards, taken, cut, {}

    def close(self) -> None:
        return

    def _come(self, rabbit: str) -> None:
        self.agents.append(rabbit)
        self._cell[rabbit] = int(self._rng.integers(self.cells))

    def _observe(self, rabbits: Any) -> Observations:
        seen = {}
        for rabbit in rabbits:
            row = np.zeros(2 * self.cells + 1, np.float32)
            row[self._cell[rabbit]] = row[self.cells + self._shadow] = 1.0
            row[-1] = self._time / self.steps
            seen[rabbit] = row
        return seen
