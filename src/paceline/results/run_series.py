"""What a run is compared by: the values of its metric over steps or time."""

from __future__ import annotations

import numpy as np

from paceline.results.run_files import Floats, is_own_evaluation, number_of
from paceline.results.runs import RunData

AXES = {"steps": "environment steps", "time": "wall seconds"}
RETURN, EVALUATION = "return", "eval"
RunSeries = tuple[Floats, Floats]
"""x, y."""


def run_series(run: RunData, metric: str, at: str, scale: tuple[float, float]) -> RunSeries:
    """The finite values of a metric on an axis. `scale`: the values that become 0 and 1."""
    steps, seconds = run.curve.steps, run.curve.seconds
    if metric == EVALUATION:
        x, y = _evaluations(run)
        x = np.interp(x, steps, seconds) if at == "time" and x.size else x
    else:
        x, y = steps if at == "steps" else seconds, run.column("return_mean" if metric == RETURN else metric)
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], (y[known] - scale[0]) / (scale[1] - scale[0])


def _evaluations(run: RunData) -> RunSeries:
    """Steps and mean returns of the run's evaluations, during training and by `paceline evaluate`: those of the kind
    that the run makes, in its own environment. Several of one checkpoint count as one."""
    kind = "stochastic" if run.section("eval").get("stochastic") else "deterministic"
    totals: dict[float, list[float]] = {}
    for row in run.evaluations:
        steps, mean, episodes = (number_of(row.get(name)) for name in ("env_steps", "return_mean", "episodes"))
        own = is_own_evaluation(row, kind) and row.get("levels", "train") == "train"
        if own and np.isfinite([steps, mean]).all():
            weight = episodes if episodes > 0 else 1.0
            total = totals.setdefault(steps, [0.0, 0.0])
            total[:] = total[0] + weight * mean, total[1] + weight
    x = np.array(sorted(totals))
    return x, np.array([totals[steps][0] / totals[steps][1] for steps in x])
