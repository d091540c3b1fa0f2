"""Statistics of `paceline bench scaling`: speed-up, efficiency, laws and verdicts. Makes `scaling.json`.

An entry is one run: `name, env, algo, engine, scaling, nodes, workers, seed, settings, state, reason, command`. If it
is done, it also has the figures of `run_figures`.
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import rllib_keys
from paceline.machine import Usage
from paceline.results import scaling_laws as laws
from paceline.results.estimates import Estimate, mean_estimate, mean_time_split, ratio_estimate
from paceline.results.runs import RunData
from paceline.run.directory import replacing
from paceline.verdict import verdict

Entry = dict[str, Any]
SERIES = ("env", "algo", "engine", "scaling")
"""Entries with the same values form a series: they differ in workers, nodes and seed."""
QUEUED = ("waiting", "running")
"""States of a run whose job has not ended."""
LAW = {"strong": laws.AMDAHL, "weak": laws.GUSTAFSON}
MIN_EPISODES = 100
"""A mean over fewer episodes does not count as a return that was reached."""
_ENGINE_SPECIFIC = {key.partition("=")[0] for key in rllib_keys.REFUSED}


def run_figures(run: RunData, threshold: float | None) -> Entry:
    """The figures of a finished run for its entry."""
    keys = ("env_steps", "wall_seconds", "train_seconds", "steps_per_second", "steady_steps_per_second", "time_split")
    return {
        "ran_on": {"engine": run.engine, "workers": run.workers, "nodes": run.nodes},
        "iterations": int(run.last("iteration")),
        "return_mean": run.last("return_mean"),
        "threshold": threshold,
        "seconds_to_return": None if threshold is None else seconds_to_return(run, threshold),
        "verdict": training_verdict(run),
        **{key: getattr(run, key) for key in (*keys, "resumed", "problems", "machine")},
    }


def training_verdict(run: RunData) -> str:
    """The verdict on the training time. The start would bound any short run, and is no part of a speed-up."""
    summary, training = run.summary, run.train_seconds
    cores = sum(host.get("cores") or 0 for host in summary.get("hosts") or []) or int(run.provenance.get("cores") or 1)
    used, others, straggling = (summary.get(key) for key in ("cpu_percent", "other_cpu_percent", "straggling_seconds"))
    stepping, waited = summary.get("stepping_cpu_seconds"), summary.get("waited_seconds")
    return verdict(
        {**run.time_split, "start": 0.0},
        summary.get("actor_time_split"),
        algo=run.algo,
        workers=run.workers,
        nodes=run.nodes,
        cpu_share=None if used is None else used / 100 / cores,
        cores=cores,
        straggling=None if straggling is None or not training else straggling / training,
        stepping=None if stepping is None or waited is None else Usage(0, stepping, waited),
        other_share=None if others is None else others / 100 / cores,
        device=run.device,
        overlap=bool(run.section("engine").get("overlap")),
        share=run.engine != "rllib",
    ).text


def seconds_to_return(run: RunData, threshold: float) -> float | None:
    """Training seconds until the return was reached: if the run was told to stop there, when an evaluation confirmed
    it; otherwise at the first row at or above it whose mean is over 100 episodes."""
    if run.section("stop").get("return_mean") == threshold:
        return run.train_seconds if run.reason.startswith("return ") else None
    above = np.flatnonzero((run.column("return_mean") >= threshold) & ~(run.column("episodes") < MIN_EPISODES))
    return float(run.column("train_seconds")[above[0]]) if above.size else None


def settings_difference(one: Entry, other: Entry) -> str | None:
    """The first setting in which two entries differ that a table would compare: `key=value, not …`, or None."""
    if any(one[key] != other[key] for key in SERIES if key != "engine"):
        return None
    if "settings" not in other:
        return "unknown settings"
    mine, theirs = one["settings"], other["settings"]
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if one["engine"] != other["engine"]:
        # Engines have settings of their own, and a preset leaves out what RLlib does not take.
        keys = [key for key in keys if not key.startswith("engine.") and key not in _ENGINE_SPECIFIC]
    return f"{keys[0]}={theirs.get(keys[0])}, not {mine.get(keys[0])}" if keys else None


def scaling_result(title: str, about: str, commands: list[str], entries: list[Entry]) -> dict[str, Any]:
    """The content of `scaling.json`. Only runs that are done count in a figure."""
    by_series: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        by_series.setdefault(tuple(entry[key] for key in SERIES), []).append(entry)
    series = [_series(dict(zip(SERIES, key, strict=True)), members) for key, members in by_series.items()]
    return {
        "scaling": title,
        "about": about,
        "commands": commands,
        "series": series,
        "engines": _engine_ratios(series),
        "runs": entries,
    }


def _series(named: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    by_size: dict[tuple[int, int], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry["workers"], entry["nodes"] or 0)):
        by_size.setdefault((entry["workers"], entry["nodes"] or 0), []).append(entry)
    done = [[entry for entry in members if entry["state"] == "done"] for members in by_size.values()]
    base = next((members for members in done if members), [])
    samples: dict[int, list[float]] = {}
    for members in filter(None, done):  # with several numbers of nodes, the fewest, which come first
        samples.setdefault(members[0]["workers"], [entry["steps_per_second"] for entry in members])
    law = LAW[named["scaling"]]
    ahead = laws.forecast(law, samples)
    return {
        **named,
        "law": law,
        "points": [_point(each, finished, base) for each, finished in zip(by_size.values(), done, strict=True)],
        "fits": [_tree(found) for name in laws.LAWS if (found := laws.fit(name, samples))],
        "check": _tree(ahead.check),
        "prediction": _tree(ahead.prediction),
        "cores": max((entry["machine"]["cores"] or 0 for members in done for entry in members), default=0),
    }


def _point(entries: list[Entry], done: list[Entry], base: list[Entry]) -> dict[str, Any]:
    """One number of workers on one number of nodes. `base`: the runs with the fewest workers."""
    first = entries[0]
    rates = [entry["steps_per_second"] for entry in done]
    gain = None
    if done:
        base_rates = [entry["steps_per_second"] for entry in base]
        gain = Estimate(1.0, runs=len(done)) if done is base else ratio_estimate(rates, base_rates)
    reached = [entry["seconds_to_return"] for entry in done if entry["seconds_to_return"] is not None]
    means = ("train_seconds", "wall_seconds", "env_steps", "return_mean", "steps_per_second", "steady_steps_per_second")
    return {
        "workers": first["workers"],
        "nodes": first["nodes"],
        "runs": len(entries),
        "done": len(done),
        "failed": sum(entry["state"] == "failed" for entry in entries),
        "queued": sum(entry["state"] in QUEUED for entry in entries),
        **{name: _mean(done, name) for name in means},
        "rates": rates,
        "speed_up": _tree(gain),
        "efficiency": _tree(gain and gain.scaled(base[0]["workers"] / first["workers"])),
        "threshold": done[0]["threshold"] if done else None,
        "reached": len(reached),
        "seconds_to_return": _tree(mean_estimate(reached)) if reached else None,
        "time_split": mean_time_split(entry["time_split"] for entry in done),
        "verdict": _common_verdict(done),
    }


def _mean(entries: Sequence[Entry], name: str) -> Any:
    values = [float(entry[name]) for entry in entries if entry[name] is not None]
    return _tree(mean_estimate(values)) if values else None


def _common_verdict(done: Sequence[Entry]) -> str:
    """The most frequent verdict, in the words of the run with the median speed among those."""
    bounds = [entry["verdict"].partition(":")[0] for entry in done]
    known = Counter(bound for bound in bounds if bound)
    if not known:
        return ""
    most = known.most_common(1)[0][0]
    same = [entry for entry, bound in zip(done, bounds, strict=True) if bound == most]
    same.sort(key=lambda entry: entry["steps_per_second"])
    return str(same[len(same) // 2]["verdict"])


def _engine_ratios(series: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of steps per second where two engines did the same job, the earlier engine over the later."""
    found = []
    for number, one in enumerate(series):
        for other in series[number + 1 :]:
            if any(one[key] != other[key] for key in ("env", "algo", "scaling")):
                continue
            points = {(point["workers"], point["nodes"]): point for point in other["points"] if point["done"]}
            for point in one["points"]:
                match = points.get((point["workers"], point["nodes"]))
                if match is not None and point["done"]:
                    found.append(
                        {
                            **{key: one[key] for key in ("env", "algo", "scaling")},
                            **{key: point[key] for key in ("workers", "nodes")},
                            "engine": one["engine"],
                            "over": other["engine"],
                            "ratio": _tree(ratio_estimate(point["rates"], match["rates"])),
                        }
                    )
    return found


def _tree(value: Any) -> Any:
    return None if value is None else dataclasses.asdict(value)


COLUMNS = (
    *("env", "algo", "engine", "scaling", "nodes", "workers", "seed", "state", "reason", "job"),
    *("env_steps", "iterations"),
    *("train_seconds", "wall_seconds", "steps_per_second", "steady_steps_per_second", "return_mean", "threshold"),
    *("seconds_to_return", "resumed", "verdict"),
)


def write_csv(path: Path, entries: Iterable[Entry]) -> None:
    """One row per run, including those that failed."""
    entries = list(entries)
    parts = list(dict.fromkeys(part for entry in entries for part in entry.get("time_split") or {}))
    with replacing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *(f"time_{part}_seconds" for part in parts)])
        for entry in entries:
            split = entry.get("time_split") or {}
            writer.writerow([*(entry.get(name) for name in COLUMNS), *(split.get(part) for part in parts)])
