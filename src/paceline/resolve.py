"""From a file, `--set`, flags and a preset to one validated `RunConfig`: flag > --set > file > preset > default."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from paceline import rllib_keys
from paceline.config import DEFAULT_TOTAL_STEPS, SECTIONS, RunConfig, UserError

Tree = dict[str, Any]
BUDGETS = ("total_steps", "iterations", "max_time")


class Loader(yaml.SafeLoader):
    """Also takes 1e-3 for a number: to YAML 1.1 it is a text, and `env.kwargs` would pass it on as one."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def resolve_tree(given: Mapping[str, Any], *, preset: str | None = None) -> tuple[RunConfig, str | None]:
    """The validated config of what the user gave, and the name of the preset that filled the rest."""
    given = tidy(given)
    named: dict[str, Any] = {key: given[key] for key in ("algo", "env", "preset") if key in given}
    engine = given.get("engine")
    if isinstance(engine, Mapping) and "name" in engine:
        named["engine"] = {"name": engine["name"]}
    validate(named)  # to look the preset up
    algo = given.get("algo") or RunConfig.model_fields["algo"].default
    for other in SECTIONS:
        if other != algo and given.get(other):
            key = f"{other}.{next(iter(given[other]))}" if isinstance(given[other], dict) else other
            raise UserError(f"{key} is a setting of --algo {other}, and this run is --algo {algo}")
    base, name = _preset_for(given, preset or given.get("preset"))
    if (given.get("engine") or {}).get("name") == "rllib":
        base = _without(base, rllib_keys.REFUSED)
    given["preset"] = name.rpartition("/")[2] if name else "none"
    stop = given.get("stop")
    if isinstance(stop, Mapping) and any(stop.get(key) is not None for key in BUDGETS):
        base.pop("stop", None)  # the user's budget replaces the preset's
    if isinstance(given.get("model"), Mapping) and given["model"].get("class"):
        base.pop("model", None)  # and so does the user's network
    config = validate(merge(base, given))
    if not config.stop.has_budget:
        config = validate(merge(base, merge(given, {"stop": {"total_steps": DEFAULT_TOTAL_STEPS}})))
    return _fit_minibatch(config, given), name


def names_envs(given: Mapping[str, Any], preset: str | None) -> bool:
    """Whether the user said how many environments, or named a preset."""
    return (preset or given.get("preset")) is not None or "envs_per_worker" in (tidy(given).get("env") or {})


def without_auto(given: Mapping[str, Any]) -> Tree:
    """Without sizes that are left to the machine: a run that is continued has them."""
    tree = deepcopy(dict(given))
    for section, name in (("env", "envs_per_worker"), ("ppo", "minibatch_size")):
        if isinstance(tree.get(section), dict) and tree[section].get(name) in (0, "0", "auto"):
            del tree[section][name]
    return tree


def tidy(given: Mapping[str, Any]) -> Tree:
    """With `env: ID` written out, and without sections that are empty (all their lines may be commented out)."""
    tree = {key: value for key, value in given.items() if value is not None or not _allowed_at([key])}
    if isinstance(tree.get("env"), str):
        tree["env"] = {"id": tree["env"]}
    return tree


def _fit_minibatch(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """A minibatch from a preset or a default shrinks with the rollout; one that the user asked for has to fit."""
    envs, steps = config.env.envs_per_worker, config.ppo.rollout_steps
    if config.algo != "ppo" or envs == 0 or config.ppo.minibatch_size <= envs * steps:
        return config
    if "minibatch_size" in given.get("ppo", {}):
        raise UserError(
            f"ppo.minibatch_size={config.ppo.minibatch_size} is more than a rollout holds: env.envs_per_worker x "
            f"ppo.rollout_steps = {envs} x {steps} = {envs * steps}"
        )
    return config.model_copy(update={"ppo": config.ppo.model_copy(update={"minibatch_size": envs * steps})})


def validate(tree: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(_one_line(error)) from None


def to_tree(config: RunConfig) -> Tree:
    """As nested plain values, without the sections of the algorithms that do not run."""
    unused = {name for name in SECTIONS if name != config.algo}
    return config.model_dump(by_alias=True, mode="json", exclude=unused)


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(to_tree(config), sort_keys=False)


def read_file(path: str | Path) -> Tree:
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(), Loader)
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"--config {path}: this is a directory, a YAML file is expected") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"--config {path}{where}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"--config {path}: a mapping of keys is expected, not {type(tree).__name__}")
    return tidy(tree)


