"""A suite (a small YAML file) and what was asked of it → the runs to make, each an ordinary `paceline train`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from paceline.bench.cell import PlannedRun, at, choice, parse_yaml, read_yaml, sets_for
from paceline.config import ALGORITHM_NAMES, Positive, Section, UserError
from paceline.resolve import merge

Range = tuple[float, float]
EVERYTHING = "all"  # what an environment without level sets is evaluated on
LEVEL_SETS = ("train", "test")
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
class Cell(PlannedRun):
    """One run of the matrix."""

    game: str
    range: Range | None
    episodes: int
    stochastic: bool
    total_steps: int | None

    @property
    def name(self) -> str:
        return f"{self.game}-{self.algo}-s{self.seed}"

    @property
    def budget(self) -> dict[str, Any]:
        return {"stop.total_steps": self.total_steps} if self.total_steps else {}

    @property
    def evaluate_words(self) -> list[str]:
        # The last checkpoint and not the best: choosing by a score would flatter it. The seed of the run, so that no
        # two runs of an algorithm share their luck with the episodes.
        words = ["evaluate", str(self.path), "--checkpoint", "last", "--episodes", str(self.episodes)]
        return [*words, "--seed", str(self.seed), *(["--stochastic"] if self.stochastic else [])]

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The level sets that `evaluate` will play."""
        from paceline.env.procgen import all_levels, game_of

        if game_of(self.env) is None:
            return (EVERYTHING,)
        return LEVEL_SETS if all_levels(self.config.env) is not None else LEVEL_SETS[:1]


def suite_names() -> list[str]:
    folder = resources.files("paceline.bench").joinpath("suites")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_suite(name: str) -> tuple[str, Suite]:
    """One of ours by its name, or a file; with the name it has in results."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).stem, read_yaml("--suite", name, Suite)
    if name not in suite_names():
        raise UserError(f"--suite {name} is not one of {', '.join(suite_names())}, nor a .yaml file")
    text = resources.files("paceline.bench").joinpath("suites", f"{name}.yaml").read_text("utf-8")
    return name, parse_yaml("--suite", name, text, Suite)


def games_of(suite: Suite) -> dict[str, Game]:
    if suite.procgen is None:
        return suite.games
    from paceline.env.procgen import SCORE_RANGES

    ranges = SCORE_RANGES[suite.procgen]
    return {name: Game(env=f"procgen:procgen-{name}-v0", range=ranges[name]) for name in sorted(ranges)}


def known_range(env: str, kwargs: Mapping[str, Any]) -> Range | None:
    """The returns that count as 0 and as 1, where one of our suites or Procgen's paper has them."""
    from paceline.env.procgen import SCORE_RANGES, game_of

    game = game_of(env)
    if game is not None:
        return SCORE_RANGES.get(kwargs.get("distribution_mode", "easy"), {}).get(game)
    suites = [suite for name in suite_names() if (suite := load_suite(name)[1]).procgen is None]
    return next((game.range for suite in suites for game in suite.games.values() if game.env == env), None)


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
    chosen = list(known) if games is None else choice("--games", games, list(known))
    algos = choice("--algos", algos, list(ALGORITHM_NAMES))
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
            sets=tuple(sets_for(algo, _settings(suite, known[name]), sets)),
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
    kwargs = {"distribution_mode": suite.procgen, **(at(tree, "env.kwargs") or {})}
    return merge(tree, {"env": {"kwargs": kwargs}})
