"""Probe environments: tiny environments whose optimal return is known.

`register_probes()` registers them as `paceline/<Name>-v0`. They draw random numbers only from `self.np_random`, and
`get_state` / `set_state` save and restore an episode, so that an interrupted run continues exactly.

| env            | what it tests                                                       | best return |
|----------------|---------------------------------------------------------------------|-------------|
| Identity       | every kind of observation and action space                          | `length`    |
| KnownReturn    | value and discount; termination; `info["metrics"]`                  | `length`    |
| FixedCost      | the speed with a slow simulator                                     | `length`    |
| TruncationOnly | bootstrapping where an episode is truncated instead of terminated   | `length`    |
| DelayedReward  | credit for an action that pays off later                            | 1           |
| ImageSide      | images                                                              | `length`    |
| Mixed          | a Dict of image, vector and category; several categories at once    | `length`    |
| Numbered       | which transitions were trained on, and how often                    | `length`    |
| Faulty         | a simulator that raises, hangs or dies                              | `length`    |

Episodes that end only because of their length are *truncated*: their observations do not show the time, so only the
infinite-horizon return is a function of the observation.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.config import UserError

Observation = Any
Info = dict[str, Any]
Step = tuple[Observation, float, bool, bool, Info]


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise UserError(f"{name}={value} is too small for this probe env; give {least} or more")


class Probe(gymnasium.Env[Any, Any], ABC):
    """Counts steps and saves the state. A subclass defines the observation (`_observe`) and what changes (`_draw`)."""

    _state: ClassVar[tuple[str, ...]] = ()
    """Attributes that make up the state, besides the step count and the random generator."""

    def __init__(
        self, length: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any] | None = None
    ) -> None:
        """`action_space`: by default two actions, for envs in which they do not matter."""
        _at_least("length", length, 1)
        self.observation_space, self.action_space = observation_space, action_space or spaces.Discrete(2)
        self.length, self.steps = length, 0

    @property
    def optimum(self) -> float:
        """The best return of an episode."""
        return float(self.length)

    def _draw(self) -> None:
        """Draw the hidden state behind the next observation."""

    @abstractmethod
    def _observe(self) -> Observation: ...

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self.steps = 0
        self._draw()
        return self._observe(), {}

    def _advance(self, reward: float) -> Step:
        """Finish a step of an env that is truncated after `length` steps."""
        self.steps += 1
        self._draw()
        return self._observe(), reward, False, self.steps >= self.length, {}

    def get_state(self) -> dict[str, Any]:
        """Numbers, strings and arrays. An env replaces its arrays instead of writing to them, so they can be shared."""
        own = {name: getattr(self, name) for name in self._state}
        return {"steps": self.steps, "rng": self.np_random.bit_generator.state, **own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the result of `get_state`, also after it was stored as JSON."""
        self.steps = int(state["steps"])
        self.np_random.bit_generator.state = state["rng"]
        for name in self._state:
            now, saved = getattr(self, name), state[name]
            setattr(self, name, np.array(saved, now.dtype) if isinstance(now, np.ndarray) else type(now)(saved))


