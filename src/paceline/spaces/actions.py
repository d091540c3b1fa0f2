"""An action as one array: `int64 [K]`, one index per choice, or `float32 [D]`, numbers which `decode` scales to the
bounds of the Box, or for a mixture `float32 [K + D]`, the indices before the numbers. The parts of Dict and Tuple lie
beside each other in it, in the order of the space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.spaces.observations import Array, check_categories, name_of

HUGE = 1e18
"""Action bounds from here on mean that there are none. No env scales its actions to such numbers."""


@dataclass(frozen=True)
class ActionPart:
    """One part of an action: its path in the space, and its columns `start:stop` in the array."""

    path: tuple[Any, ...]
    space: spaces.Space[Any]
    start: int
    stop: int


class ActionCodec:
    """Choices have `nvec`, numbers `dim`; a mixture has both. `decode` maps numbers from [-1, 1] to the bounds of the
    Box; `squash` applies tanh first, otherwise numbers beyond the bounds are clipped. `bounded`: which
    have both bounds. The others are not scaled: with one bound, -1 means the bound itself, or 1 if it is the upper
    one; without any, numbers stay as they are."""

    def __init__(self, space: spaces.Space[Any], *, squash: bool = False) -> None:
        self.space = space
        self.squash = squash
        self.nvec: tuple[int, ...] = ()
        self.dim = 0
        self.parts = _parts(space)
        self.is_nested = isinstance(space, spaces.Dict | spaces.Tuple)
        boxes = [part.space for part in self.parts if isinstance(part.space, spaces.Box)]
        categories = [_categories(part.space) for part in self.parts if not isinstance(part.space, spaces.Box)]
        self.nvec = tuple(n for nvec, _ in categories for n in nvec)
        self.offset = np.concatenate([offset for _, offset in categories] or [np.zeros(0, np.int64)])
        if boxes:
            self._read_boxes(boxes)
        if categories and boxes:
            self.parts = _choices_first(self.parts)
        if not self.nvec and not self.dim:
            raise UserError(f"the action space {space} is empty: give the env at least one action")
        check_categories(sum(self.nvec), f"the action space {space}", "an output")
        if squash and not self.dim:
            raise UserError(f"model.squash is for continuous actions, but the env has {space}")
        self._plain_discrete = isinstance(space, spaces.Discrete) and int(space.start) == 0

    def _read_boxes(self, boxes: Sequence[spaces.Box]) -> None:
        self.low, self.high = (
            np.concatenate([np.ravel(bound).astype(np.float64) for bound in bounds])
            for bounds in ([box.low for box in boxes], [box.high for box in boxes])
        )
        self.dim = len(self.low)
        below, above = (np.concatenate(sides) for sides in zip(*map(_bounded_sides, boxes), strict=True))
        self.bounded = below & above
        if self.squash and not self.bounded.all():
            raise UserError(f"model.squash needs finite action bounds, but the env has {self.space}")
        low = np.where(below, self.low, np.where(above, self.high - 2, -1.0))
        high = np.where(above, self.high, low + 2)
        self.scale, self.center = np.where(self.bounded, (high - low) / 2, 1.0), (high + low) / 2

    @property
    def is_continuous(self) -> bool:
        """Numbers only."""
        return self.dim > 0 and not self.nvec

    @property
    def is_mixed(self) -> bool:
        return self.dim > 0 and bool(self.nvec)

    @property
    def is_bounded(self) -> bool:
        return self.is_continuous and bool(self.bounded.all())

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec) + self.dim,)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.dim else np.int64)  # float32 is exact for indices, which are below 2^24

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the policy network: logits, then means."""
        return sum(self.nvec) + self.dim

    def decode(self, action: Array) -> Any:
        """`[N, *shape]` → actions for N environments, `[N, …]` in the shape and dtype of the space; for Dict and Tuple
        one such array for each part, as Gymnasium's vector environments take them."""
        if self._plain_discrete:
            return action[:, 0]
        parts = self.decode_parts(action)
        return _nest(self.space, iter(parts)) if self.is_nested else parts[0]

    def decode_parts(self, action: Array) -> list[Array]:
        """Like `decode`, as a list with one array for each of `parts`."""
        return self._shape_parts(self._values(action))

    def split(self, action: Array) -> list[Any]:
        """Like `decode`, as a list with one action per environment."""
        if self.is_nested:
            return self._rows(self.decode_parts(action))
        decoded = self.decode(action)
        actions: list[Any] = decoded.tolist() if isinstance(self.space, spaces.Discrete) else list(decoded)
        return actions

    def encode(self, sample: Any) -> Array:
        """One action of the space → `[*shape]`, the inverse of `decode`."""
        flat = self._flat(sample)
        if not self.dim:
            index: Array = flat - self.offset
            return index
        count = len(self.nvec)
        unit: Array = (flat[count:] - self.center) / self.scale
        if self.squash:
            unit = np.arctanh(np.clip(unit, -1 + 1e-6, 1 - 1e-6))
        return np.concatenate([flat[:count] - self.offset, unit]).astype(np.float32)

    def pack(self, actions: Sequence[Any]) -> Array:
        """Actions of the space as one array, for a checkpoint. It is exact, which `encode` is not."""
        return np.asarray([self._flat(action) for action in actions] if self.is_nested else actions)

    def unpack(self, packed: Array) -> list[Any]:
        """The inverse of `pack`."""
        if self.is_nested:
            return self._rows(self._shape_parts(packed)) if len(packed) else []
        return packed.tolist() if packed.ndim == 1 else list(packed)

    def _values(self, action: Array) -> Array:
        """In the units of the environment, `[N, *shape]`."""
        if not self.dim:
            shifted: Array = action + self.offset
            return shifted
        count = len(self.nvec)
        numbers = action[:, count:]
        unit = np.tanh(numbers) if self.squash else numbers
        clipped: Array = np.clip(self.center + self.scale * unit, self.low, self.high)
        return np.concatenate([action[:, :count] + self.offset, clipped], axis=1) if count else clipped

    def _shape_parts(self, values: Array) -> list[Array]:
        rows = len(values)
        if not self.is_nested:
            return [values.reshape(rows, *(self.space.shape or ())).astype(self.space.dtype, copy=False)]
        return [
            values[:, part.start : part.stop].reshape(rows, *(part.space.shape or ())).astype(part.space.dtype)
            for part in self.parts
        ]

    def _rows(self, parts: list[Array]) -> list[Any]:
        """Nested actions, one per row of the parts."""
        columns = [
            array.tolist() if isinstance(part.space, spaces.Discrete) else list(array)
            for part, array in zip(self.parts, parts, strict=True)
        ]
        return [_nest(self.space, iter(row)) for row in zip(*columns, strict=True)]

    def _flat(self, sample: Any) -> Array:
        if not self.is_nested:
            return np.ravel(np.asarray(sample))
        flat = []
        for part in sorted(self.parts, key=lambda part: part.start):
            value = sample
            for key in part.path:
                value = value[key]
            flat.append(np.ravel(np.asarray(value)))
        return np.concatenate(flat)


