"""The runs of a suite, read from their directories → scores, statistics over runs and games, tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.bench.plan import EVERYTHING, Cell
from paceline.config import UserError
from paceline.run.console import duration
from paceline.run.directory import RunDirectory
from paceline.stats import (
    improvement_interval,
    iqm,
    probability_of_improvement,
    stratified_bootstrap_interval,
)

Entry = dict[str, Any]
# What a run carries of its provenance.
VERSIONS = ("torch", "numpy", "gymnasium", "envpool", "ale-py", "ray")
COLUMNS = {EVERYTHING: "return", "train": "return, training levels", "test": "return, all levels"}
SCORES = {EVERYTHING: "normalised", "train": "normalised, training levels", "test": "normalised, all levels"}


def read(cell: Cell, before: Entry | None) -> Entry:
    """What there is of a run. `state`: done, failed, interrupted (begun or not yet evaluated) or missing."""
    run = RunDirectory(cell.path)
    status, summary = run.read_status(), run.read_summary()
    trained = status.get("state") == "done" and summary.get("status") == "done" and not _too_short(cell, run)
    rows = _evaluations(run, cell, summary.get("env_steps")) if trained else {}
    entry: Entry = {
        "name": cell.name,
        "game": cell.game,
        "env": cell.env,
        "algo": cell.algo,
        "seed": cell.seed,
        "state": "missing",
        "reason": None,
        "trained": trained,
        "range": None if cell.range is None else list(cell.range),
        "episodes": cell.episodes,
        "stochastic": cell.stochastic,
        "levels": list(cell.levels),
        "train": shlex.join(["paceline", *cell.train_words]),
        "evaluate": shlex.join(["paceline", *cell.evaluate_words]),
    }
    if set(rows) >= set(cell.levels):
        entry["state"] = "done"
        entry["returns"] = {level: rows[level]["return_mean"] for level in cell.levels}
        entry["scores"] = {level: normalised(rows[level]["return_mean"], cell.range) for level in cell.levels}
        for name in ("env_steps", "steps_per_second", "wall_seconds", "train_seconds", "resumed", "peak_memory_bytes"):
            entry[name] = summary.get(name)
        entry["machine"] = machine(run)
    elif before is not None and before["state"] == "failed":
        entry["state"], entry["reason"] = "failed", before["reason"]
    elif status.get("state") == "failed":
        entry["state"], entry["reason"] = "failed", status.get("reason")
    elif run.config_path.is_file():
        entry["state"] = "interrupted"
    return entry


def normalised(value: float, range_: Sequence[float] | None) -> float | None:
    return None if range_ is None else (value - range_[0]) / (range_[1] - range_[0])


def machine(run: RunDirectory) -> dict[str, Any]:
    """When, where and with which versions a run was made, without what names the machine or its user."""
    summary = run.read_summary()
    try:
        origin = run.read_provenance()
    except UserError:  # the figures are still worth showing
        origin = {}
    packages, git = (found if isinstance(found := origin.get(key), dict) else {} for key in ("packages", "git"))
    return {
        "date": str(origin.get("started_at") or "")[:10],
        "commit": str(git.get("commit") or "")[:12],
        "cpu": origin.get("cpu_model"),
        "cores": origin.get("cores"),
        "device": summary.get("device") or "cpu",
        "versions": {
            "paceline": origin.get("paceline"),
            "python": origin.get("python"),
            **{name: packages[name] for name in VERSIONS if name in packages},
        },
    }


def collect(suite: str, about: str, commands: list[str], entries: list[Entry]) -> dict[str, Any]:
    """All of `suite.json`. Only runs that are done count in a figure; the others are named."""
    done = [entry for entry in entries if entry["state"] == "done"]
    algos = list(dict.fromkeys(entry["algo"] for entry in entries))
    games = list(dict.fromkeys(entry["game"] for entry in entries))
    levels = list(dict.fromkeys(level for entry in entries for level in entry["levels"]))
    rows = [_row(game, algo, _of(entries, game=game, algo=algo)) for game in games for algo in algos]
    ranged = [game for game in games if all(entry["range"] for entry in _of(entries, game=game))]
    strata = {
        (algo, level): {
            game: [entry["scores"][level] for entry in runs]
            for game in ranged
            if (runs := [entry for entry in _of(done, game=game, algo=algo) if level in entry["levels"]])
        }
        for algo in algos
        for level in levels
    }
    return {
        "suite": suite,
        "about": about,
        "commands": commands,
        "games": [row for row in rows if row["runs"]],
        "aggregates": [_aggregate(algo, level, by, games) for (algo, level), by in strata.items() if by],
        "improvements": [
            _improvement(a, b, level, strata[a, level], strata[b, level])
            for level in levels
            for number, a in enumerate(algos)
            for b in algos[number + 1 :]
            # Of different games nothing could be compared.
            if set(strata[a, level]) == set(strata[b, level]) == set(ranged) and ranged
        ],
        "unranged": [game for game in games if game not in ranged],
        "runs": entries,
    }


def line(entry: Entry) -> str:
    """A finished run in a few words."""
    returns = ", ".join(
        f"{'' if level == EVERYTHING else f'{level} '}{value:.2f}" for level, value in entry["returns"].items()
    )
    rate = entry["steps_per_second"] or 0.0
    return f"return {returns} | {entry['env_steps']:,} steps, {rate:,.0f} steps/s, {duration(entry['wall_seconds'])}"


def page(result: dict[str, Any]) -> str:
    """`suite.md`: the tables, and every command."""
    return (
        f"# Suite {result['suite']}\n\n{tables(result)}\n## Every run\n\n```sh\n"
        + "".join(f"{entry['train']}\n{entry['evaluate']}\n" for entry in result["runs"])
        + "```\n"
    )


def tables(result: dict[str, Any]) -> str:
    """In Markdown: what, by which commands, where; games, aggregates, and what is missing."""
    entries = result["runs"]
    levels = list(dict.fromkeys(level for entry in entries for level in entry["levels"]))
    parts = [result["about"].strip()] if result["about"].strip() else []
    parts.append("```sh\n" + "\n".join(result["commands"]) + "\n```")
    parts += machines(entry["machine"] for entry in entries if entry["state"] == "done")
    parts.append(_game_table(result["games"], levels))
    episodes = sorted({entry["episodes"] for entry in entries})
    kinds = {True: "sampled", False: "most likely"}
    how = " or ".join(sorted({kinds[entry["stochastic"]] for entry in entries}))
    parts.append(
        f"Returns are of {' or '.join(map(str, episodes))} episodes of the last checkpoint with {how} actions: mean ± "
        "standard deviation over runs. Normalised: 0 and 1 are the ends of the game's range. Steps per second and wall "
        "time are means over runs; the start is in the wall time alone."
    )
    if result["aggregates"]:
        parts.append(_aggregate_table(result["aggregates"]))
    if result["improvements"]:
        parts.append(_improvement_table(result["improvements"]))
    parts += _missing(result)
    return "\n\n".join(parts) + "\n"


def machines(found: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each kind of machine and set of versions, with the days."""
    days: dict[str, set[str]] = {}
    for one in found:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items() if version)
        device = "" if one["device"] == "cpu" else f"{one['device']}, "
        commit = f", commit {one['commit']}" if one["commit"] else ""
        days.setdefault(f"{device}{hardware(one)}; {versions}{commit}", set()).add(one["date"])
    return [f"{' to '.join(sorted({min(dates), max(dates)}))}: {text}." for text, dates in days.items()]


