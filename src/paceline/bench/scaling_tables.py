"""The results of a scaling benchmark in Markdown: measurements, time split, verdicts, and the forecast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.bench.tables import introduction, not_done, runs_cell
from paceline.bench.tables import page as benchmark_page
from paceline.config import algorithm_name
from paceline.results.scaling_figures import SERIES
from paceline.results.text import UNKNOWN, bullets, count, counts, hardware, table
from paceline.run.console import duration

Tree = dict[str, Any]
PARTS = ("env", "act", "learn", "sync", "idle", "eval", "save")
LAWS = {"amdahl": "Amdahl's law (constant work)", "gustafson": "Gustafson's law (work grows with the workers)"}


def page(result: Tree) -> str:
    """`scaling.md`."""
    return benchmark_page(
        f"Scaling benchmark {result['scaling']}", tables(result), [entry["command"] for entry in result["runs"]]
    )


def tables(result: Tree) -> str:
    entries, series = result["runs"], result["series"]
    parts = [*introduction(result), _measurements(series), _legend(series, entries), _time_split(series)]
    if result["engines"]:
        parts.append(_engine_ratios(result["engines"]))
    if verdicts := bullets(_verdicts(series)):
        parts += ["## What limits the speed, and what would help", verdicts]
    if forecast := bullets(line for one in series for line in _forecast(one, series_title(one, series))):
        parts += ["## What more workers would bring", forecast]
    if remarks := [*not_done(entries), *_remarks(entries)]:
        parts.append(f"Missing runs and remarks:\n\n{bullets(remarks)}")
    return "\n\n".join(parts) + "\n"


def summary_line(entry: Tree) -> str:
    """A finished run in a few words."""
    value = entry["return_mean"]
    ended = "" if value is None or not math.isfinite(value) else f"return {value:.1f} | "
    rate = f"{entry['steps_per_second']:,.0f} steps/s"
    return f"{ended}{entry['env_steps']:,} steps, {rate}, {duration(entry['train_seconds'])} of training"


def series_title(series: Tree, every: Sequence[Tree]) -> str:
    """What tells a series from the others; all of it if there are no others."""
    names = [name for name in SERIES if len({one[name] for one in every}) > 1]
    return ", ".join(algorithm_name(series[name]) if name == "algo" else str(series[name]) for name in names or SERIES)


def size(point: Tree) -> str:
    return f"{point['workers']}" + (f" on {point['nodes']}" if point["nodes"] else "")


def _shown(estimate: Tree | None, digits: int, unit: str = "", *, factor: float = 1.0) -> str:
    """`1.81× (1.75–1.88)`."""
    if estimate is None or estimate["value"] is None:
        return UNKNOWN
    text = f"{factor * estimate['value']:,.{digits}f}{unit}"
    if estimate["low"] is None:
        return text
    return f"{text} ({factor * estimate['low']:,.{digits}f}–{factor * estimate['high']:,.{digits}f})"


def _points(series: Sequence[Tree]) -> Iterator[tuple[str, Tree]]:
    """(title of the series, point)."""
    for one in series:
        for point in one["points"]:
            yield series_title(one, series), point


def _measurements(series: Sequence[Tree]) -> str:
    points = list(_points(series))
    thresholds = {point["threshold"] for _, point in points if point["threshold"] is not None}
    nodes = any(point["nodes"] for _, point in points)
    head = ["", f"workers{' on nodes' if nodes else ''}", "runs", "training time, s", "return at the end", "steps/s"]
    head += ["speed-up", "efficiency", *([_threshold_head(thresholds)] if thresholds else [])]
    rows = []
    for title, point in points:
        row = [title, size(point), _runs(point), _shown(point["train_seconds"], 1)]
        row += [_shown(point["return_mean"], 1), _shown(point["steps_per_second"], 0)]
        row += [_shown(point["speed_up"], 2, "×"), _shown(point["efficiency"], 0, " %", factor=100)]
        if thresholds:
            reached = f" ({point['reached']} of {point['done']} runs)" if point["reached"] < point["done"] else ""
            row.append(f"{_shown(point['seconds_to_return'], 1)}{reached}")
        rows.append(row)
    return table(head, rows)


def _threshold_head(thresholds: set[float]) -> str:
    return f"time to return {next(iter(thresholds)):g}, s" if len(thresholds) == 1 else "time to the solved return, s"


def _runs(point: Tree) -> str:
    missing = point["runs"] - point["done"] - point["failed"] - point["queued"]
    others = {"failed": point["failed"], "queued": point["queued"], "missing": missing}
    return runs_cell(point["done"], point["runs"], counts(others))


def _legend(series: Sequence[Tree], entries: Sequence[Tree]) -> str:
    text = (
        "Means over runs (seeds), with 95 % bootstrap intervals in brackets. Training time and steps/s exclude the "
        "start. Speed-up: steps/s relative to the fewest workers. Efficiency: speed-up over the growth of the workers."
    )
    if any(one["scaling"] == "weak" for one in series):
        text += " Weak scaling: every worker has the same work, so the time should stay constant."
    stops = [
        entry["settings"] for entry in entries if (entry.get("settings") or {}).get("stop.return_mean") is not None
    ]
    if stops:  # otherwise a run would seem to end below the return it has reached
        window, confirm = (stops[0][f"stop.{name}"] for name in ("return_window", "confirm_episodes"))
        text += (
            f" The return at the end is over the last 100 episodes; a run with --stop-return stops once the last "
            f"{window} episodes reach that return and {confirm} evaluation episodes confirm it."
        )
    return text


def _time_split(series: Sequence[Tree]) -> str:
    rows = []
    for title, point in _points(series):
        split = point["time_split"]
        total = sum(split.get(part, 0.0) for part in PARTS)
        if total:
            shares = [f"{100 * split.get(part, 0.0) / total:.0f} %" for part in PARTS]
            rows.append([title, size(point), *shares, f"{split.get('start', 0.0):.1f}"])
    head = ["", "workers", *PARTS, "start, s"]
    return "Time split, as shares of the training time, and the start before it:\n\n" + table(head, rows)


def _engine_ratios(rows: Sequence[Tree]) -> str:
    body = [
        [
            row["env"],
            algorithm_name(row["algo"]),
            size(row),
            f"{row['engine']} over {row['over']}",
            _shown(row["ratio"], 2, "×"),
        ]
        for row in rows
    ]
    return "The same job on two engines:\n\n" + table(["env", "algorithm", "workers", "", "steps/s"], body)


def _verdicts(series: Sequence[Tree]) -> Iterator[str]:
    for title, point in _points(series):
        if point["verdict"]:
            nodes = f" on {count(point['nodes'], 'node')}" if point["nodes"] else ""
            yield f"{title}, {count(point['workers'], 'worker')}{nodes}: {point['verdict']}"


def _forecast(series: Tree, title: str) -> Iterator[str]:
    measured = [point for point in series["points"] if point["done"]]
    if not series["fits"]:
        return
    if series["prediction"] is None:
        slower = f"{size(measured[-1])} workers are slower than {size(measured[0])}"
        yield f"{title}: {slower}. Speed-up falls as workers are added, so no forecast is made."
        return
    for fit in series["fits"]:
        serial = _shown(fit["serial"], 1, " %", factor=100)
        yield f"{title}: {LAWS[fit['law']]}: {serial} of the time is serial; mean error {100 * fit['error']:.0f} %."
    if series["check"]:
        yield f"{title}: {_check(series['check'])}"
    elif len({point["workers"] for point in measured}) > 2:
        yield f"{title}: without the largest number of workers there is no speed-up, so the forecast is not checked."
    else:
        yield f"{title}: the forecast is not checked: that takes three numbers of workers."
    yield f"{title}: {_prediction(series)}"


def _check(check: Tree) -> str:
    prediction = check["prediction"]
    fitted_on = ", ".join(str(workers) for workers in prediction["fitted_on"])
    inside = {
        True: "inside the interval",
        False: "**outside the interval**: the law misses something",
        None: "no interval",
    }
    return (
        f"check: {fitted_on} workers predict {_shown(prediction['speed_up'], 2, '×')} for {prediction['workers']}; "
        f"measured {_shown(check['measured'], 2, '×')}, {inside[check['inside']]} (error "
        f"{100 * check['error']:+.0f} %, which widens the forecast)."
    )


def _prediction(series: Tree) -> str:
    found, cores = series["prediction"], series["cores"]
    text = f"{found['workers']} workers: {_shown(found['speed_up'], 2, '×')}, {found['steps_per_second']:,.0f} steps/s"
    beyond = f"; the machine had {cores} cores" if cores and found["workers"] > cores else ""
    return f"{text}, if the law holds and each worker has its own core{beyond}."


def _remarks(entries: Sequence[Tree]) -> Iterator[str]:
    for entry in entries:
        yield from (f"`{entry['name']}`: {text}" for text in entry.get("problems") or [])
    kinds = sorted({hardware(entry["machine"]) for entry in entries if entry["state"] == "done"})
    if len(kinds) > 1:
        yield (
            f"the runs were made on different machines ({'; '.join(kinds)}), which may explain part of the "
            "differences: `--constraint` or `--queue` gets jobs hosts of one kind"
        )
