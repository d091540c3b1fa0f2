"""What an environment must return, checked where training would otherwise fail in a riddle or learn from wrong data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.config import UserError, printable
from paceline.spaces import fits, is_text

OLD_API = (
    "this is the old gym API: derive the env from gymnasium.Env, let reset(self, *, seed=None, options=None) return "
    "(observation, info) and step return (observation, reward, terminated, truncated, info)"
)
_NORMALIZERS: dict[type, str] = {
    gymnasium.wrappers.NormalizeObservation: "normalize_observation",
    gymnasium.wrappers.NormalizeReward: "normalize_reward",
}


def check_kind(env: Any, env_id: str) -> None:
    """Refuse what is no environment of one agent, and say what it is."""
    packages = {base.__module__.partition(".")[0] for base in type(env).__mro__}
    if not isinstance(env, gymnasium.Env):
        old = "gym" in packages or all(callable(getattr(env, name, None)) for name in ("reset", "step"))
        hint = f"; {OLD_API}" if old else ""
        raise UserError(f"env.id={env_id}: it makes {_kind(env)}; expected a gymnasium.Env{hint}")


def check_made(env: Any, env_id: str) -> None:
    """Refuse an env without spaces, or with wrappers whose statistics would be lost."""
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if type(space).__module__.partition(".")[0] == "gym":
            raise UserError(f"env.id={env_id}: its {name} is of the old gym package: `from gymnasium import spaces`")
        if not isinstance(space, gymnasium.Space):
            raise UserError(f"env.id={env_id}: the env has no {name} (a gymnasium.Space); set it in __init__")
    for layer in layers(env):
        for kind, key in _NORMALIZERS.items():
            if isinstance(layer, kind) and getattr(layer, "update_running_mean", True):
                raise UserError(
                    f"the wrapper {type(layer).__name__} keeps statistics of its own in each environment, and no "
                    f"checkpoint saves them: leave it out and set env.{key}=true, which does the same for all "
                    "environments together"
                )


def layers(env: Any) -> Iterator[Any]:
    """The wrappers around an environment, outermost first, then the environment itself."""
    while isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        yield env
        env = env.env
    yield env


def set_attribute(env: Any, name: str, value: Any) -> None:
    """Of the environment, or of the outermost wrapper that has it."""
    layer = env
    while name not in vars(layer) and not hasattr(type(layer), name):
        if "env" not in vars(layer):
            raise UserError(f"env.{name}: {type(layer).__name__} has no attribute {name!r}; set it in __init__")
        layer = layer.env
    setattr(layer, name, value)


def reset_env(env: Any, seed: int) -> Any:
    try:
        return env.reset(seed=seed)
    except TypeError as error:
        if "unexpected keyword argument 'seed'" in str(error):
            raise UserError(f"the env's reset takes no seed; {OLD_API}") from error
        raise


def check_reset(result: Any, space: spaces.Space[Any]) -> None:
    """Raise UserError for the first fault in what `reset` returned."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        hint = f"; {OLD_API}" if space_contains(space, result) else ""
        raise UserError(f"the env's reset must return (observation, info dict), not {_kind(result)}{hint}")
    check_observation(result[0], space, "reset")


def check_step(result: Any, space: spaces.Space[Any]) -> None:
    """Raise UserError for the first fault in what `step` returned."""
    if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
        hint = f"; {OLD_API}" if isinstance(result, tuple) and len(result) == 4 else ""
        raise UserError(
            "the env's step must return (observation, reward, terminated, truncated, info dict), not "
            f"{_kind(result)}{hint}"
        )
    observation, reward, terminated, truncated, _ = result
    check_observation(observation, space, "step")
    for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
        try:
            float(value)
        except (TypeError, ValueError):
            wanted = "a number" if name == "reward" else "true or false"
            raise UserError(f"the env's step returned {_kind(value)} as {name}; expected {wanted}") from None


def check_observation(observation: Any, space: spaces.Space[Any], where: str) -> None:
    fault = structure_fault(observation, space, f"the observation that the env's {where} returned")
    if fault is not None:
        raise UserError(f"{fault}; `paceline envs check` tests the env")


def structure_fault(value: Any, space: spaces.Space[Any], path: str) -> str | None:
    """Why `value` cannot be encoded, or None. Types of numbers do not matter."""
    if isinstance(space, spaces.Dict):
        missing = sorted(str(key) for key in space.spaces if not isinstance(value, Mapping) or key not in value)
        if missing:
            given = f"has the keys {sorted(map(str, value))}" if isinstance(value, Mapping) else f"is {_kind(value)}"
            return f"{path} {given}; its space is a Dict of {sorted(map(str, space.spaces))}"
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            return f"{path} is {_kind(value)}; its space is a Tuple of {len(space.spaces)}"
    elif is_text(space):
        return None  # the policy does not see it
    else:
        return _array_fault(value, space, path)
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    faults = (structure_fault(value[key], part, f"{path}[{key!r}]") for key, part in parts)
    return next(filter(None, faults), None)


def _array_fault(value: Any, space: spaces.Space[Any], path: str) -> str | None:
    try:
        array = np.asarray(value)
        array.astype(np.float32)
    except (TypeError, ValueError):
        return f"{path} is {_kind(value)}, not an array of numbers"
    if not fits(array.shape, space.shape or ()):
        return f"{path} has shape {array.shape}, its space {space.shape}"
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and not space.contains(_as_sample(array, space)):
        return f"{path} is {printable(str(array))[:60]}, which is not in {space}"
    return None


def _as_sample(array: Any, space: spaces.Space[Any]) -> Any:
    shaped = array.reshape(space.shape or ())
    return int(shaped) if isinstance(space, spaces.Discrete) else shaped.astype(space.dtype)


def read_metrics(metrics: Any) -> dict[str, float]:
    """`info["metrics"]`, which is logged as `env/NAME`."""
    if not isinstance(metrics, Mapping):
        raise UserError(f'info["metrics"] must be a dict of numbers by name, not {_kind(metrics)}')
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise UserError(f'info["metrics"][{name!r}] must be a number, not {_kind(value)}') from None
    return found


def space_contains(space: spaces.Space[Any], value: Any) -> bool:
    return structure_fault(value, space, "") is None


@contextmanager
def same_folder() -> Iterator[None]:
    """Return to this folder at the end of the block: an env may change it."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


def close_env(env: Any) -> None:
    """Close an env. A failure is no reason to lose what was done with it."""
    try:
        env.close()
    except (Exception, SystemExit) as error:  # the env's code may raise anything
        text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
        print(f"paceline: warning: the env's close() failed: {text}", file=sys.stderr)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
