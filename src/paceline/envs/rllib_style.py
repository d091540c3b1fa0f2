"""Environments written for RLlib: `__init__(self, env_config)` takes all arguments in one dict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_NAMES = ("env_config", "config")


class EnvContext(dict[str, Any]):
    """`env.kwargs` as RLlib passes them, with the attributes of RLlib's class of that name. `worker_index` begins at
    0."""

    num_workers, remote, recreated_worker = 0, False, False

    def __init__(self, kwargs: Mapping[str, Any], worker_index: int, vector_index: int) -> None:
        super().__init__(kwargs)
        self.worker_index, self.vector_index = worker_index, vector_index


def takes_env_config(make: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a class or function expects `env.kwargs` in one dict: its first argument is `env_config`, or `config`
    where that is required or nothing else takes the given ones."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # code in C has no signature
        return False
    if not parameters:
        return False
    first, *others = parameters.values()
    if first.name not in _NAMES or first.name in kwargs:
        return False
    if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    if any(other.default is other.empty and other.kind is not other.VAR_KEYWORD for other in others):
        return False
    takes_any = any(other.kind is other.VAR_KEYWORD for other in others)
    unknown = bool(kwargs) and not takes_any and not set(kwargs) <= set(parameters)
    return first.name == "env_config" or first.default is first.empty or unknown
