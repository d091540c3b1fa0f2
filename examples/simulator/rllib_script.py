"""The same environment, trained by a script against RLlib itself (2.60, its new API stack).

    python examples/simulator/rllib_script.py

`paceline train --config configs/convection.yaml --engine rllib` builds this algorithm from the settings of the other
engines, and adds checkpoints, resume, evaluation and the files that `paceline plot` reads.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

HERE = Path(__file__).resolve().parent


def make_env(_: Any) -> gymnasium.Env[Any, Any]:
    """In the process of an env runner, which starts the simulator, too."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    from env import ConvectionLoop

    return gymnasium.wrappers.TimeLimit(ConvectionLoop(), 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-runners", type=int, default=2)
    parser.add_argument("--total-steps", type=int, default=80_000)
    options = parser.parse_args()
    ray.init(num_cpus=options.env_runners + 1, include_dashboard=False, log_to_driver=False)
    register_env("convection", make_env)
    config = (
        PPOConfig()
        .environment("convection")
        .env_runners(
            num_env_runners=options.env_runners,
            num_envs_per_env_runner=max(1, 8 // options.env_runners),
            sample_timeout_s=300,  # the limit on a step is the environment's; this one is on a whole rollout
        )
        .fault_tolerance(restart_failed_env_runners=True)
        .training(
            train_batch_size_per_learner=2048,
            minibatch_size=256,
            num_epochs=8,
            lr=1e-3,
            gamma=0.97,
            lambda_=0.95,
            clip_param=0.2,
            entropy_coeff=0.005,
            grad_clip=0.5,
            use_kl_loss=False,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    try:
        began, steps = time.perf_counter(), 0
        while steps < options.total_steps:
            found = algorithm.train()["env_runners"]
            steps = int(found["num_env_steps_sampled_lifetime"])
            mean = found.get("episode_return_mean", float("nan"))
            print(f"{steps:>8,} steps  {time.perf_counter() - began:6.1f} s  return {mean:7.1f}", flush=True)
    finally:
        algorithm.stop()
        ray.shutdown()


if __name__ == "__main__":
    main()
