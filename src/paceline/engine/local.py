"""One process: environments, policy and algorithm side by side."""

from __future__ import annotations

import math
from typing import Any

from paceline import machine
from paceline.algo import Algorithm
from paceline.config import RunConfig
from paceline.engine.base import Engine, Iteration
from paceline.engine.clock import Clock
from paceline.engine.replica import Replica
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch, Episode


class LocalEngine(Engine):
    name = "local"
    workers = 1

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config = config
        self.replica = Replica(config, envs=config.env.envs_per_worker, resumes=resumes)
        self.threads, self.cores = self.replica.threads, machine.cores()
        slots = config.env.envs_per_worker * config.hyper.rollout_steps
        self._rollouts = math.ceil(config.impala.batch_size / slots) if config.algo == "impala" else 1
        self.parameters = self.policy.parameters.numel()

    @property
    def policy(self) -> Policy:
        return self.replica.policy

    @property
    def algorithm(self) -> Algorithm:
        return self.replica.algorithm

    def describe(self) -> list[str]:
        config = self.config
        return [
            f"env        {config.env.id} x {config.env.envs_per_worker}, {self.replica.stepping}",
            *self.replica.describe(),
            f"learner    {config.algo.upper()}, {self.parameters:,} parameters, {self.threads} of {self.cores} cores",
        ]

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self.policy.load(arrays)

    def start(self, state: dict[str, Any] | None = None) -> bool:
        collector = self.replica.collector
        assert collector is not None
        if state is None:
            collector.start()
            return True
        self.algorithm.load(state["algorithm"])
        self.optimizer_steps = self.algorithm.optimizer_steps
        if len(state["collectors"]) != 1:
            collector.start()
            return False
        return collector.restore(state["collectors"][0])

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        batch = self._collect(clock)
        metrics, learning = self.replica.learn(batch, remaining)
        for part, seconds in learning.items():
            clock.add(part, seconds)
        self.optimizer_steps = self.algorithm.optimizer_steps
        return Iteration(batch.env_steps, metrics, batch.episodes, batch.env_metrics)

    def _collect(self, clock: Clock) -> Batch:
        """A rollout; as many as its batch takes for IMPALA."""
        parts, episodes, env_metrics = [], [], []
        while True:
            batch, seconds = self.replica.collect()
            for part, spent in seconds.items():
                clock.add(part, spent)
            if self._rollouts == 1:
                return batch
            parts.append({name: array.copy() for name, array in batch.arrays().items()})
            episodes += batch.episodes
            env_metrics += batch.env_metrics
            if len(parts) == self._rollouts:
                whole = Batch.join(parts)
                whole.episodes, whole.env_metrics, whole.version = episodes, env_metrics, batch.version
                return whole

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        return self.replica.evaluate(episodes, stochastic=stochastic, number=number)

    def state(self) -> dict[str, Any]:
        assert self.replica.collector is not None
        return {
            "algorithm": self.algorithm.state(),
            "collectors": [self.replica.collector.state()],
            "spaces": self.replica.spaces,
        }

    def usage(self) -> tuple[int, float]:
        return machine.memory_bytes(), machine.cpu_seconds()

    def close(self) -> None:
        self.replica.close()