def hardware(one: dict[str, Any]) -> str:
    return f"{one['cpu']}, {one['cores']} {'core' if one['cores'] == 1 else 'cores'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _too_short(cell: Cell, run: RunDirectory) -> bool:
    """It ended well, on a smaller budget than is asked for now."""
    had, wanted = (run.read_config().get("stop") or {}).get("total_steps"), cell.config.stop.total_steps
    return had is not None and wanted is not None and had < wanted


def _evaluations(run: RunDirectory, cell: Cell, env_steps: int | None) -> dict[str, dict[str, Any]]:
    """The newest row of each level set that this cell's evaluation of this checkpoint wrote."""
    kind = "stochastic" if cell.stochastic else "deterministic"
    wanted = {"kind": kind, "episodes": cell.episodes, "seed": cell.seed, "env_steps": env_steps}
    return {
        str(row.get("levels") or EVERYTHING): row
        for row in run.read_eval()
        if all(row.get(key) == value for key, value in wanted.items())
    }


def _of(entries: Iterable[Entry], **wanted: Any) -> list[Entry]:
    return [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]


def _row(game: str, algo: str, entries: list[Entry]) -> dict[str, Any]:
    done = _of(entries, state="done")
    levels = list(dict.fromkeys(level for entry in done for level in entry["levels"]))
    return {
        "game": game,
        "algo": algo,
        "runs": len(entries),
        "done": len(done),
        "failed": len(_of(entries, state="failed")),
        "missing": len(entries) - len(done) - len(_of(entries, state="failed")),
        "env_steps": [entry["env_steps"] for entry in done],
        "returns": {level: _spread([entry["returns"][level] for entry in done]) for level in levels},
        "scores": {level: _spread([entry["scores"][level] for entry in done]) for level in levels},
        "steps_per_second": _mean(entry["steps_per_second"] for entry in done),
        "wall_seconds": _mean(entry["wall_seconds"] for entry in done),
    }


