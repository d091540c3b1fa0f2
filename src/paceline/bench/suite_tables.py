"""The results of a suite in Markdown: games, aggregates, and what is missing."""

from __future__ import annotations

from typing import Any

from paceline.bench.tables import introduction, not_done, runs_cell
from paceline.bench.tables import page as benchmark_page
from paceline.config import algorithm_name
from paceline.results.text import UNKNOWN, bullets, counts, fixed, interval, table
from paceline.run.console import duration

Row = dict[str, Any]
LEVELS = {"all": "", "train": "training levels", "test": "all levels"}


def page(result: Row) -> str:
    """`suite.md`."""
    commands = [entry[verb] for entry in result["runs"] for verb in ("train", "evaluate")]
    return benchmark_page(f"Suite {result['suite']}", tables(result), commands)


def tables(result: Row) -> str:
    entries = result["runs"]
    levels = list(dict.fromkeys(level for entry in entries for level in entry["levels"]))
    episodes = " or ".join(map(str, sorted({entry["episodes"] for entry in entries})))
    actions = " or ".join(sorted({"sampled" if entry["stochastic"] else "most likely" for entry in entries}))
    parts = [*introduction(result), _games(result["games"], levels)]
    parts.append(
        f"Returns are means over {episodes} evaluation episodes of the last checkpoint, with {actions} actions: mean ± "
        "standard deviation over runs. Normalised: 0 and 1 are the ends of the game's range. Steps per second and wall "
        "time are means over runs; only the wall time includes the start."
    )
    if result["aggregates"]:
        parts.append(_aggregates(result["aggregates"]))
        parts.append("IQM: mean of the middle half of all runs. Intervals: bootstrap over the runs of each game.")
    if result["improvements"]:
        parts.append(_improvements(result["improvements"]))
    missing = not_done(entries)
    if result["unranged"]:
        missing.append(f"no score range, so in no aggregate: {', '.join(result['unranged'])}")
    parts += [f"Not in these figures:\n\n{bullets(missing)}"] if missing else []
    return "\n\n".join(parts) + "\n"


def summary_line(entry: Row) -> str:
    """A finished run in a few words."""
    returns = ", ".join(
        f"{'' if level == 'all' else f'{level} '}{value:.2f}" for level, value in entry["returns"].items()
    )
    rate = entry["steps_per_second"] or 0.0
    return f"return {returns} | {entry['env_steps']:,} steps, {rate:,.0f} steps/s, {duration(entry['wall_seconds'])}"


def _games(rows: list[Row], levels: list[str]) -> str:
    head = ["game", "algorithm", "runs", "steps"]
    head += [
        f"{what}{', ' * bool(LEVELS[level])}{LEVELS[level]}" for what in ("return", "normalised") for level in levels
    ]
    body = [
        [
            row["game"],
            algorithm_name(row["algo"]),
            runs_cell(row["done"], row["runs"], counts({state: row[state] for state in ("failed", "missing")})),
            _steps(row["env_steps"]),
            *(_plus_minus(row["returns"].get(level), 2) for level in levels),
            *(_plus_minus(row["scores"].get(level), 3) for level in levels),
            UNKNOWN if row["steps_per_second"] is None else f"{row['steps_per_second']:,.0f}",
            UNKNOWN if row["wall_seconds"] is None else duration(row["wall_seconds"]),
        ]
        for row in rows
    ]
    return table([*head, "steps/s", "wall time"], body)


def _aggregates(rows: list[Row]) -> str:
    by_level = _levels_column(rows)
    body = [
        [
            algorithm_name(row["algo"]),
            *([LEVELS[row["levels"]]] if by_level else []),
            f"{row['iqm']:.3f}",
            _interval(row, 3),
            f"{row['mean']:.3f}",
            str(row["runs"]),
            f"{row['games']}" + (f", without {', '.join(row['without'])}" if row["without"] else ""),
        ]
        for row in rows
    ]
    return table(
        ["algorithm", *by_level, "IQM of normalised scores", "95 % interval", "mean", "runs", "games"],
        body,
    )


def _improvements(rows: list[Row]) -> str:
    by_level = _levels_column(rows)
    body = [
        [
            f"{algorithm_name(row['algo'])} over {algorithm_name(row['over'])}",
            *([LEVELS[row["levels"]]] if by_level else []),
            f"{row['probability']:.2f}",
            _interval(row, 2),
        ]
        for row in rows
    ]
    return table(["", *by_level, "probability that a run scores higher", "95 % interval"], body)


def _levels_column(rows: list[Row]) -> list[str]:
    """The head of that column, if there are level sets."""
    return ["levels"] if any(LEVELS[row["levels"]] for row in rows) else []


def _steps(steps: list[int]) -> str:
    if not steps:
        return UNKNOWN
    least, most = min(steps), max(steps)
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"


def _plus_minus(spread: dict[str, float | None] | None, digits: int) -> str:
    if spread is None:
        return UNKNOWN
    std = "" if spread["std"] is None else f" ± {spread['std']:.{digits}f}"
    return f"{spread['mean']:.{digits}f}{std}"


def _interval(row: Row, digits: int) -> str:
    return interval(row["low"], row["high"], fixed(digits)) or "one run per game"
