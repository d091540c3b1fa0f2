"""A forecast of the speed with numbers of workers that nobody has measured: fit the parts of runs, then simulate.

    result = forecast(load_runs([Path("runs/scaling")]), workers=[64, 512], nodes=[1, 16])

All its numbers are simulated, except those called `measured`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config import UserError, algorithm_name
from paceline.results.estimates import Estimate
from paceline.results.forecast_models import ActorModel, Assumptions, Place, ReplicaModel, Simulated
from paceline.results.forecast_parts import Growth, Job, Measurement, growth, job_of, measurement
from paceline.results.forecast_simulation import Link
from paceline.results.run_files import FINISHED
from paceline.results.runs import RunData

Tree = dict[str, Any]
DRAWS = 40
"""Simulations with resampled measurements and drawn assumptions, for an interval."""
BEND = 0.8
"""Below this efficiency the curve counts as bent."""
SAME = 0.97
"""Speeds that differ by less count as the same."""
BUSY = 0.85
"""A learner or driver that is busy for this share of the time bounds its actors."""
MAX_WORKERS, MAX_NODES = 100_000, 10_000


@dataclass(frozen=True)
class Conditions:
    """What the forecast is for."""

    nodes: tuple[int, ...] = (1,)
    cores: int = 0
    """Of each node; 0: one for every worker."""
    link: Link = Link()  # noqa: RUF009  (frozen)


def forecast(
    runs: Sequence[RunData], workers: Sequence[int], conditions: Conditions, hold_out: Sequence[int] = ()
) -> Tree:
    """The content of `forecast.json`. Runs are fitted in series: same task, algorithm, scaling and sizes. `hold_out`:
    numbers of workers to predict from the others; default: the largest, if there are three."""
    found: list[Tree] = []
    problems: list[str] = []
    for name, members in _series(runs, problems).items():
        try:
            found.append(_forecast_of(name, members, workers, conditions, hold_out))
        except UserError as error:
            problems.append(str(error))
    if not found:
        raise UserError(problems[0] if problems else "no finished run to make a forecast from")
    return {"forecast": "simulated", "series": found, "problems": problems}


def _series(runs: Sequence[RunData], problems: list[str]) -> dict[str, list[RunData]]:
    """Finished runs of paceline's own engines that differ only in workers, nodes and seed."""
    by_settings: dict[str, list[RunData]] = {}
    for run in runs:
        if run.state != FINISHED or not run.usable:
            problems.append(f"{run.name}: not used: {run.state}")
        elif run.engine == "rllib":
            problems.append(f"{run.name}: not used: RLlib's time split has no parts to simulate")
        else:
            sizes = [run.section(run.algo), run.section("model"), run.value("env.envs_per_worker")]
            key = [run.task, run.algo, run.value("engine.scaling"), run.device, sizes]
            by_settings.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    named: dict[str, list[RunData]] = {}
    for members in by_settings.values():
        first = members[0]
        scaling = f", {first.value('engine.scaling')} scaling" if not first.summary.get("actor_time_split") else ""
        name = f"{algorithm_name(first.algo)} on {first.env}{scaling}"
        named[f"{name} ({first.name})" if name in named else name] = members
    return named


def _forecast_of(
    name: str, runs: Sequence[RunData], workers: Sequence[int], conditions: Conditions, hold_out: Sequence[int]
) -> Tree:
    job = job_of(runs[0])
    if not job.replicas:
        runs = [run for run in runs if run.engine == "ray"]  # a local run has no actors beside the learner
        if not runs:
            raise UserError(f"{name}: no run with actors; train with --engine ray")
    measured = sorted((measurement(run) for run in runs), key=lambda one: (one.workers, one.nodes, one.name))
    counts = sorted({one.workers for one in measured})
    held = _held_out(counts, hold_out)
    kept = [one for one in measured if one.workers not in hold_out]
    model = _model(job, kept, conditions.link, Assumptions(), np.random.default_rng(0))
    fewest = min(one.workers for one in kept)
    reference = model.simulate(Place(fewest, 1, conditions.cores), np.random.default_rng(1))
    base = reference.steps_per_second
    checks = [_check(job, measured, count, held, conditions.link) for count in held]
    error = max((abs(check["error"]) for check in checks), default=0.0)
    places = [Place(n, h, conditions.cores) for h in conditions.nodes for n in sorted({*workers}) if n >= h]
    points = _predict(job, kept, places, conditions.link)
    start = growth([one.members for one in kept], [one.start_seconds for one in kept], 0.0)
    return {
        "series": name,
        "algo": runs[0].algo,
        "env": runs[0].env,
        "kind": "replicas" if job.replicas else "actors",
        "base": {"workers": fewest, "steps_per_second": base},
        "faster_learning": job.faster_learning,
        "several_learners": job.several_learners,
        "measured": list(_fitted(model, measured, kept)),
        "checks": checks,
        "points": [
            _point(place, _widened(rate, error), shares, base, fewest, start if len(counts) > 1 else None)
            for place, (rate, shares) in zip(places, points, strict=True)
        ],
        "curves": [
            _curve(model, Place(max(*workers, fewest), nodes, conditions.cores), reference, fewest)
            for nodes in conditions.nodes
        ],
        "remarks": list(_remarks(job, kept, conditions)),
        "runs": [one.name for one in kept],
    }


