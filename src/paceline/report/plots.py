"""`paceline plot`: the curves of one or more runs in one figure, from their run directories alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from paceline.bench.study import solved_at
from paceline.config import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = npt.NDArray[np.float64]

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's colours, told apart by colour-blind readers too; without the yellow, which is lost on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # a further round of the palette gets the next one
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": "#8C8C8C",
    "axes.linewidth": 0.8,
    "axes.labelcolor": "#4D4D4D",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": "#4D4D4D",
    "ytick.color": "#4D4D4D",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "paceline",  # the same curves give the same file
}


@dataclass(frozen=True)
class RunCurves:
    """What a run directory holds to draw."""

    label: str
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def env(self) -> str | None:
        section = self.config.get("env")
        return section.get("id") if isinstance(section, dict) else None

    @property
    def heading(self) -> str:
        algo = str(self.config.get("algo", "")).upper()
        return " on ".join(part for part in (algo, self.env) if part) or self.label


def plot_runs(runs: list[Path], output: Path, smooth: int = 1) -> Path:
    """Draw the runs into `output` (its ending chooses png, svg or pdf) and return it."""
    output = Path(output)
    suffix = output.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UserError(f"-o {output}: a figure ends in .png, .svg or .pdf; give it one of these endings")
    if smooth < 1:
        raise UserError(f"--smooth {smooth}: it is a number of rows from 1 (raw) up")
    if not runs:
        raise UserError("no run given; name at least one run directory, e.g. runs/NAME")
    curves = [_load(Path(run), label) for run, label in zip(runs, _labels(runs), strict=True)]
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib, which is not installed; pip install 'paceline[report]'") from None
    # Figures are made directly, never through pyplot: nothing global, no window system, Agg for pixels.
    with matplotlib.rc_context(STYLE):
        figure = _draw(curves, smooth)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output, format=suffix, dpi=150)
        except OSError as error:
            raise UserError(f"-o {output}: it can't be written ({error.strerror}); choose another path") from None
    return output


def moving_average(y: npt.ArrayLike, rows: int) -> Curve:
    """Mean over `rows` neighbours centred on each value; values that are not finite don't count.

    Towards the ends the window shrinks on both sides alike, so that the curve is nowhere shifted: a straight line stays
    itself. An even window is centred too, by half weights on its two outermost values.
    """
    values = np.asarray(y, dtype=np.float64)
    if rows <= 1 or values.size == 0:
        return values
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0)
    index = np.arange(values.size)
    half = np.minimum(rows // 2, np.minimum(index, values.size - 1 - index))
    first, last = index - half, index + half
    whole = (half == rows // 2) & (rows % 2 == 0)
    sums, counts = (
        total[last + 1] - total[first] - np.where(whole, 0.5 * (part[first] + part[last]), 0.0)
        for part in (filled, known.astype(np.float64))
        for total in [np.concatenate([[0.0], np.cumsum(part)])]
    )
    average = np.full(values.size, np.nan)
    np.divide(sums, counts, out=average, where=counts > 0)
    return average


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if it isn't there. A last line cut short is a run still writing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise UserError(f"{path}: line {number} is not a JSON object; remove that line")
    return rows


def _load(run: Path, label: str) -> RunCurves:
    if not run.is_dir():
        raise UserError(f"{run}: no such run; {_others(run.parent)}")
    rows = read_rows(run / "metrics.jsonl")
    if not rows:
        folder = run if _runs_in(run) else run.parent
        raise UserError(f"{run}: no rows in metrics.jsonl, so nothing to plot; {_others(folder)}")
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        config = None  # it is used for the titles alone
    # Beside the evaluations of the training, `paceline evaluate` adds rows there: of any checkpoint, sampled or random.
    shown = [row for row in read_rows(run / "eval.jsonl") if row.get("kind") in (None, "deterministic")]
    shown.sort(key=lambda row: row.get("env_steps") or 0)
    return RunCurves(label, rows, shown, config if isinstance(config, dict) else {})


def _runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/metrics.jsonl") if path.stat().st_size)


def _others(folder: Path) -> str:
    names = _runs_in(folder)
    if not names:
        return f"there is no run with metrics in {folder}"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"the runs in {folder} are: {', '.join(names[:10])}{more}"


def _labels(runs: list[Path]) -> list[str]:
    """Names of the runs, with the folder before those that are not unique."""
    paths = [Path(run).absolute() for run in runs]
    names = [path.name for path in paths]
    return [
        name if names.count(name) == 1 else f"{path.parent.name}/{name}"
        for path, name in zip(paths, names, strict=True)
    ]


def _column(rows: list[dict[str, Any]], key: str) -> Curve:
    values = (row.get(key) for row in rows)
    return np.array([v if isinstance(v, int | float) else math.nan for v in values], dtype=np.float64)


def _draw(curves: list[RunCurves], smooth: int) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(14, 7.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12), facecolor="white")
    axes: list[Axes] = list(figure.subplots(2, 3).flat)
    _draw_returns(axes[0], curves, smooth)
    _draw_metric(axes[1], curves, smooth, "policy_loss", "Policy loss")
    _draw_metric(axes[2], curves, smooth, "value_loss", "Value loss", log=True)
    _draw_entropy(axes[3], curves, smooth)
    _draw_metric(axes[4], curves, smooth, "explained_variance", "Explained variance")
    _clip_below(axes[4], curves)
    speed = "iteration_steps_per_second"
    if not any(_has(run.rows, speed) for run in curves):
        speed = "steps_per_second"
    _draw_metric(axes[5], curves, smooth, speed, "Throughput", unit="steps/s")
    axes[5].set_ylim(bottom=0)
    furthest = np.concatenate([_column(run.rows + run.evaluations, "env_steps") for run in curves])
    end = max(furthest[np.isfinite(furthest)], default=1.0)
    for axis in axes:
        axis.xaxis.set_major_formatter(short)
        axis.set_xlim(0, 1.02 * max(end, 1.0))
        axis.set_xlabel("environment steps")
    headings = list(dict.fromkeys(run.heading for run in curves))
    title = headings[0] if len(headings) == 1 else f"{len(curves)} runs"
    about = [curves[0].label] if len(curves) == 1 else []
    about += [f"moving average of {smooth} rows"] if smooth > 1 else []
    figure.suptitle("  ·  ".join([title, *about]), fontsize=13, x=0.012, ha="left")
    if len(curves) > 1:
        _legend(figure, curves)
    return figure


def _legend(figure: Figure, curves: list[RunCurves]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_colour(i), linestyle=_dash(i), linewidth=2.2) for i in range(len(curves))]
    labels = [run.label for run in curves]
    columns = max(1, min(len(labels), 150 // (max(map(len, labels)) + 8)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _draw_returns(axis: Axes, curves: list[RunCurves], smooth: int) -> None:
    alone = len(curves) == 1
    _draw_metric(axis, curves, smooth, "return_mean", "Return")
    if alone and axis.lines:
        axis.lines[-1].set_label("training")
    look: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (3, 1.2)), "marker": "o", "markersize": 4}
    look |= {"markeredgecolor": "white", "markeredgewidth": 0.6}
    if any(_has(run.evaluations, "return_mean") for run in curves):
        axis.plot([], [], color=PALETTE[1] if alone else "#4D4D4D", label="evaluation, 95 % interval", **look)
    for i, run in enumerate(curves):
        if not _has(run.evaluations, "return_mean"):
            continue
        steps, mean = _column(run.evaluations, "env_steps"), _column(run.evaluations, "return_mean")
        low, high = _column(run.evaluations, "return_ci_low"), _column(run.evaluations, "return_ci_high")
        colour = PALETTE[1] if alone else _colour(i)
        axis.plot(steps, mean, color=colour, zorder=4, **look)
        axis.fill_between(steps, low, high, color=colour, alpha=0.18 if alone else 0.12, linewidth=0, zorder=1)
    envs = {run.env for run in curves}
    threshold = solved_at(next(iter(envs))) if len(envs) == 1 else None
    if threshold is not None:
        axis.axhline(threshold, color="#4D4D4D", linestyle="--", linewidth=1, zorder=2, label=f"solved, {threshold:g}")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")


def _draw_entropy(axis: Axes, curves: list[RunCurves], smooth: int) -> None:
    _draw_metric(axis, curves, smooth, "entropy", "Entropy")
    if not any(_has(run.rows, "approx_kl") for run in curves):
        return
    twin = axis.twinx()
    twin.grid(False)
    twin.spines["right"].set_visible(True)
    alone = len(curves) == 1
    for i, run in enumerate(curves):
        colour = PALETTE[1] if alone else _colour(i)
        steps, kl = _column(run.rows, "env_steps"), moving_average(_column(run.rows, "approx_kl"), smooth)
        twin.plot(steps, kl, color=colour, linewidth=1, linestyle=(0, (1, 1)), alpha=0.85)
    twin.set_ylim(bottom=0)
    twin.set_ylabel("KL divergence (dotted)", color=PALETTE[1] if alone else "#4D4D4D")
    axis.set_title("Entropy and KL divergence")
    axis.set_ylabel("entropy", color=PALETTE[0] if alone else "#4D4D4D")
    axis.set_zorder(twin.get_zorder() + 1)  # the solid curve stays above the dotted one
    axis.patch.set_visible(False)


def _draw_metric(
    axis: Axes, curves: list[RunCurves], smooth: int, key: str, title: str, unit: str = "", log: bool = False
) -> None:
    """One panel: the rows thin and pale with their moving average over them, or just the rows without smoothing."""
    axis.set_title(title)
    axis.set_ylabel(unit)
    drawn = []
    for i, run in enumerate(curves):
        if not _has(run.rows, key):
            continue
        steps, values = _column(run.rows, "env_steps"), _column(run.rows, key)
        drawn.append(values[np.isfinite(values)])
        dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(values) == 1 else {}
        if smooth > 1:
            axis.plot(steps, values, color=_colour(i), linewidth=0.7, alpha=0.3, zorder=2)
        axis.plot(
            steps,
            moving_average(values, smooth),
            color=_colour(i),
            linestyle=_dash(i),
            linewidth=1.8 if smooth > 1 else 1.3,
            zorder=3,
            **dot,
        )
    if not drawn:
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color="#8C8C8C")
        axis.set_yticks([])
        return
    seen = np.concatenate(drawn)
    if log and seen.min() > 0 and seen.max() / seen.min() > 100:
        axis.set_yscale("log")
    elif np.abs(seen).max() >= 1000:
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")


def _clip_below(axis: Axes, curves: list[RunCurves]) -> None:
    """Explained variance is at most 1 and early on anything below: the first rows must not flatten the rest."""
    values = np.concatenate([_column(run.rows, "explained_variance") for run in curves])
    values = values[np.isfinite(values)]
    if values.size:
        axis.set_ylim(max(values.min(), -1.0) - 0.05, 1.05)
        axis.axhline(0.0, color="#8C8C8C", linewidth=0.8, zorder=1)


def _has(rows: list[dict[str, Any]], key: str) -> bool:
    return bool(np.isfinite(_column(rows, key)).any())


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _dash(i: int) -> Any:
    return DASHES[i // len(PALETTE) % len(DASHES)]


def short(x: float, _: Any = None) -> str:
    """250000 → 250k, 1500000 → 1.5M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= limit:
            return f"{x / limit:g}{letter}"
    return f"{x:g}"
