"""From a file, `--set`, flags and a preset to one validated `RunConfig`: flag > --set > file > preset > default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.config import rllib_keys
from paceline.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, algorithm_class, algorithm_name
from paceline.config.keys import allowed_at, keys, one_line
from paceline.config.objects import env_name, is_object, name_of, refuse_made
from paceline.config.plugins import absolute
from paceline.config.run import DEFAULT_TOTAL_STEPS, EnvConfig, RunConfig
from paceline.config.values import UserError, did_you_mean, expanded, shortened
from paceline.config.yaml_text import load_yaml, read_mapping

__all__ = ["keys", "merge", "parse_sets", "presets", "put", "read_file", "resolve_tree", "tidy", "to_tree", "validate"]

Tree = dict[str, Any]
BUDGETS = ("total_steps", "iterations", "max_time")


def resolve_tree(given: Mapping[str, Any], *, preset: str | None = None) -> tuple[RunConfig, str | None]:
    """The validated config for what the user gave, and the name of the preset that filled the rest."""
    given = tidy(given)
    algo = given.get("algo", DEFAULT_ALGORITHM)
    if not isinstance(algo, str) or not isinstance(given.get("env", {}), Mapping):
        validate(given)  # which says what is wrong
    base, name = _preset_for(algo, given, preset or given.get("preset"))
    engine, stop, model = (_mapping(given, section) for section in ("engine", "stop", "model"))
    if engine.get("name") == "rllib":
        base = _without(base, rllib_keys.REFUSED)
    given["preset"] = name.rpartition("/")[2] if name else "none"
    if any(stop.get(key) is not None for key in BUDGETS):
        base.pop("stop", None)  # the user's budget replaces the preset's
    if model.get("class"):
        base.pop("model", None)  # and so does the user's network
    tree = merge(base, given)
    if "stop" not in tree or isinstance(tree["stop"], Mapping):
        stop = dict(tree.get("stop", {}))
        if all(stop.get(key) is None for key in BUDGETS):
            tree["stop"] = stop | {"total_steps": DEFAULT_TOTAL_STEPS}
    config = validate(tree)
    return _fit_rollout(config, _mapping(given, algorithm_name(algo))), name


def names_envs(given: Mapping[str, Any], preset: str | None) -> bool:
    """Whether the user said how many environments, or named a preset."""
    return (preset or given.get("preset")) is not None or "envs_per_worker" in (tidy(given).get("env") or {})


def without_auto(given: Mapping[str, Any]) -> Tree:
    """Without sizes left to the machine: a run that is continued keeps those it has."""
    tree = deepcopy(dict(given))
    for settings in tree.values():
        if isinstance(settings, dict):
            for name in ("envs_per_worker", "minibatch_size"):
                if settings.get(name) in (0, "0", "auto"):
                    del settings[name]
    return tree


def tidy(given: Mapping[str, Any]) -> Tree:
    """With `env: ID` and a single callback written out, objects replaced by their names, the algorithm's file named
    absolutely, and without empty sections (in a file all their lines may be commented out)."""
    tree = dict(given)
    if is_object(tree.get("env")) or isinstance(tree.get("env"), str):
        tree["env"] = {"id": tree["env"]}
    _name_env(tree)
    if isinstance(tree.get("callbacks"), str) or is_object(tree.get("callbacks")):
        tree["callbacks"] = [tree["callbacks"]]
    for key in ("algo", "env.wrappers", "model.class", "callbacks"):
        section, dot, name = key.rpartition(".")
        place = dict(_mapping(tree, section)) if dot else tree
        value = place.get(name)
        if isinstance(value, list) and any(map(is_object, value)):
            place[name] = [name_of(one, key) if is_object(one) else one for one in value]
        elif is_object(value):
            place[name] = name_of(value, key)
        if dot and place.get(name) is not value:
            tree[section] = place
    if isinstance(tree.get("algo"), str):
        tree["algo"] = absolute(tree["algo"])
    algo = tree["algo"] if isinstance(tree.get("algo"), str) and ":" in tree["algo"] else None
    tree = {key: value for key, value in tree.items() if value is not None or not allowed_at([key], algo)}
    return tree


def _name_env(tree: Tree) -> None:
    """Replace an environment that was given as an object by its name."""
    env = tree.get("env")
    made = env.get("id") if isinstance(env, Mapping) else env
    refuse_made(made)
    if isinstance(env, Mapping) and (is_object(made) or isinstance(made, str)):
        name, settings = env_name(made)
        tree["env"] = {**settings, **env, "id": name}


def _mapping(tree: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """A section as given, empty if it is something else: `validate` will say so."""
    value = tree.get(section)
    return value if isinstance(value, Mapping) else {}


def _fit_rollout(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    if config.env.envs_per_worker == 0 or not config.algorithm.native or ":" in config.env.id:
        return config  # the environment may have several agents, with a row each: `fit_to_memory` looks
    return fit_rollout(config, given)


def fit_rollout(config: RunConfig, given: Iterable[str], agents: int = 1) -> RunConfig:
    """Sizes from a preset or a default shrink with the rollout; one that the user has `given` must fit."""
    envs, hyper = config.env.envs_per_worker, config.hyper
    slots = envs * hyper.rollout_steps * agents
    fitted = hyper.fitted(slots)
    for name in given:
        if getattr(fitted, name, None) != getattr(hyper, name, None):
            section, each = config.algorithm_name, f" x {agents} agents" if agents > 1 else ""
            raise UserError(
                f"{section}.{name}={getattr(hyper, name)} is more than a rollout holds: env.envs_per_worker x "
                f"{section}.rollout_steps = {envs} x {hyper.rollout_steps}{each} = {slots}"
            )
    return config if fitted is hyper else config.model_copy(update={"hyper": fitted})


def validate(tree: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        algo = tree.get("algo", DEFAULT_ALGORITHM)
        known = isinstance(algo, str) and (":" in algo or algo in ALGORITHMS)
        raise UserError(one_line(error, algo=algo if known else None)) from None


def to_tree(config: RunConfig) -> Tree:
    """As nested plain values; the algorithm's settings are in the section named after it."""
    return config.model_dump(by_alias=True, mode="json")


