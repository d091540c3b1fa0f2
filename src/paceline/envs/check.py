"""`paceline envs check ID`: does an environment follow Gymnasium's API, do its seeds work, how fast is it?

The check runs in this process, where a step cannot be interrupted. It limits the number of steps, and after a step that
takes longer than a second it skips the tests that need many steps.
"""

from __future__ import annotations

import math
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check
from gymnasium.utils.env_checker import data_equivalence

from paceline.callable_module import make_callable
from paceline.config import UserError
from paceline.config.resolve import tidy, validate
from paceline.envs.check_agents import check_agents
from paceline.envs.check_masks import ValidActions
from paceline.envs.check_report import CheckReport, describe, short, short_space
from paceline.envs.contract import OLD_API, layers, read_metrics, reset_env, space_contains
from paceline.envs.make import make_env
from paceline.envs.masks import offered
from paceline.envs.multi_agent import AgentsEnv
from paceline.envs.vector import Env
from paceline.spaces import ActionCodec, Channels, ObservationCodec

ENDLESS_STEPS = 10_000
WALK_STEPS, WALK_SECONDS = 200, 5.0
SLOW_SECONDS = 1.0
SHOWN_STEPS = 10
SEED_STEPS, SEED_SECONDS = 100, 2.0
SPEED_SECONDS = 1.0
HUGE = 100.0

# Warnings of Gymnasium that do not matter here: the policy scales actions to their bounds, and `_check_action_space`
# has a clearer warning about unbounded actions.
_UNIMPORTANT = (
    "is different from the unwrapped version",
    "A Box observation space minimum value is -infinity",
    "A Box observation space maximum value is infinity",
    "A Box action space minimum value is -infinity",
    "A Box action space maximum value is infinity",
    "we recommend using a symmetric and normalized space",
)
# Gymnasium treats these as errors; training still works, or `_check_seed` has a clearer message.
_NOT_FATAL = ("deterministic", "super().reset")


def check_env(make: Callable[[], Any], id: str, channels: Channels = "auto", *, use_masks: bool = True) -> CheckReport:
    """Check the env that `make` returns. Exceptions from the env are reported as problems. `channels`: of images.
    `use_masks`: check the env's action masks, and take valid actions only."""
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
        with _closing(env, report):
            if isinstance(env, AgentsEnv):
                check_agents(env, make, report, channels)
            else:
                _check(env, make, report, channels, use_masks)
    for warning in caught:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(warning.message))
        # Deprecation warnings from the env's code are for its authors, unless Gymnasium itself raised them.
        about_code = issubclass(warning.category, DeprecationWarning | PendingDeprecationWarning | ImportWarning)
        if text.startswith("WARN: ") or not about_code:
            text = text.removeprefix("WARN: ").strip()
            if not any(part in text for part in _UNIMPORTANT):
                report.warn(text)
    return report


@contextmanager
def _closing(env: Env, report: CheckReport) -> Iterator[Env]:
    try:
        yield env
    finally:
        try:
            env.close()  # type: ignore[no-untyped-call]
        except Exception as error:
            report.warn(f"close() raised {describe(error)}; a run warns about it and goes on")


def _check(env: Env, make: Callable[[], Env], report: CheckReport, channels: Channels, use_masks: bool) -> None:
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), spaces.Space):
            report.problem(f"the env has no {name} (a gymnasium.spaces.Space); set it in __init__")
    if report.problems:
        return
    report.spaces = [f"observation: {short_space(env.observation_space)}", f"action: {short_space(env.action_space)}"]
    codec = _check_spaces(env, channels, report)
    # Another seed than the env's: with the same one, both generators would draw the same numbers.
    env.action_space.seed(20_011)

    guarded = ValidActions(env, codec) if use_masks and codec is not None else None
    walk = _RandomWalk(guarded or env, report)
    if not walk.run():
        return
    if guarded is not None and codec is not None and guarded.reader is not None:
        report.spaces.append(f"masks: {guarded.describe()}")
        unguarded, reader, actions = make, guarded.reader, codec
        env, make = guarded, lambda: ValidActions(unguarded(), actions, reader)
    if walk.slow:
        report.warn(f"a {walk.slow} takes over {SLOW_SECONDS:.0f} s: the tests that need many of them were skipped")
    if walk.slow != "reset":
        _gymnasium_check(env, walk.truncated_at_once, report)
    if walk.slow:
        report.steps_per_second = walk.steps / walk.seconds
        report.reset_share = walk.reset_seconds / walk.seconds
        return
    try:
        _check_seed(env, make, report)
        _measure(env, report)
    except Exception as error:
        report.problem(f"a later episode or a second instance failed: {describe(error)}")


