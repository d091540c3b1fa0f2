"""Figures of comparisons and scaling studies, drawn from their figures alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.comparison import AXES, Comparison, Estimate, Improvement
from paceline.bench.laws import law_speed_up
from paceline.bench.scaling_tables import size, title
from paceline.report.plots import DASHES, PALETTE, STYLE, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the time split, as the console colours it: work, exchange, waste.
PARTS = {
    "env": "#009E73",
    "act": "#56B4E9",
    "learn": "#CC79A7",
    "sync": "#E69F00",
    "idle": "#D55E00",
    "eval": "#0072B2",
    "save": "#8C8C8C",
    "start": "#CFCFCF",
}


MOST_PAIRS = 6
"""Of groups, whose probabilities there is room for."""


def save(output: Path, draw: Callable[[Figure], None], size: tuple[float, float]) -> bool:
    """One figure, never through pyplot: nothing global, no window system. False, with a line that says so, where it
    cannot be drawn: what it would show has been measured, and is in the tables."""
    try:
        import matplotlib
    except ImportError:
        print("figure     not drawn: matplotlib is not installed; pip install 'paceline[report]'")
        return False
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12), facecolor="white")
        draw(figure)
        figure.savefig(output, dpi=130)
    return True


def draw_comparison(result: Comparison, output: Path) -> bool:
    """Curves, scores, profiles, probabilities, speed, time. Of several tasks, the curves of the first; and all of it,
    where nothing is scored together."""
    result = result if result.results else result.by_task[0]

    def draw(figure: Figure) -> None:
        axes: list[Axes] = list(figure.subplots(2, 3).flat)
        _curves(axes[0], result if not result.by_task else result.by_task[0])
        _intervals(axes[1], result, "score", f"{result.unit.capitalize()}, interquartile mean", scatter=True)
        _profiles(axes[2], result)
        _probabilities(axes[3], result)
        _intervals(axes[4], result, "steps_per_second", "Steps per second")
        axes[4].set_xlim(left=0)
        split_bars(axes[5], [one.label for one in result.results], [one.time_split for one in result.results])
        legend(figure, [one.label for one in result.results])

    return save(output, draw, (15, 8.4))


def draw_scaling(folder: Path) -> None:
    """`scaling.png` from `scaling.json`: speed-up and what it would be if perfect, efficiency, time, time split."""
    result = json.loads((folder / "scaling.json").read_bytes())
    series = [one for one in result["series"] if any(point["done"] for point in one["points"])]
    if not series:
        return
    labels = [title(one, series) for one in series]

    def draw(figure: Figure) -> None:
        axes: list[Axes] = list(figure.subplots(2, 2).flat)
        _speed_ups(axes[0], series)
        _points(axes[1], series, "efficiency", "Efficiency")
        axes[1].axhline(1.0, color="#4D4D4D", linestyle="--", linewidth=1)
        axes[1].set_ylim(bottom=0)
        axes[1].yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        reached = any(point["seconds_to_return"] for one in series for point in one["points"])
        name, text = (
            ("seconds_to_return", "Time to the return, s") if reached else ("train_seconds", "Training time, s")
        )
        _points(axes[2], series, name, text)
        axes[2].set_ylim(bottom=0)
        rows = [(label, point) for label, one in zip(labels, series, strict=True) for point in one["points"]]
        rows = [(label, point) for label, point in rows if point["time_split"]]
        split_bars(axes[3], [f"{label}, {size(p)}" for label, p in rows], [p["time_split"] for _, p in rows])
        legend(figure, labels)

    try:
        drawn = save(folder / "scaling.png", draw, (13, 9))
    except OSError as error:
        print(f"figure     not drawn: {folder / 'scaling.png'} cannot be written ({error.strerror})")
        return
    if drawn:
        print(f"figure     {folder / 'scaling.png'}")


def _points(axis: Axes, series: list[dict[str, Any]], name: str, text: str) -> None:
    """Against the workers, with intervals."""
    axis.set_title(text)
    for place, one in enumerate(series):
        found = [(point["workers"], point[name]) for point in one["points"] if point[name] is not None]
        found = [(workers, each) for workers, each in found if each["value"] is not None]
        axis.plot(
            [workers for workers, _ in found],
            [each["value"] for _, each in found],
            color=colour(place),
            linestyle=dash(place),
            marker="o",
            markersize=5,
            linewidth=1.6,
        )
        for workers, each in found:
            if each["low"] is not None:
                axis.plot([workers, workers], [each["low"], each["high"]], color=colour(place), linewidth=3, alpha=0.4)
    axis.set_xlabel("workers")
    axis.set_xticks(sorted({point["workers"] for one in series for point in one["points"]}))


def _speed_ups(axis: Axes, series: list[dict[str, Any]]) -> None:
    """Measured, the fitted law on to what is foreseen, and a perfect one."""
    _points(axis, series, "speed_up", "Speed-up")
    most = 1.0
    for place, one in enumerate(series):
        counts = [point["workers"] for point in one["points"] if point["done"]]
        law = next((fit for fit in one["fits"] if fit["law"] == one["law"]), None)
        if law is None or one["prediction"] is None:
            continue
        base, end = min(counts), one["prediction"]["workers"]
        most = max(most, end / base)
        grid = np.linspace(base, end, 100)
        fitted = law_speed_up(one["law"], grid / base, law["serial"]["value"])
        axis.plot(grid, fitted, color=colour(place), linewidth=1, linestyle=":")
        foreseen = one["prediction"]["speed_up"]
        if foreseen["low"] is not None:
            axis.plot([end, end], [foreseen["low"], foreseen["high"]], color=colour(place), linewidth=3, alpha=0.2)
        axis.plot([end], [foreseen["value"]], marker="o", markerfacecolor="white", color=colour(place), markersize=6)
    base = min(point["workers"] for one in series for point in one["points"] if point["done"])
    axis.plot([base, base * most], [1, most], color="#4D4D4D", linestyle="--", linewidth=1, zorder=1)
    axis.set_xlabel("workers (dotted: the fitted law; hollow: foreseen; dashed: perfect)")


def legend(figure: Figure, labels: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour(i), linestyle=dash(i), linewidth=2.2) for i in range(len(labels))]
    columns = max(1, min(len(labels), 150 // (max(map(len, labels)) + 8)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def dash(place: int) -> Any:
    return DASHES[place // len(PALETTE) % len(DASHES)]


def _curves(axis: Axes, result: Comparison) -> None:
    axis.set_title(f"Learning curves, {result.tasks[0]}"[:60])
    for place, one in enumerate(result.results):
        curve = one.curve
        if curve is None:
            continue
        axis.plot(curve.x, curve.mean, color=colour(place), linestyle=dash(place), linewidth=1.8, zorder=3)
        if curve.low is not None and curve.high is not None:
            axis.fill_between(curve.x, curve.low, curve.high, color=colour(place), alpha=0.16, linewidth=0, zorder=1)
    low, high = axis.get_ylim()
    # So far off, it would press the curves together.
    if result.threshold is not None and low - 1.5 * (high - low) <= result.threshold <= high + 1.5 * (high - low):
        axis.axhline(result.threshold, color="#4D4D4D", linestyle="--", linewidth=1, label=f"{result.threshold:g}")
        axis.legend(loc="best")
    axis.set_xlabel(AXES[result.at])
    axis.set_ylabel(result.unit)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(short)


def _intervals(axis: Axes, result: Comparison, name: str, title: str, *, scatter: bool = False) -> None:
    """A row per group: the estimate, its interval, the runs."""
    axis.set_title(title)
    for place, one in enumerate(result.results):
        found: Estimate = getattr(one, name)
        if not math.isfinite(found.value):
            continue
        if found.low is not None and found.high is not None:
            axis.plot([found.low, found.high], [place, place], color=colour(place), linewidth=7, alpha=0.35)
        axis.plot([found.value], [place], marker="|", markersize=16, markeredgewidth=2.5, color=colour(place))
        if scatter:
            axis.plot(one.scores, [place + 0.28] * len(one.scores), ".", color=colour(place), markersize=5, alpha=0.7)
    axis.set_yticks(range(len(result.results)), [one.label for one in result.results])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(short)


def _profiles(axis: Axes, result: Comparison) -> None:
    axis.set_title("Performance profiles")
    for place, one in enumerate(result.results):
        profile = one.profile
        axis.plot(profile.thresholds, profile.share, color=colour(place), linestyle=dash(place), linewidth=1.8)
        if profile.low is not None and profile.high is not None:
            axis.fill_between(
                profile.thresholds, profile.low, profile.high, color=colour(place), alpha=0.14, linewidth=0
            )
    axis.set_xlabel(f"{result.unit} τ")
    axis.set_ylabel("share of runs above τ")
    axis.set_ylim(-0.02, 1.02)


def _probabilities(axis: Axes, result: Comparison) -> None:
    """Of all pairs, or if they are many of the best group over each other."""
    best = max(result.results, key=lambda one: one.score.value).label
    pairs = [(f"{one.label}\nover {one.over}", one.probability, one.low, one.high) for one in result.improvements]
    axis.set_title("Probability that a run scores higher")
    if len(pairs) > MOST_PAIRS:
        axis.set_title(f"Probability that one of {best}\nscores higher than one of", fontsize=11)
        pairs = [_of_best(one, best) for one in result.improvements if best in (one.label, one.over)]
    for place, (_, probability, low, high) in enumerate(pairs):
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=PALETTE[0], linewidth=7, alpha=0.35)
        axis.plot([probability], [place], marker="|", markersize=16, markeredgewidth=2.5, color=PALETTE[0])
    axis.axvline(0.5, color="#4D4D4D", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(pairs)), [label for label, *_ in pairs])
    axis.set_xlim(-0.02, 1.02)
    axis.invert_yaxis()
    if not pairs:
        axis.text(0.5, 0.5, "one group", transform=axis.transAxes, ha="center", va="center", color="#8C8C8C")
        axis.set_yticks([])


def _of_best(one: Improvement, best: str) -> tuple[str, float, float | None, float | None]:
    """As the probability of the best over the other."""
    if one.label == best:
        return one.over, one.probability, one.low, one.high
    low, high = (None if end is None else 1.0 - end for end in (one.high, one.low))
    return one.label, 1.0 - one.probability, low, high


def split_bars(axis: Axes, labels: list[str], splits: list[dict[str, float]]) -> None:
    """Where the time goes, in shares of all of it."""
    axis.set_title("Where the time goes")
    left = np.zeros(len(labels))
    totals = np.array([sum(split.values()) or 1.0 for split in splits])
    for part, paint in PARTS.items():
        shares = np.array([split.get(part, 0.0) for split in splits]) / totals
        if shares.max(initial=0.0) >= 0.005:
            axis.barh(range(len(labels)), shares, left=left, color=paint, label=part, height=0.62)
        left += shares
    axis.set_yticks(range(len(labels)), labels)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axis.invert_yaxis()
    axis.grid(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=8, handlelength=1, columnspacing=1)
