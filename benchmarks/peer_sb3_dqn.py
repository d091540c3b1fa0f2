"""One DQN job on Stable-Baselines3, in the peers' environment. Prints one JSON line.

    benchmarks/.venv/bin/python benchmarks/peer_sb3_dqn.py zoo --seed 1 [--steps 50000]

One thread and in-process environments, its fastest setting for networks and environments this small. Only `learn()` is
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import stable_baselines3  # type: ignore[import-not-found, unused-ignore]
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.evaluation import evaluate_policy  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.vec_env import DummyVecEnv  # type: ignore[import-not-found, unused-ignore]

EVAL_EPISODES = 20
# RL Baselines3 Zoo, hyperparams/dqn.yml, CartPole-v1.
ZOO: dict[str, Any] = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
}
WIDE: dict[str, Any] = {
    "learning_rate": 1e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "target_update_interval": 1000,
    "train_freq": 4,
    "gradient_steps": 1,
}
JOBS = {"zoo": (1, 50_000, ZOO), "throughput": (8, 100_000, WIDE)}


def run(name: str, seed: int, steps: int | None, *, threads: int, evaluate: bool) -> dict[str, Any]:
    envs, budget, settings = JOBS[name]
    torch.set_num_threads(threads)
    vector = make_vec_env("CartPole-v1", n_envs=envs, seed=seed, vec_env_cls=DummyVecEnv)
    net = {"net_arch": [256, 256]}
    model = DQN("MlpPolicy", vector, seed=seed, device="cpu", verbose=0, policy_kwargs=net, **settings)
    started = time.perf_counter()
    model.learn(steps or budget)
    seconds = time.perf_counter() - started
    returns = [episode["r"] for episode in model.ep_info_buffer]
    evaluated = None
    if evaluate:
        apart = make_vec_env("CartPole-v1", n_envs=EVAL_EPISODES, seed=seed + 10_000)
        evaluated = float(evaluate_policy(model, apart, n_eval_episodes=EVAL_EPISODES, deterministic=True)[0])
    return {
        "system": f"stable-baselines3 {stable_baselines3.__version__}",
        "job": name,
        "seed": seed,
        "env_steps": model.num_timesteps,
        "optimizer_steps": model._n_updates,
        "train_seconds": seconds,
        "steps_per_second": model.num_timesteps / seconds,
        "return_last100": float(np.mean(returns)) if returns else None,
        "return_evaluated": evaluated,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One DQN job on Stable-Baselines3; prints one JSON line.")
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="budget in env steps, also the length of the schedule")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--evaluate", action="store_true", help=f"{EVAL_EPISODES} greedy episodes afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # Stable-Baselines3 leaves log folders in there
        report = run(options.job, options.seed, options.steps, threads=options.threads, evaluate=options.evaluate)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
