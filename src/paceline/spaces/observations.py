"""An observation as one array: either one image, `uint8 [C, H, W]`, or one vector, `float32 [D]`.

The vector holds the leaves of Dict and Tuple in order, with Discrete leaves one-hot. An image among other leaves is
part of the vector, and the network extracts it.

An action mask is stored with its observation: as the last columns of the array, 1 for each valid action and 0 for each
invalid one. The array is then a vector even for one image, and `split` separates the two for the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import UserError

Array = NDArray[Any]
Channels = Literal["auto", "first", "last"]
MIN_IMAGE_SIDE, MAX_CHANNELS = 8, 32
MAX_CATEGORIES = 1_000_000
"""Largest Discrete space: each value is an input or an output of the network."""
MASK = "action_mask"
"""The name of a mask in `info` and in a Dict observation."""
TEXT_WRAPPERS = {"minigrid.core.mission": "minigrid.wrappers:DictObservationSpaceWrapper"}
"""Module of a text space → the wrapper of its package that turns the text into numbers."""
_CURES: dict[type, str] = {
    spaces.Sequence: "pad it to a Box of the greatest length",
    spaces.Graph: "give its nodes and edges as Boxes of the greatest number",
}


@dataclass(frozen=True)
class Leaf:
    """One part of an observation: its path in the space, its columns `start:stop` in the vector, and its kind."""

    path: tuple[str | int, ...]
    kind: str  # box | image | onehot
    start: int
    stop: int
    shape: tuple[int, ...]  # for an image: [C, H, W]
    nvec: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    scale: float = 1.0  # the network divides an image by this
    channels_last: bool = False  # how the env gives an image
    given: tuple[int, ...] | None = None  # the shape that the env gives numbers in


class ObservationCodec:
    """`channels`: the setting `env.channels`, for images whose shape can be read in two ways. `mask`: for masked
    actions, the number of values of each choice; the key `action_mask` of a Dict is then no observation."""

    def __init__(self, space: spaces.Space[Any], channels: Channels = "auto", mask: tuple[int, ...] = ()) -> None:
        self.space = space
        self.leaves: list[Leaf] = []
        self.mask = mask
        self._channels = channels
        self._dropped: list[str] = []
        self._walk(space, ())
        self.is_image = len(self.leaves) == 1 and self.leaves[0].kind == "image"
        self.net_size = self.leaves[-1].stop if self.leaves else 0
        """Columns that the network sees."""
        self.size = self.net_size + sum(mask)
        """All columns, with those of the mask."""
        if self.net_size == 0 and self._dropped:
            raise UserError(
                f"the observation space {space} has only Text, which a network cannot take: give numbers, such as the "
                "number of each word in a MultiDiscrete, in the env or with a wrapper"
            )
        if self.net_size == 0:
            raise UserError(f"the observation space {space} is empty")
        if channels != "auto" and not self.images:
            raise UserError(f"env.channels={channels} is for images, but the observation space is {space}")
        self.net_shape: tuple[int, ...] = self.leaves[0].shape if self.is_image else (self.net_size,)
        self.shape: tuple[int, ...] = (self.size,) if mask else self.net_shape
        keeps_bytes = self.is_image and self.leaves[0].scale != 1.0
        self.dtype: np.dtype[Any] = np.dtype(np.uint8 if keeps_bytes else np.float32)
        only = self.leaves[0]
        self.is_plain = len(self.leaves) == 1 and only.kind == "box" and only.path == () and len(space.shape or ()) == 1

    @property
    def note(self) -> str:
        """What users should know about the encoding, if anything."""
        if not self._dropped:
            return ""
        names, verb = ", ".join(self._dropped), "is" if len(self._dropped) == 1 else "are"
        return f"{names} {verb} text, which the policy does not see: {self._text_cure()} if it needs that"

    @property
    def images(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == "image"]

    @property
    def mask_columns(self) -> slice:
        return slice(self.net_size, self.size)

    def with_mask(self, mask: tuple[int, ...]) -> ObservationCodec:
        return ObservationCodec(self.space, self._channels, mask)

    def split(self, x: Any) -> tuple[Any, Any]:
        """Encoded rows, an array or a tensor → what the network takes, and the masks `[B, K]`, if there are any."""
        if not self.mask:
            return x, None
        return x[:, : self.net_size].reshape(len(x), *self.net_shape), x[:, self.net_size :]

    def encode(self, observation: Any, out: Array) -> None:
        """Write a batch of observations to `out [N, *shape]`. Masks are written by who has them."""
        if self.mask:
            out = out[:, : self.net_size].reshape(len(out), *self.net_shape)  # a view
        if self.is_plain:
            out[...] = observation
            return
        rows = len(out)
        for leaf in self.leaves:
            value = observation
            for key in leaf.path:
                value = value[key]
            value = np.asarray(value)
            if leaf.given is not None and value.shape[1:] != leaf.given:
                value = _reshaped(value, leaf.given)
            if self.is_image:
                out[...] = _channels_first(value, leaf)
            elif leaf.kind == "image":
                out[:, leaf.start : leaf.stop] = _channels_first(value, leaf).reshape(rows, -1)
            elif leaf.kind == "onehot":
                part = out[:, leaf.start : leaf.stop]
                part[...] = 0.0
                index = value.reshape(rows, -1) - np.asarray(leaf.offsets)
                starts = np.concatenate(([0], np.cumsum(leaf.nvec)[:-1]))
                part[np.arange(rows)[:, None], index + starts] = 1.0
            else:
                out[:, leaf.start : leaf.stop] = value.reshape(rows, -1)

    def encode_one(self, observation: Any, out: Array) -> None:
        """Write one observation to `out [*shape]`."""
        if self.is_plain:
            out[: self.net_size] = observation
        else:
            self.encode(_add_axis(observation, self.space), out[None])

    def _walk(self, space: spaces.Space[Any], path: tuple[str | int, ...]) -> None:
        start = self.leaves[-1].stop if self.leaves else 0
        if isinstance(space, spaces.Dict):
            for key, child in space.spaces.items():
                if path or key != MASK or not self.mask:
                    self._walk(child, (*path, key))
        elif isinstance(space, spaces.Tuple):
            for index, child in enumerate(space.spaces):
                self._walk(child, (*path, index))
        elif isinstance(space, spaces.Box):
            stop = start + int(np.prod(space.shape))
            image = _read_image(space, self._channels, name_of("observation space", path))
            if image is None:
                self.leaves.append(Leaf(path, "box", start, stop, space.shape, given=space.shape))
            else:
                shape, last = image
                scale = 255.0 if space.dtype == np.uint8 else 1.0
                self.leaves.append(Leaf(path, "image", start, stop, shape, (), (), scale, last, space.shape))
        elif isinstance(space, spaces.Discrete):
            n, first = int(space.n), int(space.start)
            check_categories(n, name_of("observation space", path), "an input")
            self.leaves.append(Leaf(path, "onehot", start, start + n, (n,), (n,), (first,)))
        elif isinstance(space, spaces.MultiDiscrete):
            nvec = tuple(int(n) for n in space.nvec.ravel())
            check_categories(sum(nvec), name_of("observation space", path), "an input")
            first_values = tuple(int(s) for s in np.ravel(space.start))
            self.leaves.append(Leaf(path, "onehot", start, start + sum(nvec), (sum(nvec),), nvec, first_values))
        elif isinstance(space, spaces.MultiBinary):
            size = int(np.prod(space.shape))
            self.leaves.append(Leaf(path, "box", start, start + size, space.shape, given=space.shape))
        elif is_text(space):
            self._dropped.append(name_of("observation", path))
        else:
            raise UserError(
                f"{name_of('observation space', path)} is a {type(space).__name__}, which is not supported; supported "
                f"are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these: {self._cure(path)}"
            )

    def _text_cure(self) -> str:
        """How to give the policy the text as numbers: by the wrapper of the package that made the space, if known."""
        modules = {type(part).__module__ for part in _leaves(self.space) if is_text(part)}
        wrapper = next((TEXT_WRAPPERS[module] for module in sorted(modules) if module in TEXT_WRAPPERS), None)
        return f"set env.wrappers=[{wrapper}]" if wrapper else "give numbers instead"

    def _cure(self, path: tuple[str | int, ...]) -> str:
        """What to do about an unsupported space inside the observation."""
        space: Any = self.space
        for key in path:
            space = space[key]
        cure = f"{_CURES.get(type(space), 'convert it')} in the env or with a wrapper"
        if path and isinstance(self.space, spaces.Dict):
            rest = [str(key) for key, child in self.space.spaces.items() if key != path[0] and _is_supported(child)]
            if rest:
                keys = ", ".join(rest)
                return f"leave it out with env.wrappers=[{{FilterObservation: {{filter_keys: [{keys}]}}}}], or {cure}"
        return cure


def _read_image(space: spaces.Box, channels: Channels, name: str) -> tuple[tuple[int, ...], bool] | None:
    """[C, H, W], and whether the channels come last, if the space is an image: 3 dimensions (4 with stacked frames), or
    2 of uint8. Otherwise None."""
    shape = tuple(space.shape)
    if len(shape) == 2 and space.dtype == np.uint8 and min(shape) >= MIN_IMAGE_SIDE:
        return (1, *shape), False
    if len(shape) not in (3, 4):
        return None
    a, b, c = shape[-3:]
    last = min(a, b) >= MIN_IMAGE_SIDE and c <= MAX_CHANNELS
    first = min(b, c) >= MIN_IMAGE_SIDE and a <= MAX_CHANNELS
    if not first and not last:
        return None
    if first and last and channels == "auto":
        raise UserError(
            f"{name} {shape} may be {c} channels of {a} x {b} pixels or {a} channels of {b} x {c}: set "
            "env.channels=last or env.channels=first"
        )
    if (channels == "first" and not first) or (channels == "last" and not last):
        raise UserError(f"env.channels={channels}: {name} {shape} has its channels {'last' if last else 'first'}")
    last = last and channels != "first"
    inner = (c, a, b) if last else (a, b, c)
    return (shape[0] * inner[0], *inner[1:]) if len(shape) == 4 else inner, last


def _channels_first(value: Array, leaf: Leaf) -> Array:
    """[N, H, W], [N, H, W, C], [N, C, H, W] or [N, K, H, W, C] → [N, C, H, W]."""
    moved = np.moveaxis(value, -1, -3) if leaf.channels_last else value
    return moved.reshape(len(value), *leaf.shape)


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether numbers of a shape can be meant for another: it differs by axes of length 1 before it, or is one
    number."""
    size = math.prod(wanted)
    return math.prod(shape) == size and (size == 1 or shape[len(shape) - len(wanted) :] == wanted)


