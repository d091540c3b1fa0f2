"""The parts that a forecast is made of, as finished runs have measured them.

A `Measurement` is one run in seconds per iteration. What is measured of a part at several numbers of workers becomes a
`Growth`, which tells it for any other number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.config import RunConfig, UserError
from paceline.config.resolve import validate
from paceline.results.run_files import Floats
from paceline.results.runs import RunData

PARTS = ("env", "act", "learn", "sync", "idle")
MIN_ITERATIONS = 4
"""A run with fewer says too little about an iteration; the first is left out, since everything is new to it."""


@dataclass(frozen=True)
class Job:
    """What all runs of a series have in common."""

    sharing: str
    """`replicas`, `rollouts`, `gradients` or `replay`, see `algorithms/base.py`."""
    weak: bool
    envs: int
    """Of all workers with strong scaling, else of each."""
    rollout_steps: int
    passes: float
    """Times that learning goes over a row."""
    rollouts_per_update: int
    faster_learning: str
    several_learners: bool

    @property
    def replicas(self) -> bool:
        return self.sharing == "replicas"

    def size(self, workers: int) -> tuple[int, int]:
        """(environments, steps of each in an iteration or rollout) of the worker that has the most."""
        if not self.replicas or self.weak:
            return self.envs, self.rollout_steps
        if workers <= self.envs:
            return -(-self.envs // workers), self.rollout_steps
        return 1, -(-self.envs * self.rollout_steps // workers)


def job_of(run: RunData) -> Job:
    config: RunConfig = validate(run.config)
    algorithm, hyper, envs = config.algorithm, config.hyper, max(1, config.env.envs_per_worker)
    replicas = algorithm.sharing == "replicas"
    if not replicas:
        hyper = hyper.for_actors(envs)
    learners = config.engine.learners
    rollouts = 1 if replicas else learners * hyper.rollouts_per_update(envs * hyper.rollout_steps * learners)
    return Job(
        sharing=algorithm.sharing,
        weak=config.engine.scaling == "weak",
        envs=envs,
        rollout_steps=hyper.rollout_steps,
        passes=1.0 if algorithm.sharing == "replay" else float(hyper.passes() + hyper.replayed()),
        rollouts_per_update=max(1, rollouts),
        faster_learning=algorithm.faster_learning,
        several_learners=algorithm.several_learners,
    )


@dataclass(frozen=True)
class Measurement:
    name: str
    workers: int
    nodes: int
    cores: int
    """Of each node; 0 if unknown."""
    speed: float
    """Steps per second, without evaluations and checkpoints."""
    rows: float
    """Env steps of all workers in an iteration."""
    optimizer_steps: float
    """In an iteration."""
    parts: dict[str, Floats]
    """Seconds of each iteration, of the mean worker, or of the learner."""
    actor: dict[str, float]
    """Seconds of an actor in its rollouts of one iteration; empty for replicas."""
    cpu_seconds: float
    """CPU time of one worker in an iteration."""
    waited_seconds: float
    """Time of one worker in an iteration in which it could have run but had no core."""
    driver_cpu_seconds: float
    """CPU time of the driver in an iteration; NaN if the run does not tell."""
    spread: float
    """Relative deviation between the workers' mean collection times."""
    parameters: float
    rollout_bytes: float
    """Bytes moved in an iteration."""
    start_seconds: float

    @property
    def members(self) -> float:
        """Workers on one node."""
        return self.workers / self.nodes

    @property
    def iteration_seconds(self) -> float:
        return self.rows / self.speed

    @property
    def crowding(self) -> float:
        """Workers on a core; 1 if each has its own."""
        return max(1.0, self.members / self.cores) if self.cores else 1.0

    def mean(self, part: str) -> float:
        return float(self.parts[part].mean())

    def resampled(self, rng: np.random.Generator) -> Measurement:
        """The same run with other iterations: bootstrap."""
        count = len(self.parts["env"])
        drawn = rng.integers(count, size=count)
        return replace(self, parts={name: seconds[drawn] for name, seconds in self.parts.items()})


