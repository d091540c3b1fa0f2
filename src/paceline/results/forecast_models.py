"""Models of training, fitted to measurements: replicas that collect and learn, or actors and a learner.

`fit` takes the measurements of a series; `simulate` tells what another number of workers would bring. `Assumptions`
stand in for what the measurements do not tell; drawing them at random shows how much depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.results.forecast_parts import Growth, Job, Measurement, growth
from paceline.results.forecast_simulation import Duration, Link, actors_and_learner, slowest

ACTOR_DEVIATION = 0.1
"""Relative deviation of an actor's rollout times, which runs do not record."""
MAX_ACTORS = 2000
"""More are simulated as so many with shorter rollouts, which arrive as often."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Assumptions:
    exponent: float = 0.5
    """Growth with the workers of a part that was measured with one number of workers: 0 constant, 1 linear."""
    step_share: float = 0.25
    """Share of an optimizer step that does not depend on its rows, if it was measured with one number of rows."""
    heavy: bool = False
    """Whether collection times have a long tail."""
    driver_share: float = 0.7
    """Share of the driver's CPU time for a rollout in which it can do nothing else; the rest is that of its threads."""

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Assumptions:
        exponent, step, tail, driver = rng.random(4)
        return cls(float(exponent), float(step) / 2, bool(tail < 0.5), 0.4 + 0.6 * float(driver))


