"""One process: environments, policy and algorithm side by side."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import machine
from paceline.algo import Algorithm
from paceline.algo.ppo import PPO
from paceline.config import RunConfig, UserError
from paceline.engine.base import Engine, Iteration
from paceline.engine.clock import Clock
from paceline.engine.replica import Replica
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.device import DeviceCollector


class LocalEngine(Engine):
    name = "local"
    workers = 1

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config = config
        self.replica = Replica(config, envs=config.env.envs_per_worker, resumes=resumes)
        self.threads, self.cores = self.replica.threads, machine.cores()
        slots = config.env.envs_per_worker * config.hyper.rollout_steps
        self._rollouts = math.ceil(config.impala.batch_size / slots) if config.algo == "impala" else 1
        self._rounds = config.dqn.rounds if config.algo == "dqn" else 1
        self.parameters = self.policy.parameters.numel()
        self.device = self.replica.device_name
        self._ahead: Batch | None = None  # collected while the last one was learned from
        for name in ("overlap", "compile") if self.replica.device == "cpu" else ():
            if getattr(config.engine, name):
                self.close()
                raise UserError(f"engine.{name}=true is for learning on a GPU, and none is used; see --device")

    @property
    def policy(self) -> Policy:
        return self.replica.policy

    @property
    def algorithm(self) -> Algorithm:
        return self.replica.algorithm

    def describe(self) -> list[str]:
        config = self.config
        where = f"{self.threads} of {self.cores} cores"
        if self.replica.device == "cuda":
            where = f"on {self.device}"
            where += ", collecting meanwhile with the weights of before" if config.engine.overlap else ""
        return [
            f"env        {config.env.id} x {config.env.envs_per_worker}, {self.replica.stepping}",
            *self.replica.describe(),
            f"learner    {config.algo.upper()}, {self.parameters:,} parameters, {where}",
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
        if len(state["collectors"]) == 1 and collector.restore(state["collectors"][0]):
            return True
        self.algorithm.interrupted()
        if len(state["collectors"]) != 1:
            collector.start()
        return False

    def keep_in(self, folder: Path) -> None:
        self.algorithm.keep_in(folder)

    def notes(self) -> list[str]:
        return self.algorithm.notes()

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        if self.config.engine.overlap:
            return self._iterate_ahead(remaining, clock)
        done = Iteration(0, {})
        for number in range(self._rounds):
            batch = self._collect(clock)
            last = number == self._rounds - 1
            done.metrics, learning = self.replica.learn(batch, remaining, measured=last)
            for part, seconds in learning.items():
                clock.add(part, seconds)
            done.env_steps += batch.env_steps
            done.episodes += batch.episodes
            done.env_metrics += batch.env_metrics
        self.optimizer_steps = self.algorithm.optimizer_steps
        return done

    def _iterate_ahead(self, remaining: float, clock: Clock) -> Iteration:
        """Learn from one rollout while the next is collected, with the weights of before."""
        algorithm, collector = self.algorithm, self.replica.collector
        assert isinstance(algorithm, PPO) and isinstance(collector, DeviceCollector)
        batch = self._ahead or self._collect(clock)
        began, lag = time.perf_counter(), algorithm.version - batch.version
        collector.publish()
        with np.errstate(all="ignore"):
            learned = algorithm.begin_update(batch, remaining)
        clock.add("learn", time.perf_counter() - began)
        self._ahead, seconds = self.replica.collect(publish=False)
        for part, spent in seconds.items():
            clock.add(part, spent)
        with clock.measure("learn"):
            metrics = learned()
        self.optimizer_steps = algorithm.optimizer_steps
        return Iteration(batch.env_steps, metrics | {"policy_lag_mean": float(lag)}, batch.episodes, batch.env_metrics)

    def _collect(self, clock: Clock) -> Batch:
        """A rollout; as many as its batch takes for IMPALA."""
        parts, episodes, env_metrics = [], [], []
        while True:
            batch, seconds = self.replica.collect()
            for part, spent in seconds.items():
                clock.add(part, spent)
            if self._rollouts == 1:
                return batch
            parts.append(batch.copied_arrays())
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

    def accounts(self) -> dict[str, Any]:
        memory = torch.cuda.max_memory_allocated() if self.replica.device == "cuda" else 0
        return super().accounts() | {"device_memory_bytes": memory}

    def usage(self) -> tuple[int, float]:
        return machine.memory_bytes(), machine.cpu_seconds()

    def close(self) -> None:
        self.replica.close()
