"""The figure of a search: the learning curves of its trials, and the score against each searched setting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.report.figure_style import PALETTE, STYLE
from paceline.results.json_lines import read_rows
from paceline.tune.space import Range
from paceline.tune.sweep_plan import DONE, EARLY, FAILED, Sweep
from paceline.tune.table import rank_points, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
BEST, CURVE, DOT = PALETTE[0], "#B8B8B8", "#4D4D4D"


def draw(sweep: Sweep) -> Path:
    """Write `trials.png`. The best point is in colour."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        panels = 1 + len(sweep.space)
        columns = min(COLUMNS, panels)
        rows = -(-panels // columns)
        figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        best = rank_points(sweep)[0].point
        _draw_curves(axes[0], sweep, best)
        for axis, key in zip(axes[1:], sweep.space, strict=False):
            _draw_setting(axis, sweep, key, best)
        for axis in axes[panels:]:
            axis.set_visible(False)
        path = sweep.folder / "trials.png"
        figure.savefig(path, dpi=150)
    return path


def _draw_curves(axis: Axes, sweep: Sweep, best: int) -> None:
    axis.set(title=sweep.metric, xlabel="environment steps")
    for trial in sorted(sweep.trials, key=lambda trial: trial.point == best):
        rows = [
            row for row in read_rows(sweep.folder / trial.name / "metrics.jsonl") if row.get(sweep.metric) is not None
        ]
        style: dict[str, Any] = {"color": BEST, "linewidth": 1.8} if trial.point == best else {"color": CURVE}
        style |= {"linestyle": ":"} if trial.status == FAILED else {}
        axis.plot([row["env_steps"] for row in rows], [row[sweep.metric] for row in rows], **style)
    axis.plot([], [], color=BEST, label="best")
    axis.legend(loc="best")


def _draw_setting(axis: Axes, sweep: Sweep, key: str, best: int) -> None:
    axis.set(title=f"{sweep.metric} by {key}", xlabel=key)
    domain = sweep.domains[key]
    scored = [(t, t.score) for t in sweep.trials if t.score is not None and t.status in (DONE, EARLY)]
    for trial, score in scored:
        value = trial.values[key]
        if isinstance(domain, Range) or value in domain.values:
            place = value if isinstance(domain, Range) else domain.values.index(value)
            colour = BEST if trial.point == best else DOT
            axis.plot([place], [score], "o", color=colour, markerfacecolor="white" if trial.status == EARLY else colour)
    if isinstance(domain, Range):
        axis.set_xscale("log" if domain.kind == "log" else "linear")
    else:
        axis.set_xticks(range(len(domain.values)), [shown(value) for value in domain.values])
        axis.margins(x=0.15)
    if any(trial.status == EARLY for trial, _ in scored):
        axis.plot([], [], "o", color=DOT, markerfacecolor="white", label="stopped early")
        axis.legend(loc="best")
