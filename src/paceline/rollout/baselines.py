"""What every agent should beat: policies that do not look at what they see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import spaces

from paceline.config import UserError
from paceline.envs.masks import random_actions
from paceline.envs.vector import VectorEnv
from paceline.spaces import Array


class Baseline(ABC):
    @abstractmethod
    def greedy(self, observation: Array, memory: Array | None = None) -> Array:
        """The actions for encoded observations."""


class RandomPolicy(Baseline):
    """Uniform valid actions."""

    def __init__(self, env: VectorEnv, seed: int) -> None:
        self._env, self._rng = env, np.random.default_rng(seed)
        for part in [env] if env.team is None else env.team.parts:
            part.action.space.seed(seed)

    def greedy(self, observation: Array, memory: Array | None = None) -> Array:
        team = self._env.team
        if team is None:
            return self._sample(observation, self._env.observation, self._env.action)
        actions: Array = np.zeros((len(observation), *team.action.shape), team.action.dtype)
        for index, part in enumerate(team.parts):
            rows = team.rows(index, len(observation))
            own = self._sample(part.read_obs(observation[rows]), part.observation, part.action)
            actions[rows, : own.shape[1]] = own
        return actions

    def _sample(self, observation: Array, seen: Any, action: Any) -> Array:
        _, masks = seen.split(observation)
        if masks is not None:
            chosen = random_actions(self._rng, masks, action.nvec)
            if not action.dim:
                return chosen
        drawn = np.stack([action.encode(action.space.sample()) for _ in range(len(observation))])
        if masks is not None:
            drawn[:, : len(action.nvec)] = chosen
        return drawn


class ConstantPolicy(Baseline):
    """The same action at every step. UserError if it is not in the action space."""

    def __init__(self, env: VectorEnv, action: Any) -> None:
        if env.team is not None or env.agents:
            raise UserError(f"a constant action ({action}) is for environments of one agent, and this one has several")
        space = env.action.space
        value = as_action(action, space)
        if not space.contains(value):
            raise UserError(f"the action {action} is not in {space}")
        self._action = env.action.encode(value)

    def greedy(self, observation: Array, memory: Array | None = None) -> Array:
        return np.repeat(self._action[None], len(observation), axis=0)


def as_action(given: Any, space: spaces.Space[Any]) -> Any:
    """An action as people write it: one number for all of a Box, lists for arrays and tuples."""
    if isinstance(space, spaces.Dict) and isinstance(given, Mapping):
        return {name: as_action(given.get(name), part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and isinstance(given, list):
        return tuple(as_action(one, part) for one, part in zip(given, space.spaces, strict=False))
    if not isinstance(space, spaces.Discrete):
        with suppress(TypeError, ValueError):
            return np.broadcast_to(np.asarray(given, space.dtype), space.shape or ()).copy()
    return given
