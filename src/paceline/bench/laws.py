"""Speed-up and what it follows: Amdahl's and Gustafson's laws fitted to measured throughput, with what they foresee.

A sample is the steps per second of several runs (seeds) with the same number of workers. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bench.comparison import Estimate
from paceline.bench.files import Floats
from paceline.stats import ratio_interval

Samples = Mapping[int, Sequence[float]]
"""By number of workers, a value a run."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Fit:
    law: str
    """`amdahl`: the work stays the same. `gustafson`: it grows with the workers."""
    serial: Estimate
    """The share of the time (with the fewest workers) that more of them do not shorten, 0 to 1."""
    error: float
    """Root mean square of (fitted - measured) / measured speed-up."""


@dataclass(frozen=True)
class Prediction:
    law: str
    workers: int
    fitted_on: list[int]
    speed_up: Estimate
    """The interval is for one new run: of the fit, the scatter of the runs, and how wrong a forecast was before."""
    steps_per_second: float


@dataclass(frozen=True)
class Check:
    """The largest number of workers, foreseen from the others."""

    prediction: Prediction
    measured: Estimate
    inside: bool | None
    """Whether the measurement lies in the interval; None where there is none."""
    error: float
    """(foreseen - measured) / measured."""


def ratio(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """mean(x) / mean(y); an interval if both have several runs: one alone says nothing of its scatter."""
    value = float(np.mean(x) / np.mean(y))
    low, high = ratio_interval(x, y) if min(len(x), len(y)) > 1 else (None, None)
    return Estimate(value, low, high, len(x))


def law_speed_up(law: str, growth: float | Floats, serial: float | Floats) -> Floats:
    """Of `growth` times the workers."""
    if law == "amdahl":
        return np.asarray(1.0 / (serial + (1.0 - np.asarray(serial)) / growth))
    return np.asarray(serial + (1.0 - np.asarray(serial)) * growth)


def is_slower(samples: Samples) -> bool:
    """The most workers make fewer steps per second than the fewest."""
    return float(np.mean(samples[max(samples)])) < float(np.mean(samples[min(samples)]))


def fit(law: str, samples: Samples) -> Fit | None:
    """None with fewer than two numbers of workers."""
    if len(samples) < 2:
        return None
    counts, means, drawn = _drawn(samples)
    serial = float(_serial(law, counts, means[None] / means[0])[0])
    measured = means / means[0]
    fitted = law_speed_up(law, counts, serial)
    ends: tuple[float | None, float | None] = (None, None)
    if drawn is not None:
        each = _serial(law, counts, drawn / drawn[:, :1])
        ends = (float(np.quantile(each, 0.025)), float(np.quantile(each, 0.975)))
    error = math.sqrt(float(np.mean(((fitted - measured) / measured)[1:] ** 2)))
    return Fit(law, Estimate(serial, *ends, runs=sum(map(len, samples.values()))), error)


def predict(law: str, samples: Samples, workers: int, off: float = 0.0) -> Prediction | None:
    """What so many workers would bring, if each has a core and the law goes on to hold. `off`: by how much of itself
    it was wrong before, which widens the interval. None with fewer than two numbers of workers, and where more of them
    were slower: neither law goes below 1."""
    if len(samples) < 2 or is_slower(samples):
        return None
    counts, means, drawn = _drawn(samples)
    growth = workers / min(samples)
    serial = _serial(law, counts, means[None] / means[0])
    value = float(law_speed_up(law, growth, serial)[0])
    ends: tuple[float | None, float | None] = (None, None)
    if drawn is not None:
        each = law_speed_up(law, growth, _serial(law, counts, drawn / drawn[:, :1]))
        each = each * _scatter(samples)
        wide = min(abs(off), 1.0)
        ends = (float(np.quantile(each, 0.025)) * (1 - wide), float(np.quantile(each, 0.975)) * (1 + wide))
    estimate = Estimate(value, *ends, runs=sum(map(len, samples.values())))
    return Prediction(law, workers, sorted(samples), estimate, value * float(means[0]))


def check(law: str, samples: Samples) -> Check | None:
    """None with fewer than three numbers of workers, as one is held out and a law needs two, or with no forecast."""
    if len(samples) < 3:
        return None
    largest = max(samples)
    rest = {workers: values for workers, values in samples.items() if workers != largest}
    found = predict(law, rest, largest)
    if found is None:
        return None
    measured = ratio(samples[largest], samples[min(samples)])
    low, high = found.speed_up.low, found.speed_up.high
    inside = None if low is None or high is None else low <= measured.value <= high
    return Check(found, measured, inside, found.speed_up.value / measured.value - 1.0)


def _drawn(samples: Samples) -> tuple[Floats, Floats, Floats | None]:
    """Growth of the workers, mean throughput of each, and resampled means `[resamples, counts]`; None where a number of
    workers has one run alone."""
    ordered = sorted(samples)
    counts = np.array(ordered, np.float64) / ordered[0]
    values = [np.asarray(samples[workers], np.float64) for workers in ordered]
    means = np.array([each.mean() for each in values])
    if min(map(len, values)) < 2:
        return counts, means, None
    rng = np.random.default_rng(0)
    drawn = [each[rng.integers(each.size, size=(RESAMPLES, each.size))].mean(axis=1) for each in values]
    return counts, means, np.stack(drawn, axis=1)


def _serial(law: str, counts: Floats, measured: Floats) -> Floats:
    """Least squares for each row of speed-ups. Both laws are lines in the serial share: 1/S = 1/n + s (1 - 1/n), and
    S = n - s (n - 1)."""
    if law == "amdahl":
        slope, rest = 1.0 - 1.0 / counts, 1.0 / measured - 1.0 / counts
    else:
        slope, rest = counts - 1.0, counts - measured
    return np.asarray(np.clip((rest * slope).sum(axis=1) / (slope**2).sum(), 0.0, 1.0))


def _scatter(samples: Samples) -> Floats:
    """How far single runs lie from the mean of their kind, as factors, drawn `RESAMPLES` times. All have several."""
    factors = np.concatenate([np.asarray(values, np.float64) / np.mean(values) for values in samples.values()])
    # A sample of k runs lies closer to its own mean than to the true one.
    sizes = [len(values) for values in samples.values()]
    widen = math.sqrt(sum(sizes) / (sum(sizes) - len(sizes)))
    return np.asarray(1.0 + widen * (np.random.default_rng(1).choice(factors, RESAMPLES) - 1.0))
