"""A suite (a small YAML file) and what was asked of it → the runs to make, each an ordinary `paceline train`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ValidationError, model_validator

from paceline.config import ALGORITHM_NAMES, Positive, RunConfig, Section, UserError
from paceline.plugins import absolute
from paceline.resolve import Loader, merge, parse_sets, put, resolve_tree, tidy, to_tree, validate, without_auto

Range = tuple[float, float]
EVERYTHING = "all"  # what an environment without level sets is evaluated on
LEVEL_SETS = ("train", "test")
MOVABLE = ("stop", "eval", "checkpoint", "engine", "out", "name")  # may differ between two calls for the same run
# What the matrix decides, by the flag that does.
DECIDED = {
    "algo": "--algos",
    "env": "--games",
    "env.id": "--games",
    "seed": "--seeds",
    "stop.total_steps": "--total-steps",
    "out": "--out",
    "name": "--out",
    "preset": "--suite",
}
_GAME_NAME = re.compile(r"[A-Za-z0-9][\w.+]*")


class Game(Section):
    """One environment of a suite. `CartPole-v1` alone is short for `{env: CartPole-v1}`."""

    env: str
    """As `paceline train --env` takes it."""
    range: Range | None = None
    """The returns that count as 0 and as 1. None: the game has no normalised score."""
    total_steps: Positive | None = None
    """Budget of a run; None: the suite's."""
    settings: dict[str, Any] = {}
    """Settings of its runs, nested as in a config file, over the suite's."""

    @model_validator(mode="after")
    def _check_range(self) -> Game:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range={list(self.range)}: [least, greatest] is expected")
        return self


def _written_out(value: Any) -> Any:
    return {"env": value} if isinstance(value, str) else value


class Suite(Section):
    about: str = ""
    games: dict[str, Annotated[Game, BeforeValidator(_written_out)]] = {}
    """By the name they have in tables and run names."""
    procgen: Literal["easy", "hard"] | None = None
    """Instead of `games`: all of Procgen, with the score ranges of this mode."""
    total_steps: Positive | None = None
    """Budget of a run; None: that of the preset."""
    episodes: Positive = 100
    """Of the evaluation at the end of a run."""
    stochastic: bool = False
    """Evaluate with sampled actions instead of the most likely ones."""
    preset: dict[str, str] = {}
    """By algorithm; one that is not listed takes the environment's own, as `paceline train` does."""
    settings: dict[str, Any] = {}
    """Settings of all runs, nested as in a config file."""

    @model_validator(mode="after")
    def _check_games(self) -> Suite:
        if bool(self.games) == bool(self.procgen):
            raise ValueError("either games or procgen is expected")
        for name in self.games:
            if not _GAME_NAME.fullmatch(name):
                raise ValueError(f"games: {name!r} cannot be part of a run's name: use letters, digits and . _ +")
        for algo in self.preset:
            if algo not in ALGORITHM_NAMES:
                raise ValueError(f"preset: {algo!r} is not one of {', '.join(ALGORITHM_NAMES)}")
        return self


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    game: str
    env: str
    algo: str
    seed: int
    range: Range | None
    episodes: int
    stochastic: bool
    preset: str | None
    sets: tuple[str, ...]
    total_steps: int | None
    out: Path = field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.game}-{self.algo}-s{self.seed}"

    @property
    def path(self) -> Path:
        return self.out / self.name

    @property
    def train_words(self) -> list[str]:
        words = ["train", "--algo", self.algo, "--env", self.env, "--seed", str(self.seed)]
        words += ["--preset", self.preset] if self.preset else []
        words += ["--total-steps", str(self.total_steps)] if self.total_steps else []
        words += [word for item in self.sets for word in ("--set", item)]
        return [*words, "--out", str(self.out), "--name", self.name, "--resume", "auto"]

    @property
    def evaluate_words(self) -> list[str]:
        # The last checkpoint and not the best: choosing by a score would flatter it. The seed of the run, so that no
        # two runs of an algorithm share their luck with the episodes.
        words = ["evaluate", str(self.path), "--checkpoint", "last", "--episodes", str(self.episodes)]
        return [*words, "--seed", str(self.seed), *(["--stochastic"] if self.stochastic else [])]

    @cached_property
    def given(self) -> dict[str, Any]:
        """The settings that the words of `train` name."""
        tree = parse_sets(self.sets)
        for key, value in {"algo": self.algo, "env.id": self.env, "seed": self.seed}.items():
            put(tree, key, value)
        if self.total_steps:
            put(tree, "stop.total_steps", self.total_steps)
        return tree

    @cached_property
    def config(self) -> RunConfig:
        """What the run will have; a UserError if it cannot be."""
        return resolve_tree(self.given, preset=self.preset)[0]

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The level sets that `evaluate` will play."""
        from paceline.env.procgen import all_levels, game_of

        if game_of(self.env) is None:
            return (EVERYTHING,)
        return LEVEL_SETS if all_levels(self.config.env) is not None else LEVEL_SETS[:1]

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """What was asked for that the run with these settings does not have: `key=value, not …`; None if nothing."""
        before = to_tree(validate(saved))
        after = to_tree(validate(merge(before, tidy(without_auto(self.given)))))
        after["preset"] = self.config.preset
        for key, value in _leaves(after):
            if key.partition(".")[0] not in MOVABLE:
                was = _absolute(_at(before, key))
                if was != _absolute(value):
                    return f"{key}={was}, not {value}"
        return None


def suite_names() -> list[str]:
    folder = resources.files("paceline.bench").joinpath("suites")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_suite(name: str) -> tuple[str, Suite]:
    """One of ours by its name, or a file; with the name it has in results."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        try:
            text, shown = path.read_text(encoding="utf-8"), path.stem
        except FileNotFoundError:
            raise UserError(f"--suite {name}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--suite {name}: cannot be read ({error})") from None
    elif name in suite_names():
        text, shown = resources.files("paceline.bench").joinpath("suites", f"{name}.yaml").read_text("utf-8"), name
    else:
        raise UserError(f"--suite {name} is not one of {', '.join(suite_names())}, nor a .yaml file")
    try:
        tree = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"--suite {name}{where}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"--suite {name}: a mapping with games is expected, not {type(tree).__name__}")
    try:
        suite = Suite.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        hint = f"; allowed: {', '.join(Suite.model_fields)}" if first["type"] == "extra_forbidden" else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"--suite {name}: {f'{key}: ' if key else ''}{reason}{hint}") from None
    return shown, suite


