"""Runs of one kind, together: what they share, what tells them from the others, and the settings they differ in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.files import FINISHED
from paceline.bench.study import KEYS, RunData
from paceline.config import SECTIONS, UserError

# Settings in which two runs of one kind may differ.
_INCIDENTAL = ("seed", "name", "out", "checkpoint", "eval", "preset")
_INCIDENTAL_ENGINE = ("name", "workers", "address", "dashboard", "start_timeout_seconds", "max_restarts")


@dataclass(frozen=True)
class Group:
    label: str
    """What tells it from the other groups: `ppo, ray, 2 workers`."""
    key: dict[str, Any]
    """The values its runs share, by grouping key."""
    runs: list[RunData]

    @property
    def used(self) -> list[RunData]:
        """Those that figures are taken from."""
        return [run for run in self.runs if run.state == FINISHED and run.usable]

    def count(self, state: str) -> int:
        return sum(run.state == state for run in self.runs)


def group(runs: Sequence[RunData], by: Sequence[str] | None = None) -> list[Group]:
    """Runs that share the values of `by`, in the order they came. None: those that differ in nothing but seed, name,
    evaluations and checkpoints; planned runs that left nothing join the only others of their kind, where there are."""
    for key in by or ():
        if runs and all(run.value(key) is None for run in runs):
            raise UserError(
                f"--by {key}: no run has it; it is one of {', '.join(KEYS)}, seed, folder, run, or a setting "
                "such as ppo.learning_rate"
            )
    members: dict[str, list[RunData]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: not _known(run)):  # a stable sort: those without settings come last
        one = {key: run.value(key) for key in by} if by else _settings(run)
        text = json.dumps(one, sort_keys=True, default=str)
        if not by and not _known(run):
            alike = [other for other, each in settings.items() if _alike(run, each)]
            text = alike[0] if len(alike) == 1 else text
        members.setdefault(text, []).append(run)
        settings.setdefault(text, one)
    # Where all that finished are of one environment, it goes without saying.
    envs = {run.env for run in runs if run.state == FINISHED and run.usable}
    labels = _labels(list(settings.values()), by, next(iter(envs)) if len(envs) == 1 else None)
    return [
        Group(label, dict(settings[text]) if by else {key: settings[text][key] for key in KEYS}, held)
        for label, (text, held) in zip(labels, members.items(), strict=True)
    ]


def differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with the value of each run in their order; names and places left out, and
    those of an algorithm in which all runs of it agree."""
    flat = [{"seed": run.seed, **_settings(run)} for run in runs]
    values = {key: [one.get(key) for one in flat] for key in dict.fromkeys(key for one in flat for key in one)}

    def told(key: str) -> list[Any]:
        section = key.partition(".")[0]
        own = [run.algo == section or section not in SECTIONS for run in runs]
        return [value for value, mine in zip(values[key], own, strict=True) if mine]

    return {key: each for key, each in values.items() if _differ(told(key))}


def _known(run: RunData) -> bool:
    """Its settings could be read."""
    return "model" in run.config


def _alike(run: RunData, settings: Mapping[str, Any]) -> bool:
    engine = run.config.get("engine")
    known: dict[str, Any] = {"env": run.env, "algo": run.algo}
    known |= {"engine": engine.get("name"), "workers": engine.get("workers")} if isinstance(engine, dict) else {}
    return all(value in (None, "auto", settings.get(key)) for key, value in known.items())


def _settings(run: RunData) -> dict[str, Any]:
    """Flat, without what runs of one kind may differ in; what was decided at its start comes first."""
    # Another algorithm's settings decide nothing.
    left_out = {*_INCIDENTAL, *(name for name in SECTIONS if name != run.algo)}
    tree = {key: value for key, value in run.config.items() if key not in left_out}
    engine = tree.get("engine")
    if isinstance(engine, dict):
        tree["engine"] = {key: value for key, value in engine.items() if key not in _INCIDENTAL_ENGINE}
    flat = {key: value for key, value in _leaves(tree) if key not in ("algo", "env.id")}
    return {**{key: run.value(key) for key in KEYS}, **flat}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key not in ("kwargs", "rllib"):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def relabel(groups: Sequence[Group]) -> list[Group]:
    """The same groups, told apart from each other alone."""
    settings = [_settings(one.runs[0]) for one in groups]
    return [replace(one, label=label) for one, label in zip(groups, _labels(settings, None, None), strict=True)]


def _labels(settings: list[dict[str, Any]], by: Sequence[str] | None, understood: str | None) -> list[str]:
    """By the keys in which groups differ: those that say most for all, settings only where it takes them to tell one
    from another. `understood`: an environment that need not be named."""
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differing = [key for key in keys if _differ([one.get(key) for one in settings])]
    chosen = [key for key in differing if key in KEYS or by]
    if not chosen and len(settings) == 1:
        chosen = [key for key in ("algo", "engine", "workers") if key in keys] or keys
    words = [
        [_word(key, one) for key in chosen if by or key != "env" or one.get(key) != understood] for one in settings
    ]
    if not by:
        _tell_apart(settings, words, [key for key in differing if key not in chosen])
    labels = [", ".join(each) or "the others" for each in words]
    return [
        f"{label} ({labels[:at].count(label) + 1})" if label in labels[:at] else label
        for at, label in enumerate(labels)
    ]


def _tell_apart(settings: list[dict[str, Any]], words: list[list[str]], keys: Sequence[str]) -> None:
    """Adds words to those that are the same: of the setting that splits them most; the algorithm's own before others,
    and one that only some have before one that all have. What a group does not have is not said."""
    alike: dict[str, list[int]] = {}
    for at, each in enumerate(words):
        alike.setdefault(", ".join(each), []).append(at)
    for members in (members for members in alike.values() if len(members) > 1):
        held = [settings[at] for at in members]
        split = {key: [one.get(key) for one in held] for key in keys if _differ([one.get(key) for one in held])}
        if not split:
            continue
        own = f"{held[0].get('algo')}."
        key = max(split, key=lambda key: (_distinct(split[key]), key.startswith(own), None in split[key]))
        added = [[*words[at], *([] if settings[at].get(key) is None else [_word(key, settings[at])])] for at in members]
        _tell_apart(held, added, [other for other in keys if other != key])
        for at, each in zip(members, added, strict=True):
            words[at] = each


def _word(key: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(key)
    if isinstance(value, str) and ":" in value:
        value = value.rpartition("/")[2]  # of a user's file, the name
    if key in ("env", "algo", "engine", "folder", "run", "task", "device"):
        return str(value)
    if key in ("workers", "nodes"):
        return f"{value} {key[:-1] if value == 1 else key}"
    name = key.removeprefix(f"{settings.get('algo')}.")
    return f"{name}={json.dumps(value, default=str)}".replace('"', "")


def _distinct(values: Sequence[Any]) -> int:
    return len({json.dumps(value, sort_keys=True, default=str) for value in values})


def _differ(values: Sequence[Any]) -> bool:
    return _distinct(values) > 1
