"""Simulated training with any number of workers. Pure functions of the parts that runs have measured.

Two kinds of training: replicas, which all collect and then learn together, so that an iteration takes as long as its
slowest worker; and actors, whose rollouts pass the driver and wait in a queue for the learner.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from paceline.results.run_files import Floats

MAX_DRAWS = 400_000
"""Collection times drawn for one simulation of replicas; with many workers it has fewer iterations."""


@dataclass(frozen=True)
class Duration:
    """A random time of this mean and standard deviation. With equal ones, `gamma` is an exponential time."""

    mean: float
    deviation: float = 0.0
    heavy: bool = False
    """Log-normal, whose longest times are longer, not gamma."""

    def draw(self, rng: np.random.Generator, *shape: int) -> Floats:
        if self.mean <= 0.0 or self.deviation <= 0.0:
            return np.full(shape, max(self.mean, 0.0))
        squared = (self.deviation / self.mean) ** 2
        if self.heavy:
            width = math.log1p(squared)
            return rng.lognormal(math.log(self.mean) - width / 2, math.sqrt(width), shape)
        return rng.gamma(1 / squared, self.mean * squared, shape)


@dataclass(frozen=True)
class Link:
    """Between hosts."""

    latency_seconds: float = 1e-4
    bytes_per_second: float = 1.25e9

    def all_reduce(self, size_bytes: float, hosts: int) -> float:
        """Seconds of a ring: twice round the hosts, each time with 1 / hosts of the bytes in every message."""
        if hosts < 2:
            return 0.0
        return 2 * (hosts - 1) * (self.latency_seconds + size_bytes / hosts / self.bytes_per_second)


def slowest(collect: Duration, spread: float, workers: int, rng: np.random.Generator, iterations: int = 200) -> float:
    """Mean time until the slowest of `workers` has collected. `spread`: relative deviation of the mean times of
    workers, some of which are slower than others in every iteration."""
    iterations = max(8, min(iterations, MAX_DRAWS // workers))
    factors = Duration(1.0, spread).draw(rng, workers)
    return float((collect.draw(rng, iterations, workers) * factors).max(axis=1).mean())


@dataclass(frozen=True)
class Queue:
    """What was simulated of actors and a learner."""

    rollouts_per_second: float
    learner_busy: float
    """Share of the time."""
    driver_busy: float
    waiting_seconds: float
    """Mean time of a rollout in the queue."""


def actors_and_learner(
    actors: int,
    rollout: Duration,
    update: Duration,
    rng: np.random.Generator,
    *,
    rollouts_per_update: int = 1,
    driver_seconds: float = 0.0,
    ahead: bool = True,
    max_queue: int | None = None,
    updates: int | None = None,
) -> Queue:
    """Discrete events: an actor finishes a rollout, the driver takes it in and asks for another one (`ahead`: it has
    asked before, so that the actor goes on at once), the learner takes the oldest `rollouts_per_update` when it is
    free. Actors rest while `max_queue` rollouts wait. Counted are `updates`, once every actor has sent a rollout."""
    updates = updates or max(40, actors // rollouts_per_update)
    warm_up = -(-actors // rollouts_per_update)
    most = max_queue if max_queue is not None else actors + 2 * max(rollouts_per_update, actors)
    drawn = iter(rollout.draw(rng, (warm_up + updates + 4) * rollouts_per_update + 4 * actors + most).tolist())
    services = update.draw(rng, warm_up + updates + 1).tolist()
    phases = rng.random(actors).tolist()  # they do not start in step
    finish = [(next(drawn) * phase, actor) for actor, phase in enumerate(phases)]
    heapq.heapify(finish)
    handled = [0.0] * actors
    arrivals: deque[float] = deque()
    resting: deque[int] = deque()
    driver_free = learner_free = start = began = waited = busy = driver_busy = 0.0
    done = 0
    while done <= warm_up + updates:
        # The next event: the learner takes rollouts, if there are enough, or an actor finishes one.
        if len(arrivals) >= rollouts_per_update:
            start = max(learner_free, arrivals[rollouts_per_update - 1])
            if not finish or start <= finish[0][0]:
                taken = [arrivals.popleft() for _ in range(rollouts_per_update)]
                learner_free = start + services[done]
                if done == warm_up:
                    began, driver_busy = start, 0.0
                elif done > warm_up:
                    waited += sum(start - arrived for arrived in taken) / rollouts_per_update
                    busy += services[done - 1]
                done += 1
                while resting and len(arrivals) + len(finish) < most:
                    actor = resting.popleft()
                    heapq.heappush(finish, (start + next(drawn), actor))
                continue
        now, actor = heapq.heappop(finish)
        before, driver_free = handled[actor], max(driver_free, now) + driver_seconds
        handled[actor] = driver_free
        driver_busy += driver_seconds
        arrivals.append(driver_free)
        if len(arrivals) + len(finish) >= most:
            resting.append(actor)
        else:
            heapq.heappush(finish, ((max(now, before) if ahead else driver_free) + next(drawn), actor))
    elapsed = start - began
    rate = updates * rollouts_per_update / elapsed if elapsed > 0 else math.inf
    return Queue(rate, min(1.0, busy / elapsed), min(1.0, driver_busy / elapsed), waited / updates)