class _RandomWalk:
    """Plays random episodes and checks every observation and reward."""

    def __init__(self, env: Env, report: CheckReport) -> None:
        self.env, self.report = env, report
        self.steps = 0
        self.seconds = self.reset_seconds = self.largest = 0.0
        self.slow = ""  # "step" or "reset"
        self.shown = True
        self.truncated_at_once = False
        self.faults: set[str] = set()

    def run(self) -> bool:
        """False if the env cannot continue."""
        limited, ended, where = _has_time_limit(self.env), False, "reset"
        try:
            self._reset()
            while self.slow != "step" and self.steps <= ENDLESS_STEPS and self.seconds < WALK_SECONDS:
                if self.steps >= (SHOWN_STEPS if self.slow else WALK_STEPS) and (ended or limited or self.slow):
                    break
                where = f"step {self.steps + 1}"
                if self._step():
                    ended, where = True, "reset"
                    self._reset()
        except UserError as error:
            self.report.problem(str(error))
            return False
        except Exception as error:
            self.report.problem(f"{where} raised {describe(error)}; nothing after it was checked")
            return False
        if not (ended or limited or self.slow):
            self.report.warn(
                f"no episode ended within {self.steps:,} random steps and no time limit is registered: "
                "set env.max_episode_steps"
            )
        if self.largest > HUGE:
            self.report.warn(
                f"observations are as large as {self.largest:.3g}, which makes learning hard: "
                "set env.normalize_observation=true or scale them in the env"
            )
        return True

    def _reset(self) -> None:
        start = time.perf_counter()
        result = reset_env(self.env, 0) if self.steps == 0 else self.env.reset()
        self._add_time(time.perf_counter() - start, "reset")
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            hint = f"; {OLD_API}" if space_contains(self.env.observation_space, result) else ""
            raise UserError(f"reset must return (observation, info dict), not {short(result)}{hint}")
        self._check_observation(result[0], "reset")
        if self.steps == 0:
            self.report.episode.append(("reset", "", short(result[0]), "", ""))

    def _step(self) -> bool:
        action = self.env.action_space.sample()
        start = time.perf_counter()
        result = self.env.step(action)
        self._add_time(time.perf_counter() - start, "step")
        self.steps += 1
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            given = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            hint = f"; {OLD_API}" if isinstance(result, tuple) and len(result) == 4 else ""
            raise UserError(
                f"step must return (observation, reward, terminated, truncated, info dict), not {given}{hint}"
            )
        if isinstance(self.env, ValidActions):
            action = self.env.taken
        observation, reward, terminated, truncated, info = result
        if "metrics" in info and (terminated or truncated):
            read_metrics(info["metrics"])
        self._check_observation(observation, f"step {self.steps}")
        if not isinstance(reward, int | float | np.integer | np.floating) or isinstance(reward, bool):
            self._fault("reward", f"the reward is a {type(reward).__name__}, not a float")
        elif not math.isfinite(reward):
            self._fault("reward", f"the reward is {reward} at step {self.steps}, not finite")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self._fault(name, f"{name} is a {type(flag).__name__}, not a bool")
        self.truncated_at_once |= bool(truncated) and self.steps == 1
        if self.shown and self.steps <= SHOWN_STEPS:
            end = "terminated" if terminated else "truncated" if truncated else ""
            self.report.episode.append((str(self.steps), short(action), short(observation), short(reward), end))
            self.shown = not end
        return bool(terminated or truncated)

    def _add_time(self, seconds: float, what: str) -> None:
        self.seconds += seconds
        self.reset_seconds += seconds if what == "reset" else 0.0
        if seconds > SLOW_SECONDS:
            self.slow = what

    def _check_observation(self, observation: Any, where: str) -> None:
        fault = observation_fault(observation, self.env.observation_space, "the observation")
        if fault:
            self._fault("observation", f"{fault} (at {where})")
        else:
            self.largest = max(self.largest, magnitude(observation, self.env.observation_space))

    def _fault(self, kind: str, text: str) -> None:
        """Report the first fault of its kind: an env that is wrong once is wrong at every step."""
        if kind not in self.faults:
            self.faults.add(kind)
            self.report.problem(text)


def _gymnasium_check(env: Env, truncated_at_once: bool, report: CheckReport) -> None:
    try:
        gymnasium_check(env, skip_render_check=True, skip_close_check=True)
    except (AssertionError, gymnasium.error.Error) as error:
        # Gymnasium compares with `is False`, so it mistakes a numpy bool for a truncation at the first step.
        if "truncates after 1 step" in str(error):
            if truncated_at_once:
                report.warn("every episode is truncated after one step: is that intended?")
        elif any(part in str(error).lower() for part in _NOT_FATAL):
            report.warn(f"Gymnasium: {error}")
        else:
            report.problem(f"Gymnasium: {error}")
    except Exception as error:
        report.problem(f"Gymnasium's check failed: {describe(error)}")


