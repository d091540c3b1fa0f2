"""A search space, as its YAML file says it, and the points that are drawn from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import SECTIONS, UserError, parse_count
from paceline.resolve import read_file

KINDS = ("uniform", "log", "int")  # every value, every magnitude, every whole number alike
MANY = 100_000  # combinations of lists, beyond which they are drawn and not counted out
FIXED = ("optimizer", "dueling", "exploration", "noisy_deviation", "prioritized", "replay", "replay_size")
"""Settings of algorithms by which the arrays of a checkpoint are made: with others it cannot be continued."""
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
            return self._short(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self._short(rng.uniform(self.low, self.high))

    def clamp(self, value: Any) -> Any:
        """The nearest that is in the range."""
        return round(self._inside(value)) if self.kind == "int" else self._short(value)

    def _short(self, value: float) -> float:
        """Four digits are enough to search with, and can be read; more where all of the range begins alike."""
        digits = 4 + max(0, math.floor(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low))))
        return float(self._inside(float(f"{value:.{digits}g}")))

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)


Space = dict[str, Choice | Range]


def read_space(path: str | Path) -> Mapping[str, Any]:
    """The file as it is written, by dotted keys."""
    try:
        tree = read_file(path)
    except UserError as error:
        raise UserError(str(error).replace("--config", "--space", 1)) from None
    raw = dict(_flat(tree))
    if not raw:
        raise UserError(f"--space {path}: it is empty; a line is KEY: {_FORMS}")
    return raw


def parse_space(raw: Mapping[str, Any], algo: str, *, pbt: bool = False) -> Space:
    """What each key may be. Keys and values are checked against the config with the points, by whoever makes runs of
    them; here what only a search can get wrong."""
    for key in raw:
        section = key.partition(".")[0]
        if key in ("seed", "seeds"):
            raise UserError(f"--space {key}: seeds are not searched but averaged over; give --seeds N")
        if section in SECTIONS and section != algo:
            raise UserError(f"--space {key} is a setting of --algo {section}, and this search is of --algo {algo}")
        if section not in ("env", "model", algo) or key == "env.id":
            raise UserError(f"--space {key}: a search is over settings of env, model and {algo}, on one environment")
        if pbt and section != algo:
            raise UserError(f"--space {key}: pbt changes settings while a run goes on, which only those of {algo} can")
        if pbt and key.partition(".")[2] in FIXED:
            raise UserError(
                f"--space {key}: a checkpoint is made for one value of it, so pbt cannot change it in a run"
            )
    return {key: _domain(key, said) for key, said in raw.items()}


def combinations(space: Space) -> int | None:
    """How many there are; None: a range has no end of values."""
    sizes = [len(domain.values) for domain in space.values() if isinstance(domain, Choice)]
    return math.prod(sizes) if len(sizes) == len(space) else None


def points(space: Space, count: int | None, seed: int, *, again: bool = False) -> list[Point]:
    """`count` of them, drawn; without a number, all combinations of what has to be lists. `again`: each of those may be
    drawn once more when all have been; else there are no more points than combinations."""
    total = combinations(space)
    if count is None:
        if total is None:
            key = next(key for key, domain in space.items() if isinstance(domain, Range))
            raise UserError(f"--space {key}: a range has no end of values; give --trials N, or a list")
        if total > MANY:
            raise UserError(f"--space: it has {total:,} combinations; give --trials N to draw some of them")
        return list(_grid(space))
    rng = np.random.default_rng(seed)
    if total is not None and total <= MANY:
        grid = list(_grid(space))
        rounds = math.ceil(count / total) if again else 1
        return [grid[i] for i in np.concatenate([rng.permutation(total) for _ in range(rounds)])[:count]]
    return [{key: domain.draw(rng) for key, domain in space.items()} for _ in range(count)]


def _grid(space: Space) -> Iterator[Point]:
    for values in itertools.product(*(domain.values for domain in space.values() if isinstance(domain, Choice))):
        yield dict(zip(space, values, strict=True))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Sections may be nested, as in a config file."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value and not set(value) & set(KINDS):
            yield from _flat(value, f"{dotted}.")
        else:
            yield dotted, value


def _domain(key: str, said: Any) -> Choice | Range:
    if isinstance(said, list):
        if not said:
            raise UserError(f"--space {key}: the list is empty")
        return Choice(tuple(said))
    if not isinstance(said, dict) or len(said) != 1 or next(iter(said)) not in KINDS:
        raise UserError(f"--space {key}: {said!r} is not {_FORMS}")
    kind, bounds = next(iter(said.items()))
    numbers = [parse_count(bound) for bound in bounds] if isinstance(bounds, list) else []
    if len(numbers) != 2 or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise UserError(f"--space {key}: {kind} takes two numbers, [low, high], not {bounds!r}")
    low, high = numbers
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"--space {key}: {kind}: {bounds!r} is not [low, high] with low below high")
    if kind == "log" and low <= 0:
        raise UserError(f"--space {key}: log: {bounds!r} has no magnitudes at or below 0")
    if kind == "int" and not (isinstance(low, int) and isinstance(high, int)):
        raise UserError(f"--space {key}: int: {bounds!r} are not whole numbers")
    return Range(kind, low, high)
