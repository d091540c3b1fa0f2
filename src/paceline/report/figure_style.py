"""The look of all matplotlib figures. Figures are made without pyplot: no global state, no window system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow that is lost on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # the second and third round of the palette
GREY, PALE_GREY = "#4D4D4D", "#8C8C8C"
NO_MATPLOTLIB = "matplotlib is not installed; pip install 'paceline[report]'"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": PALE_GREY,
    "axes.linewidth": 0.8,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "paceline",  # the same curves give the same file
}


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure; make it and draw into it within `matplotlib.rc_context(STYLE)`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12), facecolor="white")


def colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def dash(place: int) -> Any:
    return DASHES[place // len(PALETTE) % len(DASHES)]


def legend(figure: Figure, labels: Sequence[str]) -> None:
    """One legend below all axes."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour(i), linestyle=dash(i), linewidth=2.2) for i in range(len(labels))]
    columns = max(1, min(len(labels), 150 // (max(map(len, labels)) + 8)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def short_number(x: float, _: Any = None) -> str:
    """250000 → 250k, 1500000 → 1.5M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= limit:
            return f"{x / limit:g}{letter}"
    return f"{x:g}"
