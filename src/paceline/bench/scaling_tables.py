"""A scaling study in Markdown: what was measured, where the time goes, what bounds it, and what more would bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.make import QUEUED
from paceline.bench.results import hardware, machines, table

Tree = dict[str, Any]
PARTS = ("env", "act", "learn", "sync", "idle", "eval", "save")
LAWS = {"amdahl": "Amdahl (the work stays the same)", "gustafson": "Gustafson (it grows with the workers)"}


def tables(result: Tree) -> str:
    entries = result["runs"]
    done = [entry for entry in entries if entry["state"] == "done"]
    parts = [result["about"].strip()] if result["about"].strip() else []
    parts.append("```sh\n" + "\n".join(result["commands"]) + "\n```")
    parts += machines(entry["machine"] for entry in done)
    series = result["series"]
    parts.append(_measured(series))
    parts.append(_note(series, entries))
    parts.append(_split(series))
    if result["engines"]:
        parts.append(_engines(result["engines"]))
    verdicts = _verdicts(series)
    parts += ["## What bounds it, and what to change", verdicts] if verdicts else []
    forecast = _laws(series)
    parts += ["## What more workers would bring", forecast] if forecast else []
    parts += _missing(entries)
    return "\n\n".join(parts) + "\n"


def title(series: Tree, many: Sequence[Tree]) -> str:
    """What tells it from the other series; all of it if there are no others."""
    names = [name for name in ("env", "algo", "engine", "scaling") if len({one[name] for one in many}) > 1]
    return ", ".join(str(series[name]) for name in names or ("env", "algo", "engine", "scaling"))


def shown(found: Tree | None, digits: int, unit: str = "", *, factor: float = 1.0) -> str:
    """`1.81× (1.75–1.88)`; a dash for nothing."""
    if found is None or found["value"] is None:
        return "–"
    text = f"{factor * found['value']:,.{digits}f}{unit}"
    if found["low"] is None:
        return text
    return f"{text} ({factor * found['low']:,.{digits}f}–{factor * found['high']:,.{digits}f})"


def size(point: Tree) -> str:
    return f"{point['workers']}" + (f" on {point['nodes']}" if point["nodes"] else "")


def _measured(series: Sequence[Tree]) -> str:
    limits = {point["threshold"] for one in series for point in one["points"] if point["threshold"] is not None}
    nodes = any(point["nodes"] for one in series for point in one["points"])
    head = ["", f"workers{' on nodes' if nodes else ''}", "runs", "training time, s", "return at the end", "steps/s"]
    head += ["speed-up", "efficiency", *([_reach(limits)] if limits else [])]
    rows = []
    for one in series:
        for point in one["points"]:
            row = [title(one, series), size(point), _runs(point), shown(point["train_seconds"], 1)]
            row += [shown(point["return_mean"], 1), shown(point["steps_per_second"], 0)]
            row += [shown(point["speed_up"], 2, "×"), shown(point["efficiency"], 0, " %", factor=100)]
            if limits:
                reached = f" ({point['reached']} of {point['done']} runs)" if point["reached"] < point["done"] else ""
                row.append(f"{shown(point['seconds_to_return'], 1)}{reached}")
            rows.append(row)
    return table(head, rows)


def _reach(limits: set[float]) -> str:
    return f"time to return {next(iter(limits)):g}, s" if len(limits) == 1 else "time to the solved return, s"


def _note(series: Sequence[Tree], entries: Sequence[Tree]) -> str:
    text = (
        "Means over runs (seeds), in brackets the 95 % bootstrap interval. Training time and steps/s leave the start "
        "out. Speed-up: steps/s over those with the fewest workers; efficiency: that over how many times the workers."
    )
    if any(one["scaling"] == "weak" for one in series):
        text += " Weak: each worker has as much work as the one has, so that the time should stay the same."
    stops = [
        entry["settings"] for entry in entries if (entry.get("settings") or {}).get("stop.return_mean") is not None
    ]
    if stops:  # else a run would seem to end below what it has reached
        window, confirm = (stops[0][f"stop.{name}"] for name in ("return_window", "confirm_episodes"))
        text += (
            " The return at the end is of the last 100 episodes; a run that was to stop at one did so when the last "
        )
        text += f"{window} had reached it, and {confirm} of an evaluation."
    return text


def _split(series: Sequence[Tree]) -> str:
    """Shares of the time of training; the start, which is none, in seconds."""
    rows = []
    for one in series:
        for point in one["points"]:
            split = point["time_split"]
            total = sum(split.get(part, 0.0) for part in PARTS)
            if total:
                shares = [f"{100 * split.get(part, 0.0) / total:.0f} %" for part in PARTS]
                rows.append([title(one, series), size(point), *shares, f"{split.get('start', 0.0):.1f}"])
    head = ["", "workers", *PARTS, "start, s"]
    return "Where the time goes: shares of the training time, and the start before it:\n\n" + table(head, rows)


def _engines(rows: Sequence[Tree]) -> str:
    body = [
        [
            row["env"],
            row["algo"],
            size(row),
            f"{row['engine']} over {row['over']}",
            shown(row["ratio"], 2, "×"),
        ]
        for row in rows
    ]
    return "The same job by two engines:\n\n" + table(["env", "algorithm", "workers", "", "steps/s"], body)


def _verdicts(series: Sequence[Tree]) -> str:
    lines = []
    for one in series:
        for point in one["points"]:
            if point["verdict"]:
                workers = f"{point['workers']} {'worker' if point['workers'] == 1 else 'workers'}"
                workers += (
                    f" on {point['nodes']} {'node' if point['nodes'] == 1 else 'nodes'}" if point["nodes"] else ""
                )
                lines.append(f"- {title(one, series)}, {workers}: {point['verdict']}")
    return "\n".join(lines)


def _laws(series: Sequence[Tree]) -> str:
    lines = []
    for one in series:
        name = title(one, series)
        measured = [point for point in one["points"] if point["done"]]
        if one["fits"] and one["prediction"] is None:
            slower = f"{size(measured[-1])} workers are slower than {size(measured[0])}"
            lines.append(f"- {name}: {slower}; neither law allows for that, and nothing is foreseen.")
            continue
        for fit in one["fits"]:
            serial = shown(fit["serial"], 1, " %", factor=100)
            off = f"fitted speed-ups are {100 * fit['error']:.0f} % off"
            lines.append(f"- {name}: {LAWS[fit['law']]}: {serial} of the time is serial; {off}.")
        if one["check"]:
            lines.append(f"- {name}: {_check(one['check'])}")
        elif len({point["workers"] for point in measured}) > 2:
            lines.append(
                f"- {name}: with the largest number held out, the others show no gain, and nothing is foreseen."
            )
        elif one["fits"]:
            lines.append(f"- {name}: no measurement is held out: that takes three numbers of workers.")
        if one["prediction"]:
            lines.append(f"- {name}: {_prediction(one)}")
    return "\n".join(lines)


def _check(check: Tree) -> str:
    prediction = check["prediction"]
    on = ", ".join(str(workers) for workers in prediction["fitted_on"])
    foreseen = shown(prediction["speed_up"], 2, "×")
    word = {
        True: "inside the interval",
        False: "**outside the interval**: the law misses something",
        None: "no interval",
    }
    return (
        f"held out: from {on} workers, {foreseen} is foreseen for {prediction['workers']}; measured "
        f"{shown(check['measured'], 2, '×')}, {word[check['inside']]} ({100 * check['error']:+.0f} %, by which the "
        "forecast is widened)."
    )


def _prediction(series: Tree) -> str:
    found = series["prediction"]
    text = f"{found['workers']} workers: {shown(found['speed_up'], 2, '×')}, {found['steps_per_second']:,.0f} steps/s"
    cores = series["cores"]
    beyond = f"; the machine had {cores} cores" if cores and found["workers"] > cores else ""
    return f"{text}, if the law holds and each worker has a core of its own{beyond}."


def _missing(entries: Sequence[Tree]) -> list[str]:
    lines = [f"- `{entry['name']}` failed: {entry['reason']}" for entry in entries if entry["state"] == "failed"]
    lines += [f"- `{entry['name']}`: {entry['reason']}" for entry in entries if entry["state"] in QUEUED]
    for state in ("interrupted", "missing"):
        names = [f"`{entry['name']}`" for entry in entries if entry["state"] == state]
        lines += [f"- {state}: {', '.join(names)}"] if names else []
    lines += [f"- `{entry['name']}`: {text}" for entry in entries for text in entry.get("problems") or []]
    kinds = sorted({hardware(entry["machine"]) for entry in entries if entry["state"] == "done"})
    if len(kinds) > 1:
        lines.append(
            f"- the runs were made on different machines ({'; '.join(kinds)}), and part of what is compared may be "
            "theirs: jobs get hosts of one kind by `--constraint` or `--queue`"
        )
    return ["Not in these figures, or to be known:\n\n" + "\n".join(lines)] if lines else []


def _runs(point: Tree) -> str:
    missing = point["runs"] - point["done"] - point["failed"] - point["queued"]
    others = [f"{point[state]} {state}" for state in ("failed", "queued") if point[state]]
    others += [f"{missing} missing"] if missing else []
    return f"{point['done']} of {point['runs']}" + (f" ({', '.join(others)})" if others else "")
