"""`paceline plot`: the curves of one or more runs in one figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.config import UserError, algorithm_name
from paceline.envs.solved import solved_return
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
from paceline.results.discovery import Runs, find_runs, paths_of
from paceline.results.json_lines import Row, read_rows
from paceline.results.run_files import Floats, is_own_evaluation, number_of
from paceline.results.runs import read_config

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run directory."""

    label: str
    rows: list[Row]
    evaluations: list[Row]
    env: str | None
    heading: str


def plot_runs(runs: list[Path], output: Path, smooth: int = 1) -> Path:
    """Draw the runs into `output`, whose ending chooses the format, and return it."""
    output = Path(output)
    suffix = output.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UserError(f"-o {output}: a figure ends in .png, .svg or .pdf")
    figure = draw_runs(runs, smooth)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, format=suffix, dpi=150)
    except OSError as error:
        raise UserError(f"-o {output}: cannot be written ({error.strerror}); choose another path") from None
    return output


def draw_runs(runs: list[Path], smooth: int = 1) -> Figure:
    if smooth < 1:
        raise UserError(f"--smooth {smooth}: at least 1 (no smoothing)")
    if not runs:
        raise UserError("no run given; give at least one run directory, such as runs/NAME")
    runs = [one for run in runs for one in _runs_at(Path(run).expanduser())]
    curves = [_load(Path(run), label) for run, label in zip(runs, _labels(runs), strict=True)]
    try:
        import matplotlib
    except ImportError:
        raise UserError(NO_MATPLOTLIB) from None
    with matplotlib.rc_context(STYLE):
        return _draw(curves, smooth)


def plot(runs: Runs, output: str | Path | None = None, *, smooth: int = 1) -> Any:
    """Draw the return, losses, entropy and speed of runs. Returns a matplotlib figure; with `output` (.png, .svg or
    .pdf), the path that it was written to. `smooth`: moving average over this many rows."""
    paths = paths_of(runs)
    return draw_runs(paths, smooth) if output is None else plot_runs(paths, Path(output), smooth)


