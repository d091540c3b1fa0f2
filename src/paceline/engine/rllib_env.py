"""What RLlib's env runners use of ours: the environment, and a note of every episode that ends."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.config import RunConfig, UserError
from paceline.env.make import Env, make_scalar
from paceline.ship import Parcel, unpack
from paceline.spaces import ActionCodec, ObservationCodec

EPISODES = "paceline_episodes"
"""Where RLlib's results have them: return, length and metrics of each."""


class EnvMaker:
    """Makes environments wherever RLlib wants them. `parcel`: the user's code, for machines that do not have it."""

    def __init__(self, config: RunConfig, parcel: Parcel) -> None:
        self.config, self.parcel = config, parcel

    def __call__(self, context: Any) -> Env:
        env = as_rllib_takes_it(make_scalar(unpack(self.parcel, self.config).env))
        return OwnSeeds(env, context.worker_index) if context.worker_index > 1 else env


class OwnSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """RLlib seeds environment i of env runner w with seed + w + i, so that runners would play each other's episodes.
    Those of the first keep its seeds."""

    def __init__(self, env: Env, runner: int) -> None:
        super().__init__(env)
        self._runner = runner

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            seed = int(np.random.SeedSequence((seed, self._runner)).generate_state(1)[0])
        return self.env.reset(seed=seed, options=options)


def as_rllib_takes_it(env: Env) -> Env:
    """RLlib's networks take one vector or one image, and give Discrete, MultiDiscrete or Box: other spaces are brought
    to these as for our own networks. What is one already is left as it is."""
    observation, action = ObservationCodec(env.observation_space), ActionCodec(env.action_space)
    if observation.images and not observation.is_image:
        raise UserError(
            f"--engine rllib takes one image or one vector, and the env shows {env.observation_space}: RLlib's own "
            "networks have no way to put them together; --engine local and ray do"
        )
    plain = observation.is_plain and env.observation_space.dtype == np.float32
    return env if plain and _is_plain(env.action_space) else Encoded(env, observation, action)


class Encoded(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Images become `float32 [H, W, C]` from 0 to 1, as RLlib's convolutions take them."""

    def __init__(self, env: Env, observation: ObservationCodec, action: ActionCodec) -> None:
        super().__init__(env)
        self._observation, self._action = observation, action
        if observation.is_image:
            (channels, height, width), top = observation.shape, 1.0 if observation.dtype == np.uint8 else np.inf
            low = 0.0 if top == 1.0 else -np.inf
            self.observation_space = spaces.Box(low, top, (height, width, channels), np.float32)
        else:
            self.observation_space = spaces.Box(-np.inf, np.inf, observation.shape, np.float32)
        if action.is_continuous:  # in its units: RLlib would scale all of them or none
            end = 1.0 if np.isfinite(action.low).all() and np.isfinite(action.high).all() else np.inf
            self.action_space = spaces.Box(-end, end, (action.dim,), np.float32)
        elif len(action.nvec) == 1:
            self.action_space = spaces.Discrete(action.nvec[0])
        else:
            self.action_space = spaces.MultiDiscrete(list(action.nvec))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._encoded(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        taken = self._action.split(np.asarray(action, self._action.dtype).reshape(1, -1))[0]
        observation, reward, terminated, truncated, info = self.env.step(taken)
        return self._encoded(observation), reward, terminated, truncated, info

    def _encoded(self, observation: Any) -> Any:
        row = np.zeros(self._observation.shape, self._observation.dtype)
        self._observation.encode_one(observation, row)
        if not self._observation.is_image:
            return row
        image = np.ascontiguousarray(row.transpose(1, 2, 0), np.float32)
        return image / np.float32(255) if row.dtype == np.uint8 else image


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
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype != np.float32:
        return False
    ends = np.concatenate([space.bounded_below, space.bounded_above])
    return bool(ends.all() or not ends.any())
