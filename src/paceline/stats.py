"""Statistics of episodes and runs: interquartile mean, bootstrap intervals, probability of improvement, profiles.

They are those of rliable, in numpy. The module stands at the bottom of the layers because `evaluate` and the training
loop summarise episodes with it, and `results` compares runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def iqm(x: npt.ArrayLike) -> float:
    """Interquartile mean: the mean without the lowest and the highest quarter (rounded down) of the values.

    More robust to outliers than the mean, and less noisy than the median.
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
    values = _sample(x)
    rng = np.random.default_rng(seed)
    # One resample at a time: for a large sample, a matrix of all would take gigabytes.
    draws = [float(statistic(values[rng.integers(values.size, size=values.size)])) for _ in range(resamples)]
    return _interval(draws, confidence)


def stratified_bootstrap_interval(
    strata: Sequence[npt.ArrayLike],
    statistic: Callable[[npt.NDArray[np.float64]], Any] = iqm,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic over all values, with each stratum (the runs of one game) resampled
    by itself, so that differences between games do not widen it."""
    drawn = np.concatenate(_draws(strata, np.random.default_rng(seed), resamples), axis=1)
    return _interval([float(statistic(row)) for row in drawn], confidence)


def probability_of_improvement(x: Sequence[npt.ArrayLike], y: Sequence[npt.ArrayLike]) -> float:
    """Probability that a run of `x` beats one of `y` in the same game, averaged over games; a tie is half a win."""
    _check_pairs(x, y)
    return float(np.mean([_wins(_sample(a), _sample(b)) for a, b in zip(x, y, strict=True)]))


def improvement_interval(
    x: Sequence[npt.ArrayLike],
    y: Sequence[npt.ArrayLike],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Stratified bootstrap interval of `probability_of_improvement`: both sides are resampled in each game."""
    _check_pairs(x, y)
    rng = np.random.default_rng(seed)
    games = zip(_draws(x, rng, resamples), _draws(y, rng, resamples), strict=True)
    # [resamples, runs of x, runs of y] for each game; there are few runs.
    wins = [np.sign(a[:, :, None] - b[:, None, :]).mean(axis=(1, 2)) / 2 + 0.5 for a, b in games]
    return _interval(np.mean(wins, axis=0), confidence)


def performance_profile(strata: Sequence[npt.ArrayLike], thresholds: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Share of the runs of all games that score above each threshold."""
    values = np.concatenate([_sample(stratum) for stratum in strata])
    return np.asarray((values[:, None] > np.asarray(thresholds, np.float64)).mean(axis=0), np.float64)


def profile_interval(
    strata: Sequence[npt.ArrayLike],
    thresholds: npt.ArrayLike,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Stratified bootstrap interval of `performance_profile`, at each threshold by itself."""
    drawn = np.concatenate(_draws(strata, np.random.default_rng(seed), resamples), axis=1)
    shares = [(drawn > threshold).mean(axis=1) for threshold in np.asarray(thresholds, np.float64)]
    ends = [_interval(share, confidence) for share in shares]
    return np.array([low for low, _ in ends]), np.array([high for _, high in ends])


def ratio_interval(
    x: npt.ArrayLike, y: npt.ArrayLike, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of mean(x) / mean(y), with both samples resampled."""
    above, below = _draws([x, y], np.random.default_rng(seed), resamples)
    return _interval(above.mean(axis=1) / below.mean(axis=1), confidence)


def summarize(returns: npt.ArrayLike, lengths: npt.ArrayLike) -> dict[str, float | int]:
    """Episodes as one flat record. `return_ci_*` is the 95 % interval of the mean; standard deviations divide by N, so
    that of one episode is 0."""
    r, n = _sample(returns), _sample(lengths)
    if r.size != n.size:
        raise ValueError(f"{r.size} returns and {n.size} lengths: every episode needs one of each")
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


def _draws(strata: Sequence[npt.ArrayLike], rng: np.random.Generator, resamples: int) -> list[npt.NDArray[np.float64]]:
    """`[resamples, values]` for each stratum, drawn from it with replacement."""
    samples = [_sample(stratum) for stratum in strata]
    if not samples:
        raise ValueError("no strata: a statistic needs at least one")
    return [values[rng.integers(values.size, size=(resamples, values.size))] for values in samples]


def _wins(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    return float(np.sign(a[:, None] - b[None, :]).mean()) / 2 + 0.5


def _check_pairs(x: Sequence[npt.ArrayLike], y: Sequence[npt.ArrayLike]) -> None:
    if len(x) != len(y) or not x:
        raise ValueError(f"{len(x)} and {len(y)} games: both sides need the same games, at least one")


def _interval(draws: Sequence[float] | npt.NDArray[np.float64], confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is not between 0 and 1")
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _sample(x: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(x, dtype=np.float64).ravel()
    if values.size == 0:
        raise ValueError("no values: a statistic needs at least one")
    return values