def moving_average(y: npt.ArrayLike, rows: int) -> Floats:
    """Mean over a window of `rows` values centred on each value; values that are not finite do not count.

    Near the ends the window shrinks on both sides, so that a straight line stays unchanged. An even window is centred
    too: its two outermost values have half the weight.
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


def _runs_at(path: Path) -> list[Path]:
    """A run, or those below a folder that have something to plot."""
    if not path.is_dir() or (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
        return [path]
    return [run for run in find_runs([path]) if read_rows(run / "metrics.jsonl")] or [path]


def _load(run: Path, label: str) -> RunCurves:
    if not run.is_dir():
        raise UserError(f"{run}: no such run; {_others(run.parent)}")
    rows = read_rows(run / "metrics.jsonl")
    if not rows:
        folder = run if _runs_in(run) else run.parent
        raise UserError(f"{run}: no rows in metrics.jsonl, so nothing to plot; {_others(folder)}")
    config = read_config(run, [])  # only for titles, so damage does not matter
    env, algo = (config.get("env") or {}).get("id"), algorithm_name(str(config.get("algo") or "")).upper()
    # `paceline evaluate` adds rows of any checkpoint to those of the training, sampled and random ones too.
    shown = [row for row in read_rows(run / "eval.jsonl") if is_own_evaluation(row)]
    shown.sort(key=lambda row: row.get("env_steps") or 0)
    return RunCurves(label, rows, shown, env, " on ".join(part for part in (algo, env) if part) or label)


def _runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/metrics.jsonl") if path.stat().st_size)


def _others(folder: Path) -> str:
    names = _runs_in(folder)
    if not names:
        return f"there is no run with metrics in {folder}"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"the runs in {folder} are: {', '.join(names[:10])}{more}"


def _labels(runs: list[Path]) -> list[str]:
    """Names of the runs, with the folder if a name is not unique."""
    paths = [Path(run).absolute() for run in runs]
    names = [path.name for path in paths]
    return [
        name if names.count(name) == 1 else f"{path.parent.name}/{name}"
        for path, name in zip(paths, names, strict=True)
    ]


def _column(rows: list[Row], key: str) -> Floats:
    return np.array([number_of(row.get(key)) for row in rows], dtype=np.float64)


def _draw(curves: list[RunCurves], smooth: int) -> Figure:
    figure = new_figure((14, 7.4))
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
        axis.xaxis.set_major_formatter(short_number)
        axis.set_xlim(0, 1.02 * max(end, 1.0))
        axis.set_xlabel("environment steps")
    headings = list(dict.fromkeys(run.heading for run in curves))
    title = headings[0] if len(headings) == 1 else f"{len(curves)} runs"
    about = [curves[0].label] if len(curves) == 1 else []
    about += [f"moving average of {smooth} rows"] if smooth > 1 else []
    figure.suptitle("  ·  ".join([title, *about]), fontsize=13, x=0.012, ha="left")
    if len(curves) > 1:
        legend(figure, [run.label for run in curves])
    return figure


def _draw_returns(axis: Axes, curves: list[RunCurves], smooth: int) -> None:
    alone = len(curves) == 1
    _draw_metric(axis, curves, smooth, "return_mean", "Return")
    if alone and axis.lines:
        axis.lines[-1].set_label("training")
    look: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (3, 1.2)), "marker": "o", "markersize": 4}
    look |= {"markeredgecolor": "white", "markeredgewidth": 0.6}
    if any(_has(run.evaluations, "return_mean") for run in curves):
        axis.plot([], [], color=PALETTE[1] if alone else GREY, label="evaluation, 95 % interval", **look)
    for i, run in enumerate(curves):
        if not _has(run.evaluations, "return_mean"):
            continue
        steps, mean = _column(run.evaluations, "env_steps"), _column(run.evaluations, "return_mean")
        low, high = _column(run.evaluations, "return_ci_low"), _column(run.evaluations, "return_ci_high")
        paint = PALETTE[1] if alone else colour(i)
        axis.plot(steps, mean, color=paint, zorder=4, **look)
        axis.fill_between(steps, low, high, color=paint, alpha=0.18 if alone else 0.12, linewidth=0, zorder=1)
    envs = {run.env for run in curves}
    threshold = solved_return(next(iter(envs))) if len(envs) == 1 else None
    if threshold is not None:
        axis.axhline(threshold, color=GREY, linestyle="--", linewidth=1, zorder=2, label=f"solved, {threshold:g}")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")


def _draw_entropy(axis: Axes, curves: list[RunCurves], smooth: int) -> None:
    _draw_metric(axis, curves, smooth, "entropy", "Entropy")
    if not any(_has(run.rows, "approx_kl") for run in curves):
        return
    right = axis.twinx()
    right.grid(False)
    right.spines["right"].set_visible(True)
    alone = len(curves) == 1
    for i, run in enumerate(curves):
        paint = PALETTE[1] if alone else colour(i)
        steps, kl = _column(run.rows, "env_steps"), moving_average(_column(run.rows, "approx_kl"), smooth)
        right.plot(steps, kl, color=paint, linewidth=1, linestyle=(0, (1, 1)), alpha=0.85)
    right.set_ylim(bottom=0)
    right.set_ylabel("KL divergence (dotted)", color=PALETTE[1] if alone else GREY)
    axis.set_title("Entropy and KL divergence")
    axis.set_ylabel("entropy", color=PALETTE[0] if alone else GREY)
    axis.set_zorder(right.get_zorder() + 1)  # the solid curve stays above the dotted one
    axis.patch.set_visible(False)


def _draw_metric(
    axis: Axes, curves: list[RunCurves], smooth: int, key: str, title: str, unit: str = "", log: bool = False
) -> None:
    """One panel: the rows, and with smoothing their moving average over them."""
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
            axis.plot(steps, values, color=colour(i), linewidth=0.7, alpha=0.3, zorder=2)
        axis.plot(
            steps,
            moving_average(values, smooth),
            color=colour(i),
            linestyle=dash(i),
            linewidth=1.8 if smooth > 1 else 1.3,
            zorder=3,
            **dot,
        )
    if not drawn:
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color=PALE_GREY)
        axis.set_yticks([])
        return
    seen = np.concatenate(drawn)
    if log and seen.min() > 0 and seen.max() / seen.min() > 100:
        axis.set_yscale("log")
    elif np.abs(seen).max() >= 1000:
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")


def _clip_below(axis: Axes, curves: list[RunCurves]) -> None:
    """Explained variance is at most 1, but the first rows may be far below and would flatten the rest."""
    values = np.concatenate([_column(run.rows, "explained_variance") for run in curves])
    values = values[np.isfinite(values)]
    if values.size:
        axis.set_ylim(max(values.min(), -1.0) - 0.05, 1.05)
        axis.axhline(0.0, color=PALE_GREY, linewidth=0.8, zorder=1)


def _has(rows: list[dict[str, Any]], key: str) -> bool:
    return bool(np.isfinite(_column(rows, key)).any())
