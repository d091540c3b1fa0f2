"""Statistics of `paceline bench suite`: scores by game and algorithm, aggregates over games. Makes `suite.json`.

An entry is one run: `name, game, algo, seed, state, reason, levels, range`, and if it is done `returns, scores,
env_steps, steps_per_second, wall_seconds, machine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.stats import improvement_interval, iqm, probability_of_improvement, stratified_bootstrap_interval

Entry = dict[str, Any]


def normalised(value: float, range_: Sequence[float] | None) -> float | None:
    return None if range_ is None else (value - range_[0]) / (range_[1] - range_[0])


def suite_result(title: str, about: str, commands: list[str], entries: list[Entry]) -> dict[str, Any]:
    """The content of `suite.json`. Only runs that are done count in a figure."""
    done = [entry for entry in entries if entry["state"] == "done"]
    algos = list(dict.fromkeys(entry["algo"] for entry in entries))
    games = list(dict.fromkeys(entry["game"] for entry in entries))
    levels = list(dict.fromkeys(level for entry in entries for level in entry["levels"]))
    rows = [_game_row(game, algo, _select(entries, game=game, algo=algo)) for game in games for algo in algos]
    ranged = [game for game in games if all(entry["range"] for entry in _select(entries, game=game))]
    strata = {
        (algo, level): {
            game: [entry["scores"][level] for entry in runs]
            for game in ranged
            if (runs := [entry for entry in _select(done, game=game, algo=algo) if level in entry["levels"]])
        }
        for algo in algos
        for level in levels
    }
    return {
        "suite": title,
        "about": about,
        "commands": commands,
        "games": [row for row in rows if row["runs"]],
        "aggregates": [_aggregate(algo, level, by, games) for (algo, level), by in strata.items() if by],
        "improvements": [
            _improvement(a, b, level, strata[a, level], strata[b, level])
            for level in levels
            for number, a in enumerate(algos)
            for b in algos[number + 1 :]
            # Scores over different games cannot be compared.
            if set(strata[a, level]) == set(strata[b, level]) == set(ranged) and ranged
        ],
        "unranged": [game for game in games if game not in ranged],
        "runs": entries,
    }


def _select(entries: Iterable[Entry], **wanted: Any) -> list[Entry]:
    return [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]


def _game_row(game: str, algo: str, entries: list[Entry]) -> dict[str, Any]:
    done, failed = _select(entries, state="done"), len(_select(entries, state="failed"))
    levels = list(dict.fromkeys(level for entry in done for level in entry["levels"]))
    return {
        "game": game,
        "algo": algo,
        "runs": len(entries),
        "done": len(done),
        "failed": failed,
        "missing": len(entries) - len(done) - failed,
        "env_steps": [entry["env_steps"] for entry in done],
        "returns": {level: _spread([entry["returns"][level] for entry in done]) for level in levels},
        "scores": {level: _spread([entry["scores"][level] for entry in done]) for level in levels},
        "steps_per_second": _mean(entry["steps_per_second"] for entry in done),
        "wall_seconds": _mean(entry["wall_seconds"] for entry in done),
    }


def _aggregate(algo: str, level: str, by_game: dict[str, list[float]], games: list[str]) -> dict[str, Any]:
    strata = list(by_game.values())
    # With one run per game there is nothing to resample, and an interval of zero width would mislead.
    low, high = stratified_bootstrap_interval(strata) if max(map(len, strata)) > 1 else (None, None)
    return {
        "algo": algo,
        "levels": level,
        "iqm": iqm([score for scores in strata for score in scores]),
        "low": low,
        "high": high,
        "mean": _mean(_mean(scores) for scores in strata),
        "runs": sum(map(len, strata)),
        "games": len(by_game),
        "without": [game for game in games if game not in by_game],
    }


def _improvement(
    a: str, b: str, level: str, of_a: dict[str, list[float]], of_b: dict[str, list[float]]
) -> dict[str, Any]:
    x, y = list(of_a.values()), [of_b[game] for game in of_a]
    low, high = improvement_interval(x, y) if max(map(len, [*x, *y])) > 1 else (None, None)
    probability = probability_of_improvement(x, y)
    return {"algo": a, "over": b, "levels": level, "probability": probability, "low": low, "high": high}


def _spread(values: list[float | None]) -> dict[str, float | None] | None:
    """Mean and standard deviation (N - 1) over runs."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return {"mean": mean, "std": None}
    return {"mean": mean, "std": math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1))}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
