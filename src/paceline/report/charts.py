"""Figures of the page as plain data, which charts.js draws: curves thinned, numbers rounded to what a screen shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.bench.comparison import AXES, Comparison, MeanCurve
from paceline.bench.files import Floats
from paceline.bench.groups import Group
from paceline.bench.study import RunData
from paceline.report.speed import Family
from paceline.verdict import ASIDE, TRAINING

PARTS = ("start", *TRAINING, *(part for part in ASIDE if part != "start"))
MEMBER_POINTS = 150
"""Of the curve of one run."""
CONTROL_HOST = "launcher"

Data = dict[str, Any]


def curves(
    by_steps: Comparison | None, by_time: Comparison | None, groups: Sequence[Group], slots: Mapping[str, int]
) -> Data:
    """Mean and interval of each group, and its runs. Without a comparison (no run has finished) the runs alone."""
    series: list[Data] = []
    if by_steps is not None and by_time is not None:
        members = {group.label: group.used for group in groups}
        for result, timed in zip(by_steps.results, by_time.results, strict=True):
            if result.curve is None or timed.curve is None:
                continue
            series.append(
                {
                    "label": result.label,
                    "slot": slots[result.label],
                    "steps": _band(result.curve),
                    "wall": _band(timed.curve),
                    "members": [member(run) for run in members[result.label]],
                }
            )
    else:
        for group in groups:
            for run in (run for run in group.runs if has_returns(run)):
                one = member(run)
                line = {"slot": slots[group.label], "members": []}
                line |= {axis: {"x": one[axis], "mean": one["y"]} for axis in ("steps", "wall")}
                series.append({"label": run.name, **line})
    limit = by_steps.threshold if by_steps else None
    x = {"steps": AXES["steps"], "wall": AXES["time"]}
    return {"kind": "curves", "x": x, "y": "return", "threshold": limit, "series": series}


def member(run: RunData) -> Data:
    known = np.flatnonzero(np.isfinite(run.curve.returns))
    if known.size > MEMBER_POINTS:
        known = known[np.linspace(0, known.size - 1, MEMBER_POINTS).round().astype(int)]
    curve = run.curve
    return {
        "label": run.name,
        "steps": short(curve.steps[known]),
        "wall": short(curve.seconds[known]),
        "y": short(curve.returns[known]),
    }


def has_returns(run: RunData) -> bool:
    return run.usable and bool(np.isfinite(run.curve.returns).any())


def scaling(families: Sequence[Family]) -> tuple[Data, Data]:
    """Speed-up and efficiency over workers."""

    def series(name: str) -> list[Data]:
        found = []
        for slot, family in enumerate(families):
            estimates = [getattr(point, name) for point in family.points]
            one: Data = {"label": family.label, "slot": slot, "x": [point.workers for point in family.points]}
            one["y"] = short([estimate.value for estimate in estimates])
            if all(estimate.low is not None for estimate in estimates):
                one["low"] = short([estimate.low for estimate in estimates])
                one["high"] = short([estimate.high for estimate in estimates])
            found.append(one)
            if name == "speed_up" and family.prediction is not None:
                ahead, last = family.prediction, family.points[-1]
                guess: Data = {"label": f"{family.label}, foreseen", "slot": slot, "guess": True}
                guess |= {"x": [last.workers, ahead.workers], "y": short([last.speed_up.value, ahead.speed_up.value])}
                if "low" in one and ahead.speed_up.low is not None:
                    guess |= {"low": short([last.speed_up.value, ahead.speed_up.low])}
                    guess |= {"high": short([last.speed_up.value, ahead.speed_up.high])}
                found.append(guess)
        return found

    measured = {point.workers for family in families for point in family.points}
    x = sorted(measured | {family.prediction.workers for family in families if family.prediction is not None})
    least, most = min(measured), max(measured)
    common = {"kind": "points", "x": "workers", "unit": "workers"}
    up = {"ideal": {"x": x, "y": short([one / least for one in x])}, "y": "speed-up", "format": ".2f"}
    even = {"ideal": {"x": [least, most], "y": [1, 1]}, "y": "efficiency", "format": ".0%"}
    return {**common, **up, "series": series("speed_up")}, {**common, **even, "series": series("efficiency")}


def split(rows: Mapping[str, Mapping[str, float]]) -> Data:
    parts = [part for part in PARTS if any(row.get(part, 0.0) > 0 for row in rows.values())]
    held = [{"name": part, "seconds": short([row.get(part, 0.0) for row in rows.values()])} for part in parts]
    return {"kind": "split", "rows": list(rows), "parts": held}


def load(rows: Mapping[str, float]) -> Data:
    values = [{"label": "CPU", "slot": 0, "values": short(list(rows.values()))}]
    return {
        "kind": "bars",
        "rows": list(rows),
        "series": values,
        "x": "share of the node's cores in use",
        "format": ".0%",
    }


def timeline(events: Sequence[Mapping[str, Any]]) -> Data:
    """What each host was in, from one word to the next; its last lasts no time."""
    known = [event for event in events if isinstance(event.get("seconds"), int | float)]
    end = max((float(event["seconds"]) for event in known), default=0.0)
    hosts = list(dict.fromkeys(str(event.get("host")) for event in known))
    hosts.sort(key=lambda host: host != CONTROL_HOST)
    spans = []
    for host in hosts:
        own = sorted((e for e in known if str(e.get("host")) == host), key=lambda event: float(event["seconds"]))
        begins = [float(event["seconds"]) for event in own]
        for event, begin, until in zip(own, begins, [*begins[1:], end], strict=True):
            spans.append(
                {
                    "row": host,
                    "phase": str(event.get("phase")),
                    "detail": str(event.get("detail") or ""),
                    "from": round(begin, 3),
                    "to": round(max(until, begin + 0.003 * end), 3),  # seen, however short
                }
            )
    return {"kind": "timeline", "rows": hosts, "spans": spans}


def short(values: Floats | Sequence[Any]) -> list[float | int | None]:
    """Five digits; what is not finite becomes null."""
    return [_short(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def _short(value: Any) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _band(curve: MeanCurve) -> Data:
    band: Data = {"x": short(curve.x), "mean": short(curve.mean)}
    if curve.low is not None and curve.high is not None:
        band |= {"low": short(curve.low), "high": short(curve.high)}
    return band
