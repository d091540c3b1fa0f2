"""Action masks: which actions an environment allows in a state.

An environment gives them in one of three ways: `info["action_mask"]` from `reset` and `step`, a method
`action_masks()`, or a key `action_mask` in a Dict observation. All mean the same: one number per value of each choice,
1 for valid and 0 for invalid. Vector environments write them behind the observation (see `ObservationCodec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.envs.contract import layers
from paceline.spaces import MASK, ActionCodec, Array

INFO, METHOD, KEY = f'info["{MASK}"]', "action_masks()", f'observation["{MASK}"]'


class MaskReader:
    """Reads and checks masks. `where`: `INFO`, `METHOD` or `KEY`; or another name, for errors, if masks come from
    elsewhere. `nvec`: the number of values of each choice."""

    def __init__(self, where: str, nvec: tuple[int, ...]) -> None:
        self.where, self.nvec = where, nvec
        self.size = sum(nvec)
        self.starts = np.cumsum((0, *nvec[:-1]))
        self._named = "one for each action" if len(nvec) == 1 else f"for choices of {', '.join(map(str, nvec))} values"

    def read(self, env: Any, observation: Any, info: Mapping[str, Any], when: Callable[[], str]) -> Array:
        """The mask `[K]` of a scalar environment. `when`: says where it is from, for errors."""
        given = self._given(env, observation, info)
        if self.where == KEY and np.ndim(given) == 2 and np.shape(given)[1] == self.size:
            given = given[-1]  # of several frames (env.frame_stack)
        if type(given) is np.ndarray and given.shape == (self.size,):
            mask: Array = given
            return mask
        return self.flat(given, when())

    def read_all(self, env: Any, observation: Any, info: Mapping[str, Any], count: int) -> Array:
        """The masks `[N, K]` of a vector environment. One that is missing allows nothing."""
        given = self._given(env, observation, info)
        if isinstance(given, tuple | list) and len(given) == len(self.nvec) != count:
            given = np.concatenate([np.asarray(part).reshape(count, -1) for part in given], axis=1)
        if given is None or len(given) != count:
            raise UserError(f"{self._fault(given)} (in a vector of {count} environments)")
        given = np.asarray(given)
        has = np.asarray(info.get(f"_{MASK}", np.ones(count)), bool) if self.where == INFO else np.ones(count, bool)
        if given.shape == (count, self.size) and has.all():
            return given
        rows = np.zeros((count, self.size), np.float32)
        for index in np.flatnonzero(has):
            if given[index] is not None:
                rows[index] = self.flat(given[index], f"environment {index} of the vector")
        return rows

    def find_fault(self, rows: Array) -> tuple[int, str] | None:
        """The first of the masks `[N, K]` that is none, and why."""
        other = (rows != 0) & (rows != 1)
        if other.any():
            return int(np.nonzero(other)[0][0]), "contains numbers other than 0 and 1"
        allowed = np.maximum.reduceat(rows, self.starts, axis=1)
        if allowed.all():
            return None
        row, choice = (int(indices[0]) for indices in np.nonzero(allowed == 0))
        what = "no action" if len(self.nvec) == 1 else f"no value of choice {choice}"
        return row, f"allows {what}: allow one, or end the episode with this step (terminated=True)"

    def check(self, rows: Array, when: Callable[[int], str]) -> None:
        """UserError for the first of the masks `[N, K]` that is none. `when(row)`: where that was."""
        if (fault := self.find_fault(rows)) is not None:
            raise UserError(f"{self.where} {fault[1]} ({when(fault[0])})")

    def _given(self, env: Any, observation: Any, info: Mapping[str, Any]) -> Any:
        if self.where == INFO:
            return info.get(MASK) if isinstance(info, dict) else None
        if self.where == METHOD:
            return next(layer.action_masks() for layer in layers(env) if _has_method(layer))
        return observation.get(MASK)

    def flat(self, given: Any, when: str) -> Array:
        """A mask in any of the accepted forms: numbers, or one array for each choice."""
        parts = given if isinstance(given, tuple | list) else ()
        if len(parts) == len(self.nvec) and tuple(np.size(part) for part in parts) == self.nvec and np.ndim(parts[0]):
            return np.concatenate([np.ravel(part) for part in parts])
        try:
            array = np.asarray(given)
        except ValueError:  # parts of different lengths
            array = np.zeros(0)
        shapes = ((self.size,), (len(self.nvec), self.nvec[0]))
        if array.dtype.kind not in "biuf" or array.shape not in shapes or array.size != self.size:
            raise UserError(f"{self._fault(given)} ({when})")
        return np.ravel(array)

    def _fault(self, given: Any) -> str:
        if given is None:
            return f"{self.where} is missing: give it with every reset and step, or set env.action_mask=ignore"
        if isinstance(given, np.ndarray) and given.dtype.kind in "biuf":
            what = f"has shape {given.shape}"
        elif isinstance(given, tuple | list):
            what = f"is a {type(given).__name__} of {len(given)}"
        else:
            what = f"is a {type(given).__name__}"
        return f"{self.where} {what}; expected {self.size} numbers of 0 and 1, {self._named}"


def offered(env: Any) -> str:
    """How an environment, scalar or vector, offers masks without being asked for a state: `METHOD`, `KEY` or
    nothing."""
    if any(_has_method(layer) for layer in layers(env)):
        return METHOD
    space = getattr(env, "single_observation_space", None) or env.observation_space
    return KEY if isinstance(space, spaces.Dict) and MASK in space.spaces else ""


def find_masks(env: Any, action: ActionCodec, info: Mapping[str, Any] | None = None) -> MaskReader | None:
    """How to read the environment's masks, if it has any. `info`: what its reset returned, if it was reset."""
    where = offered(env) or (INFO if isinstance(info, dict) and MASK in info else "")
    if not where:
        return None
    if not action.nvec:
        raise UserError(
            f"the env offers {where}, but masks are for Discrete and MultiDiscrete actions, and the env has "
            f"{action.space}: set env.action_mask=ignore to ignore it"
        )
    return MaskReader(where, action.nvec)


def random_actions(rng: np.random.Generator, masks: Array, nvec: tuple[int, ...]) -> NDArray[np.int64]:
    """Uniform valid actions `[N, k]` for masks `[N, K]`."""
    scores = np.where(masks != 0, rng.random(masks.shape), -1.0)
    parts = np.split(scores, np.cumsum(nvec)[:-1], axis=1)
    return np.stack([part.argmax(axis=1) for part in parts], axis=1)


def _has_method(layer: Any) -> bool:
    return callable(getattr(layer, "action_masks", None))