class Identity(Probe):
    """The right action repeats the observation. The reward is the share of equal components (`box`: 1 minus the mean
    distance), so the optimum is `length` for every kind of space."""

    _state: ClassVar[tuple[str, ...]] = ("shown",)

    def __init__(self, space: str = "discrete", n: int = 4, length: int = 10) -> None:
        _at_least("n", n, 2)
        kinds: dict[str, spaces.Space[Any]] = {
            "discrete": spaces.Discrete(n),
            "multidiscrete": spaces.MultiDiscrete([n, n + 1]),
            "multibinary": spaces.MultiBinary(n),
            "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
        if space not in kinds:
            raise UserError(f"space={space!r} is not one of {', '.join(kinds)}")
        super().__init__(length, kinds[space], kinds[space])
        self.kind, self.n = space, n
        self.shown = np.zeros(self.observation_space.shape or (), self.observation_space.dtype)

    def _draw(self) -> None:
        size = self.shown.shape
        if self.kind == "box":
            draw: Any = self.np_random.uniform(-1.0, 1.0, size)
        else:
            count: Any = {"discrete": self.n, "multidiscrete": [self.n, self.n + 1], "multibinary": 2}[self.kind]
            draw = self.np_random.integers(count, size=size)
        self.shown = np.asarray(draw, self.shown.dtype)

    def _observe(self) -> Observation:
        return int(self.shown) if self.kind == "discrete" else self.shown.copy()

    def step(self, action: Any) -> Step:
        if self.kind == "box":
            reward = 1.0 - float(np.abs(np.asarray(action) - self.shown).mean())
        else:
            reward = float((np.asarray(action) == self.shown).mean())
        return self._advance(reward)


class KnownReturn(Probe):
    """Reward 1 for `length` steps, then termination, for any actions; the observation is the time.

    The last info holds `{"metrics": {"utility": 1 / length}}`, a number that differs from the return and the length.
    """

    def __init__(self, length: int = 10) -> None:
        _at_least("length", length, 1)
        super().__init__(length, spaces.Discrete(length + 1))

    @staticmethod
    def value(gamma: float, t: int = 0, length: int = 10) -> float:
        """The discounted return after observation `t`."""
        left = length - t
        return float(left) if gamma == 1.0 else (1.0 - gamma**left) / (1.0 - gamma)

    def _observe(self) -> int:
        return self.steps

    def step(self, action: Any) -> Step:
        self.steps += 1
        ended = self.steps >= self.length
        info = {"metrics": {"utility": 1.0 / self.length}} if ended else {}
        return self._observe(), 1.0, ended, False, info


class FixedCost(Probe):
    """Each step sleeps for `cost_seconds`, or with `busy` uses that much CPU time. With `cost_max_seconds` each episode
    draws its cost between the two. Observations have four floats, as in CartPole, and every reward is 1."""

    _state: ClassVar[tuple[str, ...]] = ("cost",)

    def __init__(
        self, cost_seconds: float = 0.001, busy: bool = False, length: int = 200, cost_max_seconds: float | None = None
    ) -> None:
        super().__init__(length, spaces.Box(-1.0, 1.0, (4,), np.float32))
        _at_least("cost_seconds", cost_seconds, 0.0)
        if cost_max_seconds is not None:
            _at_least("cost_max_seconds", cost_max_seconds, cost_seconds)
        self.cost_seconds, self.cost_max_seconds, self.busy = cost_seconds, cost_max_seconds, busy
        self.cost = float(cost_seconds)

    def _draw(self) -> None:
        if self.steps == 0 and self.cost_max_seconds is not None:
            self.cost = float(self.np_random.uniform(self.cost_seconds, self.cost_max_seconds))

    def _observe(self) -> Observation:
        return self.np_random.random(4, np.float32)

    def step(self, action: Any) -> Step:
        if self.busy:
            end = time.thread_time() + self.cost  # not the wall clock, which would hide that processes share a core
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.cost)
        return self._advance(1.0)