def games_of(suite: Suite) -> dict[str, Game]:
    if suite.procgen is None:
        return suite.games
    from paceline.env.procgen import SCORE_RANGES

    ranges = SCORE_RANGES[suite.procgen]
    return {name: Game(env=f"procgen:procgen-{name}-v0", range=ranges[name]) for name in sorted(ranges)}


def plan(
    suite: Suite,
    *,
    out: Path,
    algos: Sequence[str],
    seeds: int,
    games: Sequence[str] | None = None,
    total_steps: int | None = None,
    episodes: int | None = None,
    sets: Sequence[str] = (),
) -> list[Cell]:
    """The runs in the order they are made: a seed of everything before the next, so that a table has all games early.

    Every setting is checked here, before the first run.
    """
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: at least 1")
    if episodes is not None and episodes < 1:
        raise UserError(f"--episodes {episodes}: at least 1")
    known = games_of(suite)
    chosen = list(known) if games is None else _choice("--games", games, list(known))
    algos = _choice("--algos", algos, list(ALGORITHM_NAMES))
    for item in sets:
        key, section = item.partition("=")[0].strip(), item.partition(".")[0]
        if key in DECIDED:
            raise UserError(f"--set {item}: in a suite {DECIDED[key]} decides that, not --set")
        if section in ALGORITHM_NAMES and section not in algos:
            raise UserError(f"--set {item} is a setting of {section}, and --algos has {', '.join(algos)}")
    cells = [
        Cell(
            game=name,
            env=known[name].env,
            algo=algo,
            seed=seed,
            range=known[name].range,
            episodes=episodes or suite.episodes,
            stochastic=suite.stochastic,
            preset=suite.preset.get(algo),
            sets=tuple(_sets_for(algo, _settings(suite, known[name]), sets)),
            total_steps=total_steps or known[name].total_steps or suite.total_steps,
            out=out,
        )
        for seed in range(seeds)
        for name in chosen
        for algo in algos
    ]
    for cell in cells:
        _ = cell.levels  # needs the config, so that is made here too
        mode = cell.config.env.kwargs.get("distribution_mode", "easy")
        if suite.procgen and mode != suite.procgen:
            raise UserError(
                f"distribution_mode={mode}: the score ranges of this suite are those of {suite.procgen} mode"
            )
    return cells


def _settings(suite: Suite, game: Game) -> dict[str, Any]:
    tree = merge(suite.settings, game.settings)
    if suite.procgen is None:
        return tree
    kwargs = {"distribution_mode": suite.procgen, **(_at(tree, "env.kwargs") or {})}
    return merge(tree, {"env": {"kwargs": kwargs}})


def _sets_for(algo: str, settings: Mapping[str, Any], sets: Sequence[str]) -> Iterator[str]:
    """The suite's settings as words, then the user's; those of another algorithm are for its runs."""
    words = [f"{key}={json.dumps(value)}" for key, value in _leaves(settings)]
    for item in [*words, *sets]:
        section = item.partition(".")[0]
        if section == algo or section not in ALGORITHM_NAMES:
            yield item


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); kwargs are one value, as in `merge`."""
    for key, value in tree.items():
        if isinstance(value, dict) and key != "kwargs":
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _at(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _absolute(value: Any) -> Any:
    """With the user's files named as a run names them."""
    if isinstance(value, str):
        return absolute(value)
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    if isinstance(value, dict):
        return {_absolute(key): _absolute(item) for key, item in value.items()}
    return value


def _choice(flag: str, words: Iterable[str], known: list[str]) -> list[str]:
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
