"""The parts of one process: environments, policy, algorithm and collector, side by side.

The local engine is one of these; on Ray each worker has one. A learner has no environments of its own, and takes
the spaces from somebody who has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from paceline import machine
from paceline.algo import ALGORITHMS, Algorithm
from paceline.config import RunConfig
from paceline.env.make import make_vector
from paceline.env.vector import VectorEnv
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.collector import Collector
from paceline.rollout.episodes import EVAL_WORKER, eval_envs, play
from paceline.spaces import ActionCodec, ObservationCodec, space_from_json, space_to_json

Spaces = dict[str, Any]
RESTART = 1_000_000  # the environments of a worker's replacement are seeded as those of a resume with such a number


class Replica:
    def __init__(
        self,
        config: RunConfig,
        *,
        envs: int,
        worker: int = 0,
        restarts: int = 0,
        resumes: int = 0,
        cores: int = 0,
        spaces: Spaces | None = None,
    ) -> None:
        """`envs`: environments of its own; 0 needs `spaces`. `cores`: those to share out, 0 for all that are ours."""
        self.config = config
        self.env: VectorEnv | None = None
        self._eval_env: VectorEnv | None = None
        self.collector: Collector | None = None
        self.stepping = ""
        self.evaluation_steps = 0
        squash = config.model.squash
        if envs:
            self.env, self.stepping = make_vector(
                config.env, envs, seed=config.seed, worker=worker, resumes=resumes + RESTART * restarts, squash=squash
            )
            observation, action = self.env.observation, self.env.action
        else:
            assert spaces is not None
            observation = ObservationCodec(space_from_json(spaces["observation"]))
            action = ActionCodec(space_from_json(spaces["action"]), squash=squash)
        self.spaces = {"observation": space_to_json(observation.space), "action": space_to_json(action.space)}
        try:
            init, act, update, self._eval_seed = (int(s.generate_state(1)[0]) for s in _streams(config.seed))
            others = (worker, restarts) if worker or restarts else ()  # the first worker's streams are a lone one's
            torch.set_num_threads(1)  # the first weights come from a QR, which several threads compute otherwise
            self.policy = Policy(
                observation,
                action,
                config.model,
                seed=init,
                normalize_observation=config.env.normalize_observation,
            )
            self.threads = set_threads(config.engine.threads or cores, self.policy, _minibatch_rows(config, envs))
            self.algorithm: Algorithm = ALGORITHMS[config.algo](
                self.policy,
                config.hyper,
                rng=np.random.default_rng((update, *others) if others else update),
                normalize_reward=config.env.normalize_reward,
            )
            if self.env is not None:
                self.collector = Collector(
                    self.env,
                    self.policy,
                    steps=config.hyper.rollout_steps,
                    rng=np.random.default_rng((act, *others) if others else act),
                    discount=config.hyper.gamma if config.env.normalize_reward else None,
                )
        except BaseException:
            self.close()
            raise

    def describe(self) -> list[str]:
        kind = "images " if self.policy.observation.is_image else ""
        return [f"spaces     observation {kind}{self.policy.observation.shape}, action {self.policy.action.space}"]

    @property
    def ticks(self) -> int:
        """Grows as long as work goes on, whatever it is."""
        steps = self.collector.steps_taken if self.collector is not None else 0
        return steps + self.algorithm.optimizer_steps + self.evaluation_steps

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """A rollout, and the seconds it took by part."""
        collector = self.collector
        assert collector is not None
        env, act = collector.env_seconds, collector.act_seconds
        batch = collector.collect(self.algorithm.version)
        return batch, {"env": collector.env_seconds - env, "act": collector.act_seconds - act}

    def learn(self, batch: Batch, remaining: float) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from a batch: the metrics, and the seconds it took by part."""
        return self.timed(lambda: self.algorithm.update(batch, remaining))

    def timed(self, work: Callable[[], dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
        began, in_group = time.perf_counter(), self.algorithm.group.seconds
        with np.errstate(all="ignore"):  # the loop looks at the loss and says what to do
            metrics = work()
        sync = self.algorithm.group.seconds - in_group
        return metrics, {"learn": time.perf_counter() - began - sync, "sync": sync}

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        envs = eval_envs(episodes)
        if self._eval_env is None or self._eval_env.num_envs != envs:
            self._close_eval()
            self._eval_env, _ = make_vector(
                self.config.env, envs, seed=self._eval_seed, squash=self.config.model.squash
            )
        self._eval_env.reseed(self._eval_seed, EVAL_WORKER, number)
        rng = np.random.default_rng((self._eval_seed, number)) if stochastic else None
        return play(self._eval_env, self.policy, episodes, rng=rng, on_step=self._count_evaluation)

    def _count_evaluation(self) -> None:
        self.evaluation_steps += 1

    def close(self) -> None:
        self._close_eval()
        if self.env is not None:
            self.env.close()
            self.env = None

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


def _minibatch_rows(config: RunConfig, envs: int) -> int:
    if config.algo == "impala":
        return config.impala.batch_size
    slots = max(envs, 1) * config.hyper.rollout_steps
    return min(slots, config.ppo.minibatch_size) if config.algo == "ppo" else slots


def _streams(seed: int) -> list[np.random.SeedSequence]:
    """Independent streams for initialisation, actions, minibatches and evaluation."""
    return np.random.SeedSequence(seed).spawn(4)
