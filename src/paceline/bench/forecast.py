"""`paceline bench forecast`: simulate more workers from the parts that runs have measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.runner import make_folder
from paceline.config import UserError
from paceline.results.forecast import MAX_NODES, MAX_WORKERS, Conditions, forecast
from paceline.results.forecast_simulation import Link
from paceline.results.runs import load_runs
from paceline.results.text import UNKNOWN, bullets, count, percent, seconds, table
from paceline.run.directory import write_json, write_text

Tree = dict[str, Any]
CAUSES = {
    "env": "environments",
    "act": "acting",
    "learn": "learning",
    "exchange": "the exchange",
    "stragglers": "waiting for the slowest worker",
    "cores": "workers that share a core",
    "driver": "the driver",
    "actors": "collecting",
    "learner": "the learner",
    "link": "the link of the learner's host",
}
ADVICE = {
    "env": "a faster simulator, or more workers while the efficiency is worth it",
    "act": "a larger env.envs_per_worker or a smaller network",
    "exchange": "fewer and larger exchanges (larger minibatches, longer rollouts), fewer nodes, or a faster link",
    "stragglers": "engine.straggler_share=0.6, longer rollouts, or impala, whose actors do not wait for each other",
    "cores": "more cores or more nodes",
    "driver": "longer rollouts: fewer iterations and messages for the same steps",
    "actors": "more actors",
    "link": "smaller observations, or a faster link",
}


def run_forecast(
    paths: Sequence[str],
    *,
    workers: str,
    nodes: str = "1",
    cores: int | None = None,
    latency_milliseconds: float = 0.1,
    gigabits: float = 10.0,
    hold_out: str | None = None,
    as_json: bool = False,
    out: str | None = None,
) -> Tree:
    """Print the forecast, and write `forecast.md` and `.json` into `out`; returns the content of the latter."""
    if not latency_milliseconds >= 0 or not 0 < gigabits < 1e6 or latency_milliseconds > 60_000:
        raise UserError(f"a link of {latency_milliseconds:g} ms and {gigabits:g} Gbit/s: give values above zero")
    link = Link(latency_milliseconds / 1000, gigabits * 1e9 / 8)
    conditions = Conditions(_numbers("nodes", nodes, MAX_NODES), cores or 0, link)
    asked = _numbers("workers", workers, MAX_WORKERS)
    if min(conditions.nodes) > max(asked):
        raise UserError(f"{max(asked)} workers cannot use {min(conditions.nodes)} nodes: each has one at least")
    held = _numbers("hold-out", hold_out, MAX_WORKERS) if hold_out is not None else ()
    result = forecast(load_runs([Path(path) for path in paths]), asked, conditions, held)
    text = page(result)
    print(json.dumps(result, indent=2) if as_json else text, end="\n" if as_json else "")
    if out is not None:
        folder = Path(out).expanduser()
        make_folder(folder)
        write_json(folder / "forecast.json", result)
        write_text(folder / "forecast.md", f"# Simulated: what more workers would bring\n\n{text}")
    return result


def _numbers(name: str, text: str, most: int) -> tuple[int, ...]:
    """`1,2,4`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 and 0 < int(word) <= most for word in words):
        shown = text if len(text) < 60 else f"{text[:60]}…"
        raise UserError(f"{name}={shown!r}: expected whole numbers from 1 to {most:,}, such as 64,512")
    return tuple(dict.fromkeys(int(word) for word in words))


def page(result: Tree) -> str:
    parts = [text for series in result["series"] for text in _series(series)]
    if result["problems"]:
        parts += ["Not used:", bullets(result["problems"])]
    return "\n\n".join(parts) + "\n"


