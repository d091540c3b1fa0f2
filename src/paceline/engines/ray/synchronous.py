"""Data-parallel PPO and A2C: every worker collects and learns.

First all workers collect. When all have, they learn together, all or none. If one is lost, the others learn from the
rollouts they have. After learning, they collect the next rollout at once, while the driver takes in the results, writes
them and decides what comes next.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

from paceline.config import RunConfig
from paceline.engines.ray.learner_group import LearnerGroup, fetch_state
from paceline.engines.ray.messages import Report, WorkerSpec
from paceline.engines.ray.ray_engine import RayEngine, split_evenly
from paceline.engines.ray.worker_pool import ASK_SECONDS, WorkerHandle
from paceline.rollout.batch import Episode
from paceline.training.clock import Clock
from paceline.training.engine import Iteration, Levels

AHEAD_SECONDS = 1.0  # longest rollout to collect ahead: a run that stops waits for it, and the gain is milliseconds
KEEP_SECONDS, KEEP_SHARE = 1e-3, 0.01  # to keep the state before a rollout ahead: most seconds, or share of the rollout


class RaySyncEngine(RayEngine):
    def _start_pools(self) -> None:
        config = self.config
        self.worker_config = scale_up(config, self.workers)
        if config.engine.scaling == "weak":
            envs = [config.env.envs_per_worker] * self.workers
        else:
            envs = split_evenly(max(config.env.envs_per_worker, self.workers), self.workers)

        def make_spec(slot: int, restarts: int) -> WorkerSpec:
            return self._spec(self.worker_config, slot, restarts, envs[slot])

        self._ahead: dict[WorkerHandle, Any] = {}  # references to reports of rollouts that are collected ahead
        self._collect_seconds = math.inf  # of the last rollouts
        self._costly = 0  # iterations in a row in which going ahead cost too much
        places = {slot: slot for slot in range(self.workers)}
        self.group = self._started(LearnerGroup(self.cluster, config, make_spec, places))

    def _describe_schedule(self) -> list[str]:
        if self.workers == 1:
            return []
        engine = self.config.engine
        if engine.scaling == "strong":
            envs, steps = self.config.env.envs_per_worker, self.worker_config.hyper.rollout_steps
            lines = ["scaling    strong: the workers share the rows of an iteration; the learning rate is unchanged"]
            if self.workers > envs:
                lines.append(
                    f"scaling    {self.workers} workers for {envs} environments: each has one, and its rollouts are "
                    f"{steps} steps long, not {self.config.hyper.rollout_steps}; an iteration has "
                    f"{self.workers * steps:,} rows for {envs * self.config.hyper.rollout_steps:,}"
                )
            return lines
        rate = self.worker_config.hyper.learning_rate
        rule = {"keep": "is unchanged", "sqrt": "grows with their square root", "linear": "grows with their number"}
        return [
            f"scaling    weak: {self.workers} times the rows of one worker per iteration; the learning rate "
            f"{rule[engine.learning_rate_scaling]}: {rate:g}"
        ]

    def _describe_loss(self, share: float) -> str:
        return f"an iteration has {share:.0%} of its rows"

    # -- starting, saving, evaluating -------------------------------------------------------------------------------

    def change(self, changes: Mapping[str, Any]) -> None:
        """With a learning rate that grows with the workers, as that of the settings does."""
        key = f"{self.config.algorithm_name}.learning_rate"
        factor = self.worker_config.hyper.learning_rate / self.config.hyper.learning_rate
        super().change({name: value * factor if name == key else value for name, value in changes.items()})

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self.group.load_policy(arrays)

    def start(self, state: dict[str, Any] | None = None) -> Levels:
        if state is None:
            self.group.begin(None, None)
            return {}
        saved = state["collectors"]
        fits = len(saved) == self.workers and all(saved)
        levels = self.group.begin(state["algorithm"], saved if fits else None)
        self.optimizer_steps = state["algorithm"]["optimizer_steps"]
        return levels

    def state(self) -> dict[str, Any]:
        workers = sorted(self.group.workers, key=lambda worker: worker.slot)
        collectors: list[Any] = []
        if len(workers) == self.workers:  # otherwise the environments cannot be restored exactly anyway
            calls = {worker: worker.actor.collector_state.remote() for worker in workers}
            results = self.group.call(calls, limit=None if self._ahead else ASK_SECONDS)
            collectors = list(results.values()) if len(results) == len(workers) else []
        return {"algorithm": self.group.state(), "collectors": collectors, "spaces": self.first.spaces}

    def state_before(self) -> tuple[dict[str, Any], Iteration]:
        return {"algorithm": fetch_state(self._before), "collectors": [], "spaces": self.first.spaces}, Iteration(0, {})

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        self.group.take_in_replacements()
        played: list[Episode] = self.group.ask(
            lambda worker: worker.actor.evaluate.remote(episodes, stochastic, number)
        )
        return played

    # -- an iteration -----------------------------------------------------------------------------------------------

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        collected: dict[WorkerHandle, Report] = {}
        learned: dict[WorkerHandle, Report] | None = None
        self._before = self.group.state_reference
        self.group.take_in_replacements()
        ahead = self._collect_seconds < AHEAD_SECONDS and self._costly < 3 and not self.rests_next
        start = functools.partial(self._start_update, remaining, ahead)
        while learned is None:
            self.group.require_workers()
            missing = [worker for worker in self.group.workers if worker not in collected]
            if missing:
                calls = {worker: self._ahead.pop(worker, None) for worker in missing}
                # Only with all rollouts ahead, and none that the driver may have to shorten.
                early = None not in calls.values() and self.config.engine.straggler_share is None
                early = early and self.group.start_early(start)
                collected |= self._collect(calls)
                if not early:
                    continue  # a worker may have been lost
            learned = self.group.learn(start)
            self._ahead = {worker: call for worker, call in self._ahead.items() if worker in (learned or ())}
        return self._merge(collected, learned, clock)

    def _start_update(self, remaining: float, ahead: bool, worker: WorkerHandle, rank: int, with_state: bool) -> Any:
        if with_state:
            references = worker.actor.learn.options(num_returns=3).remote(remaining, True)
        else:
            references = worker.actor.learn_report.remote(remaining), None, None
        if ahead:
            self._ahead[worker] = worker.actor.collect_ahead.remote()
        return references

    def _collect(self, calls: dict[WorkerHandle, Any]) -> dict[WorkerHandle, Report]:
        """Wait for rollouts: those that are collected ahead (worker → reference), and others (worker → None)."""
        began = time.perf_counter()
        share = self.config.engine.straggler_share
        enough = math.ceil(share * len(calls)) if share is not None else math.inf
        took: list[float] = []

        def arrived(worker: WorkerHandle, report: Report) -> None:
            took.append(time.perf_counter() - began)
            if len(took) == enough:
                for other in calls:
                    other.actor.shorten_rollout.remote()

        started = {worker: reference or worker.actor.collect.remote() for worker, reference in calls.items()}
        results = self.group.call(started, on_result=arrived)
        if took:
            self.straggling_seconds += max(took) - sum(took) / len(took)
        return results

    def _merge(
        self, collected: dict[WorkerHandle, Report], learned: dict[WorkerHandle, Report], clock: Clock
    ) -> Iteration:
        """One result from those of all workers, in the order of their slots: it must not depend on who was first."""
        workers = sorted(learned, key=lambda worker: worker.slot)
        for worker in workers:
            if worker not in collected:  # lost before its report arrived, but after the update
                known = sum(collected[other].env_steps for other in workers if other in collected)
                collected[worker] = Report(env_steps=learned[worker].env_steps - known)
            worker.account(collected[worker])
            worker.account(learned[worker])
            worker.env_steps += collected[worker].env_steps
            self.group.messages += collected[worker].notes
            clock.add_split(collected[worker].seconds | learned[worker].seconds, 1 / len(workers))
        moved = sum(learned[worker].bytes_moved for worker in workers)
        self.bytes_moved += moved
        rollouts, first = [collected[worker] for worker in workers], learned[workers[0]]
        self._collect_seconds = max(sum(rollout.seconds.values()) for rollout in rollouts)
        cost = max(rollout.keep_seconds for rollout in rollouts)
        self._costly = self._costly + 1 if cost > max(KEEP_SECONDS, KEEP_SHARE * self._collect_seconds) else 0
        self.optimizer_steps = first.optimizer_steps
        return Iteration(
            env_steps=sum(rollout.env_steps for rollout in rollouts),
            metrics=first.metrics | self._health() | {"bytes_moved": moved},
            # In the order of one process, since the mean return is that of the last ones.
            episodes=sorted((e for rollout in rollouts for e in rollout.episodes), key=lambda episode: episode.step),
            env_metrics=[row for rollout in rollouts for row in rollout.env_metrics],
            agent_steps=sum(rollout.agent_steps for rollout in rollouts),
            env_restarts=sum(rollout.env_restarts for rollout in rollouts),
            env_error=next((rollout.env_error for rollout in rollouts if rollout.env_error), ""),
        )

    def accounts(self) -> dict[str, Any]:
        return super().accounts() | {"straggling_seconds": self.straggling_seconds}


def scale_up(config: RunConfig, workers: int) -> RunConfig:
    """The config of each replica. With weak scaling the minibatch, which all share, and the learning rate grow. With
    strong scaling, workers beyond the number of environments keep the rows of an iteration by shorter rollouts."""
    if config.engine.scaling == "strong" and workers > config.env.envs_per_worker:
        rows = config.env.envs_per_worker * config.hyper.rollout_steps
        return config.model_copy(
            update={"hyper": config.hyper.model_copy(update={"rollout_steps": -(-rows // workers)})}
        )
    if workers == 1 or config.engine.scaling == "strong":
        return config
    factor = {"keep": 1.0, "sqrt": math.sqrt(workers), "linear": float(workers)}[config.engine.learning_rate_scaling]
    return config.model_copy(update={"hyper": config.hyper.for_workers(workers, factor)})
