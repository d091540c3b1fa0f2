"""Estimators over a rollout `[T, N]`, as free functions.

`value[t+1]` is the value of the true successor of step t, also where an episode ended. A terminated step has no future;
a truncated one has, but the trace of rewards stops. Values in reset rows are undefined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import np

if TYPE_CHECKING:
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


def vtrace(
    reward: Floats,
    value: Floats,
    ratio: Floats,
    terminated: Bools,
    truncated: Bools,
    *,
    gamma: float,
    trace_lambda: float,
    clip_rho: float,
    clip_c: float,
) -> tuple[Floats, Floats]:
    """V-trace (Espeholt et al., 2018): advantages and value targets for data of another policy, both `[T, N]`.

    `value [T+1, N]` of the policy that learns; `ratio [T, N]`: how much more likely than the policy that acted it is
    to take the action, pi / mu. The target is the paper's v_s, with c_s = lambda min(clip_c, ratio). The advantage is
    r_s + gamma v_{s+1} - V(x_s), which the policy gradient weighs by the ratio, clipped once more.
    """
    ended = terminated | truncated
    ratio = ratio.copy()
    ratio[1:][ended[:-1]] = 0  # the rows that only reset; their actions are nobody's
    future = value[1:].copy()
    future[terminated] = 0
    change: Floats = np.minimum(ratio, np.float32(clip_rho)) * (reward + np.float32(gamma) * future - value[:-1])
    change[1:][ended[:-1]] = 0  # 0 x NaN is NaN
    keep = np.float32(gamma * trace_lambda) * np.minimum(ratio, np.float32(clip_c)) * ~ended
    for t in range(len(reward) - 2, -1, -1):
        change[t] += keep[t] * change[t + 1]
    target: Floats = change + value[:-1]
    np.copyto(future[:-1], target[1:], where=~ended[:-1])  # where the trace goes on; elsewhere the value
    advantage: Floats = reward + np.float32(gamma) * future - value[:-1]
    return advantage, target


def n_step(reward: Floats, value: Floats, terminated: Bools, truncated: Bools, *, gamma: float, n: int) -> Floats:
    """The sum of the next `n` discounted rewards and the value after them, `[T, N]`; of fewer where an episode or the
    rollout ends. `value [T+1, N]`."""
    steps, discount = len(reward), np.float32(gamma)
    future = value[1:].copy()
    future[terminated] = 0
    ended = terminated | truncated
    target: Floats = reward + discount * future
    for _ in range(1, min(n, steps)):  # one step more each time, but where there is none
        longer = reward[:-1] + discount * target[1:]
        target[:-1] = np.where(ended[:-1], target[:-1], longer)
    return target


def explained_variance(value: Floats, target: Floats) -> float:
    """1 is a perfect value, 0 no better than a constant; NaN when the targets do not vary."""
    variance = float(np.var(target))
    return 1.0 - float(np.var(target - value)) / variance if variance > 0 else float("nan")