def _held_out(counts: Sequence[int], asked: Sequence[int]) -> list[int]:
    """The numbers of workers that are predicted from the others."""
    unknown = [count for count in asked if count not in counts]
    if unknown:
        known = ", ".join(map(str, counts))
        raise UserError(f"no run has {unknown[0]} workers, so it cannot be held out; there are runs with {known}")
    if asked and len({*asked}) >= len(counts):
        raise UserError("all runs are held out; leave some numbers of workers to make the forecast from")
    return sorted({*asked}) if asked else [counts[-1]] if len(counts) > 2 else []


def _check(job: Job, measured: Sequence[Measurement], count: int, held: Sequence[int], link: Link) -> Tree:
    """One number of workers, predicted from those that are not held out."""
    rest = [one for one in measured if one.workers not in held]
    there = [one for one in measured if one.workers == count]
    place = Place(count, there[0].nodes, there[0].cores)
    rate, _ = _predict(job, rest, [place], link)[0]
    speed = float(np.mean([one.speed for one in there]))
    assert rate.low is not None and rate.high is not None
    return {
        "workers": count,
        "nodes": there[0].nodes,
        "fitted_on": sorted({one.workers for one in rest}),
        "simulated": dataclasses.asdict(rate),
        "measured": speed,
        "error": rate.value / speed - 1.0,
        "inside": rate.low <= speed <= rate.high,
    }


def _model(
    job: Job, measured: Sequence[Measurement], link: Link, assumed: Assumptions, rng: np.random.Generator
) -> ReplicaModel | ActorModel:
    kind = ReplicaModel if job.replicas else ActorModel
    return kind.fit(job, measured, link, assumed, rng)


def _predict(
    job: Job, measured: Sequence[Measurement], places: Sequence[Place], link: Link
) -> list[tuple[Estimate, dict[str, float]]]:
    """For each place the steps per second, with an interval, and the shares of its causes."""
    model = _model(job, measured, link, Assumptions(), np.random.default_rng(0))
    central = [model.simulate(place, np.random.default_rng(1)) for place in places]
    own = [Place(one.workers, one.nodes, one.cores) for one in measured]
    again = [model.simulate(place, np.random.default_rng(1)).steps_per_second for place in own]
    scatter = np.divide([one.speed for one in measured], again)
    rates = np.zeros((DRAWS, len(places)))
    for draw in range(DRAWS):
        rng = np.random.default_rng([2, draw])
        one = _model(job, _resampled(measured, rng), link, Assumptions.drawn(rng), rng)
        for number, place in enumerate(places):
            rates[draw, number] = one.simulate(place, rng).steps_per_second * rng.choice(scatter)
    low, high = np.quantile(rates, [0.025, 0.975], axis=0)
    return [
        (_estimate(each, float(low[number]), float(high[number]), len(measured)), each.shares)
        for number, each in enumerate(central)
    ]


def _estimate(found: Simulated, low: float, high: float, runs: int) -> Estimate:
    rate = found.steps_per_second
    return Estimate(rate, min(low, rate), max(high, rate), runs)


def _resampled(measured: Sequence[Measurement], rng: np.random.Generator) -> list[Measurement]:
    """Other runs of the same numbers of workers, and other iterations of each."""
    drawn = []
    for one in measured:
        alike = [other for other in measured if (other.workers, other.nodes) == (one.workers, one.nodes)]
        drawn.append(alike[int(rng.integers(len(alike)))].resampled(rng))
    return drawn


def _widened(rate: Estimate, error: float) -> Estimate:
    assert rate.low is not None and rate.high is not None
    return dataclasses.replace(rate, low=rate.low * max(0.0, 1.0 - error), high=rate.high * (1.0 + error))


def _point(
    place: Place, rate: Estimate, shares: dict[str, float], base: float, fewest: int, start: Growth | None
) -> Tree:
    gain = rate.scaled(1 / base)
    return {
        "workers": place.workers,
        "nodes": place.nodes,
        "steps_per_second": dataclasses.asdict(rate),
        "speed_up": dataclasses.asdict(gain),
        "efficiency": dataclasses.asdict(gain.scaled(fewest / place.workers)),
        "shares": shares,
        "bound": bound_of(shares),
        "start_seconds": None if start is None else start.at(place.members),
    }


