"""The picture of a sweep: the curves of its trials, and the score against each setting that was searched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.report.plots import PALETTE, STYLE, read_rows
from paceline.tune.plan import DONE, EARLY, FAILED, Sweep
from paceline.tune.space import Range
from paceline.tune.table import judge, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
PALE = "#B8B8B8"


def draw(sweep: Sweep) -> Path:
    """`trials.png`. The best point is in colour."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        panels = 1 + len(sweep.space)
        columns = min(COLUMNS, panels)
        rows = -(-panels // columns)
        figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        best = judge(sweep)[0].point
        _draw_curves(axes[0], sweep, best)
        for axis, key in zip(axes[1:], sweep.space, strict=False):
            _draw_setting(axis, sweep, key, best)
        for axis in axes[panels:]:
            axis.set_visible(False)
        path = sweep.folder / "trials.png"
        figure.savefig(path, dpi=150)
    return path


def _draw_curves(axis: Axes, sweep: Sweep, best: int) -> None:
    axis.set_title(sweep.metric)
    axis.set_xlabel("environment steps")
    for trial in sorted(sweep.trials, key=lambda trial: trial.point == best):
        rows = [
            row for row in read_rows(sweep.folder / trial.name / "metrics.jsonl") if row.get(sweep.metric) is not None
        ]
        look: dict[str, Any] = {"color": PALETTE[0], "linewidth": 1.8} if trial.point == best else {"color": PALE}
        look |= {"linestyle": ":"} if trial.status == FAILED else {}
        axis.plot([row["env_steps"] for row in rows], [row[sweep.metric] for row in rows], **look)
    axis.plot([], [], color=PALETTE[0], label="best")
    axis.legend(loc="best")


def _draw_setting(axis: Axes, sweep: Sweep, key: str, best: int) -> None:
    axis.set_title(f"{sweep.metric} by {key}")
    axis.set_xlabel(key)
    domain = sweep.domains[key]
    scored = [(t, t.score) for t in sweep.trials if t.score is not None and t.status in (DONE, EARLY)]
    for trial, score in scored:
        value = trial.values[key]
        place = value if isinstance(domain, Range) else domain.values.index(value) if value in domain.values else None
        if place is not None:
            look: dict[str, Any] = {"color": PALETTE[0] if trial.point == best else "#4D4D4D"}
            look |= {"markerfacecolor": "white"} if trial.status == EARLY else {}
            axis.plot([place], [score], "o", **look)
    if isinstance(domain, Range):
        axis.set_xscale("log" if domain.kind == "log" else "linear")
    else:
        axis.set_xticks(range(len(domain.values)), [shown(value) for value in domain.values])
        axis.margins(x=0.15)
    if any(trial.status == EARLY for trial, _ in scored):
        axis.plot([], [], "o", color="#4D4D4D", markerfacecolor="white", label="stopped early")
        axis.legend(loc="best")
