"""Environments that misbehave, or tell on whoever runs them. Named by file, so that other processes can make them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.spaces import space_from_json

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Script(gymnasium.Env[Any, Any]):
    """Episodes of random length that end in either way, with random rewards. It sees (mark of the episode, step,
    echo of the action, noise), and keeps what really happened in `history`."""

    def __init__(self, continuous: bool = False, longest: int = 6, seeded: bool = True) -> None:
        self.seeded = seeded
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32) if continuous else spaces.Discrete(3)
        self.longest = longest
        self.history: list[tuple[float, int, bool]] = []  # return, length, terminated
        self.actions: list[Any] = []  # all that `step` was given
        self.seeds: list[int | None] = []
        self.over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.seeded:
            super().reset(seed=seed)
        self.seeds.append(seed)
        self.length = int(self.np_random.integers(1, self.longest + 1))
        self.mark = self.np_random.uniform(1, 1000)
        self.steps, self.total, self.over = 0, 0.0, False
        return self._observe(0.0), {}

    def _observe(self, echo: float) -> Any:
        return np.array([self.mark, self.steps, echo, self.np_random.normal()], np.float32)

    def step(self, action: Any) -> Step:
        assert not self.over, "stepped after the end of the episode"
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.steps += 1
        reward = float(self.np_random.normal())
        self.total += reward
        self.over = self.steps >= self.length
        terminated = self.over and self.mark < 500
        info: dict[str, Any] = {}
        if self.over:
            self.history.append((self.total, self.steps, terminated))
            info["metrics"] = {"mark": self.mark, "length": self.steps}
        return self._observe(float(np.sum(action))), reward, terminated, self.over and not terminated, info


class Fixed(gymnasium.Env[Any, Any]):
    """Reward 1 for `length` steps; 0 means for ever."""

    def __init__(self, length: int = 3) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Step:
        self.steps += 1
        return np.array([self.steps], np.float32), 1.0, self.steps == self.length, False, {}


class Trouble(Fixed):
    """At step `at`: `hang` for an hour, `raise`, or `exit` the process."""

    def __init__(self, kind: str, at: int = 2) -> None:
        super().__init__(length=0)
        self.kind, self.at = kind, at

    def step(self, action: Any) -> Step:
        if self.steps + 1 == self.at:
            if self.kind == "hang":
                time.sleep(3600)
            if self.kind == "exit":
                os._exit(7)
            raise RuntimeError("the simulator exploded")
        return super().step(action)


class TroubleAtReset(Fixed):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        raise RuntimeError("no level could be loaded")


class Unseeded(Fixed):
    """Its observations come from nowhere; where `fickle`, so does the end of its episodes, and it minds being stepped
    after it."""

    def __init__(self, fickle: bool = False) -> None:
        super().__init__(length=0)
        self.fickle = fickle
        self.seeds: list[int | None] = []
        self.over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.steps, self.over = 0, False
        return np.random.default_rng().random(1).astype(np.float32), {}

    def step(self, action: Any) -> Step:
        if self.over:
            raise RuntimeError("stepped after the end of the episode")
        self.over = self.fickle and bool(np.random.default_rng().random() < 0.5)
        return np.random.default_rng().random(1).astype(np.float32), 1.0, self.over, False, {}


class NanAtTheEnd(Fixed):
    """A simulator whose last observation is no number."""

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation * (np.nan if terminated else 1.0), reward, terminated, truncated, info


class Shown(gymnasium.Env[Any, Any]):
    """Shows anything at all: samples of a space. Spaces are given as JSON."""

    def __init__(self, observation: dict[str, Any], action: dict[str, Any]) -> None:
        self.observation_space, self.action_space = space_from_json(observation), space_from_json(action)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._steps += 1
        return self.observation_space.sample(), 1.0, self._steps == 5, False, {}


class Breaks(gymnasium.Env[Any, Any]):
    """Works for `after` steps of every episode. With `how=truncate` it ends there; else the next step raises, exits the
    process or hangs. It sees (mark of the episode, step, noise), and rewards are random."""

    def __init__(self, after: int = 12, how: str = "raise", pid_file: str = "") -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.after, self.how = after, how
        if pid_file:  # a simulator that is a program of its own
            self.program = subprocess.Popen(["sleep", "600"])
            with Path(pid_file).open("a") as file:
                file.write(f"{self.program.pid}\n")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.mark = 0, self.np_random.uniform(1, 1000)
        return self._observe(), {}

    def _observe(self) -> Any:
        return np.array([self.mark, self.steps, self.np_random.normal()], np.float32)

    def step(self, action: Any) -> Step:
        self.steps += 1
        if self.steps > self.after and self.how != "truncate":
            break_down(self.how)
        reward = float(self.np_random.normal())
        return self._observe(), reward, False, self.how == "truncate" and self.steps >= self.after, {}


class Flaky(Fixed):
    """Fails in a share of its steps, at random, without regard to seeds."""

    def __init__(self, rate: float, how: str = "raise", length: int = 50, cost_seconds: float = 0.0) -> None:
        super().__init__(length)
        self.rate, self.how, self.cost_seconds = rate, how, cost_seconds
        self.dice = np.random.default_rng()

    def step(self, action: Any) -> Step:
        time.sleep(self.cost_seconds)
        if self.dice.random() < self.rate:
            break_down(self.how)
        return super().step(action)


def break_down(how: str) -> None:
    if how == "hang":
        time.sleep(3600)
    if how == "exit":
        os._exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sys.exit":
        sys.exit(0)
    raise RuntimeError("the simulator exploded")
