"""Environments: an id becomes a vector environment whose observations and actions are plain arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from paceline.callable_module import make_callable


def installed() -> dict[str, tuple[str, ...]]:
    """The ids of the environments that can be made here, by family."""
    from paceline.envs import catalog

    return {family.name: family.ids for family in catalog.families() if family.installed}


def __getattr__(name: str) -> Any:
    if name == "check":  # not yet imported: it needs more than the rest
        return import_module("paceline.envs.check")
    raise AttributeError(f"module 'paceline.envs' has no attribute {name!r}")


make_callable(__name__, "installed")
