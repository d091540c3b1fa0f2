"""Actors that never wait for each other, and a learner: IMPALA and DQN (rollouts to the learner) and A3C (gradients
to it).

One call a rollout. The data goes from the actor to the learner without passing through the driver, which handles
references only; it hands them out while the learner is at work, so that neither side waits for the other longer
than the queue makes it.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import ray

from paceline.algo import ALGORITHMS
from paceline.config import RunConfig
from paceline.engine.base import Iteration, Lane
from paceline.engine.clock import Clock
from paceline.engine.crew import Member, first_result
from paceline.engine.messages import LEARNER, Order, Report
from paceline.engine.pool import Arrival, Pool
from paceline.engine.ray_engine import RayEngine, mean_lane
from paceline.engine.ray_sync import split
from paceline.rollout.batch import Episode


def in_one_rollout(config: RunConfig) -> RunConfig:
    """DQN's rounds of an iteration as one, or as many of them as its replay has room for: actors send few and large
    messages."""
    if config.algo != "dqn":
        return config
    dqn = config.dqn
    room = (dqn.replay_size // config.env.envs_per_worker - 2) // dqn.rollout_steps
    rounds = max(1, min(dqn.rounds, room))
    changes = {"rollout_steps": rounds * dqn.rollout_steps, "gradient_steps": rounds * dqn.gradient_steps, "rounds": 1}
    return config.model_copy(update={"dqn": dqn.model_copy(update=changes)})


class RayAsyncEngine(RayEngine):
    def learners(self) -> int:
        return self.config.engine.learners

    def _begin_crews(self) -> None:
        config, learners = in_one_rollout(self.config), self.learners()
        self._began = time.perf_counter()

        def actor(slot: int, restarts: int) -> Order:
            return self._order(config, slot, restarts, config.env.envs_per_worker)

        def learner(slot: int, restarts: int) -> Order:
            facts = self.actors.members[0].facts if self.actors.members else self.facts
            assert facts is not None
            return self._order(config, slot, restarts, 0, spaces=facts.spaces)

        self.actors = self._add_crew({slot: learners + slot for slot in range(self.workers)}, actor)
        self.actors.start(config.engine.start_timeout_seconds)
        crew = self._add_crew({LEARNER + index: index for index in range(learners)}, learner)
        crew.start(config.engine.start_timeout_seconds)
        self.team = self._make_team(crew)
        self._gradients = ALGORITHMS[config.algo].schedule == "gradients"
        if self._gradients or config.algo == "dqn":
            self._count = 1
        else:
            slots = config.env.envs_per_worker * config.hyper.rollout_steps
            self._count = learners * math.ceil(config.impala.batch_size / slots / learners)
        self.pool = Pool(
            self.actors,
            "contribution" if self._gradients else "rollout",
            most=self.workers + 2 * max(self._count, self.workers),
            ahead=not self._gradients,  # a gradient of old weights does harm, a rollout is corrected for
        )

    def _describe_schedule(self) -> list[str]:
        what = "gradients" if self._gradients else f"rollouts, {self._count} an update"
        return [f"schedule   asynchronous: actors send {what}; {self.learners()} learner(s) beside the driver"]

    # -- beginning and saving -------------------------------------------------------------------------------------

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self._load_policy(self.team.crew, arrays)

    def start(self, state: dict[str, Any] | None = None) -> bool:
        self.team.begin(state["algorithm"] if state is not None else None, None)
        if state is not None:
            self.optimizer_steps = state["algorithm"]["optimizer_steps"]
        self._publish()
        self._began = time.perf_counter()
        return state is None

    def _publish(self) -> None:
        """The weights as the first learner has them."""
        weights = first_result(self.team.crew, lambda member: member.handle.weights.remote())
        self.team.weights = ray.put(weights)
        self.pool.publish(int(weights["version"][0]), self.team.weights)

    def state(self) -> dict[str, Any]:
        state = self.team.state()
        if self.config.algo == "dqn":  # with its replay, which is not copied at every update
            state = first_result(self.team.crew, lambda member: member.handle.algorithm_state.remote())
        return {"algorithm": state, "collectors": [], "spaces": self.facts.spaces}

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        self.actors.admit()
        if not self.actors.members:
            self.actors.await_members(self.config.engine.start_timeout_seconds)
        played: list[Episode] = first_result(
            self.actors,
            lambda member: member.handle.evaluate.remote(episodes, stochastic, number, self.team.weights),
            others=self.pool,
        )
        return played

    # -- an iteration ---------------------------------------------------------------------------------------------

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        self.team.admit()
        reports: Sequence[Report] = ()
        while not any(report.metrics for report in reports):
            self.team.someone()
            timeout = self.config.engine.start_timeout_seconds + self.config.env.step_timeout_seconds
            taken = self.pool.take(self._count, timeout)
            if self._gradients:  # and whatever else is there by now
                taken += self.pool.take(min(len(self.pool.arrived), self.workers - 1), timeout)
            reports, used = self._learn(taken, remaining)
        return self._settle(used, reports, clock)

    def _learn(self, taken: list[Arrival], remaining: float) -> tuple[Sequence[Report], list[Arrival]]:
        """What the learners report, and the arrivals that they really had."""
        learned: dict[Member, Report] | None = None
        shares: list[list[Arrival]] = []
        while learned is None:
            self.team.someone()
            bounds = [0, *itertools.accumulate(split(len(taken), len(self.team.crew.members)))]
            shares = [taken[a:b] for a, b in itertools.pairwise(bounds)]
            learned = self.team.learn(functools.partial(self._begin_learning, shares, remaining), others=self.pool)
        reports = list(learned.values())
        used = [
            arrival
            for report, own in zip(reports, shares, strict=True)
            for index, arrival in enumerate(own)
            if report.metrics and index not in report.missing
        ]
        if reports[0].metrics:
            self.pool.publish(reports[0].version, self.team.weights)
        else:
            self._publish()
        return reports, used

    def _begin_learning(
        self, shares: list[list[Arrival]], remaining: float, member: Member, rank: int, backup: bool
    ) -> Any:
        payloads = [arrival.payload for arrival in shares[rank]]
        versions = [arrival.report.version for arrival in shares[rank]]
        if not self._gradients:
            return member.handle.learn_from.options(num_returns=3).remote(payloads, versions, remaining, backup)
        slots = [arrival.member.slot for arrival in shares[rank]]
        return member.handle.apply.options(num_returns=3).remote(payloads, versions, slots, remaining, backup)

    def _settle(self, used: list[Arrival], reports: Sequence[Report], clock: Clock) -> Iteration:
        for member, report in zip(self.team.crew.members, reports, strict=False):
            member.account(report)
        for report in reports:
            self.team.crew.messages += report.notes
            for part, seconds in report.seconds.items():
                clock.add(part, seconds / len(reports))
        for arrival in used:
            arrival.member.env_steps += arrival.report.env_steps
        lags = [lag for report in reports for lag in report.lags]
        moved = sum(arrival.report.bytes_moved + 4 * self.parameters for arrival in used)
        moved += sum(report.bytes_moved for report in reports)
        self.bytes_moved += moved
        self.optimizer_steps = reports[0].optimizer_steps
        metrics = reports[0].metrics | self._health()
        metrics |= {
            "policy_lag_mean": sum(lags) / len(lags),
            "policy_lag_max": max(lags),
            "queued_rollouts": len(self.pool.arrived),
            "queued_bytes": self.pool.waiting_bytes,
            "bytes_moved": moved,
        }
        return Iteration(
            env_steps=sum(arrival.report.env_steps for arrival in used),
            metrics=metrics,
            episodes=[episode for arrival in used for episode in arrival.report.episodes],
            env_metrics=[row for arrival in used for row in arrival.report.env_metrics],
        )

    def accounts(self) -> dict[str, Any]:
        return super().accounts() | {"actor_time_split": self.actor_lane()}

    def actor_lane(self) -> Lane:
        lane = mean_lane(self.actors.members)
        rest = time.perf_counter() - self._began - sum(lane.values())
        lane["idle"] = lane.get("idle", 0.0) + max(0.0, rest)
        return lane