def parse_sets(sets: Iterable[str], base: Mapping[str, Any] | None = None) -> Tree:
    """`KEY=VALUE` words over `base`, as a tree."""
    tree: Tree = deepcopy(dict(base or {}))
    for item in sets:
        key, sign, text = item.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {item!r}: KEY=VALUE is expected, for example --set ppo.gamma=0.98")
        try:
            value = yaml.load(text, Loader)
        except yaml.YAMLError:
            raise UserError(f"--set {item!r}: the value is not YAML; quote it or see docs/configuration.md") from None
        key = key.strip()
        put(tree, "env.id" if key == "env" and isinstance(value, str) else key, value)
    return tree


def presets(algo: str) -> Tree:
    """All presets of an algorithm, by env id or by name."""
    file = resources.files("paceline").joinpath("presets", f"{algo}.yaml")
    tree: Tree = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return tree


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterable[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every option, for `--help` and the documentation."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, key + ".")
        else:
            default = field.get_default(call_default_factory=True)
            yield key, _type_name(field.annotation), _shown(default), (field.description or "").replace("\n", " ")


def _preset_for(given: Mapping[str, Any], wanted: str | None) -> tuple[Tree, str | None]:
    if wanted == "none":
        return {}, None
    algo = given.get("algo") or RunConfig.model_fields["algo"].default
    table = presets(algo)
    if wanted is not None:
        if wanted not in table:
            hint = _did_you_mean(wanted, list(table))
            raise UserError(f"--preset {wanted!r} is not known for {algo}{hint}; there are none, {', '.join(table)}")
        return _settings(table[wanted]), f"{algo}/{wanted}"
    env_id = (given.get("env") or {}).get("id") or RunConfig.model_fields["env"].default.id
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


def _one_line(error: ValidationError) -> str:
    first, *others = error.errors()
    path = [str(part) for part in first["loc"]]
    key, given, kind = ".".join(path), first["input"], first["type"]
    more = f" (and {len(others)} more)" if others else ""
    if kind == "extra_forbidden":
        allowed = _allowed_at(path[:-1])
        prefix = "".join(part + "." for part in path[:-1])
        near = difflib.get_close_matches(path[-1], allowed, 1, 0.5)
        elsewhere = [k for k, *_ in keys() if k.rpartition(".")[2] == path[-1]]
        if elsewhere:
            hint = f"did you mean '{elsewhere[0]}'?"
        elif near:
            hint = f"did you mean '{prefix}{near[0]}'?"
        else:
            hint = f"allowed {'in ' + prefix[:-1] if prefix else 'at the top'}: {', '.join(allowed)}"
        return f"unknown key '{key}': {hint}{more}"
    if kind == "literal_error":
        allowed = [word.strip("'") for word in str(first["ctx"]["expected"]).replace(" or ", ", ").split(", ")]
        hint = _did_you_mean(str(given), allowed)
        return f"{key}={_shown(given)} is not one of {', '.join(allowed)}{hint}{more}"
    if kind == "model_type":
        example = f"{key}.{_allowed_at(path)[0]}" if key else "env.id"
        return f"{key}={_shown(given)}: a section of settings such as {example} is expected{more}"
    if kind == "value_error":
        text = str(first["ctx"]["error"])
        return (f"{key}={_shown(given)}: {text}" if key and "=" not in text else text) + more
    if not key:
        return f"{first['msg']}{more}"
    return f"{key}={_shown(given)}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}"


def _allowed_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _did_you_mean(word: str, words: list[str]) -> str:
    lower = {w.lower(): w for w in words}
    near = difflib.get_close_matches(word.lower(), list(lower), 1, 0.5)
    return f"; did you mean '{lower[near[0]]}'?" if near else ""


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return repr(text) if isinstance(value, str) and (not text or " " in text) else text


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(word) for word in get_args(annotation))
    args = [a for a in get_args(annotation) if a is not type(None)]
    if args and type(None) in get_args(annotation):
        return f"{_type_name(args[0])} or none"
    origin = get_origin(annotation)
    if origin is not None and getattr(origin, "__name__", "") == "Annotated":
        return _type_name(args[0])
    return {"dict": "mapping"}.get(
        getattr(origin or annotation, "__name__", ""), getattr(origin or annotation, "__name__", "value")
    )


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
