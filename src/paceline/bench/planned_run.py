"""A planned run: the words of its `paceline train`, its settings, and whether a directory is that run."""

from __future__ import annotations

import difflib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from paceline.config import ALGORITHMS, RunConfig, Section, UserError, algorithm_name
from paceline.config.plugins import absolute_everywhere
from paceline.config.resolve import (
    leaves,
    merge,
    parse_sets,
    put,
    read_file,
    resolve_tree,
    tidy,
    to_tree,
    validate,
    without_auto,
)
from paceline.config.train_flags import FLAGS
from paceline.config.yaml_text import read_mapping

# Settings that vary within a series of runs, or change nothing in its figures.
_VARIED = {
    *("algo", "env.id", "seed", "engine.name", "engine.workers", "out", "name"),
    *("engine.address", "engine.dashboard", "engine.start_timeout_seconds", "engine.max_restarts"),
}
_Model = TypeVar("_Model", bound=Section)


@dataclass(frozen=True)
class PlannedRun:
    algo: str
    env: str
    seed: int
    preset: str | None
    sets: tuple[str, ...]
    out: Path = field(compare=False)

    changeable: ClassVar[tuple[str, ...]] = ("stop", "eval", "checkpoint", "engine", "out", "name")
    """Sections in which a later call for the same run may differ."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def commands(self) -> dict[str, list[str]]:
        """The commands that make the run, by what each does."""
        return {"training": self.train_words}

    @property
    def planned(self) -> dict[str, Any]:
        """Settings by key that the plan decides besides algorithm, environment and seed."""
        return {}

    @property
    def config_file(self) -> str | None:
        """Settings to start from, as `--config` takes them."""
        return None

    @property
    def path(self) -> Path:
        return self.out / self.name

    @property
    def train_words(self) -> list[str]:
        words = ["train", *(["--config", self.config_file] if self.config_file else [])]
        for key, value in self._decided.items():
            words += [FLAGS[key], str(value)]
        words += ["--preset", self.preset] if self.preset else []
        words += [word for item in self.sets for word in ("--set", item)]
        return [*words, "--out", str(self.out), "--name", self.name, "--resume", "auto"]

    @property
    def _decided(self) -> dict[str, Any]:
        return {"algo": self.algo, "env.id": self.env, "seed": self.seed, **self.planned}

    @cached_property
    def given(self) -> dict[str, Any]:
        """The settings that the words of `train` name."""
        tree = parse_sets(self.sets, read_file(self.config_file) if self.config_file else None)
        for key, value in self._decided.items():
            put(tree, key, value)
        return tree

    @cached_property
    def config(self) -> RunConfig:
        """The settings that the run will have; UserError if they are invalid."""
        return resolve_tree(self.given, preset=self.preset)[0]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by key that all runs of a series share."""
        return {
            key: absolute_everywhere(value)
            for key, value in leaves(to_tree(self.config))
            if key not in _VARIED and key.partition(".")[0] not in ("eval", "checkpoint")
        }

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """The first requested setting that a run with the `saved` settings does not have: `key=value, not …`."""
        return difference(saved, self.given, self.preset, changeable=self.changeable)


def difference(
    saved: Mapping[str, Any], given: Mapping[str, Any], preset: str | None, *, changeable: Sequence[str]
) -> str | None:
    """The first setting in `given` that a run with the `saved` settings does not have, outside of the `changeable`
    sections: `key=value, not …`."""
    before = to_tree(validate(saved))
    after = to_tree(validate(merge(before, tidy(without_auto(given)))))
    after["preset"] = resolve_tree(given, preset=preset)[0].preset
    for key, value in leaves(after):
        if key.partition(".")[0] not in changeable:
            was = absolute_everywhere(value_at(before, key))
            if was != absolute_everywhere(value):
                return f"{key}={was}, not {value}"
    return None


def read_yaml(flag: str, name: str, model: type[_Model]) -> _Model:
    where = f"{flag} {name}"
    return parse_model(where, read_mapping(Path(name).expanduser(), where), model)


def parse_model(where: str, tree: Mapping[str, Any], model: type[_Model]) -> _Model:
    """A mapping as a `model`; UserError in one line if it is invalid."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        hint = f"; allowed: {', '.join(model.model_fields)}" if first["type"] == "extra_forbidden" else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {f'{key}: ' if key else ''}{reason}{hint}") from None


def check_sets(sets: Iterable[str], decided: Mapping[str, str], algos: Sequence[str]) -> None:
    """UserError for a `--set` that a flag of the benchmark decides, or that no algorithm of it has."""
    names = [algorithm_name(algo) for algo in algos]
    for item in sets:
        key, section = item.partition("=")[0].strip(), item.partition(".")[0]
        if key in decided:
            raise UserError(f"--set {item}: use {decided[key]} instead")
        if section in ALGORITHMS and section not in names:
            raise UserError(f"--set {item} is a setting of {section}, but --algos has {', '.join(names)}")


def sets_for(algo: str, algos: Sequence[str], settings: Mapping[str, Any], sets: Sequence[str]) -> Iterator[str]:
    """`settings` as words of `--set`, then the user's own, without those of the other algorithms."""
    others = {*ALGORITHMS, *map(algorithm_name, algos)} - {algorithm_name(algo)}
    for item in [*(f"{key}={json.dumps(value)}" for key, value in leaves(settings)), *sets]:
        if item.partition(".")[0] not in others:
            yield item


def value_at(tree: Any, key: str) -> Any:
    """The value of a dotted key; None if there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def choice(flag: str, words: Iterable[str], known: Sequence[str]) -> list[str]:
    """The words, in the order given; UserError for one that is not known, or given twice."""
    chosen = list(words)
    if not chosen:
        raise UserError(f"{flag}: none given; allowed: {', '.join(known)}")
    check_once(flag, chosen)
    for word in chosen:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{flag} {word!r} is not one of {', '.join(known)}{hint}")
    return chosen


def check_once(flag: str, words: Sequence[Any]) -> None:
    """UserError for a word that is given twice: there would be one run where two were asked for."""
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise UserError(f"{flag} {','.join(map(str, words))}: {twice} is given twice")


def algorithm_choice(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """`--algos`: known names, or a user's own as `file.py:Class`."""
    return choice("--algos", words, [*known, *(word for word in words if ".py:" in word)])