def _parts(space: spaces.Space[Any], path: tuple[Any, ...] = (), start: int = 0) -> list[ActionPart]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts: list[ActionPart] = []
        for key, child in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            parts += _parts(child, (*path, key), parts[-1].stop if parts else start)
        return parts
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise UserError(
            f"{name_of('action space', path)} is a {type(space).__name__}, which is not supported; supported are "
            "Discrete, MultiDiscrete, MultiBinary, Box, and Dict or Tuple of these: convert it in the env or with a "
            "wrapper"
        )
    return [ActionPart(path, space, start, start + int(np.prod(space.shape or ())))]


def _choices_first(parts: list[ActionPart]) -> list[ActionPart]:
    """The parts in their order, with the columns of choices before those of numbers."""
    start, placed = 0, {}
    for part in sorted(parts, key=lambda part: isinstance(part.space, spaces.Box)):
        placed[part.path] = ActionPart(part.path, part.space, start, start + part.stop - part.start)
        start = placed[part.path].stop
    return [placed[part.path] for part in parts]


def _nest(space: spaces.Space[Any], parts: Iterator[Any]) -> Any:
    """The inverse of `_parts`, for values."""
    if isinstance(space, spaces.Dict):
        return {key: _nest(child, parts) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(child, parts) for child in space.spaces)
    return next(parts)


def _categories(space: spaces.Space[Any]) -> tuple[tuple[int, ...], Array]:
    """The number of values of each choice, and the first value of each."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), np.asarray([space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.ravel()), np.ravel(space.start)
    size = int(np.prod(space.shape or ()))
    return (2,) * size, np.zeros(size, np.int64)


def _bounded_sides(space: spaces.Box) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which numbers of a Box, flat, have a lower bound and which an upper one: not infinite, not `HUGE`, and not the
    limits of a wide integer type."""
    low, high = (np.ravel(b).astype(np.float64) for b in (space.low, space.high))
    below, above = np.abs(low) < HUGE, np.abs(high) < HUGE
    if np.issubdtype(space.dtype, np.integer) and np.dtype(space.dtype).itemsize >= 4:
        limits = np.iinfo(space.dtype)
        above &= high < float(limits.max)
        below &= (low > float(limits.min)) | (limits.min == 0)
    return below, above
