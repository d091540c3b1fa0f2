"""Atari games in ALE's own vector environment, with the usual preprocessing: 84 x 84 gray, 4 stacked frames, frame
skip 4, up to 30 no-ops at the start, FIRE where a game waits for it.

The defaults are those of the `ALE/…-v5` ids: with probability 0.25 an action is ignored and the last one repeated.
Rewards are not clipped. `ale_py:ALE/Pong-v5` is the game without any of this.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.envs.pool import Pool
from paceline.envs.vector import StepResult
from paceline.spaces import Array

HEIGHT, WIDTH = 210, 160  # of the original screen
# Option → type, minimum, maximum. ALE checks nothing, and some values crash the process.
OPTIONS: dict[str, tuple[type, float, float]] = {
    "img_height": (int, 8, HEIGHT),
    "img_width": (int, 8, WIDTH),
    "grayscale": (bool, 0, 1),
    "stack_num": (int, 1, 32),
    "frameskip": (int, 1, 60),
    "maxpool": (bool, 0, 1),
    "noop_max": (int, 0, 1000),
    "use_fire_reset": (bool, 0, 1),
    "episodic_life": (bool, 0, 1),
    "repeat_action_probability": (float, 0, 1),
    "full_action_space": (bool, 0, 1),
    "max_num_frames_per_episode": (int, 1, 10**9),
}


def is_atari(env_id: str) -> bool:
    return env_id.startswith("ALE/")


def options_of(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int | None = None) -> dict[str, Any]:
    """The options of the registered id, updated with the user's `env.kwargs`, which are checked."""
    for name, value in kwargs.items():
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(OPTIONS)}"
            raise UserError(f"env.kwargs.{name}: Atari games have no such option; {hint}")
        kind, least, most = OPTIONS[name]
        is_kind = isinstance(value, bool) == (kind is bool) and isinstance(
            value, (int, float) if kind is float else kind
        )
        if not is_kind or not least <= value <= most:
            wanted = "true or false" if kind is bool else f"a number from {least:g} to {most:g}"
            raise UserError(f"env.kwargs.{name}={value}: expected {wanted}")
    options = {**gymnasium.spec(env_id).kwargs, **kwargs}
    if max_episode_steps is not None:
        options["max_num_frames_per_episode"] = max_episode_steps * options["frameskip"]
    return options


class AtariPool(Pool):
    def __init__(self, options: Mapping[str, Any], num_envs: int, *, threads: int = 1, render: bool = False) -> None:
        """`options`: from `options_of`."""
        make: Any = importlib.import_module("ale_py.vector_env").AtariVectorEnv
        # Unclipped rewards, so that the reported return is the score. `same_step` and partial batches break NEXT_STEP.
        self._env = make(num_envs=num_envs, num_threads=min(threads, num_envs), reward_clipping=False, **options)
        self._colour: Any = None
        """The same game with the same seed and actions in colour, for videos: the agent's frames are small and gray."""
        if render:
            full = {"grayscale": False, "img_height": HEIGHT, "img_width": WIDTH, "stack_num": 1}
            self._colour = make(num_envs=1, num_threads=1, reward_clipping=False, **{**options, **full})
        self.observation_space = self._env.single_observation_space
        self.action_space = self._env.single_action_space

    def reset(self, seeds: Sequence[int]) -> Array:
        observation, _ = self._env.reset(seed=np.asarray(seeds))
        if self._colour is not None:
            self._picture, _ = self._colour.reset(seed=np.asarray(seeds[:1]))
        return observation  # type: ignore[no-any-return]

    def send(self, action: Array) -> None:
        self._env.send(action)
        if self._colour is not None:
            self._colour.send(action[:1])

    def receive(self) -> StepResult:
        observation, reward, terminated, truncated, _ = self._env.recv()
        if self._colour is not None:
            self._picture, *_ = self._colour.recv()
        return observation, reward, terminated, truncated

    def frame(self) -> NDArray[np.uint8]:
        return self._picture[0, -1]  # type: ignore[no-any-return]

    def close(self) -> None:
        self._env = self._colour = None
