"""Environments with nested actions, which show the action that they took, and one for each kind of space."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

LENGTH = 6
ACTIONS: dict[str, spaces.Space[Any]] = {
    "choices": spaces.Dict(
        {
            "move": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiDiscrete([[2, 4]], start=[[0, -1]])]),
            "grip": spaces.MultiBinary(2),
        }
    ),
    "numbers": spaces.Tuple(
        [
            spaces.Box(np.array([[-2.0], [0.0]]), np.array([[2.0], [1.0]]), dtype=np.float64),
            spaces.Dict({"valve": spaces.Box(100.0, np.inf, (), np.float32), "gear": spaces.Box(0, 8, (1,), np.int32)}),
        ]
    ),
    "mixed": spaces.Dict(
        {
            "aim": spaces.Tuple([spaces.Box(-2.0, 3.0, (2,), np.float32), spaces.MultiBinary(2)]),
            "go": spaces.Discrete(3, start=1),
            "power": spaces.Box(0, 8, (1,), np.float64),
        }
    ),
    "one choice": spaces.Dict({"only": spaces.Discrete(4)}),
    "by number": spaces.Dict({0: spaces.Discrete(2), 1: spaces.Discrete(3)}),
    "bounded": spaces.Dict({"a": spaces.Box(-1, 3, (2,), np.float32), "b": spaces.Box(0, 1, (1, 2), np.float32)}),
}


def flat(action: Any) -> list[float]:
    """All numbers of an action, in the order of its space."""
    if isinstance(action, dict):
        return [number for part in action.values() for number in flat(part)]
    if isinstance(action, tuple):
        return [number for part in action for number in flat(part)]
    return [float(number) for number in np.ravel(action)]


class Nested(gymnasium.Env[Any, Any]):
    """Sees its last action and noise. `masked`: with masks over all parts, of which it takes no invalid value."""

    def __init__(self, kind: str = "choices", masked: bool = False) -> None:
        self.action_space, self.masked = ACTIONS[kind], masked
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(flat(self.action_space.sample())) + 1,), np.float32)
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._see([0.0] * (self.observation_space.shape[0] - 1))

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        if self.masked:
            assert self.mask[self._chosen(flat(action))].all(), (action, self.mask)
        self.taken.append(action)
        self.steps += 1
        observation, info = self._see(flat(action))
        return observation, float(sum(flat(action))), self.steps == LENGTH, False, info

    def _see(self, action: list[float]) -> Any:
        info = {}
        if self.masked:
            self.mask = self.np_random.integers(2, size=7 if "aim" in self.action_space.spaces else 13)
            self.mask[[0, 3, 4] if len(self.mask) == 7 else [0, 3, 4, 8, 9]] = 1
            info = {"action_mask": self.mask}
        return np.array([*action, self.np_random.normal()], np.float32), info

    def _chosen(self, numbers: list[float]) -> Any:
        """The places in the mask of what was chosen."""
        if len(self.mask) == 7:  # of "mixed": aim[1] (2, 2), go (3 from 1)
            return (np.array([0, 2, 4 - 1]) + numbers[2:5]).astype(int)
        # of "choices": grip (2, 2), move (3 from 1), (2, 4 from -1)
        return (np.array([0, 2, 4 - 1, 7, 9 + 1]) + numbers).astype(int)


class NestedVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The same as a vector environment of its own, which takes actions in Gymnasium's batched form."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int, kind: str = "choices") -> None:
        self.envs = [Nested(kind) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = self.envs[0].observation_space, ACTIONS[kind]
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.checked_space = self.action_space  # paceline replaces the other one
        self.done = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.done[:] = False
        return np.stack([env.reset(seed=None if seed is None else seed + k)[0] for k, env in enumerate(self.envs)]), {}

    def step(self, actions: Any) -> Any:
        assert self.checked_space.contains(actions), actions
        results = []
        for env, action, done in zip(self.envs, iterate(self.checked_space, actions), self.done, strict=True):
            results.append(
                (env.reset()[0], 0.0, False, False, {}) if done else env.step(_single(action, env.action_space))
            )
        observation, reward, terminated, truncated, _ = zip(*results, strict=True)
        self.done = np.array(terminated)
        return np.stack(observation), np.array(reward), np.array(terminated), np.array(truncated), {}


def _single(action: Any, space: Any) -> Any:
    """Gymnasium's iteration gives numpy scalars and 0-d arrays, which spaces do not always contain."""
    if isinstance(space, spaces.Dict):
        return {key: _single(action[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_single(value, part) for value, part in zip(action, space.spaces, strict=True))
    return int(action) if isinstance(space, spaces.Discrete) else np.asarray(action, space.dtype)


# The rows of the tables in docs/spaces.md
NUMBERS = spaces.Box(-1.0, 1.0, (3,), np.float32)
BYTES = spaces.Box(0, 255, (12, 12, 3), np.uint8)
FLOATS = spaces.Box(0.0, 1.0, (2, 12, 12), np.float32)
CHOICE = spaces.Discrete(3, start=2)
OBSERVATION_KINDS: dict[str, spaces.Space[Any]] = {
    "`Box`": NUMBERS,
    "`Box`, one image of bytes": BYTES,
    "`Box`, one image of floats": FLOATS,
    "several images, with other parts": spaces.Dict({"eye": BYTES, "depth": FLOATS, "speed": NUMBERS}),
    "`Discrete`": CHOICE,
    "`MultiDiscrete`": spaces.MultiDiscrete([[2, 3]], start=[[4, -1]]),
    "`MultiBinary`": spaces.MultiBinary([2, 2]),
    "`Dict` and `Tuple`, nested": spaces.Dict({"a": spaces.Tuple([NUMBERS, spaces.Dict({"b": CHOICE})])}),
    "with `Text`": spaces.Dict({"goal": spaces.Text(9), "state": NUMBERS}),
    "`Text` alone": spaces.Text(9),
    "`Sequence`": spaces.Sequence(NUMBERS),
    "`Graph`": spaces.Graph(NUMBERS, None),
}
ACTION_KINDS: dict[str, spaces.Space[Any]] = {
    "`Discrete`": CHOICE,
    "`MultiDiscrete`": spaces.MultiDiscrete([[2, 3]], start=[[4, -1]]),
    "`MultiBinary`": spaces.MultiBinary([2, 2]),
    "`Box` with bounds": spaces.Box(np.array([[-1.0], [2.0]]), np.array([[1.0], [9.0]]), dtype=np.float64),
    "`Box` with one bound": spaces.Box(100.0, np.inf, (2,), np.float32),
    "`Box` without bounds": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "`Dict` or `Tuple` of choices": spaces.Dict({"go": CHOICE, "on": spaces.Tuple([spaces.MultiBinary(2)])}),
    "`Dict` or `Tuple` of `Box`": spaces.Dict(
        {"a": NUMBERS, "b": spaces.Tuple([spaces.Box(0, 4, (2, 1), np.float32)])}
    ),
    "`Dict` or `Tuple` of both": spaces.Dict({"a": NUMBERS, "b": CHOICE}),
    "others": spaces.Text(3),
}


class Kind(gymnasium.Env[Any, Any]):
    """Shows samples of one of the kinds."""

    def __init__(self, observation: str, action: str) -> None:
        self.observation_space = copy.deepcopy(OBSERVATION_KINDS[observation])  # each with its own seed
        self.action_space = ACTION_KINDS[action]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}
