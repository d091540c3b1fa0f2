"""Group runs that differ only in their seed, and name the settings in which groups differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import ALGORITHMS, UserError, algorithm_name
from paceline.results.run_files import FINISHED
from paceline.results.runs import KEYS, RunData

# Settings in which the runs of one group may differ.
_IGNORED = ("seed", "name", "out", "checkpoint", "eval", "preset")
_IGNORED_ENGINE = ("name", "workers", "address", "dashboard", "start_timeout_seconds", "max_restarts")


@dataclass(frozen=True)
class RunGroup:
    label: str
    """What tells it from the other groups: `ppo, ray, 2 workers`."""
    key: dict[str, Any]
    """The values its runs share, by grouping key."""
    runs: list[RunData]

    @property
    def used(self) -> list[RunData]:
        """The finished runs, which figures are taken from."""
        return [run for run in self.runs if run.state == FINISHED and run.usable]

    def count(self, state: str) -> int:
        return sum(run.state == state for run in self.runs)


def group(runs: Sequence[RunData], by: Sequence[str] | None = None) -> list[RunGroup]:
    """Runs with the same values of `by`, in their order. None: runs that differ only in seed, name, evaluations and
    checkpoints; a planned run without a directory joins the only group that fits it."""
    for key in by or ():
        if runs and all(run.value(key) is None for run in runs):
            raise UserError(
                f"--by {key}: no run has it; allowed: {', '.join(KEYS)}, seed, folder, run, or a setting such as "
                "ppo.learning_rate"
            )
    members: dict[str, list[RunData]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: not _has_settings(run)):  # a stable sort
        one = {key: run.value(key) for key in by} if by else _settings(run)
        text = json.dumps(one, sort_keys=True, default=str)
        if not by and not _has_settings(run):
            fitting = [other for other, each in settings.items() if _fits(run, each)]
            text = fitting[0] if len(fitting) == 1 else text
        members.setdefault(text, []).append(run)
        settings.setdefault(text, one)
    # Labels leave the environment out if all finished runs share it.
    envs = {run.env for run in runs if run.state == FINISHED and run.usable}
    labels = _labels(list(settings.values()), by, next(iter(envs)) if len(envs) == 1 else None)
    return [
        RunGroup(label, dict(settings[text]) if by else {key: settings[text][key] for key in KEYS}, held)
        for label, (text, held) in zip(labels, members.items(), strict=True)
    ]


def groups_of_tasks(groups: Sequence[RunGroup], tasks: Sequence[str]) -> list[RunGroup]:
    """The groups with only their runs of these tasks; empty groups are dropped."""
    held = [(group, [run for run in group.runs if run.task in tasks]) for group in groups]
    return [RunGroup(group.label, group.key, runs) for group, runs in held if runs]


def relabel(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The same groups with labels that tell only these apart."""
    settings = [_settings(one.runs[0]) for one in groups]
    return [replace(one, label=label) for one, label in zip(groups, _labels(settings, None, None), strict=True)]


def differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with one value per run. An algorithm's own settings count among its runs."""
    flat = [{"seed": run.seed, **_settings(run)} for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: each for key, each in values.items() if _distinct(relevant_values(key, each, runs)) > 1}


def relevant_values(key: str, values: Sequence[Any], runs: Sequence[RunData]) -> list[Any]:
    """Of one value per run, those of the runs whose algorithm has this setting."""
    section = key.partition(".")[0]
    return [
        value
        for value, run in zip(values, runs, strict=True)
        if section not in ALGORITHMS or algorithm_name(run.algo) == section
    ]


def _has_settings(run: RunData) -> bool:
    return "model" in run.config


def _fits(run: RunData, settings: Mapping[str, Any]) -> bool:
    engine = run.section("engine")
    known = {"env": run.env, "algo": run.algo, "engine": engine.get("name"), "workers": engine.get("workers")}
    return all(value in (None, "auto", settings.get(key)) for key, value in known.items())


def _settings(run: RunData) -> dict[str, Any]:
    """Flat settings without those that runs of one group may differ in; `KEYS` come first."""
    other_algorithms = (name for name in ALGORITHMS if name != algorithm_name(run.algo))
    left_out = {*_IGNORED, *other_algorithms}
    tree = {key: value for key, value in run.config.items() if key not in left_out}
    if "engine" in tree:
        tree["engine"] = {key: value for key, value in run.section("engine").items() if key not in _IGNORED_ENGINE}
    flat = {key: value for key, value in _leaves(tree) if key not in ("algo", "env.id")}
    return {**{key: run.value(key) for key in KEYS}, **flat}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key not in ("kwargs", "rllib"):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _labels(settings: list[dict[str, Any]], by: Sequence[str] | None, common_env: str | None) -> list[str]:
    """The keys in which groups differ: `KEYS` for all groups, other settings only where it takes them to tell two
    apart. `common_env` is not named."""
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differing = [key for key in keys if _distinct([one.get(key) for one in settings]) > 1]
    chosen = [key for key in differing if key in KEYS or by]
    if not chosen and len(settings) == 1:
        chosen = [key for key in ("algo", "engine", "workers") if key in keys] or keys
    words = [
        [_word(key, one) for key in chosen if by or key != "env" or one.get(key) != common_env] for one in settings
    ]
    if not by:
        _tell_apart(settings, words, [key for key in differing if key not in chosen])
    labels = [", ".join(each) or "the others" for each in words]
    return [
        f"{label} ({labels[:at].count(label) + 1})" if label in labels[:at] else label
        for at, label in enumerate(labels)
    ]


def _tell_apart(settings: list[dict[str, Any]], words: list[list[str]], keys: Sequence[str]) -> None:
    """Extend equal labels by the setting with the most distinct values. The algorithm's own settings are preferred,
    then those that only some groups have. A group without the setting gets no word."""
    same: dict[str, list[int]] = {}
    for at, each in enumerate(words):
        same.setdefault(", ".join(each), []).append(at)
    for members in (members for members in same.values() if len(members) > 1):
        held = [settings[at] for at in members]
        split = {key: values for key in keys if _distinct(values := [one.get(key) for one in held]) > 1}
        if not split:
            continue
        own = f"{algorithm_name(str(held[0].get('algo')))}."
        key = max(split, key=lambda key: (_distinct(split[key]), key.startswith(own), None in split[key]))
        added = [[*words[at], *([] if settings[at].get(key) is None else [_word(key, settings[at])])] for at in members]
        _tell_apart(held, added, [other for other in keys if other != key])
        for at, each in zip(members, added, strict=True):
            words[at] = each


def _word(key: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(key)
    if key == "algo":
        return algorithm_name(str(value))
    if isinstance(value, str) and ":" in value:
        value = value.rpartition("/")[2]  # a user's file by its name
    if key in ("env", "engine", "folder", "run", "task", "device"):
        return str(value)
    if key in ("workers", "nodes"):
        return f"{value} {key[:-1] if value == 1 else key}"
    name = key.removeprefix(f"{algorithm_name(str(settings.get('algo')))}.")
    return f"{name}={json.dumps(value, default=str)}".replace('"', "")


def _distinct(values: Sequence[Any]) -> int:
    return len({json.dumps(value, sort_keys=True, default=str) for value in values})
