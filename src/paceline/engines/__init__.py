"""Engines: one process, workers on Ray, or Ray RLlib. `paceline.training.loop` drives all of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.training.engine import Engine

RLLIB_PACKAGES = ("ray", "tree", "pandas", "pyarrow", "lz4", "ormsgpack", "scipy", "tensorboardX")


def make_engine(config: RunConfig, *, resumes: int = 0) -> Engine:
    """Create the engine that the config asks for. `resumes`: how often the run was continued so far."""
    from paceline.config import UserError
    from paceline.envs import catalog
    from paceline.training.placement import choose_engine
    from paceline.training.stopping import Deadline
    from paceline.training.watchdog import grace_seconds

    Deadline(os.environ), grace_seconds(os.environ)  # report bad ones before anything is written
    name = choose_engine(config)
    if name == "local":
        from paceline.engines.local import LocalEngine

        return LocalEngine(config, resumes=resumes)
    if name == "rllib":
        from paceline.engines.rllib import settings as rllib_settings

        rllib_settings.check(config)
        missing = [package for package in RLLIB_PACKAGES if not catalog.is_installed(package)]
        if missing:
            raise UserError(f"--engine rllib needs {', '.join(missing)}: pip install 'paceline[rllib]'")
        from paceline.engines.rllib.rllib_engine import RllibEngine

        return RllibEngine(config, resumes=resumes)
    if not catalog.is_installed("ray"):
        raise UserError("several workers run on Ray, which is not installed: pip install 'paceline[ray]'")
    if config.engine.overlap:
        raise UserError("engine.overlap=true needs one process with a GPU: use --engine local")
    if config.algorithm.sharing == "replicas":
        from paceline.engines.ray.synchronous import RaySyncEngine

        return RaySyncEngine(config, resumes=resumes)
    from paceline.engines.ray.asynchronous import RayAsyncEngine

    return RayAsyncEngine(config, resumes=resumes)
