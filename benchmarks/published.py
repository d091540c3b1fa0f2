"""Published figures of three guides to reinforcement learning on clusters, and paceline's for the same jobs."""

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
    """The key of a record that is compared."""
    better: Literal["lower", "higher"]
    figures: dict[str, tuple[float, str]]
    """By place: the figure, and the published return."""
    here: dict[str, tuple[str, str]]
    """By label: the part and the job of our records."""


# The defaults of RLlib in 2021: 32 rows every 4 steps of each environment, a replay of 50,000 rows, learning from 1000
# on, a dueling 256-256 network, target copied every 500 steps.
_EAGLE = (
    "--preset none --algo dqn --env CartPole-v0 --set dqn.rollout_steps=4 --set dqn.gradient_steps=1 "
    "--set dqn.batch_size=32 --set dqn.learning_rate=5e-4 --set dqn.replay_size=50000 --set dqn.learning_starts=1000 "
    "--set dqn.prioritized=true --set dqn.dueling=true --set model.hidden=[256,256] --set model.activation=tanh"
)
EAGLE = {
    "eagle, 1 environment": f"{_EAGLE} --threads 1 --envs-per-worker 1 --set dqn.target_update_every=125 "
    "--total-steps 2000",
    # 36 environments, so that there is one optimizer step per 144 steps; theirs was 140.
    "eagle, 36 environments": f"{_EAGLE} --workers 2 --envs-per-worker 18 --set dqn.rounds=8 "
    "--set dqn.target_update_every=4 --total-steps 4480",
}
TABLES = [
    Published(
        "Grid'5000: PPO on CartPole-v1, ten iterations",
        "Published: RLlib with its defaults, on nodes of 64 cores. Its returns are means over the last iteration's "
        "episodes, paceline's over the last 100. The job is `configs/grid5000.yaml`: 40,000 steps, with 30 epochs over "
        "every 4000 of them.",
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
        "Published: RLlib with its defaults, in 2021, on a node of 36 cores. 2000 steps took 2.56 s with one core, and "
        "4480 steps took 8.04 s with 35 workers: more workers made fewer steps per second.",
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
        "The Nature-CNN, 128 steps, 4 epochs, minibatches of 1024; paceline with 32 environments. The published steps "
        "per second follow from the typical training times that the guide gives, always the shorter one: 3 to 4 hours "
        "for 10 million steps on 16 cores, 1 to 2 on 64, and 6 to 8 for 100 million on 128.",
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
