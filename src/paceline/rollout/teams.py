"""Episodes of environments with several agents: the return of a team is the sum over its agents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.batch import Batch, Bools, Episode
from paceline.spaces import Array
from paceline.team_spaces import TeamSpaces


def team_episode(returns: Array, acted: Array, length: int, team: TeamSpaces | None, step: int = 0) -> Episode:
    """`returns [A]` of the agents, and which of them `acted`."""
    policies = {}
    for part in team.parts if team is not None else ():
        own = [number for number in part.agents if acted[number]]
        if own:
            policies[part.name] = float(returns[own].mean())
    return Episode(float(returns.sum()), length, step, int(np.count_nonzero(acted)), policies)


class Teams:
    """The running episodes of E environments of A agents each. Rows are in the order of the environments."""

    def __init__(self, steps: int, num_envs: int, agents: int, team: TeamSpaces | None = None) -> None:
        self.stepped: Bools = np.zeros((steps, num_envs), np.bool_)  # [T, E] not only reset
        self.over: Bools = np.zeros((steps, num_envs), np.bool_)  # [T, E] the episode ended
        self._team = team
        self._total: NDArray[np.float64] = np.zeros((num_envs, agents))
        self._length: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._acted: Bools = np.zeros((num_envs, agents), np.bool_)  # who took part so far

    def start(self) -> None:
        for array in self.running().values():
            array[...] = 0

    def running(self) -> dict[str, Array]:
        """The state of the running episodes, by name in a checkpoint."""
        return {"return": self._total, "length": self._length, "acted": self._acted}

    def track(self, batch: Batch, reward: Array, failures: list[tuple[int, int]]) -> None:
        """Fill the episodes and the steps of a batch from the rewards `[T, N]` as they were given. `failures`: step
        and row of environments that failed."""
        steps, (envs, agents) = len(batch.reward), self._acted.shape
        rewards = reward[:steps].reshape(steps, envs, agents)
        valid = batch.valid.reshape(steps, envs, agents)
        failed = np.zeros((steps, envs), np.bool_)
        for t, row in failures:
            failed[t, row // agents] = True
            if t and batch.valid[t - 1, row] and not batch.terminated[t - 1, row]:
                batch.truncated[t - 1, row] = True  # see `Collector._cut_failed`
        for t in range(steps):
            self._total += rewards[t]
            self._length += self.stepped[t]
            self._acted |= valid[t]
            for env in np.flatnonzero(self.over[t]):
                length = int(self._length[env])
                batch.episodes.append(team_episode(self._total[env], self._acted[env], length, self._team, t))
            ended = self.over[t] | failed[t]
            if ended.any():
                self._total[ended] = 0.0
                self._length[ended] = 0
                self._acted[ended] = False
        batch.team_steps = int(np.count_nonzero(self.stepped[:steps]))
