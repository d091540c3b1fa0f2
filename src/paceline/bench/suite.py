"""`paceline bench suite`: games x algorithms x seeds, trained and evaluated, each an ordinary `paceline train`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict, Unpack

from pydantic import BeforeValidator, model_validator

from paceline.bench import suite_tables
from paceline.bench.planned_run import (
    PlannedRun,
    algorithm_choice,
    check_sets,
    choice,
    parse_model,
    read_yaml,
    sets_for,
    value_at,
)
from paceline.bench.runner import Benchmark, Entry, run_benchmark
from paceline.config import Positive, Section, UserError, algorithm_name, native_algorithms
from paceline.config.resolve import merge
from paceline.config.yaml_text import parse_mapping
from paceline.results.run_files import FAILED, FINISHED
from paceline.results.runs import RunData, load_run
from paceline.results.suite_scores import normalised, suite_result

Range = tuple[float, float]
ALL_LEVELS = "all"
"""The level set of an environment without levels."""
LEVEL_SETS = ("train", "test")
# Settings that a suite decides, and the flag that does.
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
MAX_SEEDS = 1_000
_GAME_NAME = re.compile(r"[A-Za-z0-9][\w.+]*")


class Game(Section):
    """One environment of a suite. `CartPole-v1` is short for `{env: CartPole-v1}`."""

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
            raise ValueError(f"range={list(self.range)}: expected [least, greatest]")
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
    """Episodes of the evaluation at the end of a run."""
    stochastic: bool = False
    """Evaluate with sampled actions instead of the most likely ones."""
    preset: dict[str, str] = {}
    """By algorithm; the others take the environment's own, as `paceline train` does."""
    settings: dict[str, Any] = {}
    """Settings of all runs, nested as in a config file."""

    @model_validator(mode="after")
    def _check_games(self) -> Suite:
        if bool(self.games) == bool(self.procgen):
            raise ValueError("expected either games or procgen")
        for name in self.games:
            if not _GAME_NAME.fullmatch(name):
                raise ValueError(f"games: {name!r} cannot be part of a run's name: use letters, digits and . _ +")
        for algo in self.preset:
            if algo not in native_algorithms():
                raise ValueError(f"preset: {algo!r} is not one of {', '.join(native_algorithms())}")
        return self

    @property
    def all_games(self) -> dict[str, Game]:
        """`games`, or those of Procgen."""
        if self.procgen is None:
            return self.games
        from paceline.envs.procgen import SCORE_RANGES

        ranges = SCORE_RANGES[self.procgen]
        return {name: Game(env=f"procgen:procgen-{name}-v0", range=ranges[name]) for name in sorted(ranges)}

    def settings_of(self, game: Game) -> dict[str, Any]:
        tree = merge(self.settings, game.settings)
        if self.procgen is None:
            return tree
        kwargs = {"distribution_mode": self.procgen, **(value_at(tree, "env.kwargs") or {})}
        return merge(tree, {"env": {"kwargs": kwargs}})


@dataclass(frozen=True)
class SuiteRun(PlannedRun):
    """One game, algorithm and seed."""

    game: str
    range: Range | None
    episodes: int
    stochastic: bool
    total_steps: int | None

    @property
    def name(self) -> str:
        return f"{self.game}-{algorithm_name(self.algo)}-s{self.seed}"

    @property
    def planned(self) -> dict[str, Any]:
        return {"stop.total_steps": self.total_steps} if self.total_steps else {}

    @property
    def evaluate_words(self) -> list[str]:
        # The last checkpoint, since choosing the best by its score would flatter it. The seed of the run, so that no
        # two runs of an algorithm are evaluated in the same episodes.
        words = ["evaluate", str(self.path), "--checkpoint", "last", "--episodes", str(self.episodes)]
        return [*words, "--seed", str(self.seed), *(["--stochastic"] if self.stochastic else [])]

    @property
    def commands(self) -> dict[str, list[str]]:
        return {"training": self.train_words, "evaluation": self.evaluate_words}

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The level sets that `evaluate` plays."""
        from paceline.envs.procgen import all_levels, game_of

        if game_of(self.env) is None:
            return (ALL_LEVELS,)
        return LEVEL_SETS if all_levels(self.config.env) is not None else LEVEL_SETS[:1]


def suite_names() -> list[str]:
    folder = resources.files("paceline.bench").joinpath("suites")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_suite(name: str) -> tuple[str, Suite]:
    """A suite of the package by its name, or a file; with the name it has in results."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).stem, read_yaml("--suite", name, Suite)
    if name not in suite_names():
        raise UserError(f"--suite {name} is not one of {', '.join(suite_names())}, nor a .yaml file")
    text = resources.files("paceline.bench").joinpath("suites", f"{name}.yaml").read_text("utf-8")
    return name, parse_model(f"--suite {name}", parse_mapping(text, f"--suite {name}"), Suite)


def known_range(env: str, kwargs: Mapping[str, Any]) -> Range | None:
    """The returns that count as 0 and as 1, if a suite of the package or Procgen's paper has them."""
    from paceline.envs.procgen import SCORE_RANGES, game_of

    game = game_of(env)
    if game is not None:
        return SCORE_RANGES.get(kwargs.get("distribution_mode", "easy"), {}).get(game)
    suites = [suite for name in suite_names() if (suite := load_suite(name)[1]).procgen is None]
    return next((game.range for suite in suites for game in suite.games.values() if game.env == env), None)


class SuiteOptions(TypedDict, total=False):
    """What the command line chooses of a suite."""

    algos: Required[Sequence[str]]
    seeds: Required[int]
    games: Sequence[str] | None
    total_steps: int | None
    episodes: int | None
    sets: Sequence[str]


