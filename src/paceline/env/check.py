"""`paceline envs check ID`: does an environment keep the contract, does its seed hold, how fast is it?

The check runs in this process, where a step cannot be interrupted: it bounds the number of steps and, after one that
takes longer than a second, leaves out what would need many more.
"""

from __future__ import annotations

import math
import random
import re
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check
from gymnasium.utils.env_checker import data_equivalence

from paceline.config import UserError
from paceline.env.wording import describe, magnitude, observation_fault, short, short_space

Env = gymnasium.Env[Any, Any]

ENDLESS_STEPS = 10_000
WALK_STEPS = 200
WALK_SECONDS = 5.0
SLOW_SECONDS = 1.0
SHOWN_STEPS = 10
SEED_STEPS = 100
SEED_SECONDS = 2.0
SPEED_SECONDS = 1.0
HUGE = 100.0

# True of good environments, or of no consequence here: actions are scaled to their bounds by the policy, and what is
# said of unbounded actions below says what to do.
_UNIMPORTANT = (
    "is different from the unwrapped version",
    "A Box observation space minimum value is -infinity",
    "A Box observation space maximum value is infinity",
    "A Box action space minimum value is -infinity",
    "A Box action space maximum value is infinity",
    "we recommend using a symmetric and normalized space",
)
# Gymnasium stops at these; a run does not suffer, or the test of the seed below says it better.
_NOT_FATAL = ("deterministic", "super().reset")


@dataclass
class CheckReport:
    id: str
    problems: list[str] = field(default_factory=list)
    """Break the contract: training would fail or learn from wrong data."""
    warnings: list[str] = field(default_factory=list)
    """Would make a run slow, unrepeatable or hard to learn."""
    steps_per_second: float = math.nan
    """Of one instance, resets included."""
    reset_share: float = math.nan
    """The part of that time spent in `reset`."""
    spaces: list[str] = field(default_factory=list)
    episode: list[tuple[str, ...]] = field(default_factory=list)
    """A random episode: step, action, observation, reward, end."""

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def text(self) -> str:
        lines = [self.id, *(f"  {line}" for line in self.spaces)]
        if self.episode:
            rows = [("step", "action", "observation", "reward", "end"), *self.episode]
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            lines += ["", "A random episode:"]
            lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if not math.isnan(self.steps_per_second):
            lines += ["", f"{self.steps_per_second:,.0f} steps/s, {self.reset_share:.0%} of the time in reset"]
        for title, entries in (("Problems", self.problems), ("Warnings", self.warnings)):
            lines += ["", f"{title}:", *(f"  - {entry}" for entry in entries)] if entries else []
        verdict = f"{len(self.problems)} problem(s): not ready to train on" if self.problems else "ready to train on"
        return "\n".join([*lines, "", f"{self.id}: {verdict}"])


def check_env(make: Callable[[], Env], id: str) -> CheckReport:
    """Everything that can be said about the env that `make` builds. What the env raises becomes a problem."""
    report = CheckReport(id)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            env = make()
        except UserError:
            raise
        except Exception as error:
            report.problem(f"the env cannot be made: {describe(error)}")
            return report
        with closing(env):
            _check(env, make, report)
    for warning in caught:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(warning.message))
        # Warnings about old library calls inside the env are for its authors, unless Gymnasium itself raised them.
        about_code = issubclass(warning.category, DeprecationWarning | PendingDeprecationWarning | ImportWarning)
        if text.startswith("WARN: ") or not about_code:
            text = text.removeprefix("WARN: ").strip()
            if not any(part in text for part in _UNIMPORTANT):
                report.warn(text)
    return report


def _check(env: Env, make: Callable[[], Env], report: CheckReport) -> None:
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), spaces.Space):
            report.problem(f"the env has no {name} (a gymnasium.spaces.Space); set it in __init__")
    if report.problems:
        return
    report.spaces = [f"observation: {short_space(env.observation_space)}", f"action: {short_space(env.action_space)}"]
    _check_observation_space(env.observation_space, "observation space", report)
    _check_action_space(env.action_space, report)
    # Not the seed of the env: the two generators would draw the same numbers, and random actions would not be random.
    env.action_space.seed(20_011)

    walk = _Walk(env, report)
    if not walk.run():
        return
    if walk.slow:
        report.warn(f"a {walk.slow} takes over {SLOW_SECONDS:.0f} s: the tests that need many of them were left out")
    if walk.slow != "reset":
        _gymnasium_check(env, walk.cut_at_once, report)
    if walk.slow:
        report.steps_per_second = walk.steps / walk.seconds
        report.reset_share = walk.reset_seconds / walk.seconds
        return
    try:
        _check_seed(env, make, report)
        _measure(env, report)
    except Exception as error:
        report.problem(f"a later episode or a second instance failed: {describe(error)}")


