"""Every option as a dotted key with its type, default and meaning; and validation errors in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paceline.config.algorithms import ALGORITHMS, algorithm_class, algorithm_name
from paceline.config.values import did_you_mean

OTHER_NAMES = {
    "lr": ("learning_rate",),
    "timesteps": ("total_steps",),
    "total_timesteps": ("total_steps",),
    "n_timesteps": ("total_steps",),
    "num_timesteps": ("total_steps",),
    "steps": ("total_steps",),
    "env_id": ("env.id",),
    "task": ("env.id",),
    "env_name": ("env.id",),
    "n_envs": ("envs_per_worker",),
    "num_envs": ("envs_per_worker",),
    "num_workers": ("workers",),
    "num_env_runners": ("workers",),
    "n_steps": ("rollout_steps",),
    "num_steps": ("rollout_steps",),
    "train_batch_size": ("batch_size", "minibatch_size"),
    "batch_size": ("batch_size", "minibatch_size"),
    "minibatch": ("minibatch_size", "batch_size"),
    "n_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "update_epochs": ("epochs",),
    "discount": ("gamma",),
    "ent_coef": ("entropy_coef", "temperature"),
    "entropy_coeff": ("entropy_coef", "temperature"),
    "alpha": ("temperature",),
    "vf_coef": ("value_coef",),
    "lam": ("gae_lambda", "trace_lambda"),
    "lambda": ("gae_lambda", "trace_lambda"),
    "clip_range": ("clip",),
    "clip_coef": ("clip",),
    "anneal_lr": ("learning_rate_schedule",),
    "grad_clip": ("max_grad_norm",),
    "buffer_size": ("buffer_size", "replay_size"),
    "replay_size": ("replay_size", "buffer_size"),
    "tau": ("tau", "target_tau"),
    "net_arch": ("model.hidden",),
    "hidden_sizes": ("model.hidden",),
    "lstm": ("model.memory",),
    "eval_freq": ("eval.every_steps",),
    "n_eval_episodes": ("eval.episodes",),
    "save_freq": ("checkpoint.every_iterations",),
    "checkpoint_freq": ("checkpoint.every_iterations",),
    "num_threads": ("threads",),
    "gpu": ("device",),
    "cuda": ("device",),
    "log_dir": ("out",),
    "logdir": ("out",),
    "exp_name": ("name",),
    "run_name": ("name",),
}
"""What other tools call a setting → its key here, or the last part of it; the first one that the algorithm has."""
Key = tuple[str, str, str, str]
"""Dotted key, type, default, meaning."""


def keys(algo: str | None = None) -> Iterator[Key]:
    """Every option, for `--help` and the documentation, with the settings of all built-in algorithms and of `algo`."""
    sections = _sections(algo)
    for name, field in _run_fields().items():
        if name == "hyper":
            for section, settings in sections.items():
                yield from _keys_of(settings, f"{section}.")
        elif _is_section(field.annotation):
            yield from _keys_of(field.annotation, f"{field.alias or name}.")
        else:
            yield _key(name, field, "")


def allowed_at(path: Sequence[str], algo: str | None = None) -> list[str]:
    """The names of the options in a section (`[]`: at the top), empty if there is no such section."""
    sections = _sections(algo)
    if not path:
        names = [[*sections] if name == "hyper" else [field.alias or name] for name, field in _run_fields().items()]
        return [name for some in names for name in some]
    field = _run_fields().get(path[0])
    model: Any = sections.get(path[0]) or (field.annotation if field is not None else None)
    if len(path) > 1 or not _is_section(model):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def one_line(error: ValidationError, section: str | None = None, algo: str | None = None) -> str:
    """What is wrong, what is allowed. `section`: where the error's locations begin, if not at the top."""
    first, *others = error.errors()
    path = [*([section] if section else []), *(str(part) for part in first["loc"])]
    key, given, kind = ".".join(path), first["input"], first["type"]
    more = f" (and {len(others)} more)" if others else ""
    if kind == "extra_forbidden":
        return f"unknown key '{key}': {_where_it_belongs(path, algo)}{more}"
    if kind == "literal_error":
        allowed = [word.strip("'") for word in str(first["ctx"]["expected"]).replace(" or ", ", ").split(", ")]
        return f"{key}={shown(given)} is not one of {', '.join(allowed)}{did_you_mean(str(given), allowed)}{more}"
    if kind == "model_type":
        example = f"{key}.{allowed_at(path, algo)[0]}" if key else "env.id"
        return f"{key}={shown(given)}: expected a section of settings such as {example}{more}"
    if kind == "value_error":
        text = str(first["ctx"]["error"])
        return (f"{key}={shown(given)}: {text}" if key and "=" not in text else text) + more
    if not key:
        return f"{first['msg']}{more}"
    return f"{key}={shown(given)}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}"


def shown(value: Any) -> str:
    """A value as the user would write it."""
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return repr(text) if isinstance(value, str) and (not text or " " in text) else text


def key_meant(name: str, algo: str | None = None) -> str | None:
    """The key of a setting that has this name in a section or in another tool, if there is one. `algo`: whose settings
    to prefer."""
    known = [key for key, *_ in keys(algo)]
    own = [key for key in known if algo is not None and key.startswith(f"{algorithm_name(algo)}.")]
    names = (name, *OTHER_NAMES.get(name.lower(), ()))
    found = (key for pool in (own, known) for each in names for key in pool if each in (key, key.rpartition(".")[2]))
    return next(found, None)


def _where_it_belongs(path: list[str], algo: str | None) -> str:
    *parents, name = path
    prefix, allowed = "".join(f"{part}." for part in parents), allowed_at(parents, algo)
    near = difflib.get_close_matches(name, allowed, 1, 0.5)
    if meant := key_meant(name, algo) or (prefix + near[0] if near else None):
        return f"did you mean '{meant}'?"
    return f"allowed {'in ' + prefix[:-1] if prefix else 'at the top'}: {', '.join(allowed)}"


def _sections(algo: str | None) -> dict[str, type[BaseModel]]:
    """The settings of each algorithm by the name of their section."""
    names = list(ALGORITHMS) + ([algo] if algo is not None and algo not in ALGORITHMS else [])
    return {algorithm_name(name): algorithm_class(name).Settings for name in names}


def _run_fields() -> dict[str, Any]:
    from paceline.config.run import RunConfig  # which needs `one_line`

    return RunConfig.model_fields


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        yield _key(name, field, prefix)


def _key(name: str, field: Any, prefix: str) -> Key:
    default = field.get_default(call_default_factory=True)
    meaning = (field.description or "").replace("\n", " ")
    return prefix + (field.alias or name), _type_name(field.annotation), shown(default), meaning


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(word) for word in get_args(annotation))
    args = [a for a in get_args(annotation) if a is not type(None)]
    if args and type(None) in get_args(annotation):
        return f"{_type_name(args[0])} or none"
    origin = get_origin(annotation)
    if origin is not None and getattr(origin, "__name__", "") == "Annotated":
        return _type_name(args[0])
    name = getattr(origin or annotation, "__name__", "value")
    return {"dict": "mapping"}.get(name, name)
