"""What a sample of episodes says, and how sure that is. Numpy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


def iqm(x: npt.ArrayLike) -> float:
    """Interquartile mean: the mean without the lowest and the highest quarter (rounded down) of the values.

    Less moved by outliers than the mean, and less noisy than the median.
    """
    values = np.sort(_sample(x))
    cut = values.size // 4
    return float(values[cut : values.size - cut].mean())


def bootstrap_interval(
    x: npt.ArrayLike,
    statistic: Callable[[npt.NDArray[np.float64]], Any] = np.mean,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic. The same sample and seed give the same interval."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is not between 0 and 1")
    values = _sample(x)
    rng = np.random.default_rng(seed)
    # One resample at a time: a matrix of them all would take gigabytes for a large sample.
    draws = [float(statistic(values[rng.integers(values.size, size=values.size)])) for _ in range(resamples)]
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def summarize(returns: npt.ArrayLike, lengths: npt.ArrayLike) -> dict[str, float | int]:
    """Episodes as one flat record. `return_ci_*` is the 95 % interval of the mean; deviations are those of the sample
    itself (divided by N, so one episode has 0)."""
    r, n = _sample(returns), _sample(lengths)
    if r.size != n.size:
        raise ValueError(f"{r.size} returns and {n.size} lengths: one of each is needed for every episode")
    low, high = bootstrap_interval(r)
    return {
        "return_mean": float(r.mean()),
        "return_std": float(r.std()),
        "return_median": float(np.median(r)),
        "return_iqm": iqm(r),
        "return_ci_low": low,
        "return_ci_high": high,
        "return_min": float(r.min()),
        "return_max": float(r.max()),
        "length_mean": float(n.mean()),
        "length_std": float(n.std()),
        "length_min": int(n.min()),
        "length_max": int(n.max()),
        "episodes": int(r.size),
    }


def _sample(x: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(x, dtype=np.float64).ravel()
    if values.size == 0:
        raise ValueError("no values: a statistic needs at least one")
    return values
