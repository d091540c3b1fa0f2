"""SAC and TD3 on one GPU, compared with the CPU of the same machine.

First both make the same optimizer steps on the same rows: the weights must agree. Then whole runs in turns.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import paceline
from paceline.algorithms.continuous import Transitions
from paceline.config.resolve import validate
from paceline.spaces import ActionCodec, ObservationCodec
from ppo import Bench, say
from tables import Row

OBSERVATIONS, ACTIONS, BATCH, STEPS = 17, 6, 256, 40
MOST_DIFFERENCE = 1.0  # percent of the distance that the weights have moved
ENV = "HalfCheetah-v5" if importlib.util.find_spec("mujoco") else "Pendulum-v1"
SECONDS = 20.0
STARTS = 1000
# algorithm, environments, optimizer steps per step, hidden units, rows per optimizer step
RUNS = [
    ("sac", 1, 1.0, 256, 256),
    ("td3", 1, 1.0, 256, 256),
    ("sac", 8, 0.125, 256, 256),
    ("sac", 8, 1.0, 256, 256),
    ("sac", 8, 0.125, 1024, 1024),
]


def weights_after(algo: str, device: str) -> tuple[Any, Any]:
    """Parameters and targets before and after optimizer steps on the same rows."""
    config = validate({"algo": algo, "env": {"id": ENV}, "model": {"hidden": [256, 256], "activation": "relu"}})
    observation = ObservationCodec(spaces.Box(-1, 1, (OBSERVATIONS,), np.float32))
    action = ActionCodec(spaces.Box(-1, 1, (ACTIONS,), np.float32))
    policy: Any = config.algorithm.make_policy(config, observation, action, seed=1)
    if device != "cpu":
        policy.learn_on(device)
    algorithm: Any = config.algorithm(policy, config.hyper, rng=np.random.default_rng(0))
    rng = np.random.default_rng(2)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    n = STEPS * BATCH
    discount = np.where(rng.random(n) < 0.1, 0, 0.99).astype(np.float32)
    rows = Transitions(
        normal(n, OBSERVATIONS),
        np.tanh(normal(n, ACTIONS)),
        normal(n),
        normal(n, OBSERVATIONS),
        discount,
        normal(n, ACTIONS),
        normal(n, ACTIONS),
    )
    before = torch.cat([policy.parameters, policy.target_parameters]).clone()
    if algorithm._gpu is not None:
        for part in (slice(0, n // 2), slice(n // 2, n)):  # the graphs are made in the first part
            algorithm._gpu.run(rows.take(part), algorithm.annealed["learning_rate"])
        policy.fetch()
    else:
        for begin in range(0, n, BATCH):
            algorithm._step(rows.take(slice(begin, begin + BATCH)))
    return before.numpy(), torch.cat([policy.parameters, policy.target_parameters]).numpy()


def agreement(bench: Bench) -> list[Row]:
    rows = []
    for algo in ("sac", "td3"):
        before, here = weights_after(algo, "cpu")
        _, there = weights_after(algo, "cuda")
        difference = 100 * float(np.linalg.norm(there - here) / np.linalg.norm(here - before))
        say(f"{algo}: after {STEPS} optimizer steps the weights differ by {difference:.4f} % of what they have moved")
        rows.append(Row(algo, f"weights after {STEPS} steps, %", [difference], limit=MOST_DIFFERENCE, digits=4))
    return rows


def speed_of(bench: Bench, device: str, job: tuple[str, int, float, int, int], seed: int) -> float:
    """Env steps per second after the warm-up."""
    algo, envs, ratio, hidden, batch = job
    hyper = {"updates_per_step": ratio, "batch_size": batch, "learning_starts": STARTS, "rounds": 64}
    run = paceline.train(
        {
            "algo": algo,
            "seed": seed,
            "env": {"id": ENV, "envs_per_worker": envs},
            "model": {"hidden": [hidden, hidden], "activation": "relu"},
            algo: hyper | {"buffer_size": 200_000},
            "engine": {"device": device},
            "stop": {"max_time": 4.0 if bench.quick else SECONDS},
            "out": str(bench.runs_directory),
            "name": f"x{time.time_ns()}",
        },
        preset="none",
    )
    if (run.summary["device"] != "cpu") != (device == "cuda"):
        raise RuntimeError(f"asked for {device}, but the run was on {run.summary['device']}")
    rows = [row for row in run.read_metrics() if row["env_steps"] > STARTS and row.get("critic_loss") is not None]
    first, last = rows[1], rows[-1]  # the first has made the graphs
    return float((last["env_steps"] - first["env_steps"]) / (last["train_seconds"] - first["train_seconds"]))


def runs(bench: Bench) -> list[Row]:
    found = []
    for job in RUNS if not bench.quick else RUNS[:2]:
        algo, envs, ratio, hidden, batch = job
        speeds: dict[str, list[float]] = {"cpu": [], "cuda": []}
        for seed in range(1, 1 + min(2, bench.repeats)):
            for device, own in speeds.items():
                own.append(speed_of(bench, device, job, seed))
        name = f"{algo} {ENV}, {envs} envs, {ratio:g} updates a step, {hidden}-{hidden}, batch {batch}"
        say(f"{name}: {speeds['cpu']} on the CPU, {speeds['cuda']} on the GPU")
        measure = "env steps/s (peer: the CPU)"
        found.append(Row(name, measure, speeds["cuda"], speeds["cpu"], better="higher", factor=1.0, digits=0))
    return found
