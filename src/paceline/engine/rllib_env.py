"""What RLlib's env runners use of ours: the environment, and a note of every episode that ends."""

from __future__ import annotations

import atexit
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.config import RunConfig, UserError
from paceline.env.make import Env, make_scalar
from paceline.ship import Parcel, clean, unpack
from paceline.spaces import ActionCodec, ObservationCodec

EPISODES = "paceline_episodes"
"""Where RLlib's results have them: return, length and metrics of each."""


class EnvMaker:
    """Makes environments wherever RLlib wants them. `parcel`: the user's code, for machines that do not have it."""

    def __init__(self, config: RunConfig, parcel: Parcel) -> None:
        self.config, self.parcel = config, parcel

    def __call__(self, context: Any) -> Env:
        if self.parcel.roots:
            atexit.register(clean, self.parcel)
        return as_rllib_takes_it(make_scalar(unpack(self.parcel, self.config).env))


def as_rllib_takes_it(env: Env) -> Env:
    """RLlib's networks take one vector, and give Discrete, MultiDiscrete or Box: other spaces are brought to these as
    for our own networks. What is one already is left as it is."""
    observation, action = ObservationCodec(env.observation_space), ActionCodec(env.action_space)
    if observation.images:
        raise UserError(f"--engine rllib takes vectors, and the env shows images: {env.observation_space}")
    plain = observation.is_plain and env.observation_space.dtype == np.float32
    return env if plain and _is_plain(env.action_space) else Encoded(env, observation, action)


class Encoded(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Env, observation: ObservationCodec, action: ActionCodec) -> None:
        super().__init__(env)
        self._observation, self._action = observation, action
        self.observation_space = spaces.Box(-np.inf, np.inf, observation.shape, np.float32)
        if action.is_continuous:
            low, high = action.low.astype(np.float32), action.high.astype(np.float32)
            self.action_space = spaces.Box(low, high, dtype=np.float32)
        elif len(action.nvec) == 1:
            self.action_space = spaces.Discrete(action.nvec[0])
        else:
            self.action_space = spaces.MultiDiscrete(list(action.nvec))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._encoded(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._action.is_continuous:  # RLlib has brought it into the bounds
            space = self.env.action_space
            taken = np.asarray(action).reshape(space.shape or ()).astype(space.dtype)
        else:
            taken = self._action.split(np.asarray(action, np.int64).reshape(1, -1))[0]
        observation, reward, terminated, truncated, info = self.env.step(taken)
        return self._encoded(observation), reward, terminated, truncated, info

    def _encoded(self, observation: Any) -> Any:
        row = np.zeros(self._observation.shape, np.float32)
        self._observation.encode_one(observation, row)
        return row


def note_episode(*, episode: Any, prev_episode_chunks: Any = (), metrics_logger: Any, **_: Any) -> None:
    """RLlib reports means; we keep each episode. What it hands over is its last part, and those before it."""
    parts = [*prev_episode_chunks, episode]
    info = episode.get_infos(-1) or {}
    metrics = {str(name): float(value) for name, value in (info.get("metrics") or {}).items()}
    total, length = sum(part.get_return() for part in parts), sum(len(part) for part in parts)
    metrics_logger.log_value(EPISODES, (float(total), int(length), metrics), reduce="item_series")


def _is_plain(space: gymnasium.Space[Any]) -> bool:
    if isinstance(space, spaces.Discrete):
        return int(space.start) == 0
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ndim == 1 and not np.any(space.start)
    return isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype == np.float32