def portable(config: RunConfig) -> RunConfig:
    """With absolute file names and with arguments as JSON stores them: a run trains with exactly the settings that it
    saves, and can be read from any folder. This cannot make valid settings invalid, so they are not validated again."""
    tree = to_tree(config)
    env = {
        "id": absolute(config.env.id),
        "wrappers": _absolute_entries(tree["env"]["wrappers"]),
        "kwargs": tree["env"]["kwargs"],
    }
    model = {"class_": config.model.class_ and absolute(config.model.class_), "kwargs": tree["model"]["kwargs"]}
    engine = {"rllib": tree["engine"]["rllib"]}
    frozen = {name: str(expanded(path).resolve()) for name, path in config.multi_agent.frozen.items()}
    return config.model_copy(
        update={
            "algo": absolute(config.algo),
            "env": config.env.model_copy(update=env),
            "multi_agent": config.multi_agent.model_copy(update={"frozen": frozen}),
            "model": config.model.model_copy(update=model),
            "engine": config.engine.model_copy(update=engine),
            "callbacks": _absolute_entries(tree["callbacks"]),
        }
    )


def _absolute_entries(entries: list[Any]) -> list[Any]:
    return [
        absolute(one) if isinstance(one, str) else {absolute(name): arguments for name, arguments in one.items()}
        for one in entries
    ]


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(to_tree(config), sort_keys=False)


def read_file(path: str | Path) -> Tree:
    return tidy(read_mapping(Path(path), f"--config {path}"))


def parse_sets(sets: Iterable[str], base: Mapping[str, Any] | None = None) -> Tree:
    """`KEY=VALUE` words over `base`, as a tree."""
    tree: Tree = deepcopy(dict(base or {}))
    for item in sets:
        key, sign, text = item.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {item!r}: expected KEY=VALUE, for example --set ppo.gamma=0.98")
        try:
            value = load_yaml(text)
        except yaml.YAMLError as error:
            reason = "" if isinstance(error, yaml.MarkedYAMLError) else f" ({error})"
            raise UserError(
                f"--set {shortened(item)!r}: the value is not YAML{reason}; quote it or see docs/configuration.md"
            ) from None
        key = key.strip()
        put(tree, "env.id" if key == "env" and isinstance(value, str) else key, value)
    return tree


def presets(algo: str) -> Tree:
    """The presets of a built-in algorithm, by env id or by name; it may have none."""
    if algo not in ALGORITHMS:
        return {}
    file = resources.files("paceline.config").joinpath("presets", f"{algo}.yaml")
    tree: Tree = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return tree


def _preset_for(algo: str, given: Mapping[str, Any], wanted: str | None) -> tuple[Tree, str | None]:
    if wanted == "none":
        return {}, None
    algorithm_class(algo)  # an unknown one is an error before its presets are looked for
    table = presets(algo)
    if wanted is not None:
        if wanted not in table:
            hint = did_you_mean(wanted, list(table))
            raise UserError(
                f"--preset {wanted!r} is not known for {algo}{hint}; use none, or one of {', '.join(table)}"
            )
        return _settings(table[wanted]), f"{algo}/{wanted}"
    env_id = str(_mapping(given, "env").get("id") or EnvConfig.model_fields["id"].default)
    name: str | None = env_id.rpartition(":")[2]
    if name not in table:
        name = next((n for n, preset in table.items() if _is_for(preset, env_id)), None)
    return (_settings(table[name]), f"{algo}/{name}") if name else ({}, None)


def _without(preset: Tree, refused: Iterable[str]) -> Tree:
    """A preset fills what the engine can take, and no more."""
    return {
        section: {
            key: value
            for key, value in settings.items()
            if not {f"{section}.{key}", f"{section}.{key}={value}"}.intersection(refused)
        }
        if isinstance(settings, dict)
        else settings
        for section, settings in preset.items()
    }


def _is_for(preset: Tree, env_id: str) -> bool:
    return any(fnmatchcase(env_id.lower(), pattern.lower()) for pattern in preset.get("for", ()))


def _settings(preset: Tree) -> Tree:
    """Without `for`, the patterns of the env ids that have no preset of their own name."""
    return deepcopy({key: value for key, value in preset.items() if key != "for"})


def put(tree: Tree, dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for part in parents:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError(f"{dotted}: '{part}' already has the value {child!r}")
        tree = child
    tree[last] = value


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> Tree:
    """`high` over `low`; mappings are merged except kwargs, which are one value."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict) and key != "kwargs"
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); kwargs are one value, as in `merge`."""
    for key, value in tree.items():
        if isinstance(value, dict) and key != "kwargs":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
