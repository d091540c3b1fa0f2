"""Spaces ↔ arrays. Every observation becomes one array a network can take; every action comes from one array.

An observation is either one image, `uint8 [C, H, W]`, or one `float32 [D]` vector: the leaves of Dict and Tuple in
order, Discrete parts one-hot. An image among other leaves lies in the vector too and is cut out again by the network.
An action is either `int64 [K]`, one index per categorical, or `float32 [D]`, which `decode` brings into the Box.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import UserError

Array = NDArray[Any]
MIN_IMAGE_SIDE = 8


@dataclass(frozen=True)
class Leaf:
    """One part of the observation: where it comes from, where it goes, what it is."""

    path: tuple[str | int, ...]
    kind: str  # box | image | onehot
    start: int
    stop: int
    shape: tuple[int, ...]  # of an image: [C, H, W]
    nvec: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    scale: float = 1.0  # an image is divided by this inside the network


class ObservationCodec:
    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self.leaves: list[Leaf] = []
        self._walk(space, ())
        self.is_image = len(self.leaves) == 1 and self.leaves[0].kind == "image"
        self.size = self.leaves[-1].stop if self.leaves else 0
        if self.size == 0:
            raise UserError(f"the observation space {space} is empty")
        self.shape: tuple[int, ...] = self.leaves[0].shape if self.is_image else (self.size,)
        keeps_bytes = self.is_image and self.leaves[0].scale != 1.0
        self.dtype: np.dtype[Any] = np.dtype(np.uint8 if keeps_bytes else np.float32)
        only = self.leaves[0]
        self.is_plain = len(self.leaves) == 1 and only.kind == "box" and only.path == () and len(space.shape or ()) == 1

    @property
    def images(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == "image"]

    def encode(self, observation: Any, out: Array) -> None:
        """Batched observations into `out [N, *shape]`."""
        if self.is_plain:
            out[...] = observation
            return
        rows = len(out)
        for leaf in self.leaves:
            value = observation
            for key in leaf.path:
                value = value[key]
            value = np.asarray(value)
            if self.is_image:
                out[...] = _channels_first(value)
            elif leaf.kind == "image":
                out[:, leaf.start : leaf.stop] = _channels_first(value).reshape(rows, -1)
            elif leaf.kind == "onehot":
                part = out[:, leaf.start : leaf.stop]
                part[...] = 0.0
                index = value.reshape(rows, -1) - np.asarray(leaf.offsets)
                starts = np.concatenate(([0], np.cumsum(leaf.nvec)[:-1]))
                part[np.arange(rows)[:, None], index + starts] = 1.0
            else:
                out[:, leaf.start : leaf.stop] = value.reshape(rows, -1)

    def encode_one(self, observation: Any, out: Array) -> None:
        """One observation into `out [*shape]`."""
        if self.is_plain:
            out[...] = observation
        else:
            self.encode(_add_axis(observation, self.space), out[None])

    def _walk(self, space: spaces.Space[Any], path: tuple[str | int, ...]) -> None:
        start = self.leaves[-1].stop if self.leaves else 0
        if isinstance(space, spaces.Dict):
            for key, child in space.spaces.items():
                self._walk(child, (*path, key))
        elif isinstance(space, spaces.Tuple):
            for index, child in enumerate(space.spaces):
                self._walk(child, (*path, index))
        elif isinstance(space, spaces.Box):
            shape = _image_shape(space)
            size = int(np.prod(space.shape))
            kind = "image" if shape else "box"
            scale = 255.0 if shape and space.dtype == np.uint8 else 1.0
            self.leaves.append(Leaf(path, kind, start, start + size, shape or tuple(space.shape), scale=scale))
        elif isinstance(space, spaces.Discrete):
            n, first = int(space.n), int(space.start)
            self.leaves.append(Leaf(path, "onehot", start, start + n, (n,), (n,), (first,)))
        elif isinstance(space, spaces.MultiDiscrete):
            nvec = tuple(int(n) for n in space.nvec.ravel())
            first_values = tuple(int(s) for s in np.ravel(space.start))
            self.leaves.append(Leaf(path, "onehot", start, start + sum(nvec), (sum(nvec),), nvec, first_values))
        elif isinstance(space, spaces.MultiBinary):
            size = int(np.prod(space.shape))
            self.leaves.append(Leaf(path, "box", start, start + size, tuple(space.shape)))
        else:
            raise UserError(
                f"observation space {type(space).__name__} is not supported; "
                "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these are"
            )


class ActionCodec:
    """`nvec` for categorical actions, else `dim` of a continuous one, whose unit is half the width of its bounds."""

    def __init__(self, space: spaces.Space[Any], *, squash: bool = False) -> None:
        self.space = space
        self.squash = squash
        self.nvec: tuple[int, ...] = ()
        self.dim = 0
        if isinstance(space, spaces.Discrete):
            self.nvec, self.offset = (int(space.n),), np.asarray([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            self.nvec, self.offset = tuple(int(n) for n in space.nvec.ravel()), np.ravel(space.start)
        elif isinstance(space, spaces.MultiBinary):
            size = int(np.prod(space.shape))
            self.nvec, self.offset = (2,) * size, np.zeros(size, np.int64)
        elif isinstance(space, spaces.Box):
            self.dim = int(np.prod(space.shape))
            self.low, self.high = (np.ravel(b).astype(np.float64) for b in (space.low, space.high))
            bounded = np.isfinite(self.low) & np.isfinite(self.high)
            if squash and not bounded.all():
                raise UserError(f"model.squash needs finite action bounds, the env has {space}")
            low, high = np.where(bounded, self.low, -1.0), np.where(bounded, self.high, 1.0)
            self.scale, self.center = (high - low) / 2, (high + low) / 2
        else:
            raise UserError(
                f"action space {type(space).__name__} is not supported; "
                "Discrete, MultiDiscrete, MultiBinary and Box are"
            )
        if squash and self.nvec:
            raise UserError(f"model.squash is for continuous actions, the env has {space}")
        self._plain_discrete = isinstance(space, spaces.Discrete) and int(space.start) == 0

    @property
    def is_continuous(self) -> bool:
        return self.dim > 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dim,) if self.is_continuous else (len(self.nvec),)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.is_continuous else np.int64)

    @property
    def num_outputs(self) -> int:
        """How many numbers the policy network gives: logits, or means."""
        return self.dim if self.is_continuous else sum(self.nvec)

    def decode(self, action: Array) -> Array:
        """`[N, *shape]` → what N environments take, `[N, …]` of the space's own shape and dtype."""
        if self._plain_discrete:
            return action[:, 0]
        if not self.is_continuous:
            shaped: Array = (action + self.offset).reshape(len(action), *(self.space.shape or ()))
            return shaped.astype(self.space.dtype, copy=False)
        bounded = np.tanh(action) if self.squash else action
        real: Array = np.clip(self.center + self.scale * bounded, self.low, self.high)
        return real.reshape(len(action), *(self.space.shape or ())).astype(self.space.dtype)

    def encode(self, sample: Any) -> Array:
        """One action of the space → `[*shape]`, the inverse of `decode` (before squashing)."""
        flat = np.ravel(np.asarray(sample))
        if not self.is_continuous:
            index: Array = flat - self.offset
            return index
        unit: Array = (flat - self.center) / self.scale
        if self.squash:
            unit = np.arctanh(np.clip(unit, -1 + 1e-6, 1 - 1e-6))
        return unit.astype(np.float32)

    def split(self, action: Array) -> list[Any]:
        """The same, one entry for each of N scalar environments."""
        decoded = self.decode(action)
        return decoded.tolist() if isinstance(self.space, spaces.Discrete) else list(decoded)