def bound_of(shares: dict[str, float]) -> str:
    """The cause that takes the most time; of actors, a server that is always busy."""
    if "actors" not in shares:
        return max(shares, key=lambda cause: shares[cause])
    servers = {cause: share for cause, share in shares.items() if cause != "actors"}
    busiest = max(servers, key=lambda cause: servers[cause])
    return busiest if servers[busiest] >= BUSY else "actors"


def _curve(model: ReplicaModel | ActorModel, end: Place, reference: Simulated, fewest: int) -> Tree:
    """Simulated speed from few workers to those of `end`, and where it bends. `reference`: that of the fewest."""
    first, most = max(fewest, end.nodes), max(end.workers, end.nodes)
    doublings = max(1, math.ceil(math.log2(most / first)))
    counts = sorted({round(first * (most / first) ** (k / doublings)) for k in range(doublings + 1)})
    found = [model.simulate(dataclasses.replace(end, workers=n), np.random.default_rng(1)) for n in counts]
    rates = [one.steps_per_second for one in found]
    bend = None
    for n, one in zip(counts, found, strict=True):
        efficiency = one.steps_per_second / reference.steps_per_second * fewest / n
        if efficiency < BEND:
            cause = _growing(one.shares, reference.shares)
            share, before = one.shares[cause], reference.shares.get(cause, 0.0)
            bend = {"workers": n, "efficiency": efficiency, "cause": cause, "share": share, "share_before": before}
            break
    return {
        "nodes": end.nodes,
        "workers": counts,
        "steps_per_second": rates,
        "bend": bend,
        "fastest": counts[-1] if rates[-1] >= SAME * max(rates) else counts[int(np.argmax(rates))],
    }


def _growing(shares: dict[str, float], before: dict[str, float]) -> str:
    """The cause that has grown most."""
    causes = [cause for cause in shares if cause != "actors"]
    return max(causes, key=lambda cause: shares[cause] - before.get(cause, 0.0))


def _fitted(
    model: ReplicaModel | ActorModel, measured: Sequence[Measurement], kept: Sequence[Measurement]
) -> Iterator[Tree]:
    """What the simulation says of the measured numbers of workers."""
    for workers, nodes in dict.fromkeys((one.workers, one.nodes) for one in measured):
        alike = [one for one in measured if (one.workers, one.nodes) == (workers, nodes)]
        simulated = model.simulate(Place(workers, nodes, alike[0].cores), np.random.default_rng(1))
        yield {
            "workers": workers,
            "nodes": nodes,
            "runs": len(alike),
            "cores": alike[0].cores,
            "measured": float(np.mean([one.speed for one in alike])),
            "simulated": simulated.steps_per_second,
            "held_out": alike[0] not in kept,
        }


def _remarks(job: Job, measured: Sequence[Measurement], conditions: Conditions) -> Iterator[str]:
    """What was assumed, and what the runs do not tell."""
    counts, link = {one.workers for one in measured}, conditions.link
    latency, rate = f"{1000 * link.latency_seconds:g} ms", f"{8 * link.bytes_per_second / 1e9:g} Gbit/s"
    yield f"each node has {conditions.cores} cores" if conditions.cores else "every worker has a core of its own"
    if len(counts) > 1:
        yield "the start is taken to depend on the workers of a node, as on the measured machine"
    else:
        yield (
            f"all runs have {next(iter(counts))} worker(s), so how exchange and driver grow is unknown: the intervals "
            "reach from no growth to growth with every worker; runs with other numbers of workers narrow them"
        )
    if job.replicas and max(counts) == 1:
        yield "no run has two workers, so the exchange within a node is unknown and left out"
    if job.replicas and not job.weak and len(counts) == 1:
        yield "an optimizer step with fewer rows: 0 to 50 % of its time is taken as independent of the rows"
    if max(conditions.nodes) > 1 and all(one.nodes == 1 for one in measured):
        yield f"no run has two nodes; the link between them is taken as {latency} and {rate}"
    elif max(conditions.nodes) > 1:
        yield f"the latency between nodes is fitted, their bandwidth taken as {rate}"
    if not job.replicas:
        yield "runs do not record how an actor's rollout times vary: 10 % is taken, beside the spread between actors"
        if all(math.isnan(one.driver_cpu_seconds) for one in measured):
            yield "these runs do not record the driver's CPU time, so its limit is left out"
        else:
            yield "40 to 100 % of the driver's CPU time for a rollout is taken as work that holds up other rollouts"
