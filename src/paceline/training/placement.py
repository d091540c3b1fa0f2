"""Which engine a run uses, and on which Ray cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import EngineConfig, RunConfig


def cluster_address(config: EngineConfig) -> str | None:
    """Address of an existing Ray cluster, from `engine.address` or `RAY_ADDRESS`; None if the run starts its own."""
    address = config.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def choose_engine(config: RunConfig) -> str:
    """The engine's name, with `auto` resolved."""
    engine = config.engine
    if engine.name != "auto":
        return engine.name
    several = engine.workers > 1 or engine.learners > 1
    return "ray" if several or cluster_address(engine) else "local"
