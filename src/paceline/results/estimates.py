"""A figure over several runs, with its bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.results.run_files import Floats
from paceline.stats import bootstrap_interval, ratio_interval, stratified_bootstrap_interval


@dataclass(frozen=True)
class Estimate:
    """A figure over runs and its 95 % bootstrap interval, which a single run does not have."""

    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1

    def scaled(self, factor: float) -> Estimate:
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, low, high, self.runs)


def mean_estimate(*tasks: Sequence[float] | Floats) -> Estimate:
    """Mean over the runs of all tasks; each task is resampled by itself. Values that are not finite do not count."""
    strata = [known for values in tasks if (known := [float(value) for value in values if math.isfinite(value)])]
    if not strata:
        return Estimate(math.nan, runs=0)
    together, low, high = [value for values in strata for value in values], None, None
    if min(map(len, strata)) > 1:
        many = len(strata) > 1
        low, high = stratified_bootstrap_interval(strata, np.mean) if many else bootstrap_interval(together)
    return Estimate(float(np.mean(together)), low, high, len(together))


def ratio_estimate(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """mean(x) / mean(y), with an interval if both have several runs."""
    low, high = ratio_interval(x, y) if min(len(x), len(y)) > 1 else (None, None)
    return Estimate(float(np.mean(x) / np.mean(y)), low, high, len(x))


def mean_time_split(splits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by part, mean over the runs that measured any."""
    known = [split for split in splits if split]
    parts = dict.fromkeys(part for split in known for part in split)
    return {part: float(np.mean([split.get(part, 0.0) for split in known])) for part in parts}
