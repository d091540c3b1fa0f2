"""Procgen on one GPU: the speed of each part alone and of whole runs.

The parts are environments stepping with random actions, the network acting, and the network learning. Then follow short
runs with different numbers of environments, with and without overlap of collecting and learning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import paceline
from paceline.algorithms.ppo import PPO
from paceline.config.resolve import resolve_tree
from paceline.engines.actor_learner import ActorLearner
from paceline.rollout.gpu_collector import GpuCollector
from ppo import Bench, say
from tables import Row

SHAPES = ((64, 256), (256, 64), (512, 64))  # environments x steps
ITERATIONS = 24

Tree = dict[str, Any]


def config_of(envs: int, steps: int, compiled: bool, overlap: bool, cnn: str = "impala") -> Tree:
    model = {"cnn": cnn, "hidden": [256 if cnn == "impala" else 512], "activation": "relu", "shared": cnn == "impala"}
    return {
        "env": {"id": "coinrun", "envs_per_worker": envs, "normalize_reward": True},
        "model": model,
        "ppo": {"rollout_steps": steps},
        "engine": {"device": "cuda", "compile": compiled, "overlap": overlap},
    }


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def stepping(replica: ActorLearner) -> float:
    """Steps per second of the environments alone, both halves at once."""
    rng = np.random.default_rng(0)
    actions = [rng.integers(0, 15, (env.num_envs, 1)) for env in replica.envs]
    for env in replica.envs:
        env.reset()

    def step() -> None:
        for env, action in zip(replica.envs, actions, strict=True):
            env.send(action)
        for env in replica.envs:
            env.receive()

    return sum(env.num_envs for env in replica.envs) / seconds_of(step, 100)


def _alone(envs: int, steps: int, compiled: bool) -> Tree:
    config, _ = resolve_tree(config_of(envs, steps, compiled, False), preset="procgen-paper")
    replica = ActorLearner(config, envs=envs)
    collector, algorithm = replica.collector, replica.algorithm
    assert isinstance(collector, GpuCollector) and isinstance(algorithm, PPO)
    found: Tree = {"envs": envs, "steps": steps, "compiled": compiled, "stepping": stepping(replica)}
    acting = collector._acting
    found["acting"] = envs / len(replica.envs) / seconds_of(acting.run, 100)
    collector.start()
    replica.collect()
    began = time.perf_counter()
    batch, _ = replica.collect()
    found["collecting"] = batch.env_steps / (time.perf_counter() - began)
    began = time.perf_counter()
    algorithm.update(batch, 1.0)
    found["first_update_seconds"] = time.perf_counter() - began
    algorithm.update(batch, 1.0)
    began = time.perf_counter()
    algorithm.update(batch, 1.0)
    found["update"] = batch.env_steps / (time.perf_counter() - began)
    assert algorithm._gpu is not None
    found["learning"] = len(algorithm._gpu._x) / seconds_of(algorithm._gpu._step, 30)
    found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    replica.close()
    return found


def _run(bench: Bench, envs: int, steps: int, overlap: bool) -> Tree:
    tree, iterations = config_of(envs, steps, True, overlap), 6 if bench.quick else ITERATIONS
    tree |= {"stop": {"iterations": iterations}, "out": str(bench.runs_directory), "name": f"x{time.time_ns()}"}
    made = paceline.train(tree, preset="procgen-paper")
    rows = [json.loads(line) for line in (made.path / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[3], rows[-1]
    rate = (last["env_steps"] - first["env_steps"]) / (last["train_seconds"] - first["train_seconds"])
    split = {p: last[f"time_{p}_seconds"] - first[f"time_{p}_seconds"] for p in ("env", "act", "learn")}
    whole = last["train_seconds"] - first["train_seconds"]
    shares = {f"{p}_share": round(s / whole, 3) for p, s in split.items()}
    found = {"envs": envs, "steps": steps, "overlap": overlap, "steps_per_second": rate}
    return found | shares | {"start_seconds": last["wall_seconds"] - last["train_seconds"]}


def alone(bench: Bench) -> list[Row]:
    found = []
    for compiled in (False, True):
        for envs, steps in SHAPES[:2]:
            found.append(_alone(envs, steps, compiled))
            say(f"alone: {found[-1]}")
    bench.tables["a second, of each part alone"] = found
    return []


def runs(bench: Bench) -> list[Row]:
    found = []
    for envs, steps in SHAPES:
        for overlap in (False, True):
            found.append(_run(bench, envs, steps, overlap))
            say(f"run: {found[-1]}")
    bench.tables["short runs, compiled"] = found
    return []
