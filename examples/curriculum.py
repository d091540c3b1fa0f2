"""A lock that nobody opens by chance, and a curriculum with which an agent learns to open it.

paceline train --env examples/curriculum.py:Lock --total-steps 100k
paceline train --env examples/curriculum.py:Lock --total-steps 100k --set callbacks=examples/curriculum.py:Curriculum

One of three actions is right at each of 20 places; the others end the episode. Only the last place is worth something,
and random actions get there once in three billion episodes. The curriculum begins at the last place, and one place
earlier whenever the agent opens the lock from there. Evaluation always begins at the first place.
In Python: `paceline.train({"env": Lock}, callbacks=[Curriculum()])`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

import paceline

PLACES = 20


class Lock(gymnasium.Env[int, int]):
    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(PLACES + 1), spaces.Discrete(3)
        self.start = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.start
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        right = action == self.place * self.place % 7 % 3
        self.place += right
        is_open = self.place == PLACES
        return self.place, float(is_open), not right or is_open, False, {}


class Curriculum(paceline.Callback):
    def on_start(self) -> None:
        if self.get("env.start") is None:  # otherwise a resumed run, which has its value
            self.set("env.start", PLACES - 1)

    def on_iteration(self, metrics: dict[str, Any]) -> None:
        start = self.get("env.start")
        self.log("start", start)
        if start > 0 and metrics.get("return_mean", 0) > 0.8:
            self.set("env.start", start - 1)
