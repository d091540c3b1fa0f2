"""The figure of `paceline bench forecast`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.report.figure_style import GREY, colour, dash, short_number
from paceline.report.figures import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_forecast(result: dict[str, Any], output: Path) -> None:
    """One panel per series, on log-log axes: measured and simulated steps per second, and the ideal line."""
    series = result["series"]

    def draw(figure: Figure) -> None:
        for axis, one in zip(figure.subplots(1, len(series), squeeze=False)[0], series, strict=True):
            _panel(axis, one)

    try:
        drawn = save(output, draw, (6.5 * len(series), 5))
    except OSError as error:
        print(f"figure     not drawn: {output} cannot be written ({error.strerror})")
        return
    if drawn:
        print(f"figure     {output}")


def _panel(axis: Axes, series: dict[str, Any]) -> None:
    base = series["base"]
    most = max(point["workers"] for point in [*series["points"], *series["measured"]])
    ideal = base["steps_per_second"] * most / base["workers"]
    axis.plot(
        [base["workers"], most],
        [base["steps_per_second"], ideal],
        color=GREY,
        linestyle="--",
        linewidth=1,
        label="ideal",
    )
    for place, curve in enumerate(series["curves"]):
        nodes = f"{curve['nodes']} node" + ("s" if curve["nodes"] > 1 else "")
        axis.plot(
            curve["workers"],
            curve["steps_per_second"],
            color=colour(place),
            linestyle=dash(place),
            label=f"simulated, {nodes}",
        )
        for point in series["points"]:
            if point["nodes"] == curve["nodes"]:
                rate, n = point["steps_per_second"], point["workers"]
                axis.plot([n, n], [rate["low"], rate["high"]], color=colour(place), linewidth=3, alpha=0.3)
                axis.plot([n], [rate["value"]], "o", markerfacecolor="white", color=colour(place), markersize=6)
    for held, marker, label in ((False, "o", "measured"), (True, "D", "measured, held out")):
        shown = [one for one in series["measured"] if one["held_out"] == held]
        if shown:
            axis.plot(
                [one["workers"] for one in shown],
                [one["measured"] for one in shown],
                marker,
                color="black",
                markersize=5,
                label=label,
                zorder=4,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(series["series"][:60])
    axis.set_xlabel("workers")
    axis.set_ylabel("steps per second")
    axis.xaxis.set_major_formatter(lambda workers, _: f"{workers:,.0f}")
    axis.yaxis.set_major_formatter(short_number)
    axis.legend(loc="upper left")