def measurement(run: RunData) -> Measurement:
    """UserError if the run has too little to measure."""
    iterations = np.diff(run.column("iteration"))
    if run.rows < MIN_ITERATIONS or not (iterations > 0).all():
        raise UserError(f"{run.name} has {run.rows} iterations; a forecast needs at least {MIN_ITERATIONS} of a run")
    if not run.steady_steps_per_second > 0:
        raise UserError(f"{run.name} has no steps or no time after its first iteration")
    parts = {part: np.diff(np.nan_to_num(run.column(f"time_{part}_seconds"))) / iterations for part in PARTS}
    counted, summary, total = float(iterations.sum()), run.summary, run.last("iteration")
    seconds = run.train_seconds / total
    hosts = [host for host in summary.get("hosts") or [] if host.get("workers")]
    cores = sum(host.get("cores") or 0 for host in hosts) / len(hosts) if hosts else run.provenance.get("cores")
    driver = summary.get("driver_cpu_seconds")
    stepping, waited = (summary.get(key) or 0.0 for key in ("stepping_cpu_seconds", "waited_seconds"))
    actor = {part: spent / total for part, spent in (summary.get("actor_time_split") or {}).items()}
    return Measurement(
        name=run.name,
        workers=run.workers,
        nodes=max(1, run.nodes),
        cores=int(cores or 0),
        speed=run.steady_steps_per_second,
        rows=float(run.column("env_steps")[-1] - run.column("env_steps")[0]) / counted,
        optimizer_steps=float(run.column("optimizer_steps")[-1] - run.column("optimizer_steps")[0]) / counted,
        parts=parts,
        actor=actor,
        cpu_seconds=min(stepping / total / run.workers, seconds),
        waited_seconds=min(waited / total / run.workers, seconds),
        driver_cpu_seconds=math.nan if driver is None else driver / total,
        spread=_spread(run),
        parameters=float(summary.get("parameters") or 0),
        rollout_bytes=float(summary.get("bytes_moved") or 0) / total,
        start_seconds=run.time_split.get("start", math.nan),
    )


def _spread(run: RunData) -> float:
    """Relative deviation between the mean collection times of workers, without what chance explains."""
    splits = (run.summary.get("worker_time_split") or {}).values()
    collected = [split.get("env", 0.0) + split.get("act", 0.0) for split in splits if isinstance(split, dict)]
    means = np.array([seconds for seconds in collected if seconds > 0])
    if len(means) < 2:
        return 0.0
    each = np.diff(np.nan_to_num(run.column("time_env_seconds") + run.column("time_act_seconds")))
    chance = 0.0
    if run.summary.get("actor_time_split") is None and each.mean() > 0:
        chance = float((each.std() / each.mean()) ** 2 * len(means) / max(1, len(each)))
    return math.sqrt(max(0.0, float(means.var(ddof=1) / means.mean() ** 2) - chance))


@dataclass(frozen=True)
class Growth:
    """A time as a function of a size."""

    base: float = 0.0
    slope: float = 0.0
    exponent: float = 1.0

    def at(self, size: float) -> float:
        return self.base + self.slope * float(size**self.exponent)


def growth(
    sizes: Sequence[float], seconds: Sequence[float], exponent: float, whole: Sequence[float] | None = None
) -> Growth:
    """A line through the measured times by least squares, neither coefficient below zero. Errors count relative to
    `whole`, the time that a part belongs to; default: to the times themselves. `exponent` is that of the growth if all
    sizes are equal, which then tell nothing about it."""
    x, y = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    weights = 1 / np.maximum(y if whole is None else np.asarray(whole, np.float64), 1e-12)
    known = np.isfinite(x * y * weights)
    x, y, weights = x[known], y[known], weights[known]
    if not len(x):
        return Growth()
    if len(set(x.tolist())) == 1:
        return Growth(0.0, float(y.mean() / x[0] ** exponent), exponent)
    columns, wanted = np.stack([weights, x * weights], axis=1), y * weights
    base, slope = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    if base < 0:
        return Growth(0.0, _alone(columns[:, 1], wanted))
    if slope < 0:
        return Growth(_alone(columns[:, 0], wanted))
    return Growth(float(base), float(slope))


def _alone(column: Floats, wanted: Floats) -> float:
    """The coefficient of the only column."""
    return max(0.0, float((column * wanted).sum() / (column**2).sum()))
