"""numpy and torch, imported when they are first used: help and errors in settings then answer at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch as torch
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._module = name

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self._module), name)
            setattr(self, name, value)  # found at once the next time
            return value

    np, torch = _Lazy("numpy"), _Lazy("torch")

__all__ = ["np", "torch"]
