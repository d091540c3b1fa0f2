"""Nested state ↔ the content of a checkpoint: named arrays, and JSON with references to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
_REFERENCE = "$array"


def pack(tree: Any) -> tuple[Arrays, Any]:
    """The arrays in `tree`, named by their path, and `tree` with references in their place."""
    arrays: Arrays = {}
    return arrays, _pack(tree, "", arrays)


def unpack(arrays: Arrays, tree: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(tree, dict):
        if set(tree) == {_REFERENCE}:
            return arrays[tree[_REFERENCE]]
        return {key: unpack(arrays, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [unpack(arrays, value) for value in tree]
    return tree


def _pack(tree: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(tree, np.ndarray):
        arrays[path] = np.ascontiguousarray(tree).reshape(tree.shape)
        return {_REFERENCE: path}
    if isinstance(tree, dict):
        return {str(key): _pack(value, f"{path}.{key}" if path else str(key), arrays) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_pack(value, f"{path}.{index}" if path else str(index), arrays) for index, value in enumerate(tree)]
    if isinstance(tree, np.generic):
        return tree.item()
    return tree