class _Walk:
    """Random episodes, every observation and reward looked at."""

    def __init__(self, env: Env, report: CheckReport) -> None:
        self.env = env
        self.report = report
        self.steps = 0
        self.seconds = 0.0
        self.reset_seconds = 0.0
        self.slow = ""
        self.largest = 0.0
        self.shown = True
        self.cut_at_once = False
        self.faults: set[str] = set()

    def run(self) -> bool:
        """False when the env cannot go on."""
        limited = _has_time_limit(self.env)
        ended = False
        where = "reset"
        try:
            self._reset()
            while self.slow != "step" and self.steps <= ENDLESS_STEPS and self.seconds < WALK_SECONDS:
                if self.steps >= (SHOWN_STEPS if self.slow else WALK_STEPS) and (ended or limited or self.slow):
                    break
                where = f"step {self.steps + 1}"
                if self._step():
                    ended, where = True, "reset"
                    self._reset()
        except _Malformed as error:
            self.report.problem(str(error))
            return False
        except Exception as error:
            self.report.problem(f"{where} raised {describe(error)}; the rest was not checked")
            return False
        if not (ended or limited or self.slow):
            self.report.warn(
                f"no episode ended within {self.steps:,} random steps and no time limit is registered: "
                "set env.max_episode_steps"
            )
        if self.largest > HUGE:
            self.report.warn(
                f"observations are as large as {self.largest:.3g}: networks learn badly from such numbers; "
                "set env.normalize_observation=true or scale them in the env"
            )
        return True

    def _reset(self) -> None:
        start = time.perf_counter()
        result = self.env.reset(seed=0) if self.steps == 0 else self.env.reset()
        self._took(time.perf_counter() - start, "reset")
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise _Malformed(f"reset must return (observation, info dict), not {short(result)}")
        self._look(result[0], "reset")
        if self.steps == 0:
            self.report.episode.append(("reset", "", short(result[0]), "", ""))

    def _step(self) -> bool:
        action = self.env.action_space.sample()
        start = time.perf_counter()
        result = self.env.step(action)
        self._took(time.perf_counter() - start, "step")
        self.steps += 1
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            given = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise _Malformed(f"step must return (observation, reward, terminated, truncated, info dict), not {given}")
        observation, reward, terminated, truncated, _ = result
        self._look(observation, f"step {self.steps}")
        if not isinstance(reward, int | float | np.integer | np.floating) or isinstance(reward, bool):
            self._fault("reward", f"the reward is a {type(reward).__name__}, not a float")
        elif not math.isfinite(reward):
            self._fault("reward", f"the reward is {reward} at step {self.steps}, not finite")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self._fault(name, f"{name} is a {type(flag).__name__}, not a bool")
        self.cut_at_once |= bool(truncated) and self.steps == 1
        if self.shown and self.steps <= SHOWN_STEPS:
            end = "terminated" if terminated else "truncated" if truncated else ""
            self.report.episode.append((str(self.steps), short(action), short(observation), short(reward), end))
            self.shown = not end
        return bool(terminated or truncated)

    def _took(self, seconds: float, what: str) -> None:
        self.seconds += seconds
        self.reset_seconds += seconds if what == "reset" else 0.0
        if seconds > SLOW_SECONDS:
            self.slow = what

    def _look(self, observation: Any, where: str) -> None:
        fault = observation_fault(observation, self.env.observation_space, "the observation")
        if fault:
            self._fault("observation", f"{fault} (at {where})")
        else:
            self.largest = max(self.largest, magnitude(observation, self.env.observation_space))

    def _fault(self, kind: str, text: str) -> None:
        """The first of its kind; an env that is wrong once is wrong at every step."""
        if kind not in self.faults:
            self.faults.add(kind)
            self.report.problem(text)


class _Malformed(Exception):
    """The env returned something that cannot be taken apart."""


