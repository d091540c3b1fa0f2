"""The runs of a scaling study, read from their directories → speed-up, efficiency, laws, verdicts; tables and files."""

from __future__ import annotations

import csv
import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline import rllib_keys
from paceline.bench import laws, scaling_tables
from paceline.bench.comparison import Estimate, estimate
from paceline.bench.files import FAILED, FINISHED, INTERRUPTED, RUNNING
from paceline.bench.make import QUEUED
from paceline.bench.results import machine
from paceline.bench.study import RunData, load_run, solved_at
from paceline.run.console import duration
from paceline.run.directory import RunDirectory, replacing
from paceline.verdict import verdict

if TYPE_CHECKING:
    from paceline.bench.scaling import Point

Entry = dict[str, Any]
SERIES = ("env", "algo", "engine", "scaling")
EPISODES = 100
"""That a mean is taken over."""
LAW = {"strong": "amdahl", "weak": "gustafson"}
_REFUSED = {key.partition("=")[0] for key in rllib_keys.REFUSED}
STATES = {FINISHED: "done", FAILED: "failed", RUNNING: "interrupted", INTERRUPTED: "interrupted"}


def read(cell: Point, before: Entry | None, threshold: float | None = None) -> Entry:
    """What its directory holds of a run. `state`: done, failed, interrupted or missing."""
    entry: Entry = {
        "name": cell.name,
        "env": cell.env,
        "algo": cell.algo,
        "engine": cell.engine,
        "scaling": cell.scaling,
        "nodes": cell.nodes,
        "workers": cell.workers,
        "seed": cell.seed,
        "settings": cell.settings,
        "state": "missing",
        "reason": None,
        "command": shlex.join(["paceline", *cell.words]),
    }
    run = load_run(cell.path) if RunDirectory(cell.path).config_path.is_file() else None
    if run is not None:
        entry["state"], entry["reason"] = STATES[run.state], run.reason or None
    if run is not None and run.state == FINISHED and run.usable:
        return {**entry, **_figures(run, solved_at(cell.env) if threshold is None else threshold)}
    if entry["state"] == "done":
        entry["state"], entry["reason"] = "failed", "; ".join(run.problems if run is not None else [])
    if before is not None and before["state"] == "failed" and before.get("settings", cell.settings) == cell.settings:
        entry["state"], entry["reason"] = "failed", before["reason"]
    return entry


def difference(one: Entry, other: Entry) -> str | None:
    """What `other` has that `one` has not, of runs that a table shows as the same job with more workers or by another
    engine: `key=value, not …`; None if nothing."""
    if any(one[key] != other[key] for key in SERIES if key != "engine"):
        return None
    if "settings" not in other:
        return "settings that it does not name"
    mine, theirs = one["settings"], other["settings"]
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if one["engine"] != other["engine"]:
        # Each engine is told things of its own, and a preset leaves out what RLlib does not take.
        keys = [key for key in keys if not key.startswith("engine.") and key not in _REFUSED]
    return f"{keys[0]}={theirs.get(keys[0])}, not {mine.get(keys[0])}" if keys else None


def _figures(run: RunData, threshold: float | None) -> Entry:
    """All from `metrics.jsonl`, but what only the end of a run knows."""
    return {
        "ran_on": {"engine": run.engine, "workers": run.workers, "nodes": run.nodes},
        "env_steps": run.env_steps,
        "iterations": int(run.last("iteration")),
        "wall_seconds": run.wall_seconds,
        "train_seconds": run.train_seconds,
        "steps_per_second": run.steps_per_second,
        "steady_steps_per_second": run.steady_steps_per_second,
        "return_mean": run.last("return_mean"),
        "threshold": threshold,
        "seconds_to_return": None if threshold is None else _seconds_to(run, threshold),
        "time_split": run.time_split,
        "verdict": verdict_on_training(run),
        "resumed": run.resumed,
        "problems": run.problems,
        "machine": machine(RunDirectory(run.path)),
    }


