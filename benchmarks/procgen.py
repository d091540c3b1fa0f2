"""Procgen on the CPU: the speed of a run compared with the bound by its parts.

Stepping, acting and learning are measured alone, with the threads of a run, before and after each run. Since the parts
take turns, the bound is 1 / (epochs / learn + 1 / act + 1 / step); for the IMPALA-CNN it is learning alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from measuring import ours
from paceline.config import RunConfig
from paceline.config.resolve import parse_sets, resolve_tree
from paceline.engines.actor_learner import ActorLearner
from paceline.models.policy import Policy
from ppo import Bench, say
from tables import Row

SHARE = 0.8
MEMORY_BYTES = 2.5e9
_SETS = {
    "nature": [],
    "impala": ["model.cnn=impala", "model.hidden=[256]", "model.shared=true", "ppo.epochs=3"],
}
ITERATIONS = {"nature": 10, "impala": 3}
_CPU = "--algo ppo --env coinrun --device cpu"
PARTS = ("step", "act", "learn")


def rate(work: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows per second: the median over calls for `seconds`, after a warm-up call."""
    work()
    took: list[float] = []
    while sum(took) < seconds or len(took) < 3:
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return rows / statistics.median(took)


def parts(config: RunConfig, seconds: float) -> dict[str, float]:
    """Rates of each part alone: stepping all environments, acting for all of them, learning from one minibatch."""
    envs, minibatch = config.env.envs_per_worker, config.ppo.minibatch_size
    replica = ActorLearner(config, envs=envs)
    policy, rng = replica.policy, np.random.default_rng(0)
    frames = np.concatenate([env.reset() for env in replica.envs])
    actions = [rng.integers(0, 15, (env.num_envs, 1)) for env in replica.envs]

    def step() -> None:
        for env, action in zip(replica.envs, actions, strict=True):
            env.send(action)
        for env in replica.envs:
            env.receive()

    def act() -> None:
        policy.act(frames, policy.head.noise(rng, (envs,)))

    x = frames[rng.integers(0, len(frames), minibatch)]
    found = {"step": rate(step, envs, seconds), "act": rate(act, envs, seconds)}
    found["learn"] = rate(lambda: _learn(policy, x), minibatch, 2 * seconds)
    replica.close()
    return found


def _learn(policy: Policy, x: Any) -> None:
    """Forward, the simplest possible loss, backward."""
    for part in policy.passes(len(x)):
        policy.learn(x[part], lambda out: out * np.float32(1e-3), lambda value: value, add=part.start > 0)


def bound_of(name: str, epochs: int, rates: dict[str, float]) -> float:
    learning = epochs / rates["learn"]
    return 1 / learning if name == "impala" else 1 / (learning + 1 / rates["act"] + 1 / rates["step"])


def nature(bench: Bench) -> list[Row]:
    return _speed(bench, "nature")


def impala(bench: Bench) -> list[Row]:
    return _speed(bench, "impala")


def _speed(bench: Bench, name: str) -> list[Row]:
    sets, iterations, seconds = _SETS[name], 2 if bench.quick else ITERATIONS[name], 0.5 if bench.quick else 4.0
    config, _ = resolve_tree(parse_sets([*sets, "engine.device=cpu"], {"env": {"id": "coinrun"}}), preset="procgen-cpu")
    words = " ".join([f"{_CPU} --preset procgen-cpu --iterations {iterations}", *(f"--set {s}" for s in sets)])
    alone, records = [parts(config, seconds)], []
    for seed in range(1, bench.repeats + 1):
        records.append({**ours(words, seed, 900, bench.runs_directory), "job": name})
        alone.append(parts(config, seconds))
        rates = ", ".join(f"{part} {rate:,.0f}" for part, rate in alone[-1].items())
        say(f"{name}, seed {seed}: {records[-1]['steps_per_second']:,.0f} steps/s; {rates}")
    bench.records[name] = records
    bench.tables[f"{name}: rows a second of each part alone"] = alone
    around = [{part: (a[part] + b[part]) / 2 for part in PARTS} for a, b in pairwise(alone)]
    bounds = [bound_of(name, config.ppo.epochs, rates) for rates in around]
    speeds = [record["steps_per_second"] for record in records]
    return [Row(name, "env steps/s", speeds, bounds, factor=SHARE, better="higher", digits=0)]


def memory(bench: Bench) -> list[Row]:
    """The rollout of the Procgen paper, with its network."""
    record = {**ours(f"{_CPU} --preset procgen-paper --iterations 1", 1, 900, bench.runs_directory), "job": "memory"}
    bench.records["memory"] = [record]
    most = record["peak_memory_bytes"] / 1e9
    say(f"memory: {most:.2f} GB at most, {record['steps_per_second']:,.0f} steps/s")
    return [Row("memory", "64 x 256 steps, most, GB", [most], limit=MEMORY_BYTES / 1e9, digits=2)]
