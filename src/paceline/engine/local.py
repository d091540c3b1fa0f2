"""One process: environments, policy and algorithm side by side."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from paceline import machine
from paceline.algo import ALGORITHMS, Algorithm
from paceline.config import RunConfig
from paceline.engine.clock import Clock
from paceline.env.make import make_vector
from paceline.env.vector import VectorEnv
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.collector import Collector
from paceline.rollout.episodes import EVAL_WORKER, eval_envs, play
from paceline.spaces import space_to_json


class LocalEngine:
    """`take` a batch, `learn` from it. Never sees a loss, a stop rule or a file."""

    name = "local"

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config = config
        squash = config.model.squash
        self.env, self.stepping = make_vector(
            config.env, config.env.envs_per_worker, seed=config.seed, resumes=resumes, squash=squash
        )
        self._eval_env: VectorEnv | None = None
        try:
            init, action, update, self._eval_seed = (int(s.generate_state(1)[0]) for s in _streams(config.seed))
            torch.set_num_threads(1)  # the first weights come from a QR, which several threads compute otherwise
            self.policy = Policy(
                self.env.observation,
                self.env.action,
                config.model,
                seed=init,
                normalize_observation=config.env.normalize_observation,
            )
            self.threads = set_threads(config.engine.threads, self.policy, _minibatch_rows(config))
            self.algorithm: Algorithm = ALGORITHMS[config.algo](
                self.policy,
                config.hyper,
                rng=np.random.default_rng(update),
                normalize_reward=config.env.normalize_reward,
            )
            self.collector = Collector(
                self.env,
                self.policy,
                steps=config.hyper.rollout_steps,
                rng=np.random.default_rng(action),
                discount=config.hyper.gamma if config.env.normalize_reward else None,
            )
        except BaseException:
            self.env.close()
            raise

    def describe(self) -> list[str]:
        env, count = self.env, self.policy.parameters.numel()
        kind = "images " if env.observation.is_image else ""
        return [
            f"env        {self.config.env.id} x {env.num_envs}, {self.stepping}",
            f"spaces     observation {kind}{env.observation.shape}, action {env.action.space}",
            f"learner    {self.config.algo.upper()}, {count:,} parameters, {self.threads} of {machine.cores()} cores",
        ]

    def start(self) -> None:
        self.collector.start()

    def take(self, clock: Clock) -> Batch:
        collector = self.collector
        env, act = collector.env_seconds, collector.act_seconds
        batch = collector.collect(self.algorithm.version)
        clock.add("env", collector.env_seconds - env)
        clock.add("act", collector.act_seconds - act)
        return batch

    def learn(self, batch: Batch, remaining: float, clock: Clock) -> dict[str, float]:
        before = time.perf_counter()
        with np.errstate(all="ignore"):  # the loop looks at the loss and says what to do
            metrics = self.algorithm.update(batch, remaining)
        clock.add("learn", time.perf_counter() - before)
        return metrics

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        """Separate environments, the normaliser as it is; the same `number` gives the same episodes."""
        envs = eval_envs(episodes)
        if self._eval_env is None or self._eval_env.num_envs != envs:
            self._close_eval()
            self._eval_env, _ = make_vector(
                self.config.env, envs, seed=self._eval_seed, squash=self.config.model.squash
            )
        self._eval_env.reseed(self._eval_seed, EVAL_WORKER, number)
        rng = np.random.default_rng((self._eval_seed, number)) if stochastic else None
        return play(self._eval_env, self.policy, episodes, rng=rng)

    def state(self) -> dict[str, Any]:
        spaces = {"observation": self.env.observation.space, "action": self.env.action.space}
        return {
            "algorithm": self.algorithm.state(),
            "collector": self.collector.state(),
            "spaces": {name: space_to_json(space) for name, space in spaces.items()},
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """True: exact. False: the environments start afresh."""
        self.algorithm.load(state["algorithm"])
        return self.collector.restore(state["collector"])

    def close(self) -> None:
        self._close_eval()
        self.env.close()

    def _close_eval(self) -> None:
        if self._eval_env is not None:
            self._eval_env.close()
            self._eval_env = None


def set_threads(wanted: int, policy: Policy, rows: int) -> int:
    """Share our cores out. An MLP gets two at most: its matrix products are too small to be split, its towers are not.

    Torch and BLAS then have one thread each: theirs would wait for each other at every product.
    """
    cores = wanted or machine.cores()
    if policy.fast is None:
        # A user's own network over a vector is as small: threads that wait for a core others use cost 20 times more.
        threads = cores if wanted or policy.observation.images else 1
        torch.set_num_threads(threads)
        return threads
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")
    policy.fast.threads = min(cores, 2) if policy.fast.pays_in_two_threads(rows) else 1
    return policy.fast.threads


def _minibatch_rows(config: RunConfig) -> int:
    slots = config.env.envs_per_worker * config.hyper.rollout_steps
    return min(slots, config.ppo.minibatch_size) if config.algo == "ppo" else slots


def _streams(seed: int) -> list[np.random.SeedSequence]:
    """Independent streams for initialisation, actions, minibatches and evaluation."""
    return np.random.SeedSequence(seed).spawn(4)