def _check_seed(env: Env, make: Callable[[], Env], report: CheckReport) -> None:
    """The same seed and actions three times: twice in one instance, then in another under other global seeds."""
    actions = [env.action_space.sample() for _ in range(SEED_STEPS)]
    global_numpy, global_python = np.random.get_state(), random.getstate()
    try:
        first = _trace(env, actions, 1)
        again = _trace(env, actions, 1)
        with _closing(make(), report) as second:
            other = _trace(second, actions, 2)
    finally:
        np.random.set_state(global_numpy)
        random.setstate(global_python)
    if (step := _first_difference(first, again)) is not None:
        report.warn(
            f"reset(seed=...) does not repeat an episode (they differ {step}): draw from self.np_random, call "
            "super().reset(seed=seed) first in reset, and keep no state from the previous episode"
        )
    elif (step := _first_difference(first, other)) is not None:
        report.warn(
            f"two instances with the same seed differ {step}: the env draws from the global random or numpy.random "
            "(or from another source that the seed does not control); use self.np_random"
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
    # The time limit may have cut a trace short; the common part is compared.
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if not data_equivalence(left, right, exact=True):
            return "at the reset" if i == 0 else f"after {i} steps"
    return None


def _measure(env: Env, report: CheckReport) -> None:
    actions = [env.action_space.sample() for _ in range(256)]
    steps, in_reset, ended = 0, 0.0, True
    start = time.perf_counter()
    while (now := time.perf_counter()) - start < SPEED_SECONDS:
        if ended:
            env.reset()
            in_reset += time.perf_counter() - now
        _, _, terminated, truncated, _ = env.step(actions[steps % len(actions)])
        steps += 1
        ended = terminated or truncated
    report.steps_per_second = steps / (now - start)
    report.reset_share = in_reset / (now - start)


def _has_time_limit(env: Env) -> bool:
    if env.spec is not None and env.spec.max_episode_steps:
        return True
    return any(isinstance(layer, gymnasium.wrappers.TimeLimit) for layer in layers(env))


def observation_fault(value: Any, space: spaces.Space[Any], path: str) -> str | None:
    """Why `value` is not a valid observation, or None."""
    kind = f"is a {type(value).__name__}"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if isinstance(space, spaces.Dict):
            if not isinstance(value, dict) or value.keys() != space.spaces.keys():
                given = f"has the keys {sorted(map(str, value))}" if isinstance(value, dict) else kind
                return f"{path} {given}; the space is a Dict of {sorted(map(str, space.spaces))}"
        elif not isinstance(value, tuple) or len(value) != len(space.spaces):
            return f"{path} {kind}; the space is a Tuple of {len(space.spaces)}"
        faults = (observation_fault(value[key], part, f"{path}[{key!r}]") for key, part in _parts(space))
        return next(filter(None, faults), None)
    if isinstance(space, spaces.Box):
        if not isinstance(value, np.ndarray | np.generic):
            return f"{path} {kind}, not a numpy array"
        if value.dtype != space.dtype:
            return f"{path} has dtype {value.dtype}, its space {space.dtype}: return it with .astype(np.{space.dtype})"
        if value.shape != space.shape:
            return f"{path} has shape {value.shape}, its space {space.shape}"
        if not np.isfinite(value).all():
            return f"{path} contains NaN or infinity"
        if not space.contains(np.asarray(value)):
            return f"{path} is outside the bounds of its space: {short(value)}"
    elif not space.contains(value):
        return f"{path} {kind}, {short(value)}, which is not in {space}"
    return None


def magnitude(value: Any, space: spaces.Space[Any]) -> float:
    """The largest number that the network sees as it is: bytes are scaled and categories become one-hot."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return max((magnitude(value[key], part) for key, part in _parts(space)), default=0.0)
    if isinstance(space, spaces.Box) and space.dtype != np.uint8 and np.size(value):
        return float(np.abs(value).max())
    return 0.0


def _parts(space: spaces.Dict | spaces.Tuple) -> Iterable[tuple[Any, spaces.Space[Any]]]:
    return space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)


def _check_spaces(env: Env, channels: Channels, report: CheckReport) -> ActionCodec | None:
    """The codec of the actions, if they are supported."""
    codec = None
    try:
        codec = ActionCodec(env.action_space)
    except UserError as error:
        report.problem(str(error))
    try:
        seen = ObservationCodec(env.observation_space, channels, codec.nvec if codec and offered(env) else ())
        if seen.note:
            report.warn(seen.note)
    except UserError as error:
        report.problem(str(error))
    if codec is not None and codec.is_continuous:
        if not codec.bounded.all():
            report.warn(
                "action bounds are infinite or huge, so actions cannot be scaled to them: give the Box bounds that the "
                "env uses"
            )
        for dtype in {part.space.dtype for part in codec.parts}:
            if not np.issubdtype(dtype or np.float32, np.floating):
                report.warn(f"actions are a Box of {dtype}: use Discrete or MultiDiscrete for whole numbers")
    return codec


def check(env: Any, **settings: Any) -> CheckReport:
    """Test an environment, given as `paceline.train` takes it, with further settings of `env`: its interface, a random
    episode, its speed. Print the report, or look at its `problems` and `warnings`."""
    config = validate(tidy({"env": {**settings, "id": env}})).env
    return check_env(lambda: make_env(config), config.id, config.channels, use_masks=config.action_mask == "auto")


make_callable(__name__, "check")
