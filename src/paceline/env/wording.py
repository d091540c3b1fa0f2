"""Values and spaces in words, for the reports of `check.py`."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces


def observation_fault(value: Any, space: spaces.Space[Any], path: str) -> str | None:
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            given = f"has the keys {sorted(map(str, value))}" if isinstance(value, dict) else _is(value)
            return f"{path} {given}; the space is a Dict of {sorted(map(str, space.spaces))}"
        faults = (observation_fault(value[key], part, f"{path}[{key!r}]") for key, part in space.spaces.items())
        return next(filter(None, faults), None)
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            return f"{path} {_is(value)}; the space is a Tuple of {len(space.spaces)}"
        faults = (observation_fault(value[i], part, f"{path}[{i}]") for i, part in enumerate(space.spaces))
        return next(filter(None, faults), None)
    if isinstance(space, spaces.Box):
        if not isinstance(value, np.ndarray | np.generic):
            return f"{path} {_is(value)}, not a numpy array"
        if value.dtype != space.dtype:
            return f"{path} has dtype {value.dtype}, its space {space.dtype}: return it with .astype(np.{space.dtype})"
        if value.shape != space.shape:
            return f"{path} has shape {value.shape}, its space {space.shape}"
        if not np.isfinite(value).all():
            return f"{path} holds NaN or infinity"
        if not space.contains(np.asarray(value)):
            return f"{path} is outside the bounds of its space: {short(value)}"
    elif not space.contains(value):
        return f"{path} {_is(value)}, {short(value)}, which is not in {space}"
    return None


def magnitude(value: Any, space: spaces.Space[Any]) -> float:
    """The largest number among those that reach the network as they are: bytes are scaled, choices become one-hot."""
    if isinstance(space, spaces.Dict):
        return max((magnitude(value[key], part) for key, part in space.spaces.items()), default=0.0)
    if isinstance(space, spaces.Tuple):
        return max((magnitude(v, part) for v, part in zip(value, space.spaces, strict=True)), default=0.0)
    if isinstance(space, spaces.Box) and space.dtype != np.uint8 and np.size(value):
        return float(np.abs(value).max())
    return 0.0


def _is(value: Any) -> str:
    return f"is a {type(value).__name__}"


def short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(short, value)) + ")"
    if isinstance(value, np.ndarray):
        if value.size > 8:
            return f"{value.dtype}{list(value.shape)} {value.min():.3g}..{value.max():.3g}"
        return "[" + " ".join(map(short, value.ravel().tolist())) + "]"
    return f"{value:.3g}" if isinstance(value, float | np.floating) else str(value)[:60]


def short_space(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Dict):
        return "Dict(" + ", ".join(f"{key}: {short_space(part)}" for key, part in space.spaces.items()) + ")"
    if isinstance(space, spaces.Tuple):
        return "Tuple(" + ", ".join(map(short_space, space.spaces)) + ")"
    if isinstance(space, spaces.Box):
        return f"Box{list(space.shape)} of {space.dtype} in {space.low.min():.3g}..{space.high.max():.3g}"
    return str(space)


def describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
