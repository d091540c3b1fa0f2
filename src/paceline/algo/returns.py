"""Estimators over a rollout `[T, N]`, as free functions.

`value[t+1]` is the value of the true successor of step t, whatever happened there. A terminated step has no future; a
truncated one has, but the trace of rewards stops. Rows that only reset come out as whatever and are never used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


def gae(
    reward: Floats, value: Floats, terminated: Bools, truncated: Bools, *, gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Generalised advantage estimates and the value targets `advantage + value`, both `[T, N]`.

    `value [T+1, N]`. With `gae_lambda=1` the targets are n-step returns that bootstrap at the end of the rollout.
    """
    # A simulator may end in observations that are no numbers. Nothing may come of their values, and 0 x NaN is NaN.
    future = value[1:].copy()
    future[terminated] = 0
    advantage: Floats = reward + np.float32(gamma) * future - value[:-1]
    ended = terminated | truncated
    advantage[1:][ended[:-1]] = 0  # the rows that only reset
    keep = np.float32(gamma * gae_lambda) * ~ended
    for t in range(len(reward) - 2, -1, -1):
        advantage[t] += keep[t] * advantage[t + 1]
    target: Floats = advantage + value[:-1]
    return advantage, target


def explained_variance(value: Floats, target: Floats) -> float:
    """1 is a perfect value, 0 no better than a constant; NaN when the targets do not vary."""
    variance = float(np.var(target))
    return 1.0 - float(np.var(target - value)) / variance if variance > 0 else float("nan")
