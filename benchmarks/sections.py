"""The sections of docs/benchmarks.md and their parts, which `bench.py` measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Result = dict[str, Any]
"""The content of a part's file in results/: the measurements, their command, date, machine and versions."""


@dataclass(frozen=True)
class Section:
    """Part NAME of section KEY is the function NAME of `module`; its result is `results/KEY/NAME.json`."""

    title: str
    module: str
    minutes: dict[str, float]
    """By part: how long it takes on two cores, or on one GPU with 16 cores."""
    about: str
    gpu: bool = False
    floor_threads: int = 1
    """Threads whose arithmetic is the floor."""


SECTIONS = {
    "ppo": Section(
        "PPO against the peers",
        "ppo",
        {
            "grid5000": 6,
            "zoo": 6,
            "solve": 1.5,
            "throughput": 1,
            "userenv": 1,
            "recurrent": 11,
            "startup": 0.5,
            "memory": 1,
        },
        "Stable-Baselines3 or RLlib and paceline do the same work in turns, one process at a time. Results of the "
        "Grid'5000 job from before 2026-11-16 trained the two towers separately, on a core each, which this version "
        "does not.",
    ),
    "scaling": Section(
        "More workers",
        "scaling",
        {
            "two-workers": 3,
            "grid5000": 6,
            "sleeping": 9,
            "one-worker": 1.5,
            "uneven": 4,
            "start": 0.5,
            "sixty-four": 3,
        },
        "A run with many workers is compared with the same run with one worker, one worker on Ray with the same run "
        "without Ray, IMPALA with uneven steps with PPO, and the Grid'5000 job with RLlib with two env runners.",
    ),
    "studies": Section(
        "Scaling studies",
        "studies",
        {"grid5000": 12, "waiting": 4},
        "Two runs of `paceline bench scaling`: the Grid'5000 job by paceline and by RLlib, and an environment that "
        "waits 2 ms per step, with strong and with weak scaling.",
    ),
    "dqn": Section(
        "DQN",
        "dqn",
        {"zoo": 4, "throughput": 4, "replay": 6},
        "Plain DQN, compared with Stable-Baselines3. The replay on disk is compared with the same replay in memory.",
    ),
    "sac": Section(
        "SAC and TD3",
        "sac",
        {"sac": 2, "td3": 1.5, "wide": 2.5},
        "HalfCheetah-v5, networks of 256-256, batches of 256, compared with Stable-Baselines3 with one thread and with "
        "two, of which the faster counts in each round. `sac` and `td3` have one environment and an update at every "
        "step, `wide` has 8 environments and an update for every 8 steps.",
        floor_threads=2,
    ),
    "agents": Section(
        "Several agents",
        "agents",
        {"rows": 1},
        "PPO with one policy for 64 agents of one environment, compared with 64 environments of one agent that do the "
        "same work: rows collected and learned from per second.",
    ),
    "rllib": Section(
        "RLlib under paceline's loop",
        "rllib",
        {"overhead": 5},
        "The Grid'5000 job with `--engine rllib` and by RLlib alone, one iteration of each in turns, in one process. "
        "Times are per optimizer step, because the number of RLlib's minibatches depends on where episodes are cut.",
    ),
    "procgen": Section(
        "Images on the CPU",
        "procgen",
        {"nature": 4, "impala": 6, "memory": 2},
        "PPO on Procgen's coinrun, compared with the bound that its parts set, each measured alone before and after "
        "each run: stepping, acting and learning in turn for `nature`, learning for `impala`.",
    ),
    "published": Section(
        "Compared with published figures",
        "published",
        {"eagle": 1},
        "Figures from three guides to reinforcement learning on clusters, and the same jobs measured here. A ratio "
        "says how many times better the figure measured here is. Machines and years differ, so the ratios show what "
        "to expect after switching; the sections below compare programs on one machine.",
    ),
    "scores": Section(
        "Scores",
        "scores",
        {"dqn-control": 8},
        "Returns of suites of games. Each run is an ordinary run that is trained and evaluated.",
    ),
    "gpu": Section(
        "One GPU",
        "gpu",
        {"alone": 3, "runs": 5},
        "PPO with the IMPALA-CNN on coinrun: each part alone, then short runs with different numbers of environments, "
        "with and without overlap of collecting and learning.",
        gpu=True,
    ),
    "sac-gpu": Section(
        "SAC and TD3 on one GPU",
        "sac_gpu",
        {"agreement": 0.5, "runs": 6},
        "The optimizer steps on a GPU, compared with those on the same machine's CPU: the weights that both reach from "
        "the same rows, and the steps per second of whole runs, in turns.",
        gpu=True,
    ),
    "scores-gpu": Section(
        "Scores on one GPU",
        "scores",
        {"procgen-gpu": 30, "procgen-gpu-impala": 7},
        "Games of Procgen in the paper's easy mode: PPO, 25 million steps each, and IMPALA.",
        gpu=True,
    ),
}


def minutes(gpu: bool) -> dict[str, float]:
    """Minutes of each part, by its full name."""
    return {
        f"{key}/{name}": about
        for key, section in SECTIONS.items()
        if section.gpu == gpu
        for name, about in section.minutes.items()
    }


def result_path(part: str, folder: Path = RESULTS) -> Path:
    return folder / f"{part}.json"
