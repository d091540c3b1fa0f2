"""Engines: where a run happens. One loop, in `loop.py`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.engine.base import Engine


def choose(config: RunConfig) -> str:
    """The engine's name, where it is left to us."""
    engine = config.engine
    if engine.name != "auto":
        return engine.name
    several = engine.workers > 1 or engine.learners > 1
    return "ray" if several or engine.address or os.environ.get("RAY_ADDRESS") else "local"


def make_engine(config: RunConfig, *, resumes: int = 0) -> Engine:
    """Ray is imported only where it is needed."""
    from paceline.algo import ALGORITHMS

    if choose(config) == "local":
        from paceline.engine.local import LocalEngine

        return LocalEngine(config, resumes=resumes)
    if ALGORITHMS[config.algo].schedule == "replicas":
        from paceline.engine.ray_sync import RaySyncEngine

        return RaySyncEngine(config, resumes=resumes)
    from paceline.engine.ray_async import RayAsyncEngine

    return RayAsyncEngine(config, resumes=resumes)
