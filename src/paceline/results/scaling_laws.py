"""Amdahl's and Gustafson's laws, fitted to measured throughput, and the forecast they give.

A sample is the steps per second of several runs (seeds) with the same number of workers. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.results.estimates import Estimate, ratio_estimate
from paceline.results.run_files import Floats

Samples = Mapping[int, Sequence[float]]
"""By number of workers, one value per run."""
AMDAHL, GUSTAFSON = LAWS = ("amdahl", "gustafson")
"""Amdahl: the work stays the same. Gustafson: it grows with the workers."""
RESAMPLES = 2000


@dataclass(frozen=True)
class LawFit:
    law: str
    serial: Estimate
    """Share of the time (with the fewest workers) that more workers do not shorten, 0 to 1."""
    error: float
    """Root mean square of (fitted - measured) / measured speed-up."""


@dataclass(frozen=True)
class Prediction:
    law: str
    workers: int
    fitted_on: list[int]
    speed_up: Estimate
    """The interval is that of one new run: uncertainty of the fit, scatter of the runs, error of the held-out check."""
    steps_per_second: float


@dataclass(frozen=True)
class HeldOutCheck:
    """The largest number of workers, predicted from the others."""

    prediction: Prediction
    measured: Estimate
    inside: bool | None
    """Whether the measurement lies in the interval; None if there is no interval."""
    error: float
    """(predicted - measured) / measured."""


@dataclass(frozen=True)
class Forecast:
    """What a law says about a series of measurements."""

    check: HeldOutCheck | None
    prediction: Prediction | None
    """For twice the most workers; None with fewer than two numbers of workers, or if more were slower."""


def law_speed_up(law: str, growth: float | Floats, serial: float | Floats) -> Floats:
    """Speed-up with `growth` times the workers."""
    if law == AMDAHL:
        return np.asarray(1.0 / (serial + (1.0 - np.asarray(serial)) / growth))
    return np.asarray(serial + (1.0 - np.asarray(serial)) * growth)


def is_slower(samples: Samples) -> bool:
    """Whether the most workers do fewer steps per second than the fewest."""
    return float(np.mean(samples[max(samples)])) < float(np.mean(samples[min(samples)]))


def fit(law: str, samples: Samples) -> LawFit | None:
    """None with fewer than two numbers of workers."""
    if len(samples) < 2:
        return None
    growth, means, drawn = _resample(samples)
    measured = means / means[0]
    serial = float(_serial_share(law, growth, measured[None])[0])
    low, high = None, None
    if drawn is not None:
        low, high = _quantiles(_serial_share(law, growth, drawn / drawn[:, :1]))
    errors = (law_speed_up(law, growth, serial) - measured) / measured
    error = math.sqrt(float(np.mean(errors[1:] ** 2)))
    return LawFit(law, Estimate(serial, low, high, runs=sum(map(len, samples.values()))), error)


def predict(law: str, samples: Samples, workers: int, error: float = 0.0) -> Prediction | None:
    """Speed-up of `workers` if each has a core and the law keeps holding. `error` (of the held-out check) widens the
    interval. None with fewer than two numbers of workers, or if more were slower: both laws start at 1 and grow."""
    if len(samples) < 2 or is_slower(samples):
        return None
    counts, means, drawn = _resample(samples)
    growth = workers / min(samples)
    value = float(law_speed_up(law, growth, _serial_share(law, counts, means[None] / means[0]))[0])
    low, high = None, None
    if drawn is not None:
        each = law_speed_up(law, growth, _serial_share(law, counts, drawn / drawn[:, :1])) * _scatter(samples)
        low, high = _quantiles(each)
        low, high = low * (1 - min(abs(error), 1.0)), high * (1 + min(abs(error), 1.0))
    estimate = Estimate(value, low, high, runs=sum(map(len, samples.values())))
    return Prediction(law, workers, sorted(samples), estimate, value * float(means[0]))


def check(law: str, samples: Samples) -> HeldOutCheck | None:
    """None with fewer than three numbers of workers (one is held out, a law needs two), or without a prediction."""
    if len(samples) < 3:
        return None
    largest = max(samples)
    rest = {workers: values for workers, values in samples.items() if workers != largest}
    found = predict(law, rest, largest)
    if found is None:
        return None
    measured = ratio_estimate(samples[largest], samples[min(samples)])
    low, high = found.speed_up.low, found.speed_up.high
    inside = None if low is None or high is None else low <= measured.value <= high
    return HeldOutCheck(found, measured, inside, found.speed_up.value / measured.value - 1.0)


def forecast(law: str, samples: Samples) -> Forecast:
    """The held-out check, and the prediction for twice the most workers, widened by its error."""
    checked = check(law, samples)
    error = checked.error if checked is not None else 0.0
    return Forecast(checked, predict(law, samples, 2 * max(samples), error) if samples else None)


def _resample(samples: Samples) -> tuple[Floats, Floats, Floats | None]:
    """Growth of the workers, mean throughput of each, and resampled means `[resamples, counts]`, or None if a number
    of workers has a single run."""
    ordered = sorted(samples)
    growth = np.array(ordered, np.float64) / ordered[0]
    values = [np.asarray(samples[workers], np.float64) for workers in ordered]
    means = np.array([each.mean() for each in values])
    if min(map(len, values)) < 2:
        return growth, means, None
    rng = np.random.default_rng(0)
    drawn = [each[rng.integers(each.size, size=(RESAMPLES, each.size))].mean(axis=1) for each in values]
    return growth, means, np.stack(drawn, axis=1)


def _serial_share(law: str, growth: Floats, measured: Floats) -> Floats:
    """Least squares for each row of speed-ups. Both laws are linear in the serial share: 1/S = 1/n + s (1 - 1/n), and
    S = n - s (n - 1)."""
    if law == AMDAHL:
        slope, rest = 1.0 - 1.0 / growth, 1.0 / measured - 1.0 / growth
    else:
        slope, rest = growth - 1.0, growth - measured
    return np.asarray(np.clip((rest * slope).sum(axis=1) / (slope**2).sum(), 0.0, 1.0))


def _scatter(samples: Samples) -> Floats:
    """Ratios of single runs to the mean of their sample, drawn `RESAMPLES` times. Every sample has several runs."""
    ratios = np.concatenate([np.asarray(values, np.float64) / np.mean(values) for values in samples.values()])
    # A sample of k runs lies closer to its own mean than to the true one.
    sizes = [len(values) for values in samples.values()]
    widen = math.sqrt(sum(sizes) / (sum(sizes) - len(sizes)))
    return np.asarray(1.0 + widen * (np.random.default_rng(1).choice(ratios, RESAMPLES) - 1.0))


def _quantiles(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
