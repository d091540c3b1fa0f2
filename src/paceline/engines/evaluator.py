"""Evaluation during training, in separate environments."""

from __future__ import annotations

import numpy as np

from paceline.config import RunConfig
from paceline.envs.make import make_vector
from paceline.envs.vector import VectorEnv
from paceline.models.acting import ActingPolicy
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import EVAL_WORKER, eval_envs, play


class Evaluator:
    """Keeps its environments from one evaluation to the next."""

    def __init__(self, config: RunConfig, seed: int, *, squash: bool, in_worker: bool = False) -> None:
        self._config, self._seed, self._squash, self._in_worker = config, seed, squash, in_worker
        self._env: VectorEnv | None = None
        self.steps_taken = self.env_restarts = 0
        self.first_error = ""

    def play(self, policy: ActingPolicy, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        """The same `number` gives the same episodes."""
        envs = eval_envs(episodes)
        if self._env is None or self._env.num_envs != envs:
            self.close()
            self._env, _ = make_vector(
                self._config.env,
                envs,
                seed=self._seed,
                squash=self._squash,
                policies=self._config.multi_agent.policies,
                masked=bool(policy.observation.mask),
                in_worker=self._in_worker,
            )
        self._env.reseed(self._seed, EVAL_WORKER, number)
        rng = np.random.default_rng((self._seed, number)) if stochastic else None
        try:
            return play(self._env, policy, episodes, rng=rng, on_step=self._count)
        finally:
            self.env_restarts += self._env.env_restarts
            self.first_error = self.first_error or self._env.first_error
            self._env.env_restarts = 0

    def _count(self) -> None:
        self.steps_taken += 1

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
