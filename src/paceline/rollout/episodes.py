"""Exactly N episodes, without a bias to short ones: each environment has its share and then stops counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.model.heads import Head
from paceline.rollout.batch import Episode
from paceline.rollout.collector import Vector
from paceline.spaces import Array

MAX_EVAL_ENVS = 32
EVAL_WORKER = 1_000_000  # seeds evaluation apart from every worker
MAX_EPISODE_STEPS = 100_000  # an episode that never ends is cut here


class Player(Protocol):
    @property
    def head(self) -> Head: ...

    def act(self, observation: Array, noise: NDArray[np.float32]) -> tuple[Array, Array | None, Array | None]: ...
    def best(self, observation: Array) -> Array: ...


class RandomPlayer:
    """Uniform actions: the baseline that every agent should beat."""

    def __init__(self, env: Vector, seed: int) -> None:
        self._space = env.action.space
        self._space.seed(seed)
        self._action = env.action
        self.head: Head

    def best(self, observation: Array) -> Array:
        rows = [self._action.encode(self._space.sample()) for _ in range(len(observation))]
        return np.stack(rows)


def eval_envs(episodes: int) -> int:
    return min(episodes, MAX_EVAL_ENVS)


def play(
    env: Vector,
    player: Player | RandomPlayer,
    episodes: int,
    *,
    rng: np.random.Generator | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play `episodes` episodes from a reset; sampled actions if `rng` is given, else the most likely ones.

    The result is in order of environment, then time, so that it does not depend on who finished first.
    """
    n = env.num_envs
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    finished: list[list[Episode]] = [[] for _ in range(n)]
    total, length, done = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    observation = env.reset().copy()
    while any(len(own) < share for own, share in zip(finished, quota, strict=True)):
        if rng is None:
            action = player.best(observation)
        else:
            assert not isinstance(player, RandomPlayer)
            action, _, _ = player.act(observation, player.head.noise(rng, (n,)))
        counted = ~done
        on_step()
        observation, reward, terminated, truncated = env.step(action)
        total += np.where(counted, reward, 0.0)
        length += counted
        done = (terminated | truncated) | (length >= MAX_EPISODE_STEPS)
        for index in np.flatnonzero(done & counted):
            if len(finished[index]) < quota[index]:
                finished[index].append(Episode(float(total[index]), int(length[index])))
        total[done] = 0.0
        length[done] = 0
    env.finished_metrics.clear()
    return [episode for own in finished for episode in own]
