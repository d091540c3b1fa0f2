"""Build an RLlib algorithm from settings, quietly and without leaving files in the home folder."""

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

from paceline.code_bundle import CodeBundle
from paceline.config import RunConfig, UserError
from paceline.config.resolve import to_tree
from paceline.engines.rllib import settings as rllib_settings
from paceline.engines.rllib.env import MODULE, EnvMaker, record_episode
from paceline.engines.rllib.modules import Modules
from paceline.engines.rllib.settings import Settings
from paceline.training.engine import TrainingError

ENV = "paceline"
UNSAVED = ("curr_kl_coeffs_per_module", "last_update_ts_by_mid", "_last_update_ts_by_mid")
"""Attributes of a learner that RLlib does not save: KL coefficients, and when target networks were last updated."""


def configure(config: RunConfig, settings: Settings, modules: Modules, code_bundle: CodeBundle) -> Any:
    """RLlib's config of the algorithm. Adds `engine.rllib` to `settings`."""
    name = rllib_settings.algorithm_of(config)
    for logger in ("ray", "ray.rllib", "ray.tune", "ray._common"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    module = importlib.import_module(f"ray.rllib.algorithms.{name.lower()}")
    model = importlib.import_module("ray.rllib.core.rl_module.default_model_config").DefaultModelConfig
    rllib_config = getattr(module, f"{name}Config")()
    rllib_settings.override(settings, config.engine.rllib, _accepted(rllib_config))
    importlib.import_module("ray.tune.registry").register_env(ENV, EnvMaker(to_tree(config), code_bundle))
    rllib_config.environment(ENV).callbacks(on_episode_end=record_episode)
    networks = {name: model(**arguments) for name, arguments in modules.networks().items()}
    if modules.policy_of:
        _add_agents(rllib_config, modules, networks)
    else:
        rllib_config.rl_module(model_config=networks[MODULE])
    try:
        for method, arguments in settings.items():
            getattr(rllib_config, method)(**arguments)
        rllib_config.validate()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"RLlib refuses these settings: {_one_line(str(error))}") from error
    return rllib_config


def _add_agents(rllib_config: Any, modules: Modules, networks: dict[str, Any]) -> None:
    rl_modules = importlib.import_module("ray.rllib.core.rl_module")
    specs = {name: rl_modules.RLModuleSpec(model_config=network) for name, network in networks.items()}
    rllib_config.environment(disable_env_checking=True)  # which would step them
    rllib_config.multi_agent(
        policies=set(networks), policy_mapping_fn=PolicyOf(modules.policy_of), policies_to_train=modules.learning
    )
    rllib_config.rl_module(rl_module_spec=rl_modules.MultiRLModuleSpec(rl_module_specs=specs))


class PolicyOf:
    """RLlib's `policy_mapping_fn`."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table

    def __call__(self, agent: str, *_: Any, **__: Any) -> str:
        return self._table[agent]


def build(rllib_config: Any) -> Any:
    """The algorithm, with its env runners ready."""
    output: list[str] = []
    try:
        with _own_folder(), _captured_stderr(output):
            return rllib_config.build_algo()
    except Exception as error:  # RLlib turns errors of its processes into other types
        causes = [line for line in "".join(output).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
        raise TrainingError(
            f"RLlib could not be started: {_one_line(causes[-1] if causes else f'{type(error).__name__}: {error}')}"
        ) from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def state_of(algorithm: Any) -> dict[str, Any]:
    """RLlib's own state, and what it leaves out of its learners'."""
    unsaved = next(iter(algorithm.learner_group.foreach_learner(_get_unsaved))).get()
    return {"algorithm": algorithm.get_state(), "learner": unsaved}


def restore(algorithm: Any, state: dict[str, Any]) -> None:
    # set_state tells the env runners the number of steps, for epsilon, before it restores that number itself.
    algorithm.metrics.set_state(state["algorithm"]["metrics_logger"])
    algorithm.set_state(state["algorithm"])
    for result in algorithm.learner_group.foreach_learner(_set_unsaved, unsaved=state["learner"]):
        result.get()


def _get_unsaved(learner: Any) -> dict[str, dict[str, float]]:
    found = {name: getattr(learner, name) for name in UNSAVED if hasattr(learner, name)}
    return {name: {module: float(value) for module, value in values.items()} for name, values in found.items()}


def _set_unsaved(learner: Any, unsaved: dict[str, dict[str, float]]) -> None:
    for name, values in unsaved.items():
        for module, value in values.items():
            is_tensor = name == "curr_kl_coeffs_per_module"
            getattr(learner, name)[module] = learner._get_tensor_variable(value) if is_tensor else int(value)


def hosts_of(algorithm: Any, *, local: bool) -> list[dict[str, Any]]:
    """Where the env runners are. `local`: the only one is in this process."""
    places = Counter(algorithm.env_runner_group.foreach_env_runner(_place, local_env_runner=local))
    return [{"host": host, "address": address, "workers": count} for (host, address), count in sorted(places.items())]


def _place(runner: Any) -> tuple[str, str]:
    import ray

    return socket.gethostname(), str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _accepted(rllib_config: Any) -> dict[str, str]:
    """Each argument of the config's methods → the method that takes it."""
    found: dict[str, str] = {}
    for owner in (
        type(rllib_config),
        *type(rllib_config).__mro__,
    ):  # `training` of a subclass passes other arguments on
        for method in rllib_settings.METHODS:
            for name, parameter in inspect.signature(getattr(owner, method, lambda: None)).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not name.startswith("_"):
                    found.setdefault(name, method)
    return found


@contextmanager
def _own_folder() -> Iterator[None]:
    """Keep RLlib from creating a folder in ~/ray_results for each algorithm, which stays empty."""
    trainable: Any = importlib.import_module("ray.tune.trainable.trainable")
    before = trainable.DEFAULT_STORAGE_PATH
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        trainable.DEFAULT_STORAGE_PATH = folder
        try:
            yield
        finally:
            trainable.DEFAULT_STORAGE_PATH = before


@contextmanager
def _captured_stderr(output: list[str]) -> Iterator[None]:
    """Append standard error to `output`, including that of Ray's C++ code, which bypasses Python."""
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            output.append(file.read().decode(errors="replace"))
