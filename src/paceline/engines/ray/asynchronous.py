"""Actors that never wait for each other, and a learner: IMPALA and DQN send it rollouts, A3C gradients.

One call per rollout. The data goes from the actor to the learner; the driver only passes references. It requests new
rollouts while the learner works, so that neither side waits longer than the length of the queue requires.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from typing import Any

import ray

from paceline.config import RunConfig
from paceline.engines.ray.learner_group import LearnerGroup, fetch_state
from paceline.engines.ray.messages import LEARNER, Report, WorkerSpec
from paceline.engines.ray.ray_engine import RayEngine, split_evenly
from paceline.engines.ray.rollout_queue import QueuedRollout, RolloutQueue
from paceline.engines.ray.worker_pool import WorkerHandle, WorkerPool
from paceline.rollout.batch import Episode
from paceline.training.clock import Clock
from paceline.training.engine import Iteration, Levels, TimeSplit


def in_one_rollout(config: RunConfig) -> RunConfig:
    """The config of actors and learners, with few and large messages."""
    return config.model_copy(update={"hyper": config.hyper.for_actors(config.env.envs_per_worker)})


class RayAsyncEngine(RayEngine):
    @property
    def learner_count(self) -> int:
        return self.config.engine.learners

    def _start_pools(self) -> None:
        config, learners = in_one_rollout(self.config), self.learner_count
        self._began = time.perf_counter()

        def actor_spec(slot: int, restarts: int) -> WorkerSpec:
            return self._spec(config, slot, restarts, config.env.envs_per_worker)

        def learner_spec(slot: int, restarts: int) -> WorkerSpec:
            return self._spec(config, slot, restarts, 0, self._spaces)

        places = {slot: learners + slot for slot in range(self.workers)}
        self.actors = self._started(WorkerPool(self.cluster, config, actor_spec, places))
        info = self.actors.workers[0].info
        assert info is not None
        self._spaces = info.spaces
        places = {LEARNER + index: index for index in range(learners)}
        self.learners = self._started(LearnerGroup(self.cluster, config, learner_spec, places))
        self._gradients = config.algorithm.sharing == "gradients"
        slots = config.env.envs_per_worker * max(1, info.agents) * config.hyper.rollout_steps
        self._count = learners * config.hyper.rollouts_per_update(slots * learners)
        self.queue = RolloutQueue(
            self.actors,
            max_length=self.workers + 2 * max(self._count, self.workers),
            in_advance=not self._gradients,  # rollouts of old weights are corrected for, gradients are not
        )

    def _describe_schedule(self) -> list[str]:
        what = "gradients" if self._gradients else f"rollouts, {self._count} per update"
        return [f"schedule   asynchronous: actors send {what}; {self.learner_count} learner(s) beside the driver"]

    def _describe_loss(self, share: float) -> str:
        return f"rollouts arrive at {share:.0%} of the speed"

    # -- starting, saving, evaluating -------------------------------------------------------------------------------

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self.learners.load_policy(arrays)

    def start(self, state: dict[str, Any] | None = None) -> Levels:
        levels = self.learners.begin(state["algorithm"] if state is not None else None, None)
        if state is not None:
            self.optimizer_steps = state["algorithm"]["optimizer_steps"]
        self._publish()
        self._began = time.perf_counter()
        return levels

    def _publish(self) -> None:
        """Send the first learner's weights to the actors."""
        weights = self.learners.ask(lambda worker: worker.actor.weights.remote())
        self.learners.weights = ray.put(weights)
        self.queue.publish(int(weights["version"][0]), self.learners.weights)

    def state(self) -> dict[str, Any]:
        state = self.learners.state()
        if self.config.algorithm.sharing == "replay":  # with the replay, which is not copied at every update
            state = self.learners.ask(lambda worker: worker.actor.algorithm_state.remote())
        return {"algorithm": state, "collectors": [], "spaces": self._spaces}

    def state_before(self) -> tuple[dict[str, Any], Iteration]:
        """Without a replay: the learner that has it is busy."""
        return {"algorithm": fetch_state(self._before), "collectors": [], "spaces": self._spaces}, Iteration(0, {})

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        self.actors.admit()
        weights = self.learners.weights
        played: list[Episode] = self.actors.ask(
            lambda worker: worker.actor.evaluate.remote(episodes, stochastic, number, weights), queue=self.queue
        )
        return played

    # -- an iteration -----------------------------------------------------------------------------------------------

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        timeout = self.config.engine.start_timeout_seconds + self.config.env.step_timeout_seconds
        reports: list[Report] = []
        self._before = self.learners.state_reference
        self.learners.take_in_replacements()
        while not any(report.metrics for report in reports):
            taken = self.queue.take(self._count, timeout)
            if self._gradients:  # and all others that have arrived
                taken += self.queue.take(min(len(self.queue.rollouts), self.workers - 1), timeout)
            reports, used = self._learn(taken, remaining)
        return self._merge(used, reports, clock)

    def _learn(self, taken: list[QueuedRollout], remaining: float) -> tuple[list[Report], list[QueuedRollout]]:
        """The learners' reports, and the rollouts that they could fetch."""
        learned: dict[WorkerHandle, Report] | None = None
        shares: list[list[QueuedRollout]] = []
        while learned is None:
            self.learners.require_workers()
            bounds = [0, *itertools.accumulate(split_evenly(len(taken), len(self.learners.workers)))]
            shares = [taken[a:b] for a, b in itertools.pairwise(bounds)]
            learned = self.learners.learn(functools.partial(self._start_update, shares, remaining), self.queue)
        for worker, report in learned.items():
            worker.account(report)
        reports = list(learned.values())
        used = [
            rollout
            for report, share in zip(reports, shares, strict=True)
            for index, rollout in enumerate(share)
            if report.metrics and index not in report.missing
        ]
        if reports[0].metrics:
            self.queue.publish(reports[0].version, self.learners.weights)
        else:
            self._publish()
        return reports, used

    def _start_update(
        self, shares: list[list[QueuedRollout]], remaining: float, worker: WorkerHandle, rank: int, with_state: bool
    ) -> Any:
        payloads = [rollout.payload for rollout in shares[rank]]
        versions = [rollout.report.version for rollout in shares[rank]]
        slots = [rollout.worker.slot for rollout in shares[rank]]
        return worker.actor.learn_from.options(num_returns=3).remote(payloads, versions, slots, remaining, with_state)

    def _merge(self, used: list[QueuedRollout], reports: list[Report], clock: Clock) -> Iteration:
        for report in reports:
            self.learners.messages += report.notes
            clock.add_split(report.seconds, 1 / len(reports))
        for rollout in used:
            rollout.worker.env_steps += rollout.report.env_steps
            self.learners.messages += rollout.report.notes
        lags = [lag for report in reports for lag in report.lags]
        moved = sum(rollout.report.bytes_moved + 4 * self.parameters for rollout in used)
        moved += sum(report.bytes_moved for report in reports)
        self.bytes_moved += moved
        self.optimizer_steps = reports[0].optimizer_steps
        metrics = reports[0].metrics | self._health()
        metrics |= {
            "policy_lag_mean": sum(lags) / len(lags),
            "policy_lag_max": max(lags),
            "queued_rollouts": len(self.queue.rollouts),
            "queued_bytes": self.queue.waiting_bytes,
            "bytes_moved": moved,
        }
        return Iteration(
            env_steps=sum(rollout.report.env_steps for rollout in used),
            metrics=metrics,
            episodes=[episode for rollout in used for episode in rollout.report.episodes],
            env_metrics=[row for rollout in used for row in rollout.report.env_metrics],
            agent_steps=sum(rollout.report.agent_steps for rollout in used),
            env_restarts=sum(rollout.report.env_restarts for rollout in used),
            env_error=next((rollout.report.env_error for rollout in used if rollout.report.env_error), ""),
        )

    def accounts(self) -> dict[str, Any]:
        return super().accounts() | {"actor_time_split": self.actor_time_split()}

    def actor_time_split(self) -> TimeSplit:
        actors = self.actors.workers
        split: TimeSplit = defaultdict(float)
        for worker in actors:
            for part, seconds in worker.time_split.items():
                split[part] += seconds / len(actors)
        split["idle"] += max(0.0, time.perf_counter() - self._began - sum(split.values()))
        return dict(split)
