"""paceline: train deep-RL agents with one command, from a laptop to a cluster.

import paceline
run = paceline.train({"env": "CartPole-v1"})
agent = paceline.load(run)
action = agent.act(observation)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["UserError", "load", "train"]

if TYPE_CHECKING:
    from paceline.api import load, train
    from paceline.config import UserError


def __getattr__(name: str) -> Any:
    """Imported when first used: `paceline --help` and the readers of runs do not pay for torch."""
    if name in ("train", "load"):
        from paceline import api

        return getattr(api, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("paceline")
    if name == "UserError":
        from paceline.config import UserError

        return UserError
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