class TruncationOnly(Probe):
    """Reward 1 at every step, in episodes truncated after `length` steps. A learner that bootstraps at truncation finds
    `value(gamma)`; one that confuses it with termination finds less, at most `length`."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length, spaces.Box(0.0, 1.0, (1,), np.float32))

    @staticmethod
    def value(gamma: float) -> float:
        """1 + gamma + gamma² + … for gamma < 1."""
        return 1.0 / (1.0 - gamma)

    def _observe(self) -> Observation:
        return np.ones(1, np.float32)

    def step(self, action: Any) -> Step:
        return self._advance(1.0)


class DelayedReward(Probe):
    """The first action must name the cue; its reward comes `delay` steps later and ends the episode.

    The observation is the cue (-1 or 1, at the first step only), whether the reward will come (-1 or 1, afterwards)
    and the time from 0 to 1. It is Markov, so that one-step methods can solve it too. A random policy earns 0.5.
    """

    _state: ClassVar[tuple[str, ...]] = ("cue", "right")

    def __init__(self, delay: int = 5) -> None:
        _at_least("delay", delay, 1)
        super().__init__(delay + 1, spaces.Box(-1.0, 1.0, (3,), np.float32))
        self.cue, self.right = 0, False

    @property
    def optimum(self) -> float:
        return 1.0

    def _draw(self) -> None:
        self.cue = int(self.np_random.integers(2))

    def _observe(self) -> Observation:
        first = self.steps == 0
        cue = 2.0 * self.cue - 1.0 if first else 0.0
        promise = 0.0 if first else 2.0 * self.right - 1.0
        return np.array([cue, promise, self.steps / self.length], np.float32)

    def step(self, action: Any) -> Step:
        if self.steps == 0:
            self.right = int(action) == self.cue
        self.steps += 1
        ended = self.steps >= self.length
        return self._observe(), float(ended and self.right), ended, False, {}


def _image(size: int, side: int, row: int, column: int) -> Observation:
    """A dark square image with a bright patch in its left (0) or right (1) half."""
    patch = size // 4
    image = np.full((size, size, 3), 25, np.uint8)
    left = side * (size // 2) + column
    image[row : row + patch, left : left + patch] = (230, 200, 160)
    return image


class ImageSide(Probe):
    """The right action names the side of the patch: 0 left, 1 right. The patch moves at every step."""

    _state: ClassVar[tuple[str, ...]] = ("side", "row", "column")

    def __init__(self, size: int = 36, length: int = 8) -> None:
        _at_least("size", size, 8)
        super().__init__(length, spaces.Box(0, 255, (size, size, 3), np.uint8))
        self.size = size
        self.side = self.row = self.column = 0

    def _draw(self) -> None:
        patch = self.size // 4
        self.side = int(self.np_random.integers(2))
        self.row = int(self.np_random.integers(self.size - patch + 1))
        self.column = int(self.np_random.integers(self.size // 2 - patch + 1))

    def _observe(self) -> Observation:
        return _image(self.size, self.side, self.row, self.column)

    def step(self, action: Any) -> Step:
        return self._advance(float(int(action) == self.side))


class Mixed(ImageSide):
    """Three answers at once: the side of the patch in `camera`, the number in `mode`, and whether the first entry of
    `state` is positive. Each right answer gives a third of the reward."""

    _state: ClassVar[tuple[str, ...]] = ("side", "row", "column", "mode", "place")

    def __init__(self, size: int = 36, length: int = 8) -> None:
        super().__init__(size, length)
        state = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict(
            {"camera": self.observation_space, "state": state, "mode": spaces.Discrete(3)}
        )
        self.action_space = spaces.MultiDiscrete([2, 3, 2])
        self.mode = 0
        self.place = np.zeros(2, np.float32)

    def _draw(self) -> None:
        super()._draw()
        self.mode = int(self.np_random.integers(3))
        self.place = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)

    def _observe(self) -> Observation:
        return {"camera": super()._observe(), "state": self.place.copy(), "mode": self.mode}

    def step(self, action: Any) -> Step:
        answers = (self.side, self.mode, int(self.place[0] > 0))
        right = sum(int(given) == answer for given, answer in zip(action, answers, strict=True))
        return self._advance(right / 3.0)


class Numbered(Probe):
    """Every observation in a run is unique: `[high, low, index]`, whole numbers that a float32 represents exactly. The
    first two identify the stream, drawn from the seed; `index` counts the stream's observations, including those of
    resets, so that a transition is identified by its first observation. Every reward is 1."""

    _state: ClassVar[tuple[str, ...]] = ("stream", "index")
    _BITS = 24  # in the significand of a float32

    def __init__(self, length: int = 10) -> None:
        super().__init__(length, spaces.Box(0.0, float(2**self._BITS - 1), (3,), np.float32))
        self.stream = self.index = -1

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        if seed is not None:
            self.stream = self.index = -1
        return super().reset(seed=seed, options=options)

    def _draw(self) -> None:
        if self.stream < 0:
            self.stream = int(self.np_random.integers(2 ** (2 * self._BITS)))
        self.index += 1

    def _observe(self) -> Observation:
        high, low = divmod(self.stream, 2**self._BITS)
        return np.array([high, low, self.index], np.float32)

    def step(self, action: Any) -> Step:
        return self._advance(1.0)


class Faulty(FixedCost):
    """Fails in step `after` + 1, counted over all episodes: `raise` an error, `hang` forever, or `exit`, which ends the
    process at once with status 13. `once` names a file: only the env that creates it fails."""

    KINDS = ("raise", "hang", "exit")
    EXIT_STATUS = 13
    _state: ClassVar[tuple[str, ...]] = (*FixedCost._state, "done")

    def __init__(
        self,
        how: str = "raise",
        after: int = 100,
        once: str | None = None,
        cost_seconds: float = 0.0,
        length: int = 200,
    ) -> None:
        super().__init__(cost_seconds, length=length)
        _at_least("after", after, 0)
        if how not in self.KINDS:
            raise UserError(f"how={how!r} is not one of {', '.join(self.KINDS)}")
        self.how, self.after, self.once = how, after, once
        self.done = 0

    def step(self, action: Any) -> Step:
        self.done += 1
        if self.done == self.after + 1 and self._may_fail():
            if self.how == "raise":
                raise RuntimeError(f"this probe env fails after {self.after} steps, as asked")
            if self.how == "exit":
                os._exit(self.EXIT_STATUS)
            while True:
                time.sleep(60.0)
        return super().step(action)

    def _may_fail(self) -> bool:
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True


PROBES: tuple[type[Probe], ...] = (
    Identity, KnownReturn, FixedCost, TruncationOnly, DelayedReward, ImageSide, Mixed, Numbered, Faulty,
)  # fmt: skip


def register_probes() -> None:
    """Register the probes with Gymnasium; calling it again has no effect."""
    for probe in PROBES:
        env_id = f"paceline/{probe.__name__}-v0"
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=f"{probe.__module__}:{probe.__name__}")
