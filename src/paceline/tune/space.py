"""A search space, as its YAML file states it, and the points drawn from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import ALGORITHMS, UserError, parse_count
from paceline.config.resolve import read_file

KINDS = ("uniform", "log", "int")  # all numbers, all magnitudes, all whole numbers are equally likely
MAX_GRID = 100_000  # combinations; larger grids are sampled, never listed
FIXED = ("optimizer", "dueling", "exploration", "noisy_deviation", "prioritized", "replay", "replay_size")
"""Settings of algorithms that decide which arrays a checkpoint has: a run cannot continue with another value."""
_FORMS = "a list of values, or one of {uniform: [low, high]}, {log: [low, high]}, {int: [low, high]}"

Point = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        return self.values[int(rng.integers(len(self.values)))]

    def clamp(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Range:
    kind: str
    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> Any:
        if self.kind == "int":
            return int(rng.integers(int(self.low), int(self.high), endpoint=True))
        if self.kind == "log":
            return self.clamp(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self.clamp(rng.uniform(self.low, self.high))

    def clamp(self, value: float) -> Any:
        """The nearest value in the range. It has four digits, or as many more as a narrow range needs."""
        if self.kind == "int":
            return round(min(max(value, self.low), self.high))
        digits = 4 + max(0, math.floor(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low))))
        return float(min(max(float(f"{value:.{digits}g}"), self.low), self.high))


Space = dict[str, Choice | Range]


def read_space(path: str | Path) -> Mapping[str, Any]:
    """The content of the file, by dotted keys."""
    try:
        raw = dict(_flatten(read_file(path)))
    except UserError as error:
        raise UserError(str(error).replace("--config", "--space", 1)) from None
    if not raw:
        raise UserError(f"--space {path}: the file is empty; each line is KEY: {_FORMS}")
    return raw


def parse_space(raw: Mapping[str, Any], algo: str, *, pbt: bool = False) -> Space:
    """The values that each key may take. Whether a key exists and a value is allowed is checked with the trials."""
    for key in raw:
        section, _, setting = key.partition(".")
        if key in ("seed", "seeds"):
            raise UserError(f"--space {key}: a search averages over seeds; give --seeds N")
        if section in ALGORITHMS and section != algo:
            raise UserError(f"--space {key} is a setting of --algo {section}, but this search uses --algo {algo}")
        if section not in ("env", "model", algo) or key == "env.id":
            raise UserError(f"--space {key}: only settings of env (except env.id), model and {algo} can be searched")
        if pbt and section != algo:
            raise UserError(
                f"--space {key}: pbt changes settings during a run, which is possible only for those of {algo}"
            )
        if pbt and setting in FIXED:
            raise UserError(f"--space {key}: checkpoints depend on its value, so pbt cannot change it during a run")
    return {key: _domain(key, value) for key, value in raw.items()}


def combinations(space: Space) -> int | None:
    """The size of the grid; None where the space has a range."""
    sizes = [len(domain.values) for domain in space.values() if isinstance(domain, Choice)]
    return math.prod(sizes) if len(sizes) == len(space) else None


def points(space: Space, count: int | None, seed: int, *, repeat: bool = False) -> list[Point]:
    """`count` points drawn at random; with None the whole grid. A grid is drawn from without replacement, so there may
    be fewer than `count`; with `repeat` it is drawn from again."""
    total = combinations(space)
    if count is None:
        if total is None:
            key = next(key for key, domain in space.items() if isinstance(domain, Range))
            raise UserError(f"--space {key}: a range has infinitely many values; give --trials N, or a list")
        if total > MAX_GRID:
            raise UserError(f"--space: there are {total:,} combinations; give --trials N to draw some of them")
        return list(_grid(space))
    rng = np.random.default_rng(seed)
    if total is not None and total <= MAX_GRID:
        grid = list(_grid(space))
        passes = math.ceil(count / total) if repeat else 1
        return [grid[i] for i in np.concatenate([rng.permutation(total) for _ in range(passes)])[:count]]
    return [{key: domain.draw(rng) for key, domain in space.items()} for _ in range(count)]


def _grid(space: Space) -> Iterator[Point]:
    for values in itertools.product(*(domain.values for domain in space.values() if isinstance(domain, Choice))):
        yield dict(zip(space, values, strict=True))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Sections may be nested, as in a config file."""
    for key, value in tree.items():
        if isinstance(value, dict) and value and not set(value) & set(KINDS):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _domain(key: str, raw: Any) -> Choice | Range:
    if isinstance(raw, list):
        if not raw:
            raise UserError(f"--space {key}: the list is empty")
        return Choice(tuple(raw))
    if not isinstance(raw, dict) or len(raw) != 1 or next(iter(raw)) not in KINDS:
        raise UserError(f"--space {key}: {raw!r} is not {_FORMS}")
    kind, bounds = next(iter(raw.items()))
    numbers = [parse_count(bound) for bound in bounds] if isinstance(bounds, list) else []
    if len(numbers) != 2 or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise UserError(f"--space {key}: {kind} takes two numbers, [low, high], not {bounds!r}")
    low, high = numbers
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"--space {key}: {kind}: {bounds!r} is not [low, high] with low below high")
    if kind == "log" and low <= 0:
        raise UserError(f"--space {key}: log: {bounds!r} must be above 0")
    if kind == "int" and not (isinstance(low, int) and isinstance(high, int)):
        raise UserError(f"--space {key}: int: {bounds!r} are not whole numbers")
    return Range(kind, low, high)
