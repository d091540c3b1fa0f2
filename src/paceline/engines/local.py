"""Everything in one process."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import machine
from paceline.algorithms.on_policy import OnPolicy
from paceline.config import RunConfig, UserError
from paceline.engines.actor_learner import ActorLearner
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.gpu_collector import GpuCollector
from paceline.training.clock import Clock
from paceline.training.engine import Engine, Iteration, Levels, restored

LONG_SECONDS = 1.0  # a longer update may be interrupted by a save


class LocalEngine(Engine):
    name = "local"
    workers = 1

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config = config
        self.actor_learner = ActorLearner(config, envs=config.env.envs_per_worker, resumes=resumes)
        self.threads, self.cores = self.actor_learner.threads, machine.cores()
        slots = sum(env.rows for env in self.actor_learner.envs) * config.hyper.rollout_steps
        self._rollouts = config.hyper.rollouts_per_update(slots)
        self._rounds = config.hyper.rounds_per_iteration()
        self.parameters = self.policy.parameters.numel()
        self.device = self.actor_learner.device_name
        self._next_batch: Batch | None = None  # with engine.overlap: collected while learning from the last one
        self._learning = threading.Lock()
        """Held while the algorithm's state changes."""
        self._learn_seconds = 0.0
        self._done = Iteration(0, {})
        """What the iteration that is running has learned from."""
        self._before: tuple[dict[str, Any], Iteration] | None = None
        for name in ("overlap", "compile") if self.actor_learner.device == "cpu" else ():
            if getattr(config.engine, name):
                self.close()
                raise UserError(f"engine.{name}=true needs a GPU, but this run uses none; see --device")

    @property
    def policy(self) -> Any:
        """A `Policy`, or several as a `TeamPolicy`."""
        return self.actor_learner.policy

    @property
    def algorithm(self) -> Any:
        """An `Algorithm`, or several as a `TeamAlgorithm`."""
        return self.actor_learner.algorithm

    def describe(self) -> list[str]:
        config = self.config
        where = f"{self.threads} of {self.cores} cores"
        if self.actor_learner.device == "cuda":
            where = f"on {self.device}"
            where += ", collecting the next rollout while learning" if config.engine.overlap else ""
        return [
            f"env        {config.env.id} x {config.env.envs_per_worker}, {self.actor_learner.stepping}",
            *self.actor_learner.describe(),
            f"learner    {config.algorithm.__name__}, {self.parameters:,} parameters, {where}",
        ]

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self.policy.load(arrays)

    def start(self, state: dict[str, Any] | None = None) -> Levels:
        collector = self.actor_learner.collector
        assert collector is not None
        if state is None:
            collector.start()
            return {}
        self.algorithm.load(state["algorithm"])
        self.optimizer_steps = self.algorithm.optimizer_steps
        own = self.algorithm.restored()
        if state.get("collected_ahead"):
            own = own | {"rollout": "dropped: checkpoints do not hold the one that engine.overlap collects ahead"}
        if len(state["collectors"]) == 1 and collector.restore(state["collectors"][0]):
            return restored(True, own)
        self.algorithm.interrupted()
        if len(state["collectors"]) != 1:
            collector.start()
        return restored(False, own)

    def change(self, changes: Mapping[str, Any]) -> None:
        self.actor_learner.change(changes)

    def set_scratch_dir(self, folder: Path) -> None:
        self.algorithm.set_scratch_dir(folder)

    def notes(self) -> list[str]:
        notes: list[str] = self.algorithm.notes()
        return notes

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        if self.config.engine.overlap:
            began = time.perf_counter()
            with self._learning:
                self._done = Iteration(0, {})
                self._keep_state()
                done = self._done = self._iterate_overlapped(remaining, clock)
            self._learn_seconds = time.perf_counter() - began
            return done
        done = self._done = Iteration(0, {})
        for number in range(self._rounds):
            batch = self._collect(clock)
            last = number == self._rounds - 1
            with self._learning:
                self._keep_state()
                done.metrics, seconds = self.actor_learner.learn(batch, remaining, measured=last)
                done.env_steps += batch.env_steps
                done.agent_steps += batch.agent_steps
                done.episodes += batch.episodes
                done.env_metrics += batch.env_metrics
                done.env_restarts += batch.env_restarts
                done.env_error = done.env_error or batch.env_error
            clock.add_split(seconds)
            self._learn_seconds = seconds["learn"]
        self.optimizer_steps = self.algorithm.optimizer_steps
        return done

    def _iterate_overlapped(self, remaining: float, clock: Clock) -> Iteration:
        """Learn from one rollout while the next is collected with the weights from before the update."""
        algorithm, collector = self.algorithm, self.actor_learner.collector
        assert isinstance(algorithm, OnPolicy) and isinstance(collector, GpuCollector)
        batch = self._next_batch or self._collect(clock)
        began, lag = time.perf_counter(), algorithm.version - batch.version
        collector.publish()
        with np.errstate(all="ignore"):
            pending = algorithm.begin_update(batch, remaining)
        clock.add("learn", time.perf_counter() - began)
        self._next_batch, seconds = self.actor_learner.collect(publish=False)
        clock.add_split(seconds)
        with clock.measure("learn"):
            metrics = algorithm.end_update(pending)
        self.optimizer_steps = algorithm.optimizer_steps
        metrics["policy_lag_mean"] = float(lag)
        return Iteration(
            batch.env_steps,
            metrics,
            batch.episodes,
            batch.env_metrics,
            batch.agent_steps,
            batch.env_restarts,
            batch.env_error,
        )

    def _collect(self, clock: Clock) -> Batch:
        """One rollout, or several joined where the algorithm's batch takes more."""
        parts, episodes, env_metrics, restarts, error = [], [], [], 0, ""
        steps: int | None = None
        while True:
            batch, seconds = self.actor_learner.collect()
            clock.add_split(seconds)
            if self._rollouts == 1:
                return batch
            parts.append(batch.copied_arrays())
            steps = None if batch.team_steps is None else (steps or 0) + batch.team_steps
            episodes += batch.episodes
            env_metrics += batch.env_metrics
            restarts, error = restarts + batch.env_restarts, error or batch.env_error
            if len(parts) == self._rollouts:
                whole = Batch.join(parts)
                whole.episodes, whole.env_metrics, whole.version = episodes, env_metrics, batch.version
                whole.env_restarts, whole.env_error, whole.team_steps = restarts, error, steps
                return whole

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        return self.actor_learner.evaluate(episodes, stochastic=stochastic, number=number)

    def state(self) -> dict[str, Any]:
        assert self.actor_learner.collector is not None
        return {
            "algorithm": self.algorithm.state(),
            "collectors": [self.actor_learner.collector.state()],
            "spaces": self.actor_learner.spaces,
            "collected_ahead": self._next_batch is not None,
        }

    def _keep_state(self) -> None:
        """Copy the algorithm's state before an update that takes long, in case that the run must be saved meanwhile."""
        self._before = None
        if self._learn_seconds > LONG_SECONDS:
            done = Iteration(self._done.env_steps, {}, list(self._done.episodes), agent_steps=self._done.agent_steps)
            self._before = copy.deepcopy(self.algorithm.snapshot()), done

    def state_before(self) -> tuple[dict[str, Any], Iteration] | None:
        if self._learning.acquire(timeout=LONG_SECONDS):  # for ever: the state must not change any more
            before = self.algorithm.state(), self._done
        elif self._before is not None:
            before = self._before
        else:
            return None
        return {"algorithm": before[0], "collectors": [], "spaces": self.actor_learner.spaces}, before[1]

    def accounts(self) -> dict[str, Any]:
        memory = torch.cuda.max_memory_allocated() if self.actor_learner.device == "cuda" else 0
        return super().accounts() | {"device_memory_bytes": memory}

    def usage(self) -> machine.Usage:
        return machine.usage()

    def close(self) -> None:
        self.actor_learner.close()