def plan_suite(suite: Suite, out: Path, **options: Unpack[SuiteOptions]) -> list[SuiteRun]:
    """The runs in the order they are made: one seed of everything before the next, so that a table has all games early.

    All settings are checked here, before the first run.
    """
    seeds, episodes, sets = options["seeds"], options.get("episodes"), options.get("sets", ())
    if not 1 <= seeds <= MAX_SEEDS:
        raise UserError(f"--seeds {seeds}: at least 1 and at most {MAX_SEEDS:,}")
    if episodes is not None and episodes < 1:
        raise UserError(f"--episodes {episodes}: at least 1")
    known, games = suite.all_games, options.get("games")
    chosen = list(known) if games is None else choice("--games", games, list(known))
    algos = algorithm_choice(options["algos"], native_algorithms())
    check_sets(sets, DECIDED, algos)
    runs = [
        SuiteRun(
            game=name,
            env=known[name].env,
            algo=algo,
            seed=seed,
            range=known[name].range,
            episodes=episodes or suite.episodes,
            stochastic=suite.stochastic,
            preset=suite.preset.get(algo),
            sets=tuple(sets_for(algo, algos, suite.settings_of(known[name]), sets)),
            total_steps=options.get("total_steps") or known[name].total_steps or suite.total_steps,
            out=out,
        )
        for seed in range(seeds)
        for name in chosen
        for algo in algos
    ]
    for run in runs:
        _ = run.levels  # resolves and checks the config too
        mode = run.config.env.kwargs.get("distribution_mode", "easy")
        if suite.procgen and mode != suite.procgen:
            raise UserError(
                f"distribution_mode={mode}: the score ranges of this suite are those of {suite.procgen} mode"
            )
    return runs


def run_suite(
    name: str,
    *,
    out: str | None = None,
    retry: bool = False,
    dry_run: bool = False,
    **options: Unpack[SuiteOptions],
) -> int:
    """Make what is missing, write `suite.json` and `suite.md`, and return the exit status."""
    title, suite = load_suite(name)
    folder = Path(out or f"runs/{title}").expanduser()
    runs = plan_suite(suite, folder, **options)
    words = ["--suite", name, "--algos", ",".join(options["algos"]), "--seeds", str(options["seeds"])]
    games = options.get("games")
    words += ["--games", ",".join(games)] if games is not None else []
    for flag, value in (
        ("--total-steps", options.get("total_steps")),
        ("--episodes", options.get("episodes")),
        ("--out", out),
    ):
        words += [flag, str(value)] if value is not None else []
    words += [word for item in options.get("sets", ()) for word in ("--set", item)]
    return run_benchmark(SuiteBenchmark(folder, title, suite.about, runs, words), retry=retry, dry_run=dry_run)


class SuiteBenchmark(Benchmark[SuiteRun]):
    kind = "suite"
    no_result = "evaluation: it left no row in eval.jsonl"
    text = suite_tables

    def read(self, run: SuiteRun, before: Entry | None) -> Entry:
        return read_entry(run, before)

    def result(self) -> dict[str, Any]:
        return suite_result(self.title, self.about, self.commands, list(self.entries.values()))


def read_entry(run: SuiteRun, before: Entry | None) -> Entry:
    """The entry of a run. `interrupted` includes runs that are trained but not evaluated."""
    data = load_run(run.path) if (run.path / "config.yaml").is_file() else None
    trained = data is not None and _is_trained(run, data)
    evaluations = _evaluations(run, data) if data is not None and trained else {}
    entry: Entry = {
        **{key: getattr(run, key) for key in ("name", "game", "env", "algo", "seed", "episodes", "stochastic")},
        "state": "missing",
        "reason": None,
        "trained": trained,
        "range": None if run.range is None else list(run.range),
        "levels": list(run.levels),
        "train": shlex.join(["paceline", *run.train_words]),
        "evaluate": shlex.join(["paceline", *run.evaluate_words]),
    }
    if data is not None and set(evaluations) >= set(run.levels):
        entry["state"] = "done"
        entry["returns"] = {level: evaluations[level]["return_mean"] for level in run.levels}
        entry["scores"] = {level: normalised(value, run.range) for level, value in entry["returns"].items()}
        for name in ("env_steps", "steps_per_second", "wall_seconds", "train_seconds", "resumed", "peak_memory_bytes"):
            entry[name] = data.summary.get(name)
        entry["machine"] = data.machine
    elif before is not None and before["state"] == "failed":
        entry["state"], entry["reason"] = "failed", before["reason"]
    elif data is not None:
        failed = data.state == FAILED
        entry["state"], entry["reason"] = ("failed", data.reason) if failed else ("interrupted", None)
    return entry


def _is_trained(run: SuiteRun, data: RunData) -> bool:
    """Whether it finished with at least the budget that is asked for now."""
    had, wanted = data.section("stop").get("total_steps"), run.config.stop.total_steps
    enough = had is None or wanted is None or had >= wanted
    return data.state == FINISHED and data.summary.get("status") == "done" and enough


def _evaluations(run: SuiteRun, data: RunData) -> dict[str, dict[str, Any]]:
    """By level set, the newest evaluation of this checkpoint with this run's episodes and seed."""
    wanted = {
        "kind": "stochastic" if run.stochastic else "deterministic",
        "episodes": run.episodes,
        "seed": run.seed,
        "env_steps": data.summary.get("env_steps"),
    }
    return {
        str(row.get("levels") or ALL_LEVELS): row
        for row in data.evaluations
        if all(row.get(key) == value for key, value in wanted.items())
    }
