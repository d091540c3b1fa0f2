"""One SAC or TD3 job on Stable-Baselines3, in the peers' environment. Prints one JSON line.

    benchmarks/.venv/bin/python benchmarks/peer_sb3_sac.py sac --threads 2 --seed 1 [--steps 1256]

HalfCheetah-v5 in this process, networks of 256-256, batches of 256. Only `learn()` is timed; its first `STARTS` steps
have random actions and no updates.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import stable_baselines3  # type: ignore[import-not-found, unused-ignore]
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.vec_env import DummyVecEnv  # type: ignore[import-not-found, unused-ignore]

STARTS = 256
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "buffer_size": 100_000,
    "learning_starts": STARTS,
    "batch_size": 256,
    "tau": 0.005,
    "gamma": 0.99,
    "train_freq": 1,
    "gradient_steps": 1,  # for each step of the vector of environments
    "policy_kwargs": {"net_arch": [256, 256]},
}
JOBS: dict[str, tuple[Any, int]] = {"sac": (SAC, 1), "td3": (TD3, 1), "sac-wide": (SAC, 8)}


def run(name: str, seed: int, steps: int, threads: int) -> dict[str, Any]:
    kind, envs = JOBS[name]
    torch.set_num_threads(threads)
    vector = make_vec_env("HalfCheetah-v5", n_envs=envs, seed=seed, vec_env_cls=DummyVecEnv)
    model = kind("MlpPolicy", vector, seed=seed, device="cpu", verbose=0, **SETTINGS)
    started = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - started
    return {
        "system": f"stable-baselines3 {stable_baselines3.__version__}, {threads} thread{'s' * (threads > 1)}",
        "job": name,
        "seed": seed,
        "env_steps": model.num_timesteps,
        "optimizer_steps": model._n_updates,
        "train_seconds": seconds,
        "steps_per_second": model.num_timesteps / seconds,
        "return_last100": None,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One SAC or TD3 job on Stable-Baselines3; prints one JSON line.")
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1256, help="env steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # Stable-Baselines3 leaves log folders in there
        report = run(options.job, options.seed, options.steps, options.threads)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
