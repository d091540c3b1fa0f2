"""Workers that collect and learn: PPO and A2C, data-parallel.

An iteration is atomic: all collect; when the driver knows that all have, they learn together, all or nothing. What
was collected by those that are left is learned from again if somebody is lost.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

from paceline.config import RunConfig
from paceline.engine.base import Iteration, TrainingError
from paceline.engine.clock import Clock
from paceline.engine.crew import ASK_SECONDS, Member, first_result
from paceline.engine.messages import Order, Report
from paceline.engine.ray_engine import RayEngine
from paceline.rollout.batch import Episode


class RaySyncEngine(RayEngine):
    def _begin_crews(self) -> None:
        config = self.config
        self.worker_config = share(config, self.workers)
        if config.engine.scaling == "weak":
            envs = [config.env.envs_per_worker] * self.workers
        else:
            envs = split(config.env.envs_per_worker, self.workers)

        def order(slot: int, restarts: int) -> Order:
            return self._order(self.worker_config, slot, restarts, envs[slot])

        self.crew = self._add_crew({slot: slot for slot in range(self.workers)}, order)
        self.crew.start(config.engine.start_timeout_seconds)
        self.team = self._make_team(self.crew)

    def _describe_schedule(self) -> list[str]:
        if self.workers == 1:
            return []
        engine = self.config.engine
        if engine.scaling == "strong":
            return ["scaling    strong: the workers share the rows of an iteration; the learning rate stays"]
        rate = self.worker_config.hyper.learning_rate
        rule = {"keep": "stays", "sqrt": "grows with their root", "linear": "grows with them"}
        return [
            f"scaling    weak: {self.workers} times the rows of one worker an iteration; the learning rate "
            f"{rule[engine.learning_rate_scaling]}: {rate:g}"
        ]

    # -- beginning and saving -------------------------------------------------------------------------------------

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self._load_policy(self.crew, arrays)

    def start(self, state: dict[str, Any] | None = None) -> bool:
        if state is None:
            self.team.begin(None, None)
            return True
        saved = state["collectors"]
        fits = len(saved) == self.workers and all(saved)
        exact = self.team.begin(state["algorithm"], saved if fits else None)
        self.optimizer_steps = state["algorithm"]["optimizer_steps"]
        return fits and all(exact)

    def state(self) -> dict[str, Any]:
        members = sorted(self.crew.members, key=lambda member: member.slot)
        collectors: list[Any] = []
        if len(members) == self.workers:  # else its environments cannot come back exactly anyway
            results, _ = self.crew.call({m: m.handle.collector_state.remote() for m in members}, limit=ASK_SECONDS)
            collectors = [results[m] for m in members] if len(results) == len(members) else []
        return {"algorithm": self.team.state(), "collectors": collectors, "spaces": self.facts.spaces}

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        self.team.admit()
        self.team.someone()
        played: list[Episode] = first_result(
            self.crew, lambda member: member.handle.evaluate.remote(episodes, stochastic, number)
        )
        return played

    # -- an iteration ---------------------------------------------------------------------------------------------

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        collected: dict[Member, Report] = {}
        learned: dict[Member, Report] | None = None
        self.team.admit()
        while learned is None:
            self.team.someone()
            lacking = [member for member in self.crew.members if member not in collected]
            if lacking:
                collected |= self._collect(lacking)
                continue  # somebody may be gone
            learned = self.team.learn(functools.partial(_begin_learning, remaining))
        return self._settle({member: collected[member] for member in learned}, learned, clock)

    def _collect(self, members: list[Member]) -> dict[Member, Report]:
        began = time.perf_counter()
        share = self.config.engine.straggler_share
        enough = math.ceil(share * len(members)) if share is not None else math.inf
        took: list[float] = []

        def arrived(member: Member, report: Report) -> None:
            took.append(time.perf_counter() - began)
            if len(took) == enough:
                for other in members:
                    other.handle.halt.remote()

        results, losses = self.crew.call({m: m.handle.collect.remote() for m in members}, on_result=arrived)
        if losses and not self.crew.members and all(loss.trace for loss in losses):
            raise TrainingError(f"the environment fails in every worker:\n{losses[0].trace}")
        if took:
            self.straggling_seconds += max(took) - sum(took) / len(took)
        return results

    def _settle(self, collected: dict[Member, Report], learned: dict[Member, Report], clock: Clock) -> Iteration:
        moved = sum(report.bytes_moved for report in learned.values())
        self.bytes_moved += moved
        for member, report in collected.items():
            member.account(report)
            member.account(learned[member])
            member.env_steps += report.env_steps
            for part, seconds in (report.seconds | learned[member].seconds).items():
                clock.add(part, seconds / len(collected))
        first = next(iter(learned.values()))
        self.optimizer_steps = first.optimizer_steps
        return Iteration(
            env_steps=sum(report.env_steps for report in collected.values()),
            metrics=first.metrics | self._health() | {"bytes_moved": moved},
            episodes=[episode for report in collected.values() for episode in report.episodes],
            env_metrics=[row for report in collected.values() for row in report.env_metrics],
        )

    def accounts(self) -> dict[str, Any]:
        return super().accounts() | {"straggling_seconds": self.straggling_seconds}


def _begin_learning(remaining: float, member: Member, rank: int, backup: bool) -> Any:
    if backup:
        return member.handle.learn.options(num_returns=3).remote(remaining, True)
    return member.handle.learn_along.remote(remaining), None, None


def share(config: RunConfig, workers: int) -> RunConfig:
    """The config of each of `workers` replicas: what grows with them has grown. A minibatch is that of all together."""
    if workers == 1 or config.engine.scaling == "strong":
        return config
    factor = {"keep": 1.0, "sqrt": math.sqrt(workers), "linear": float(workers)}[config.engine.learning_rate_scaling]
    hyper = config.hyper
    changes: dict[str, Any] = {"learning_rate": factor * hyper.learning_rate}
    if config.algo == "ppo":
        changes["minibatch_size"] = workers * config.ppo.minibatch_size
    return config.model_copy(update={config.algo: hyper.model_copy(update=changes)})


def split(whole: int, parts: int) -> list[int]:
    """As even as can be."""
    return [whole // parts + (index < whole % parts) for index in range(parts)]
