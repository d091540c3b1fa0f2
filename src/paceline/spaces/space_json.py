"""Spaces as JSON, so that a checkpoint can be used without its environment."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

from paceline.spaces.actions import ActionCodec
from paceline.spaces.observations import Array, Channels, ObservationCodec, is_text


def codecs_to_json(observation: ObservationCodec, action: ActionCodec) -> dict[str, Any]:
    """What a checkpoint or another process needs to make the same codecs."""
    tree = {"observation": space_to_json(observation.space), "action": space_to_json(action.space)}
    return tree | ({"masked": True} if observation.mask else {})


def codecs_from_json(
    tree: dict[str, Any], channels: Channels = "auto", *, squash: bool = False
) -> tuple[ObservationCodec, ActionCodec]:
    action = ActionCodec(space_from_json(tree["action"]), squash=squash)
    mask = action.nvec if tree.get("masked") else ()
    return ObservationCodec(space_from_json(tree["observation"]), channels, mask), action


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        keys: list[Any] = list(space.spaces)
        tree = {"type": "Dict", "spaces": {str(key): space_to_json(child) for key, child in space.spaces.items()}}
        return tree | ({"keys": keys} if any(isinstance(key, int) for key in keys) else {})
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_json(child) for child in space.spaces]}
    if isinstance(space, spaces.Box):
        low, high = (_bound(bound) for bound in (space.low, space.high))
        return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
    if is_text(space):
        text = space if isinstance(space, spaces.Text) else spaces.Text(1)  # policies do not see it
        characters = "".join(sorted(text.character_set))
        return {"type": "Text", "min": text.min_length, "max": text.max_length, "characters": characters}
    assert isinstance(space, spaces.MultiBinary), space
    return {"type": "MultiBinary", "shape": list(space.shape)}


def space_from_json(tree: dict[str, Any]) -> spaces.Space[Any]:
    kind = tree["type"]
    if kind == "Dict":
        # Gymnasium sorts the keys of a plain dict, but the order determines the columns.
        keys = tree.get("keys", tree["spaces"])
        children = map(space_from_json, tree["spaces"].values())
        return spaces.Dict(OrderedDict(zip(keys, children, strict=True)))
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
    if kind == "Text":
        return spaces.Text(tree["max"], min_length=tree["min"], charset=frozenset(tree["characters"]))
    shape = tree["shape"]
    return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)


def _bound(bound: Array) -> Any:
    """One number if all bounds are equal, as in images."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
