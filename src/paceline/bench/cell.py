"""A run that is planned: an ordinary `paceline train`, its words, its settings, and whether a directory is that run."""

from __future__ import annotations

import difflib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import ValidationError

from paceline.config import ALGORITHM_NAMES, RunConfig, Section, UserError
from paceline.plugins import absolute_everywhere
from paceline.resolve import (
    Loader,
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

# The settings that have a flag of their own in `paceline train`.
FLAGS = {
    "algo": "--algo",
    "env.id": "--env",
    "seed": "--seed",
    "engine.name": "--engine",
    "engine.workers": "--workers",
    "stop.total_steps": "--total-steps",
    "stop.iterations": "--iterations",
    "stop.max_time": "--max-time",
    "stop.return_mean": "--stop-return",
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

    movable: ClassVar[tuple[str, ...]] = ("stop", "eval", "checkpoint", "engine", "out", "name")
    """Sections that may differ between two calls for the same run."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def budget(self) -> dict[str, Any]:
        """By key: what the matrix decides besides algorithm, environment and seed."""
        return {}

    @property
    def file(self) -> str | None:
        """Settings to start from, as `--config` takes them."""
        return None

    @property
    def path(self) -> Path:
        return self.out / self.name

    @property
    def train_words(self) -> list[str]:
        words = ["train", *(["--config", self.file] if self.file else [])]
        for key, value in self._decided.items():
            words += [FLAGS[key], str(value)]
        words += ["--preset", self.preset] if self.preset else []
        words += [word for item in self.sets for word in ("--set", item)]
        return [*words, "--out", str(self.out), "--name", self.name, "--resume", "auto"]

    @property
    def _decided(self) -> dict[str, Any]:
        return {"algo": self.algo, "env.id": self.env, "seed": self.seed, **self.budget}

    @cached_property
    def given(self) -> dict[str, Any]:
        """The settings that the words of `train` name."""
        tree = parse_sets(self.sets, read_file(self.file) if self.file else None)
        for key, value in self._decided.items():
            put(tree, key, value)
        return tree

    @cached_property
    def config(self) -> RunConfig:
        """What the run will have; a UserError if it cannot be."""
        return resolve_tree(self.given, preset=self.preset)[0]

    @property
    def settings(self) -> dict[str, Any]:
        """By key: what all runs of a series have in common, whatever the matrix varies."""
        varied = {"algo", "env.id", "seed", "engine.name", "engine.workers", "engine.address", "out", "name"}
        varied |= {
            "engine.dashboard",
            "engine.start_timeout_seconds",
            "engine.max_restarts",
        }  # and what changes nothing
        return {
            key: absolute_everywhere(value)
            for key, value in leaves(to_tree(self.config))
            if key not in varied and key.partition(".")[0] not in ("eval", "checkpoint")
        }

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """What was asked for that the run with these settings does not have: `key=value, not …`; None if nothing."""
        before = to_tree(validate(saved))
        after = to_tree(validate(merge(before, tidy(without_auto(self.given)))))
        after["preset"] = self.config.preset
        for key, value in leaves(after):
            if key.partition(".")[0] not in self.movable:
                was = absolute_everywhere(at(before, key))
                if was != absolute_everywhere(value):
                    return f"{key}={was}, not {value}"
        return None


def read_yaml(flag: str, name: str, model: type[_Model]) -> _Model:
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{flag} {name}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {name}: cannot be read ({error})") from None
    return parse_yaml(flag, name, text, model)


def parse_yaml(flag: str, name: str, text: str, model: type[_Model]) -> _Model:
    """A file that describes runs; a UserError in one line if it is not one."""
    try:
        tree = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{flag} {name}{where}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{flag} {name}: a mapping of {', '.join(model.model_fields)} is expected")
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        hint = f"; allowed: {', '.join(model.model_fields)}" if first["type"] == "extra_forbidden" else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{flag} {name}: {f'{key}: ' if key else ''}{reason}{hint}") from None


def sets_for(algo: str, settings: Mapping[str, Any], sets: Sequence[str]) -> Iterator[str]:
    """Settings as words, then the user's own words; those of another algorithm are for its runs."""
    words = [f"{key}={json.dumps(value)}" for key, value in leaves(settings)]
    for item in [*words, *sets]:
        section = item.partition(".")[0]
        if section == algo or section not in ALGORITHM_NAMES:
            yield item


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); kwargs are one value, as in `merge`."""
    for key, value in tree.items():
        if isinstance(value, dict) and key != "kwargs":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def at(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def choice(flag: str, words: Iterable[str], known: list[str]) -> list[str]:
    """Each word once, in the order given."""
    chosen = list(dict.fromkeys(words))
    if not chosen:
        raise UserError(f"{flag}: none given; there are {', '.join(known)}")
    for word in chosen:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{flag} {word!r} is not one of {', '.join(known)}{hint}")
    return chosen
