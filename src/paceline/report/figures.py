"""The figures of `paceline compare` and `paceline bench scaling`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.scaling_tables import series_title, size
from paceline.report.figure_style import (
    GREY,
    NO_MATPLOTLIB,
    PALE_GREY,
    PALETTE,
    STYLE,
    colour,
    dash,
    legend,
    new_figure,
    short_number,
)
from paceline.results.comparison import Comparison, Improvement
from paceline.results.estimates import Estimate
from paceline.results.run_series import AXES
from paceline.results.scaling_laws import law_speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Parts of the time split, in the colours of the console: work, exchange, waste.
PART_COLOURS = {
    "env": "#009E73",
    "act": "#56B4E9",
    "learn": "#CC79A7",
    "sync": "#E69F00",
    "idle": "#D55E00",
    "eval": "#0072B2",
    "save": PALE_GREY,
    "start": "#CFCFCF",
}
MAX_PAIRS = 6
"""Pairs of groups that fit into one panel."""


def save(output: Path, draw: Callable[[Figure], None], size: tuple[float, float]) -> bool:
    """Draw and save a figure. Without matplotlib, say so and return False: the tables have the same numbers."""
    try:
        import matplotlib
    except ImportError:
        print(f"figure     not drawn: {NO_MATPLOTLIB}")
        return False
    with matplotlib.rc_context(STYLE):
        figure = new_figure(size)
        draw(figure)
        figure.savefig(output, dpi=130)
    return True


def draw_comparison(result: Comparison, output: Path) -> bool:
    """Curves, scores, profiles, probabilities, speed and time split. With several tasks, the curves are those of the
    first, and so is everything else if there is no overall score."""
    result = result if result.results else result.by_task[0]

    def draw(figure: Figure) -> None:
        axes: list[Axes] = list(figure.subplots(2, 3).flat)
        _curves(axes[0], result if not result.by_task else result.by_task[0])
        _intervals(axes[1], result, "score", f"{result.unit.capitalize()}, interquartile mean", scatter=True)
        _profiles(axes[2], result)
        _probabilities(axes[3], result)
        _intervals(axes[4], result, "steps_per_second", "Steps per second")
        axes[4].set_xlim(left=0)
        _time_split(axes[5], [one.label for one in result.results], [one.time_split for one in result.results])
        legend(figure, [one.label for one in result.results])

    return save(output, draw, (15, 8.4))


def draw_scaling(folder: Path) -> None:
    """`scaling.png` from `scaling.json`: speed-up beside the ideal one, efficiency, time, time split."""
    result = json.loads((folder / "scaling.json").read_bytes())
    series = [one for one in result["series"] if any(point["done"] for point in one["points"])]
    if not series:
        return
    labels = [series_title(one, series) for one in series]

    def draw(figure: Figure) -> None:
        axes: list[Axes] = list(figure.subplots(2, 2).flat)
        _speed_ups(axes[0], series)
        _points(axes[1], series, "efficiency", "Efficiency")
        axes[1].axhline(1.0, color=GREY, linestyle="--", linewidth=1)
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
        _time_split(axes[3], [f"{label}, {size(p)}" for label, p in rows], [p["time_split"] for _, p in rows])
        legend(figure, labels)

    try:
        drawn = save(folder / "scaling.png", draw, (13, 9))
    except OSError as error:
        print(f"figure     not drawn: {folder / 'scaling.png'} cannot be written ({error.strerror})")
        return
    if drawn:
        print(f"figure     {folder / 'scaling.png'}")


def _points(axis: Axes, series: list[dict[str, Any]], name: str, text: str) -> None:
    """A figure over the number of workers, with intervals."""
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
    """Measured speed-up, the fitted law up to the forecast, and the ideal speed-up."""
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
        ahead = one["prediction"]["speed_up"]
        if ahead["low"] is not None:
            axis.plot([end, end], [ahead["low"], ahead["high"]], color=colour(place), linewidth=3, alpha=0.2)
        axis.plot([end], [ahead["value"]], marker="o", markerfacecolor="white", color=colour(place), markersize=6)
    base = min(point["workers"] for one in series for point in one["points"] if point["done"])
    axis.plot([base, base * most], [1, most], color=GREY, linestyle="--", linewidth=1, zorder=1)
    axis.set_xlabel("workers (dotted: fitted law; hollow: forecast; dashed: ideal)")


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
    # A threshold far away would flatten the curves.
    if result.threshold is not None and low - 1.5 * (high - low) <= result.threshold <= high + 1.5 * (high - low):
        axis.axhline(result.threshold, color=GREY, linestyle="--", linewidth=1, label=f"{result.threshold:g}")
        axis.legend(loc="best")
    axis.set_xlabel(AXES[result.at])
    axis.set_ylabel(result.unit)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(short_number)


def _intervals(axis: Axes, result: Comparison, name: str, title: str, *, scatter: bool = False) -> None:
    """One row per group: the estimate, its interval, the runs."""
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
    axis.xaxis.set_major_formatter(short_number)


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
    """Of all pairs; if they are many, of the best group over each other group."""
    best = max(result.results, key=lambda one: one.score.value).label
    pairs = [(f"{one.label}\nover {one.over}", one.probability, one.low, one.high) for one in result.improvements]
    axis.set_title("Probability that a run scores higher")
    if len(pairs) > MAX_PAIRS:
        axis.set_title(f"Probability that a run of {best}\nscores higher than one of", fontsize=11)
        pairs = [_of_best(one, best) for one in result.improvements if best in (one.label, one.over)]
    for place, (_, probability, low, high) in enumerate(pairs):
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=PALETTE[0], linewidth=7, alpha=0.35)
        axis.plot([probability], [place], marker="|", markersize=16, markeredgewidth=2.5, color=PALETTE[0])
    axis.axvline(0.5, color=GREY, linestyle="--", linewidth=1)
    axis.set_yticks(range(len(pairs)), [label for label, *_ in pairs])
    axis.set_xlim(-0.02, 1.02)
    axis.invert_yaxis()
    if not pairs:
        axis.text(0.5, 0.5, "one group", transform=axis.transAxes, ha="center", va="center", color=PALE_GREY)
        axis.set_yticks([])


def _of_best(one: Improvement, best: str) -> tuple[str, float, float | None, float | None]:
    """The probability of the best group over the other."""
    if one.label == best:
        return one.over, one.probability, one.low, one.high
    low, high = (None if end is None else 1.0 - end for end in (one.high, one.low))
    return one.label, 1.0 - one.probability, low, high


def _time_split(axis: Axes, labels: Sequence[str], splits: Sequence[dict[str, float]]) -> None:
    """Shares of the whole time."""
    axis.set_title("Time split")
    left = np.zeros(len(labels))
    totals = np.array([sum(split.values()) or 1.0 for split in splits])
    for part, paint in PART_COLOURS.items():
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
