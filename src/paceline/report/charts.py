"""The charts of a report as plain data for charts.js: curves are thinned out, numbers rounded for a screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.results.comparison import Comparison, MeanCurve
from paceline.results.estimates import Estimate
from paceline.results.groups import RunGroup
from paceline.results.run_files import Floats
from paceline.results.run_series import AXES
from paceline.results.runs import RunData
from paceline.results.scaling_series import ScalingSeries
from paceline.verdict import OVERHEAD, TRAINING

PARTS = ("start", *TRAINING, *(part for part in OVERHEAD if part != "start"))
MEMBER_POINTS = 150
"""Most points of the curve of one run."""
CONTROL_HOST = "launcher"

Data = dict[str, Any]


def curves(
    by_steps: Comparison | None, by_time: Comparison | None, groups: Sequence[RunGroup], slots: Mapping[str, int]
) -> Data:
    """Mean and interval of each group, and its runs. Without a comparison (no run has finished), only the runs."""
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
        "steps": rounded(curve.steps[known]),
        "wall": rounded(curve.seconds[known]),
        "y": rounded(curve.returns[known]),
    }


def has_returns(run: RunData) -> bool:
    return run.usable and bool(np.isfinite(run.curve.returns).any())


def scaling(series: Sequence[ScalingSeries]) -> tuple[Data, Data]:
    """Speed-up and efficiency over workers."""
    measured = {point.workers for one in series for point in one.points}
    x = sorted(measured | {one.prediction.workers for one in series if one.prediction is not None})
    least, most = min(measured), max(measured)
    lines, efficiencies = [], []
    for slot, one in enumerate(series):
        lines.append(_line(one, slot, [point.speed_up for point in one.points]))
        efficiencies.append(_line(one, slot, [point.efficiency for point in one.points]))
        if one.prediction is not None:
            ahead, last = one.prediction, one.points[-1]
            ends = [Estimate(last.speed_up.value, last.speed_up.value, last.speed_up.value), ahead.speed_up]
            line = {"label": f"{one.label}, forecast", "slot": slot, "guess": True, "x": [last.workers, ahead.workers]}
            lines.append(line | _values(ends))
    common = {"kind": "points", "x": "workers", "unit": "workers"}
    ideal = {"x": x, "y": rounded([workers / least for workers in x])}
    speed_up = {"ideal": ideal, "y": "speed-up", "format": ".2f", "series": lines}
    level = {"x": [least, most], "y": [1, 1]}
    efficiency = {"ideal": level, "y": "efficiency", "format": ".0%", "series": efficiencies}
    return {**common, **speed_up}, {**common, **efficiency}


def _line(series: ScalingSeries, slot: int, estimates: Sequence[Estimate]) -> Data:
    workers = [point.workers for point in series.points]
    return {"label": series.label, "slot": slot, "x": workers, **_values(estimates)}


def _values(estimates: Sequence[Estimate]) -> Data:
    found: Data = {"y": rounded([estimate.value for estimate in estimates])}
    if all(estimate.low is not None for estimate in estimates):
        found["low"] = rounded([estimate.low for estimate in estimates])
        found["high"] = rounded([estimate.high for estimate in estimates])
    return found


def time_split(rows: Mapping[str, Mapping[str, float]]) -> Data:
    parts = [part for part in PARTS if any(row.get(part, 0.0) > 0 for row in rows.values())]
    held = [{"name": part, "seconds": rounded([row.get(part, 0.0) for row in rows.values()])} for part in parts]
    return {"kind": "split", "rows": list(rows), "parts": held}


def load(rows: Mapping[str, float]) -> Data:
    values = [{"label": "CPU", "slot": 0, "values": rounded(list(rows.values()))}]
    return {
        "kind": "bars",
        "rows": list(rows),
        "series": values,
        "x": "share of the node's cores in use",
        "format": ".0%",
    }


def timeline(events: Sequence[Mapping[str, Any]]) -> Data:
    """The phases of each host. A phase lasts until the host's next event."""
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
                    "to": round(max(until, begin + 0.003 * end), 3),  # visible, however short
                }
            )
    return {"kind": "timeline", "rows": hosts, "spans": spans}


def rounded(values: Floats | Sequence[Any]) -> list[float | int | None]:
    """Five digits; null for values that are not finite."""
    return [_round(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def _round(value: Any) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _band(curve: MeanCurve) -> Data:
    band: Data = {"x": rounded(curve.x), "mean": rounded(curve.mean)}
    if curve.low is not None and curve.high is not None:
        band |= {"low": rounded(curve.low), "high": rounded(curve.high)}
    return band
