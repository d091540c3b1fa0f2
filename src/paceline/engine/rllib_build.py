"""Settings → an algorithm of RLlib, built without noise and without a trace in the home folder."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.config import RunConfig, UserError
from paceline.engine import rllib_settings
from paceline.engine.base import TrainingError
from paceline.engine.rllib_env import EnvMaker, note_episode
from paceline.engine.rllib_settings import Settings
from paceline.ship import Parcel

ENV = "paceline"
UNSAVED = ("curr_kl_coeffs_per_module", "last_update_ts_by_mid", "_last_update_ts_by_mid")
"""Of a learner, what RLlib leaves out: the weight of the KL term, and when the target network was last updated."""


def configure(config: RunConfig, settings: Settings, network: dict[str, Any], parcel: Parcel) -> Any:
    """RLlib's config of the algorithm. `settings` get what `engine.rllib` says; `network` is for its model."""
    name = rllib_settings.algorithm_of(config)
    for logger in ("ray", "ray.rllib", "ray.tune", "ray._common"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    module = importlib.import_module(f"ray.rllib.algorithms.{name.lower()}")
    model = importlib.import_module("ray.rllib.core.rl_module.default_model_config").DefaultModelConfig
    theirs = getattr(module, f"{name}Config")()
    rllib_settings.override(settings, config.engine.rllib, _accepted(theirs))
    importlib.import_module("ray.tune.registry").register_env(ENV, EnvMaker(config, parcel))
    theirs.environment(ENV).callbacks(on_episode_end=note_episode).rl_module(model_config=model(**network))
    try:
        for method, arguments in settings.items():
            getattr(theirs, method)(**arguments)
        theirs.validate()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"RLlib does not take these settings: {_line(str(error))}") from error
    return theirs


def build(theirs: Any) -> Any:
    """The algorithm, whose env runners are ready."""
    said: list[str] = []
    try:
        with _own_folder(), _quiet(said):
            return theirs.build_algo()
    except Exception as error:  # RLlib lets whatever happens in its processes turn into something else here
        causes = [line for line in "".join(said).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
        raise TrainingError(
            f"RLlib could not be started: {_line(causes[-1] if causes else f'{type(error).__name__}: {error}')}"
        ) from error


def _line(text: str) -> str:
    return " ".join(text.split())[:400]


def state_of(algorithm: Any) -> dict[str, Any]:
    """RLlib's own, and what its learners know besides."""
    known = next(iter(algorithm.learner_group.foreach_learner(_recall))).get()
    return {"algorithm": algorithm.get_state(), "learner": known}


def restore(algorithm: Any, state: dict[str, Any]) -> None:
    # It tells its env runners how many steps there were, for epsilon, and only then takes up its own count.
    algorithm.metrics.set_state(state["algorithm"]["metrics_logger"])
    algorithm.set_state(state["algorithm"])
    for result in algorithm.learner_group.foreach_learner(_remember, known=state["learner"]):
        result.get()


def _recall(learner: Any) -> dict[str, dict[str, float]]:
    found = {name: getattr(learner, name) for name in UNSAVED if hasattr(learner, name)}
    return {name: {module: float(value) for module, value in values.items()} for name, values in found.items()}


def _remember(learner: Any, known: dict[str, dict[str, float]]) -> None:
    for name, values in known.items():
        for module, value in values.items():
            weight = name == "curr_kl_coeffs_per_module"
            getattr(learner, name)[module] = learner._get_tensor_variable(value) if weight else int(value)


def hosts_of(algorithm: Any, *, local: bool) -> list[dict[str, Any]]:
    """Where the env runners are. `local`: there is one, in this process."""
    places = Counter(algorithm.env_runner_group.foreach_env_runner(_place, local_env_runner=local))
    return [{"host": host, "address": address, "workers": count} for (host, address), count in sorted(places.items())]


def _place(runner: Any) -> tuple[str, str]:
    import ray

    return socket.gethostname(), str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _accepted(theirs: Any) -> dict[str, str]:
    """Each argument that a method of RLlib's config takes → that method."""
    found: dict[str, str] = {}
    for owner in (type(theirs), *type(theirs).__mro__):  # `training` of a subclass passes the rest on
        for method in rllib_settings.METHODS:
            for name, parameter in inspect.signature(getattr(owner, method, lambda: None)).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not name.startswith("_"):
                    found.setdefault(name, method)
    return found


@contextmanager
def _own_folder() -> Iterator[None]:
    """RLlib makes a folder below ~/ray_results for each algorithm, and puts nothing into it."""
    trainable: Any = importlib.import_module("ray.tune.trainable.trainable")
    before = trainable.DEFAULT_STORAGE_PATH
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        trainable.DEFAULT_STORAGE_PATH = folder
        try:
            yield
        finally:
            trainable.DEFAULT_STORAGE_PATH = before


@contextmanager
def _quiet(said: list[str]) -> Iterator[None]:
    """Ray's C++ warns of what RLlib does. It writes to the file of standard error, past Python: into `said` instead."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