@dataclass(frozen=True)
class Place:
    """Where to simulate."""

    workers: int
    nodes: int = 1
    cores: int = 0
    """Of each node; 0: one for every worker."""

    @property
    def members(self) -> int:
        """Workers on the fullest node."""
        return -(-self.workers // self.nodes)

    @property
    def crowding(self) -> float:
        return max(1.0, self.members / self.cores) if self.cores else 1.0


@dataclass(frozen=True)
class Simulated:
    steps_per_second: float
    shares: dict[str, float]
    """Of the time of an iteration, by cause; of actors: how busy each server is."""


@dataclass(frozen=True)
class ReplicaModel:
    job: Job
    link: Link
    valid: float
    """Env steps of a slot of the rollout; the rest are resets."""
    env_row: float
    act_call: Growth
    """Of one step of all environments of a worker, by their number."""
    computing: float
    """Share of the collection time in which a worker uses a core."""
    learn_step: Growth
    """Of one optimizer step, by the rows of one worker in it."""
    optimizer_steps: float
    exchange: Growth
    """Of one optimizer step on one node, by its workers."""
    exchange_bytes: float
    driver: Growth
    """Time of an iteration in no other part, by the number of workers."""
    deviation: float
    """Relative, of the collection time of one worker, for `deviation_rows` rows."""
    deviation_rows: float
    spread: float
    heavy: bool

    @classmethod
    def fit(
        cls, job: Job, runs: Sequence[Measurement], link: Link, assumed: Assumptions, rng: np.random.Generator
    ) -> ReplicaModel:
        rows = [run.rows / run.workers for run in runs]
        steps = [job.size(run.workers)[1] for run in runs]
        made = max(1e-9, float(np.mean([run.optimizer_steps for run in runs])))
        learn = [run.mean("learn") / run.crowding for run in runs]
        waits = [_waits(run, own) for run, own in zip(runs, learn, strict=True)]
        env = [run.mean("env") * wait for run, wait in zip(runs, waits, strict=True)]
        act = [run.mean("act") * wait for run, wait in zip(runs, waits, strict=True)]
        spinning = [run.mean("sync") if run.crowding == 1.0 else 0.0 for run in runs]
        collect = np.add(env, act)
        cpu = np.array([run.cpu_seconds for run in runs]) - learn - spinning
        cpu = np.where([run.cpu_seconds > 0 for run in runs], np.clip(cpu, 0.0, collect), collect)
        fewest = min(runs, key=lambda run: run.workers)
        collected = fewest.parts["env"] + fewest.parts["act"]
        model = cls(
            job=job,
            link=link,
            valid=float(np.mean([run.rows / _slots(job, run.workers) for run in runs])),
            env_row=float(np.mean(np.divide(env, rows))),
            act_call=growth([job.size(run.workers)[0] for run in runs], np.divide(act, steps).tolist(), 0.0),
            computing=float(np.mean(cpu / np.maximum(collect, 1e-12))),
            learn_step=_learn_step(np.multiply(rows, job.passes / made).tolist(), [s / made for s in learn], assumed),
            optimizer_steps=made,
            exchange=Growth(),
            exchange_bytes=FLOAT_BYTES * runs[-1].parameters,
            driver=Growth(),
            deviation=float(collected.std() / max(collected.mean(), 1e-12)) * math.sqrt(fewest.workers),
            deviation_rows=fewest.rows / fewest.workers,
            spread=max(runs, key=lambda run: run.workers).spread,
            heavy=assumed.heavy,
        )
        model = model._with_exchange([run for run in runs if run.workers > 1], assumed)
        rest = []
        for run in runs:
            waiting = model._slowest(Place(run.workers, run.nodes, run.cores), rng)
            mean = model._collect(Place(run.workers, run.nodes, run.cores))
            rest.append(max(0.0, run.mean("idle") - (waiting - mean)))
        whole = [run.iteration_seconds for run in runs]
        return replace(model, driver=growth([run.workers for run in runs], rest, assumed.exponent, whole))

    def _with_exchange(self, runs: Sequence[Measurement], assumed: Assumptions) -> ReplicaModel:
        """First within a node; what several nodes take beyond that is the latency between them."""
        each = [run.mean("sync") / self.optimizer_steps for run in runs]
        within = [run for run in runs if run.nodes == 1]
        local = growth(
            [run.members for run in within],
            [run.mean("sync") / self.optimizer_steps for run in within],
            assumed.exponent,
            [run.iteration_seconds / self.optimizer_steps for run in within],
        )
        transfer = replace(self.link, latency_seconds=0.0)
        latencies = [
            max(0.0, seconds - local.at(run.members) - transfer.all_reduce(self.exchange_bytes, run.nodes))
            / (2 * (run.nodes - 1))
            for run, seconds in zip(runs, each, strict=True)
            if run.nodes > 1
        ]
        link = replace(self.link, latency_seconds=float(np.mean(latencies))) if latencies else self.link
        return replace(self, exchange=local, link=link)

    def _rows(self, workers: int) -> float:
        envs, steps = self.job.size(workers)
        return max(1.0, self.valid * envs * steps)

    def _uncrowded(self, workers: int) -> tuple[float, float]:
        """(env, act) seconds of an iteration."""
        envs, steps = self.job.size(workers)
        return self.env_row * self._rows(workers), self.act_call.at(envs) * steps

    def _collect(self, place: Place) -> float:
        """Workers that share a core take turns, but one may compute while others wait for their simulators."""
        return sum(self._uncrowded(place.workers)) * max(1.0, self.computing * place.crowding)

    def _slowest(self, place: Place, rng: np.random.Generator) -> float:
        mean = self._collect(place)
        relative = self.deviation * math.sqrt(self.deviation_rows / self._rows(place.workers))
        return slowest(Duration(mean, relative * mean, self.heavy), self.spread, place.workers, rng)

    def simulate(self, place: Place, rng: np.random.Generator) -> Simulated:
        env, act = self._uncrowded(place.workers)
        collect = self._collect(place)
        rows_in_step = self._rows(place.workers) * self.job.passes / self.optimizer_steps
        learn = self.optimizer_steps * self.learn_step.at(rows_in_step)
        local = self.exchange.at(place.members) if place.members > 1 else 0.0
        exchange = self.optimizer_steps * (local + self.link.all_reduce(self.exchange_bytes, place.nodes))
        seconds = {
            "env": env,
            "act": act,
            "learn": learn,
            "exchange": exchange,
            "stragglers": self._slowest(place, rng) - collect,
            "cores": collect - env - act + learn * (place.crowding - 1.0),
            "driver": self.driver.at(place.workers),
        }
        total = sum(seconds.values())
        rows = self.valid * _slots(self.job, place.workers)
        return Simulated(rows / total, {cause: spent / total for cause, spent in seconds.items()})


def _slots(job: Job, workers: int) -> int:
    """Rows of an iteration, resets included."""
    envs, steps = job.size(workers)
    if job.weak:
        return workers * envs * steps
    return max(job.envs, workers) * steps


def _waits(run: Measurement, learn: float) -> float:
    """Share of the collection time that is left without waiting for a core that other workers use."""
    collect = run.mean("env") + run.mean("act")
    waited = run.waited_seconds - (run.mean("learn") - learn) - run.mean("sync")
    if run.crowding == 1.0 or collect <= 0.0:
        return 1.0
    return 1.0 - min(0.9, max(0.0, waited) / collect)


def _learn_step(rows: list[float], seconds: list[float], assumed: Assumptions) -> Growth:
    if max(rows) - min(rows) > 0.05 * max(rows):
        return growth(rows, seconds, 1.0)
    whole = float(np.mean(seconds))
    return Growth(assumed.step_share * whole, (1 - assumed.step_share) * whole / float(np.mean(rows)))


@dataclass(frozen=True)
class ActorModel:
    job: Job
    link: Link
    rows: float
    """Env steps in a rollout."""
    rollout: float
    """Seconds of a rollout, and of what an actor does before the next one."""
    cpu: float
    """CPU seconds of a rollout."""
    update: Duration
    """The learner's time for `job.rollouts_per_update` rollouts."""
    driver: float
    """Seconds of the driver for a rollout; 0 if unknown."""
    rollout_bytes: float
    spread: float
    heavy: bool

    @classmethod
    def fit(
        cls, job: Job, runs: Sequence[Measurement], link: Link, assumed: Assumptions, rng: np.random.Generator
    ) -> ActorModel:
        gradients = job.sharing == "gradients"
        slots = float(job.envs * job.rollout_steps)
        rows = [slots if gradients else run.rows / job.rollouts_per_update for run in runs]
        rollouts = np.array([run.rows / each for run, each in zip(runs, rows, strict=True)])  # in an iteration
        each = np.array([run.workers for run in runs]) / rollouts  # iterations of a rollout of one actor
        busy = np.array([sum(run.actor.get(part, 0.0) for part in ("env", "act", "learn", "sync")) for run in runs])
        waited = np.array([run.waited_seconds if run.crowding > 1.0 else 0.0 for run in runs])
        idle = np.array([run.actor.get("idle", 0.0) for run in runs]) * each
        seconds = np.array([run.iteration_seconds for run in runs])
        cpu_share = np.array([run.driver_cpu_seconds for run in runs]) / seconds  # some of it without any rollout
        driver = growth((rollouts / seconds).tolist(), cpu_share.tolist(), 1.0, [1.0] * len(runs))
        updates = np.array([run.mean("learn") + run.mean("sync") for run in runs])
        both = [run.parts["learn"] + run.parts["sync"] for run in runs]
        deviation = float(np.mean([one.std() / max(one.mean(), 1e-12) for one in both]))
        update = float(np.mean(updates / rollouts)) * job.rollouts_per_update
        return cls(
            job=job,
            link=link,
            rows=float(np.mean(rows)),
            rollout=float(np.mean(np.maximum(busy - waited, busy / 10) * each) + idle.min()),
            cpu=float(np.mean(np.array([run.cpu_seconds for run in runs]) * each)),
            update=Duration(update, deviation * update),
            driver=assumed.driver_share * driver.slope,
            rollout_bytes=float(np.mean(np.array([run.rollout_bytes for run in runs]) / rollouts)),
            spread=max(runs, key=lambda run: run.workers).spread,
            heavy=assumed.heavy,
        )

    def simulate(self, place: Place, rng: np.random.Generator) -> Simulated:
        seconds = max(self.rollout, self.cpu * place.crowding)
        away = 1.0 - 1.0 / place.nodes  # share of the rollouts that come over the link of the learner's host
        transfer = away * self.rollout_bytes / self.link.bytes_per_second
        actors = min(place.workers, MAX_ACTORS)
        shorter = seconds * actors / place.workers
        found = actors_and_learner(
            actors,
            Duration(shorter, shorter * math.hypot(ACTOR_DEVIATION, self.spread), self.heavy),
            self.update,
            rng,
            rollouts_per_update=self.job.rollouts_per_update,
            driver_seconds=max(self.driver, transfer),
            ahead=self.job.sharing != "gradients",
        )
        passing = "driver" if self.driver >= transfer else "link"
        shares = {
            "actors": found.rollouts_per_second * self.rollout / place.workers,
            "learner": found.learner_busy,
            passing: found.driver_busy,
            "cores": 1.0 - self.rollout / seconds,
        }
        return Simulated(found.rollouts_per_second * self.rows, shares)