def _reshaped(value: Array, shape: tuple[int, ...]) -> Array:
    if not fits(value.shape[1:], shape):
        raise ValueError(f"an observation has shape {value.shape[1:]}, its space {shape}")
    return value.reshape(len(value), *shape)


def name_of(what: str, path: tuple[str | int, ...]) -> str:
    return what + "".join(f"[{key!r}]" for key in path)


def _is_supported(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(map(_is_supported, _leaves(space)))
    return is_text(space) or isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def is_text(space: spaces.Space[Any]) -> bool:
    """Whether its values are text: Gymnasium's Text, or a class of a package's own such as MiniGrid's missions."""
    return space.dtype is not None and space.dtype.kind == "U"


def _leaves(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [space]
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
    return [leaf for part in parts for leaf in _leaves(part)]


def check_categories(count: int, name: str, what: str) -> None:
    if count > MAX_CATEGORIES:
        raise UserError(
            f"{name} has {count:,} values, and each is {what} of the network: at most {MAX_CATEGORIES:,}; give numbers "
            "as a Box, or split them into the digits of a MultiDiscrete"
        )


def _add_axis(observation: Any, space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {k: _add_axis(observation[k], child) for k, child in space.spaces.items() if k in observation}
    if isinstance(space, spaces.Tuple):
        return tuple(_add_axis(value, child) for value, child in zip(observation, space.spaces, strict=True))
    return np.asarray(observation)[None]
