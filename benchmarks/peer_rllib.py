"""The Grid'5000 job on Ray RLlib (new API stack), in the peers' environment. Prints one JSON line.

    benchmarks/.venv/bin/python benchmarks/peer_rllib.py --seed 1 [--iterations 10]

PPO on CartPole-v1, 4000 steps per iteration, two 256-256 towers; everything not in `settings` is RLlib's default. Only
the `train()` calls are timed. Ray gets its own home under /tmp, which is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARAMETERS = 134_915  # two towers 4-256-256, a head of 2 and one of 1
STEPS_PER_ITERATION = 4000


def settings(seed: int, env_runners: int, returns_file: Path) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig  # type: ignore[import-not-found, unused-ignore]
    from ray.rllib.core.rl_module.default_model_config import (  # type: ignore[import-not-found, unused-ignore]
        DefaultModelConfig,
    )

    def note_return(*, episode: Any, **_: Any) -> None:
        # RLlib's own mean covers only the last iteration; the other systems report the last 100 episodes.
        with returns_file.open("a") as file:
            file.write(f"{episode.get_return()}\n")

    return (
        PPOConfig()  # type: ignore[no-untyped-call, unused-ignore]
        .environment("CartPole-v1")
        .env_runners(num_env_runners=env_runners)
        .learners(num_learners=0)  # the default, in this process: no copies between learner and driver
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[256, 256], fcnet_activation="tanh", vf_share_layers=False)
        )
        .training(
            train_batch_size_per_learner=STEPS_PER_ITERATION,
            minibatch_size=128,
            num_epochs=30,
            lr=3e-4,
            gamma=0.99,
            lambda_=1.0,
            clip_param=0.3,
        )
        .callbacks(on_episode_end=note_return)
        .debugging(seed=seed, log_level="ERROR")
    )


def run(seed: int, iterations: int, env_runners: int, threads: int, home: Path) -> dict[str, Any]:
    import ray  # type: ignore[import-not-found, unused-ignore]
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if threads:
        torch.set_num_threads(threads)
    optimizer_steps = 0

    def count(*_: Any) -> None:
        nonlocal optimizer_steps
        optimizer_steps += 1

    ray.init(
        num_cpus=max(1 + env_runners, len(os.sched_getaffinity(0))),
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=256 * 1024 * 1024,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(home),
    )
    algorithm = None
    try:
        returns_file = home / "returns.txt"
        algorithm = settings(seed, env_runners, returns_file).build_algo()
        module = algorithm.learner_group._learner.module["default_policy"]
        parameters = sum(p.numel() for p in module.parameters())
        if parameters != PARAMETERS:
            raise SystemExit(f"RLlib built {parameters} parameters instead of {PARAMETERS}: not the same work")
        hook = register_optimizer_step_post_hook(count)
        seconds = 0.0
        result: dict[str, Any] = {}
        for iteration in range(iterations):
            started = time.perf_counter()
            result = algorithm.train()
            seconds += time.perf_counter() - started
            print(f"iteration {iteration + 1}/{iterations}: {seconds:.1f} s", file=sys.stderr, flush=True)
        hook.remove()
        runners = result["env_runners"]
        returns = [float(line) for line in returns_file.read_text().split()]
        last = returns[-100:]
        return {
            "system": f"rllib {ray.__version__}",
            "job": "grid5000",
            "seed": seed,
            "env_steps": int(runners["num_env_steps_sampled_lifetime"]),
            "optimizer_steps": optimizer_steps,
            "train_seconds": seconds,
            "steps_per_second": int(runners["num_env_steps_sampled_lifetime"]) / seconds,
            "return_last100": sum(last) / len(last) if last else None,
            "return_reported": float(runners["episode_return_mean"]),
            "episodes": len(returns),
            "solved_seconds": None,
            "solved_steps": None,
            "parameters": parameters,
            "threads": torch.get_num_threads(),
        }
    finally:
        if algorithm is not None:
            algorithm.stop()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="The Grid'5000 job on RLlib; prints one JSON line.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--env-runners", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of the learner; 0: torch's default")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below stops Ray and removes its files
    # At most 39 characters, for the socket paths below it. As HOME it also holds ~/ray_results and ~/.ray.
    home = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))
    os.environ.update(
        HOME=str(home),
        CUDA_VISIBLE_DEVICES="",
        PYTHONWARNINGS="ignore",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        os.environ.pop(name, None)
    try:
        # RLlib prints to stdout, where only the JSON line belongs.
        with contextlib.redirect_stdout(sys.stderr):
            report = run(options.seed, options.iterations, options.env_runners, options.threads, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
