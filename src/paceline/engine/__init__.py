"""Engines: where a run happens. One loop, in `loop.py`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import EngineConfig, RunConfig
    from paceline.engine.base import Engine

RLLIB_PACKAGES = ("ray", "tree", "pandas", "pyarrow", "lz4", "ormsgpack", "scipy", "tensorboardX")


def cluster_address(config: EngineConfig) -> str | None:
    """Of the Ray cluster that is named, by the config or by the environment; None: there is none."""
    address = config.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def choose(config: RunConfig) -> str:
    """The engine's name, where it is left to us."""
    engine = config.engine
    if engine.name != "auto":
        return engine.name
    several = engine.workers > 1 or engine.learners > 1
    return "ray" if several or cluster_address(engine) else "local"


def make_engine(config: RunConfig, *, resumes: int = 0) -> Engine:
    """Ray is imported only where it is needed."""
    from paceline.algo import ALGORITHMS
    from paceline.config import UserError
    from paceline.engine.stopping import Deadline
    from paceline.env import catalog

    Deadline(os.environ)  # a bad one is told before anything is written
    if choose(config) == "rllib":
        from paceline.engine import rllib_settings

        rllib_settings.check(config)
        missing = [name for name in RLLIB_PACKAGES if not catalog.is_installed(name)]
        if missing:
            raise UserError(f"--engine rllib needs {', '.join(missing)}: pip install 'paceline[rllib]'")
        from paceline.engine.rllib import RllibEngine

        return RllibEngine(config, resumes=resumes)
    if choose(config) == "local":
        from paceline.engine.local import LocalEngine

        return LocalEngine(config, resumes=resumes)
    if not catalog.is_installed("ray"):
        raise UserError("several workers run on Ray, which is not installed here: pip install 'paceline[ray]'")
    if config.engine.overlap:
        raise UserError("engine.overlap=true is for one process with a GPU: use --engine local")
    if ALGORITHMS[config.algo].schedule == "replicas":
        from paceline.engine.ray_sync import RaySyncEngine

        return RaySyncEngine(config, resumes=resumes)
    from paceline.engine.ray_async import RayAsyncEngine

    return RayAsyncEngine(config, resumes=resumes)