def _image_shape(space: spaces.Box) -> tuple[int, ...] | None:
    """[C, H, W] if this is an image: 3 dimensions (4 when frames are stacked), or 2 of uint8."""
    shape = space.shape
    if len(shape) == 2 and space.dtype == np.uint8 and min(shape) >= MIN_IMAGE_SIDE:
        return (1, *shape)
    if len(shape) == 4:
        inner = _image_shape(spaces.Box(0, 255, shape[1:], np.uint8))
        return (shape[0] * inner[0], *inner[1:]) if inner else None
    if len(shape) != 3:
        return None
    if min(shape[0], shape[1]) >= MIN_IMAGE_SIDE and shape[2] <= 32:
        return (shape[2], shape[0], shape[1])
    if min(shape[1], shape[2]) >= MIN_IMAGE_SIDE and shape[0] <= 32:
        return (shape[0], shape[1], shape[2])
    return None


def _channels_first(value: Array) -> Array:
    """[N, H, W], [N, H, W, C], [N, C, H, W] or [N, K, H, W, C] → [N, C, H, W]."""
    if value.ndim == 3:
        return value[:, None]
    if value.ndim == 5:
        n, k = value.shape[:2]
        inner = _channels_first(value.reshape(n * k, *value.shape[2:]))
        return inner.reshape(n, k * inner.shape[1], *inner.shape[2:])
    last = min(value.shape[1], value.shape[2]) >= MIN_IMAGE_SIDE and value.shape[3] <= 32
    return value.transpose(0, 3, 1, 2) if last else value


def _add_axis(observation: Any, space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _add_axis(observation[key], child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_add_axis(value, child) for value, child in zip(observation, space.spaces, strict=True))
    return np.asarray(observation)[None]


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as JSON, so that a checkpoint can act without its environment."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {str(key): space_to_json(child) for key, child in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_json(child) for child in space.spaces]}
    if isinstance(space, spaces.Box):
        low, high = (_bound(bound) for bound in (space.low, space.high))
        return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
    assert isinstance(space, spaces.MultiBinary), space
    return {"type": "MultiBinary", "shape": list(space.shape)}


def space_from_json(tree: dict[str, Any]) -> spaces.Space[Any]:
    kind = tree["type"]
    if kind == "Dict":
        # Gymnasium sorts the keys of a plain dict; the order here is that of the columns.
        return spaces.Dict(OrderedDict((key, space_from_json(child)) for key, child in tree["spaces"].items()))
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(child) for child in tree["spaces"]])
    if kind == "Box":
        dtype = np.dtype(tree["dtype"])
        shape = tuple(tree["shape"])
        low, high = (np.broadcast_to(np.asarray(tree[b], dtype), shape) for b in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(tree["n"], start=tree["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.asarray(tree["nvec"]), start=np.asarray(tree["start"]))
    shape = tree["shape"]
    return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)


def _bound(bound: Array) -> Any:
    """One number where all are the same, as in images."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