def verdict_on_training(run: RunData) -> str:
    """On its training alone: the start, which would bound any short run, is no part of a speed-up."""
    summary, training = run.summary, run.train_seconds
    hosts = summary.get("hosts") or []
    cores = sum(host.get("cores") or 0 for host in hosts) or int(run.provenance.get("cores") or 1)
    used, late = summary.get("cpu_percent"), summary.get("straggling_seconds")
    engine = run.config.get("engine") or {}
    found = verdict(
        {**run.time_split, "start": 0.0},
        summary.get("actor_time_split"),
        algo=run.algo,
        workers=run.workers,
        nodes=run.nodes,
        cpu_share=None if used is None else used / 100 / cores,
        cores=cores,
        straggling=None if late is None or not training else late / training,
        device=run.device,
        overlap=bool(engine.get("overlap")),
        share=run.engine != "rllib",
    )
    return found.text


def line(entry: Entry) -> str:
    value = entry["return_mean"]
    ended = "" if value is None or not math.isfinite(value) else f"return {value:.1f} | "
    rate = f"{entry['steps_per_second']:,.0f} steps/s"
    return f"{ended}{entry['env_steps']:,} steps, {rate}, {duration(entry['train_seconds'])} of training"


def collect(title: str, about: str, commands: list[str], entries: list[Entry]) -> dict[str, Any]:
    """All of `scaling.json`. Only runs that are done count in a figure; the others are named."""
    kinds = list(dict.fromkeys(tuple(entry[key] for key in SERIES) for entry in entries))
    series = [_series(kind, _of(entries, kind)) for kind in kinds]
    return {
        "scaling": title,
        "about": about,
        "commands": commands,
        "series": [one for one in series if one["points"]],
        "engines": _engines(series),
        "runs": entries,
    }


def _of(entries: Iterable[Entry], kind: Sequence[Any]) -> list[Entry]:
    return [entry for entry in entries if tuple(entry[key] for key in SERIES) == tuple(kind)]


def _seconds_to(run: RunData, threshold: float) -> float | None:
    """Training seconds until the return was reached. A run that was to stop there did so when an evaluation agreed; of
    the others it is the first row at or above it, once there is a mean of 100 episodes: one of a few is luck."""
    if (run.config.get("stop") or {}).get("return_mean") == threshold:
        return run.train_seconds if run.reason.startswith("return ") else None
    above = np.flatnonzero((run.column("return_mean") >= threshold) & ~(run.column("episodes") < EPISODES))
    return float(run.column("train_seconds")[above[0]]) if above.size else None


def _series(kind: Sequence[Any], entries: list[Entry]) -> dict[str, Any]:
    """Runs that differ in workers, nodes and seed alone."""
    named = dict(zip(SERIES, kind, strict=True))
    sizes = sorted({(entry["workers"], entry["nodes"] or 0) for entry in entries})
    cells = [[e for e in entries if (e["workers"], e["nodes"] or 0) == size] for size in sizes]
    measured = [[entry for entry in cell if entry["state"] == "done"] for cell in cells]
    base = next((cell for cell in measured if cell), [])
    law = LAW[named["scaling"]]
    samples = _samples(measured)
    check = laws.check(law, samples)
    off = check.error if check is not None else 0.0
    return {
        **named,
        "law": law,
        "points": [_point(cell, done, base) for cell, done in zip(cells, measured, strict=True)],
        "fits": [_tree(found) for name in ("amdahl", "gustafson") if (found := laws.fit(name, samples))],
        "check": _tree(check),
        "prediction": _tree(laws.predict(law, samples, 2 * max(samples), off)) if samples else None,
        "cores": max((entry["machine"]["cores"] or 0 for cell in measured for entry in cell), default=0),
    }


def _samples(measured: Iterable[list[Entry]]) -> dict[int, list[float]]:
    """Throughput by number of workers; of several node counts with as many, the fewest nodes, which come first."""
    found: dict[int, list[float]] = {}
    for cell in measured:
        if cell and cell[0]["workers"] not in found:
            found[cell[0]["workers"]] = [entry["steps_per_second"] for entry in cell]
    return found


