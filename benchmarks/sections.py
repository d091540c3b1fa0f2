"""What there is to measure: the sections of docs/benchmarks.md and their parts. `bench.py` measures them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Result = dict[str, Any]
"""One part, as its file in results/ holds it: what was measured, by which command, when, where and with what."""


@dataclass(frozen=True)
class Section:
    """Part NAME of section KEY is the function NAME of `module`, and `results/KEY/NAME.json` what it found."""

    title: str
    module: str
    minutes: dict[str, float]
    """Of each part: about how long it takes, on two cores or on one GPU with 16."""
    about: str
    gpu: bool = False


SECTIONS = {
    "ppo": Section(
        "PPO against the peers",
        "ppo",
        {"grid5000": 6, "zoo": 6, "solve": 1.5, "throughput": 1, "userenv": 1, "startup": 0.5, "memory": 1},
        "The same work by Stable-Baselines3 or RLlib and by paceline, in turns, one process at a time.",
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
        "The peer of a run with many workers is the same run with one, of one on Ray the same without, of IMPALA "
        "where steps are uneven PPO, and of the Grid'5000 job RLlib with two env runners.",
    ),
    "studies": Section(
        "Scaling studies",
        "studies",
        {"grid5000": 12, "waiting": 4},
        "Whole studies by one command: the Grid'5000 job by paceline and by RLlib, and an environment that waits for "
        "2 ms a step, with the same work for any number of workers and with the same for each.",
    ),
    "dqn": Section(
        "DQN",
        "dqn",
        {"zoo": 4, "throughput": 4, "replay": 6},
        "Plain DQN, as Stable-Baselines3 has it. The peer of the replay on disk is the same in memory.",
    ),
    "rllib": Section(
        "RLlib under paceline's loop",
        "rllib",
        {"overhead": 5},
        "The Grid'5000 job with `--engine rllib` and by RLlib alone, an iteration of each in turns, in one process. "
        "Times are by optimizer step, because RLlib's minibatches follow from how many episodes were cut.",
    ),
    "procgen": Section(
        "Images on the CPU",
        "procgen",
        {"nature": 4, "impala": 6, "memory": 2},
        "PPO on Procgen's coinrun. The peer is what its parts allow, each measured alone before and after each run: of "
        "`nature` stepping, acting and learning in turn, of `impala` learning alone.",
    ),
    "published": Section(
        "Beside published figures",
        "published",
        {"eagle": 1},
        "What three guides to reinforcement learning on clusters report, and the same jobs here. A ratio says how many "
        "times better ours is than the figure it is named after. Machines and years differ, so it is what to expect "
        "after a move; which program is faster is measured below, on one machine.",
    ),
    "scores": Section(
        "Scores",
        "scores",
        {"dqn-control": 8},
        "What agents learned: suites of ordinary runs, trained and evaluated.",
    ),
    "gpu": Section(
        "One GPU",
        "gpu",
        {"alone": 3, "runs": 5},
        "PPO with the IMPALA-CNN on coinrun: parts alone, then short runs, by the number of environments and by "
        "whether collecting and learning overlap.",
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
    """Of each part, by its full name."""
    return {
        f"{key}/{name}": about
        for key, section in SECTIONS.items()
        if section.gpu == gpu
        for name, about in section.minutes.items()
    }


def result_path(part: str, folder: Path = RESULTS) -> Path:
    return folder / f"{part}.json"
