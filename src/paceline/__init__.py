"""paceline: train deep-RL agents with one command, from a laptop to a cluster.

import paceline
run = paceline.train({"env": "CartPole-v1"})
agent = paceline.load(run)
action = agent.act(observation)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Callback", "UserError", "load", "train"]

if TYPE_CHECKING:
    from paceline.api import load, train
    from paceline.config import UserError
    from paceline.training.callbacks import Callback

_MODULES = {
    "Callback": "paceline.training.callbacks",
    "UserError": "paceline.config",
    "load": "paceline.api",
    "train": "paceline.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `paceline --help` and readers of runs do not need torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("paceline")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