def _aggregate(algo: str, level: str, by_game: dict[str, list[float]], games: list[str]) -> dict[str, Any]:
    strata = list(by_game.values())
    # With one run a game there is nothing to resample: no interval is better than one of no width.
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
    several = max(map(len, [*x, *y])) > 1
    low, high = improvement_interval(x, y) if several else (None, None)
    probability = probability_of_improvement(x, y)
    return {"algo": a, "over": b, "levels": level, "probability": probability, "low": low, "high": high}


def _spread(values: list[float | None]) -> dict[str, float | None] | None:
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


def _game_table(rows: list[dict[str, Any]], levels: list[str]) -> str:
    head = ["game", "algorithm", "runs", "steps", *(COLUMNS[level] for level in levels)]
    head += [*(SCORES[level] for level in levels), "steps/s", "wall time"]
    return table(
        head,
        [
            [
                row["game"],
                row["algo"],
                _runs(row),
                _steps(row["env_steps"]),
                *(_plus_minus(row["returns"].get(level), 2) for level in levels),
                *(_plus_minus(row["scores"].get(level), 3) for level in levels),
                "–" if row["steps_per_second"] is None else f"{row['steps_per_second']:,.0f}",
                "–" if row["wall_seconds"] is None else duration(row["wall_seconds"]),
            ]
            for row in rows
        ],
    )


def _aggregate_table(rows: list[dict[str, Any]]) -> str:
    several = any(row["levels"] != EVERYTHING for row in rows)
    body = [
        [
            row["algo"],
            *([SCORES[row["levels"]].partition(", ")[2]] if several else []),
            f"{row['iqm']:.3f}",
            _between(row, 3),
            f"{row['mean']:.3f}",
            str(row["runs"]),
            f"{row['games']}" + (f", without {', '.join(row['without'])}" if row["without"] else ""),
        ]
        for row in rows
    ]
    head = ["algorithm", *(["levels"] if several else []), "IQM of normalised scores", "95 % interval", "mean", "runs"]
    note = "IQM: mean of the middle half of all runs. Intervals: bootstrap over the runs of each game."
    return f"{table([*head, 'games'], body)}\n\n{note}"


def _improvement_table(rows: list[dict[str, Any]]) -> str:
    several = any(row["levels"] != EVERYTHING for row in rows)
    body = [
        [
            f"{row['algo']} over {row['over']}",
            *([SCORES[row["levels"]].partition(", ")[2]] if several else []),
            f"{row['probability']:.2f}",
            _between(row, 2),
        ]
        for row in rows
    ]
    return table(
        ["", *(["levels"] if several else []), "probability that a run scores higher", "95 % interval"],
        body,
    )


def _missing(result: dict[str, Any]) -> list[str]:
    lines = [f"- `{entry['name']}` failed: {entry['reason']}" for entry in result["runs"] if entry["state"] == "failed"]
    for state in ("interrupted", "missing"):
        names = [f"`{entry['name']}`" for entry in result["runs"] if entry["state"] == state]
        lines += [f"- {state}: {', '.join(names)}"] if names else []
    if result["unranged"]:
        lines.append(f"- no score range, so in no aggregate: {', '.join(result['unranged'])}")
    return ["Not in these figures:\n\n" + "\n".join(lines)] if lines else []


def _runs(row: dict[str, Any]) -> str:
    others = [f"{row[state]} {state}" for state in ("failed", "missing") if row[state]]
    return f"{row['done']} of {row['runs']}" + (f" ({', '.join(others)})" if others else "")


def _steps(steps: list[int]) -> str:
    if not steps:
        return "–"
    least, most = min(steps), max(steps)
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"


def _plus_minus(spread: dict[str, float | None] | None, digits: int) -> str:
    if spread is None:
        return "–"
    std = "" if spread["std"] is None else f" ± {spread['std']:.{digits}f}"
    return f"{spread['mean']:.{digits}f}{std}"


def _between(row: dict[str, Any], digits: int) -> str:
    return "one run a game" if row["low"] is None else f"{row['low']:.{digits}f} to {row['high']:.{digits}f}"