def _point(cell: list[Entry], done: list[Entry], base: list[Entry]) -> dict[str, Any]:
    """One number of workers on one number of nodes."""
    first = cell[0]
    rates, base_rates = ([entry["steps_per_second"] for entry in each] for each in (done, base))
    # Over itself it is 1, for sure.
    gain = Estimate(1.0, runs=len(done)) if done and done is base else laws.ratio(rates, base_rates) if done else None
    growth = first["workers"] / base[0]["workers"] if base else math.nan
    reached = [entry["seconds_to_return"] for entry in done if entry["seconds_to_return"] is not None]
    return {
        "workers": first["workers"],
        "nodes": first["nodes"],
        "runs": len(cell),
        "done": len(done),
        "failed": sum(entry["state"] == "failed" for entry in cell),
        "queued": sum(entry["state"] in QUEUED for entry in cell),
        "train_seconds": _tree(_over(done, "train_seconds")),
        "wall_seconds": _tree(_over(done, "wall_seconds")),
        "env_steps": _tree(_over(done, "env_steps")),
        "return_mean": _tree(_over(done, "return_mean")),
        "steps_per_second": _tree(_over(done, "steps_per_second")),
        "steady_steps_per_second": _tree(_over(done, "steady_steps_per_second")),
        "rates": rates,
        "speed_up": _tree(gain),
        "efficiency": _tree(gain and _scaled(gain, 1.0 / growth)),
        "threshold": done[0]["threshold"] if done else None,
        "reached": len(reached),
        "seconds_to_return": _tree(estimate(reached)) if reached else None,
        "time_split": _mean_split([entry["time_split"] for entry in done]),
        "verdict": _verdict(done),
    }


def _over(entries: Sequence[Entry], name: str) -> Estimate | None:
    values = [entry[name] for entry in entries if entry[name] is not None]
    return estimate([float(value) for value in values]) if values else None


def _scaled(found: Estimate, factor: float) -> Estimate:
    ends = [None if end is None else end * factor for end in (found.low, found.high)]
    return Estimate(found.value * factor, ends[0], ends[1], found.runs)


def _mean_split(splits: Sequence[dict[str, float]]) -> dict[str, float]:
    parts = dict.fromkeys(part for split in splits for part in split)
    return {part: float(np.mean([split.get(part, 0.0) for split in splits])) for part in parts}


def _verdict(done: Sequence[Entry]) -> str:
    """What most of the runs say, in the words of the one with the middle speed."""
    said = [entry for entry in done if entry["verdict"]]
    if not said:
        return ""
    bound = Counter(entry["verdict"].partition(":")[0] for entry in said).most_common(1)[0][0]
    same = sorted(
        (entry for entry in said if entry["verdict"].partition(":")[0] == bound), key=lambda e: e["steps_per_second"]
    )
    return str(same[len(same) // 2]["verdict"])


def _engines(series: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same job by two engines: how many times the steps per second. Of all pairs, the first over the later."""
    found = []
    for number, one in enumerate(series):
        for other in series[number + 1 :]:
            if any(one[key] != other[key] for key in ("env", "algo", "scaling")):
                continue
            for point in one["points"]:
                twin = next(
                    (p for p in other["points"] if all(p[key] == point[key] for key in ("workers", "nodes"))), None
                )
                if twin is None or not point["done"] or not twin["done"]:
                    continue
                found.append(
                    {
                        **{key: one[key] for key in ("env", "algo", "scaling")},
                        **{key: point[key] for key in ("workers", "nodes")},
                        "engine": one["engine"],
                        "over": other["engine"],
                        "ratio": _tree(laws.ratio(point["rates"], twin["rates"])),
                    }
                )
    return found


def _tree(value: Any) -> Any:
    return None if value is None else dataclasses.asdict(value)


def page(result: dict[str, Any]) -> str:
    """`scaling.md`: the tables, and every command."""
    commands = "".join(f"{entry['command']}\n" for entry in result["runs"])
    return f"# Scaling study {result['scaling']}\n\n{tables(result)}\n## Every run\n\n```sh\n{commands}```\n"


def tables(result: dict[str, Any]) -> str:
    return scaling_tables.tables(result)


COLUMNS = (
    *("env", "algo", "engine", "scaling", "nodes", "workers", "seed", "state", "reason", "job"),
    *("env_steps", "iterations"),
    *("train_seconds", "wall_seconds", "steps_per_second", "steady_steps_per_second", "return_mean", "threshold"),
    *("seconds_to_return", "resumed", "verdict"),
)


def write_csv(path: Path, result: dict[str, Any]) -> None:
    """A row per run, failures too."""
    parts = list(dict.fromkeys(part for entry in result["runs"] for part in entry.get("time_split") or {}))
    with replacing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *(f"time_{part}_seconds" for part in parts)])
        for entry in result["runs"]:
            split = entry.get("time_split") or {}
            writer.writerow([*(entry.get(name) for name in COLUMNS), *(split.get(part) for part in parts)])
