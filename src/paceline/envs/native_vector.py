"""An environment's own vector implementation."""

from __future__ import annotations

import copy
from typing import Any, Unpack

import gymnasium
import numpy as np

from paceline.envs.contract import close_env, read_metrics, set_attribute
from paceline.envs.env_state import can_save, is_vector_cartpole
from paceline.envs.masks import MaskReader, find_masks, offered
from paceline.envs.vector import State, StepResult, VectorEnv, VectorOptions, seed_from
from paceline.spaces import MASK, Array


class NativeVector(VectorEnv):
    """It must use NEXT_STEP autoreset."""

    def __init__(self, env: gymnasium.vector.VectorEnv[Any, Any, Any], **options: Unpack[VectorOptions]) -> None:
        self.env = env
        self._base: Any = env.unwrapped
        self._base.action_space = _without_checks(env.action_space)
        self._ahead: Any = None  # what a reset returned before the first one was asked for
        self._steps = 0
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space, **options)

    def _find_masks(self, masked: bool | None) -> MaskReader | None:
        info = {MASK: None} if masked else {}
        if not masked and not offered(self.env) and self.action.nvec:
            self._ahead = self._reset()
            info = self._ahead[1]
        return find_masks(self.env, self.action, info)

    def set_attribute(self, name: str, value: Any) -> None:
        set_attribute(self.env, name, value)

    def reset(self) -> Array:
        (observation, info), self._ahead = self._ahead or self._reset(), None
        self.observation.encode(observation, self._obs)
        self._write_masks(observation, info)
        return self._obs

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        super().reseed(seed, worker, resumes)
        self._ahead = None

    def _write_masks(self, observation: Any, info: Any, terminated: Any = False) -> None:
        if self.masks is not None:
            rows = self._obs[:, self.observation.mask_columns]
            rows[...] = self.masks.read_all(self.env, observation, info, self.num_envs)
            rows[np.broadcast_to(terminated, self.num_envs)] = 1
            self.masks.check(rows, lambda index: f"environment {index} of the vector, step {self._steps}")

    def _reset(self) -> Any:
        self._ahead = None
        return self.env.reset(seed=seed_from((*self._entropy, *([self._first_env] if self._first_env else []))))

    def step(self, action: Array) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(self.action.decode(action))
        self.observation.encode(observation, self._obs)
        self._steps += 1
        self._write_masks(observation, info, terminated)
        if "metrics" in info:
            values = {name: value for name, value in info["metrics"].items() if not name.startswith("_")}
            for index in np.flatnonzero(terminated | truncated):
                own = read_metrics({name: value[index] for name, value in values.items()})
                self.finished_metrics.append((int(index), own))
        return self._obs, reward, terminated, truncated

    def state(self) -> State | None:
        base = self._base
        if can_save(base):
            state: State = base.get_state()
            return state
        if not is_vector_cartpole(base):
            return None
        return {
            "state": np.array(base.state),
            "steps": np.array(base.steps),
            "prev_done": np.array(base.prev_done),
            "rng": base.np_random.bit_generator.state,
        }

    def restore(self, state: State, observation: Array) -> bool:
        base = self._base
        self._reset()
        if can_save(base):
            base.set_state(state)
        elif is_vector_cartpole(base):
            base.state, base.steps = np.array(state["state"]), np.array(state["steps"])
            base.prev_done = np.array(state["prev_done"])
            base.np_random.bit_generator.state = state["rng"]
        else:
            return False
        self._obs[...] = observation
        return True

    def close(self) -> None:
        close_env(self.env)


def _without_checks(space: Any) -> Any:
    """The same space, which accepts every action. The codec makes valid ones, and checking takes a third of a step."""
    unchecked = copy.copy(space)
    unchecked.__class__ = type(type(space).__name__, (type(space),), {"contains": lambda self, action: True})
    return unchecked