def _gymnasium_check(env: Env, cut_at_once: bool, report: CheckReport) -> None:
    try:
        gymnasium_check(env, skip_render_check=True, skip_close_check=True)
    except (AssertionError, gymnasium.error.Error) as error:
        # Gymnasium compares with `is False`, so a numpy bool looks to it like an episode cut at its first step.
        if "truncates after 1 step" in str(error):
            if cut_at_once:
                report.warn("every episode is truncated after one step: is that what you want?")
        elif any(part in str(error).lower() for part in _NOT_FATAL):
            report.warn(f"Gymnasium: {error}")
        else:
            report.problem(f"Gymnasium: {error}")
    except Exception as error:
        report.problem(f"Gymnasium's check failed: {describe(error)}")


def _check_seed(env: Env, make: Callable[[], Env], report: CheckReport) -> None:
    """The same seed and actions thrice: twice in one instance, then in another with the global generators moved."""
    actions = [env.action_space.sample() for _ in range(SEED_STEPS)]
    global_numpy, global_python = np.random.get_state(), random.getstate()
    try:
        first = _trace(env, actions, 1)
        again = _trace(env, actions, 1)
        with closing(make()) as second:
            other = _trace(second, actions, 2)
    finally:
        np.random.set_state(global_numpy)
        random.setstate(global_python)
    if (step := _first_difference(first, again)) is not None:
        report.warn(
            f"reset(seed=...) does not repeat an episode (they differ {step}): draw from self.np_random, call "
            "super().reset(seed=seed) first in reset, and leave nothing over from the episode before"
        )
    elif (step := _first_difference(first, other)) is not None:
        report.warn(
            f"two instances with the same seed differ {step}: the env draws from the global random or numpy.random "
            "(or from something else its seed does not reach); use self.np_random"
        )


def _trace(env: Env, actions: list[Any], global_seed: int) -> list[tuple[Any, ...]]:
    np.random.seed(global_seed)
    random.seed(global_seed)
    end = time.perf_counter() + SEED_SECONDS
    observation, _ = env.reset(seed=123)
    trace: list[tuple[Any, ...]] = [(deepcopy(observation),)]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        trace.append((deepcopy(observation), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            trace.append((deepcopy(env.reset()[0]),))
        if time.perf_counter() > end:
            break
    return trace


def _first_difference(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> str | None:
    # A trace cut short by its time limit is compared as far as it goes.
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if not data_equivalence(left, right, exact=True):
            return "at the reset" if i == 0 else f"after {i} steps"
    return None


def _measure(env: Env, report: CheckReport) -> None:
    actions = [env.action_space.sample() for _ in range(256)]
    steps, in_reset = 0, 0.0
    start = now = time.perf_counter()
    env.reset()
    in_reset += time.perf_counter() - start
    while (now := time.perf_counter()) - start < SPEED_SECONDS:
        _, _, terminated, truncated, _ = env.step(actions[steps % len(actions)])
        steps += 1
        if terminated or truncated:
            before = time.perf_counter()
            env.reset()
            in_reset += time.perf_counter() - before
    report.steps_per_second = steps / (now - start)
    report.reset_share = in_reset / (now - start)


def _has_time_limit(env: Env) -> bool:
    if env.spec is not None and env.spec.max_episode_steps:
        return True
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, gymnasium.wrappers.TimeLimit):
            return True
        layer = layer.env
    return False


def _check_observation_space(space: spaces.Space[Any], path: str, report: CheckReport) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in entries:
            _check_observation_space(part, f"{path}[{key!r}]", report)
    elif not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        report.problem(
            f"{path} is a {type(space).__name__}; supported are Box, Discrete, MultiDiscrete, MultiBinary and "
            "Dict or Tuple of these: convert it in the env or with a wrapper"
        )


def _check_action_space(space: spaces.Space[Any], report: CheckReport) -> None:
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        report.problem(
            f"action space is a {type(space).__name__}; supported are Box, Discrete, MultiDiscrete and MultiBinary: "
            "convert it in the env or with a wrapper"
        )
    elif isinstance(space, spaces.Box):
        if not np.isfinite([space.low, space.high]).all():
            report.warn("action bounds are infinite: actions cannot be scaled to them; give the Box finite ones")
        if not np.issubdtype(space.dtype or np.float32, np.floating):
            report.warn(f"actions are a Box of {space.dtype}: whole numbers are better a Discrete or MultiDiscrete")
