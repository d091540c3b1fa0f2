"""One training job on Stable-Baselines3, in the peers' environment. Prints one JSON line.

    benchmarks/.venv/bin/python benchmarks/peer_sb3.py zoo --seed 1 [--steps 100000] [--stop-return 475]

One thread and in-process environments, its fastest setting for networks and environments this small. Only `learn()` is
timed, without the evaluations that confirm a return.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import stable_baselines3  # type: ignore[import-not-found, unused-ignore]
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.evaluation import evaluate_policy  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.vec_env import DummyVecEnv  # type: ignore[import-not-found, unused-ignore]
from torch.optim.optimizer import register_optimizer_step_post_hook

from cartpole_scalar import CartPole

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import without_velocity

RETURN_WINDOW = 20
CONFIRM_EPISODES = 20


def linear(start: float) -> Callable[[float], float]:
    """From `start` to 0 over the budget. Stable-Baselines3 passes the remaining share."""
    return lambda left: left * start


@dataclass(frozen=True)
class Job:
    env: str | type[Any]
    envs: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    recurrent: bool = False


# RL Baselines3 Zoo, hyperparams/ppo.yml, CartPole-v1. The nets of `MlpPolicy` are 64-64 tanh, one tower each.
ZOO: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "learning_rate": linear(1e-3),
    "clip_range": linear(0.2),
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "ent_coef": 0.0,
}
# The same, hyperparams/ppo_lstm.yml, CartPoleNoVel: one LSTM for the policy and one for the value.
RECURRENT: dict[str, Any] = {"policy_kwargs": {"lstm_hidden_size": 64, "net_arch": {"pi": [64], "vf": [64]}}}
JOBS = {
    "zoo": Job("CartPole-v1", envs=8, steps=100_000, settings=ZOO),
    "throughput": Job(
        "CartPole-v1", envs=64, steps=245_760, settings={"n_steps": 128, "batch_size": 2048, "n_epochs": 4}
    ),
    "recurrent": Job(without_velocity.CartPole, envs=8, steps=50_000, settings=ZOO | RECURRENT, recurrent=True),
    "recurrent-shared": Job(
        without_velocity.CartPole,
        envs=8,
        steps=50_000,
        settings=ZOO
        | {"policy_kwargs": RECURRENT["policy_kwargs"] | {"shared_lstm": True, "enable_critic_lstm": False}},
        recurrent=True,
    ),
    "userenv": Job(CartPole, envs=8, steps=50_000, settings=ZOO),
}


class SolvedRule(BaseCallback):  # type: ignore[misc, unused-ignore]
    """Ends training when the last training episodes reach the return and an evaluation confirms it.

    It checks after each update, like our own stop rule; but ours waits for a while after a failed confirmation.
    """

    def __init__(self, stop_return: float, eval_env: Any) -> None:
        super().__init__()
        self.stop_return = stop_return
        self.eval_env = eval_env
        self.started = 0.0
        self.eval_seconds = 0.0
        self.solved_seconds: float | None = None
        self.solved_steps: int | None = None

    def _check(self) -> None:
        recent = [episode["r"] for episode in self.model.ep_info_buffer][-RETURN_WINDOW:]
        if self.solved_steps is not None or len(recent) < RETURN_WINDOW or np.mean(recent) < self.stop_return:
            return
        now = time.perf_counter()
        mean, _ = evaluate_policy(self.model, self.eval_env, n_eval_episodes=CONFIRM_EPISODES, deterministic=True)
        if mean >= self.stop_return:
            self.solved_seconds = now - self.started - self.eval_seconds
            self.solved_steps = self.num_timesteps
        self.eval_seconds += time.perf_counter() - now

    def _on_training_start(self) -> None:
        self.started = time.perf_counter()

    def _on_rollout_start(self) -> None:
        self._check()

    def _on_training_end(self) -> None:
        self._check()

    def _on_step(self) -> bool:
        return self.solved_steps is None


def run(name: str, seed: int, steps: int | None, stop_return: float | None) -> dict[str, Any]:
    job = JOBS[name]
    torch.set_num_threads(1)
    optimizer_steps = 0

    def count(*_: Any) -> None:
        nonlocal optimizer_steps
        optimizer_steps += 1

    hook = register_optimizer_step_post_hook(count)
    envs = make_vec_env(job.env, n_envs=job.envs, seed=seed, vec_env_cls=DummyVecEnv)
    kind, policy = PPO, "MlpPolicy"
    if job.recurrent:
        from sb3_contrib import RecurrentPPO  # type: ignore[import-not-found, unused-ignore]

        kind, policy = RecurrentPPO, "MlpLstmPolicy"
    model = kind(policy, envs, seed=seed, device="cpu", verbose=0, **job.settings)
    rule = None
    if stop_return is not None:
        rule = SolvedRule(stop_return, make_vec_env(job.env, n_envs=CONFIRM_EPISODES, seed=seed + 10_000))
    started = time.perf_counter()
    model.learn(steps or job.steps, callback=rule)
    seconds = time.perf_counter() - started - (rule.eval_seconds if rule else 0.0)
    hook.remove()
    returns = [episode["r"] for episode in model.ep_info_buffer]
    return {
        "system": f"stable-baselines3 {stable_baselines3.__version__}",
        "job": name,
        "seed": seed,
        "env_steps": model.num_timesteps,
        "optimizer_steps": optimizer_steps,
        "train_seconds": seconds,
        "steps_per_second": model.num_timesteps / seconds,
        "return_last100": float(np.mean(returns)) if returns else None,
        "solved_seconds": rule.solved_seconds if rule else None,
        "solved_steps": rule.solved_steps if rule else None,
        "parameters": sum(p.numel() for p in model.policy.parameters()),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One PPO job on Stable-Baselines3; prints one JSON line.")
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="budget in env steps, also the length of the schedules")
    parser.add_argument("--stop-return", type=float, help="stop at this return, confirmed by 20 evaluation episodes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # Stable-Baselines3 leaves log folders in there
        report = run(options.job, options.seed, options.steps, options.stop_return)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