def _series(series: Tree) -> Iterator[str]:
    base = series["base"]
    yield f"## {series['series']}"
    yield (
        f"Simulated from {count(len(series['runs']), 'run')} with "
        f"{', '.join(str(n) for n in dict.fromkeys(one['workers'] for one in _fitted(series)))} worker(s). "
        f"Speed-up: over {base['steps_per_second']:,.0f} simulated steps/s with {count(base['workers'], 'worker')}. "
        "Intervals: 95 %, from resampled measurements, drawn assumptions and the error of the check."
    )
    yield _points(series)
    yield _measured(series)
    lines = [*_checks(series), *_bends(series)]
    if lines:
        yield bullets(lines)
    yield f"Assumed, or not recorded:\n\n{bullets(series['remarks'])}"


def _fitted(series: Tree) -> list[Tree]:
    return [one for one in series["measured"] if not one["held_out"]]


def _points(series: Tree) -> str:
    head = ["workers", "nodes", "steps/s, simulated", "speed-up", "efficiency", "bound by", "start"]
    rows = [
        [
            f"{point['workers']:,}",
            f"{point['nodes']:,}",
            _shown(point["steps_per_second"], "{:,.0f}"),
            _shown(point["speed_up"], "{:,.1f}×"),
            _shown(point["efficiency"], "{:.0%}"),
            _bound(point),
            UNKNOWN if point["start_seconds"] is None else seconds(point["start_seconds"]),
        ]
        for point in series["points"]
    ]
    return table(head, rows)


def _shown(estimate: Tree, form: str) -> str:
    value, low, high = (form.format(estimate[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})".replace("%", " %")


def _bound(point: Tree) -> str:
    shares, bound = point["shares"], point["bound"]
    others = sorted((cause for cause in shares if cause not in (bound, "actors")), key=lambda cause: -shares[cause])
    text = f"{CAUSES[bound]} {percent(shares[bound])}"
    return text + (f", {CAUSES[others[0]]} {percent(shares[others[0]])}" if shares[others[0]] >= 0.1 else "")


def _measured(series: Tree) -> str:
    rows = [
        [
            f"{one['workers']:,}",
            f"{one['nodes']:,}",
            str(one["runs"]),
            f"{one['measured']:,.0f}",
            f"{one['simulated']:,.0f}",
            f"{round(100 * (one['simulated'] / one['measured'] - 1)):+d} %",
            "held out" if one["held_out"] else "",
        ]
        for one in series["measured"]
    ]
    head = ["workers", "nodes", "runs", "steps/s, measured", "simulated", "error", ""]
    return f"The simulation beside the measurements:\n\n{table(head, rows)}"


def _checks(series: Tree) -> Iterator[str]:
    for check in series["checks"]:
        fitted = ", ".join(map(str, check["fitted_on"]))
        inside = "inside" if check["inside"] else "**outside**"
        yield (
            f"Check: from {fitted} worker(s), {check['workers']} are simulated at "
            f"{_shown(check['simulated'], '{:,.0f}')} steps/s; measured: {check['measured']:,.0f}, {inside} the "
            f"interval (error {round(100 * check['error']):+d} %)."
        )
    if not series["checks"]:
        yield "Not checked: that takes runs with three numbers of workers, or a number to hold out."


def _bends(series: Tree) -> Iterator[str]:
    for curve in series["curves"]:
        where = f"On {count(curve['nodes'], 'node')}"
        bend, last = curve["bend"], curve["workers"][-1]
        if bend is None:
            yield f"{where}: the efficiency stays above 80 % up to {last:,} workers."
            continue
        cause = bend["cause"]
        fastest = "" if curve["fastest"] == last else f" Most steps/s: about {curve['fastest']:,} workers."
        yield (
            f"{where} it bends at about {bend['workers']:,} workers (efficiency {percent(bend['efficiency'])}): "
            f"{CAUSES[cause]} {percent(bend['share'])}, with {count(series['base']['workers'], 'worker')} "
            f"{percent(bend['share_before'])}.{fastest} What to change: {_advice(series, cause)}."
        )


def _advice(series: Tree, cause: str) -> str:
    if cause not in ("learn", "learner"):
        return ADVICE[cause]
    more = ["engine.learners"] if series["several_learners"] else ["engine.scaling=weak"] * (cause == "learn")
    return ", ".join([series["faster_learning"] or "larger batches", *more, "a smaller network"])
