"""Figures that three guides to reinforcement learning on clusters report, and which of ours stand beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from measuring import ours
from ppo import Bench, say
from tables import Row


@dataclass(frozen=True)
class Published:
    title: str
    about: str
    measure: str
    key: str
    """Of a record: what is compared."""
    better: Literal["lower", "higher"]
    figures: dict[str, tuple[float, str]]
    """By where: the figure, and the return as it was given."""
    here: dict[str, tuple[str, str]]
    """By what stands beside it: the part and the job that hold the records."""


# RLlib of 2021 by its defaults: 32 rows every 4 steps of each environment, a replay of 50,000 that learns from 1000 on,
# a 256-256 network with both outputs, target copied every 500 steps.
_EAGLE = (
    "--preset none --algo dqn --env CartPole-v0 --set dqn.rollout_steps=4 --set dqn.gradient_steps=1 "
    "--set dqn.batch_size=32 --set dqn.learning_rate=5e-4 --set dqn.replay_size=50000 --set dqn.learning_starts=1000 "
    "--set dqn.prioritized=true --set dqn.dueling=true --set model.hidden=[256,256] --set model.activation=tanh"
)
EAGLE = {
    "eagle, 1 environment": f"{_EAGLE} --threads 1 --envs-per-worker 1 --set dqn.target_update_every=125 "
    "--total-steps 2000",
    # 36 environments, so that an optimizer step comes after 144 steps, as after 140 there.
    "eagle, 36 environments": f"{_EAGLE} --workers 2 --envs-per-worker 18 --set dqn.rounds=8 "
    "--set dqn.target_update_every=4 --total-steps 4480",
}
TABLES = [
    Published(
        "Grid'5000: PPO on CartPole-v1, ten iterations",
        "RLlib with its defaults, on nodes of 64 cores; returns are the mean of the last iteration's episodes there, "
        "of the last 100 here. The job is `configs/grid5000.yaml`: 40,000 steps and 30 passes over each 4000 of them.",
        "training, s",
        "train_seconds",
        "lower",
        {
            "1 worker": (150.0, "290"),
            "64 workers": (120.0, "250"),
            "128 workers, 2 nodes": (100.0, "270"),
        },
        {
            "1 worker": ("ppo/grid5000", "grid5000"),
            "2 workers": ("scaling/grid5000", "grid5000 x 2"),
        },
    ),
    Published(
        "Eagle: DQN on CartPole-v0, first iterations",
        "RLlib with its defaults, in 2021, on a node of 36 cores: 2000 steps in 2.56 s with one core, 4480 steps in "
        "8.04 s with 35 workers, that is more workers and fewer steps a second.",
        "env steps/s",
        "steps_per_second",
        "higher",
        {
            "1 core": (2000 / 2.55838, "19.7"),
            "35 workers": (4480 / 8.04318, "17.4"),
        },
        {name: ("published/eagle", name) for name in EAGLE},
    ),
    Published(
        "rl-cluster-benchmark: PPO on Procgen's coinrun, CPUs only",
        "The Nature-CNN, 128 steps, 4 epochs, minibatches of 1024; 32 environments here. Steps a second are from the "
        "training times that it calls typical, the shorter of each two: 3 to 4 hours for 10 million steps on 16 cores, "
        "1 to 2 on 64, 6 to 8 for 100 million on 128.",
        "env steps/s",
        "steps_per_second",
        "higher",
        {
            "16 cores": (10e6 / (3 * 3600), "–"),
            "64 cores": (10e6 / 3600, "–"),
            "4 nodes of 32 cores": (100e6 / (6 * 3600), "–"),
        },
        {"32 environments": ("procgen/nature", "nature")},
    ),
]


def eagle(bench: Bench) -> list[Row]:
    for name, words in EAGLE.items():
        bench.records[name] = []
        for seed in range(1, bench.repeats + 1):
            record = {**ours(words, seed, 300, bench.runs_directory), "job": name}
            say(f"{name}, seed {seed}: {record['env_steps']} steps in {record['train_seconds']:.2f} s")
            bench.records[name].append(record)
    return []
