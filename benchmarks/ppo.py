"""PPO compared with the peers.

Peer and paceline run in turns, one process at a time, so that a slow minute of the machine affects both.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Record, first_iteration_seconds, help_seconds, ours, peer, read_metrics, sgemm_gflops
from tables import Row

Pairs = list[tuple[Record, Record]]
"""Records of peer and ours, run one after the other with the same seed."""

PPO_CARTPOLE = "--preset none --algo ppo --env CartPole-v1"
_ZOO_PPO = (
    "--envs-per-worker 8 --set ppo.rollout_steps=32 --set ppo.epochs=20 --set ppo.minibatch_size=256 "
    "--set ppo.learning_rate=1e-3 --set ppo.learning_rate_schedule=linear --set ppo.clip=0.2 "
    "--set ppo.clip_schedule=linear --set ppo.gamma=0.98 --set ppo.gae_lambda=0.8"
)
_ZOO = f"{_ZOO_PPO} --set model.hidden=[64,64]"
_RECURRENT = (
    f"--preset none --algo ppo --env examples/without_velocity.py:CartPole {_ZOO_PPO} --set model.hidden=[64] "
    "--set model.memory=lstm"
)
# RLlib's defaults for what the job leaves open: no gradient clipping, value loss weight 1. 1028 slots per environment
# instead of 1000: the slot after an episode is its reset, and ten iterations must hold 40,000 real steps.
GRID5000 = (
    "--envs-per-worker 4 --set ppo.rollout_steps=1028 --set ppo.epochs=30 --set ppo.minibatch_size=128 "
    "--set ppo.learning_rate=3e-4 --set ppo.gamma=0.99 --set ppo.gae_lambda=1.0 --set ppo.clip=0.3 "
    "--set ppo.max_grad_norm=0 --set ppo.value_coef=1.0 "
    "--set model.hidden=[256,256] --set model.activation=tanh --set model.shared=false"
)
_WIDE = (
    "--envs-per-worker 64 --set ppo.rollout_steps=128 --set ppo.epochs=4 --set ppo.minibatch_size=2048 "
    "--set model.hidden=[64,64]"
)
MEMORY_RUN = f"{PPO_CARTPOLE} {_WIDE} --total-steps {{size}}"
MEMORY_LIMIT_MB = 400
MEMORY_GROWTH_PERCENT = 5
HELP_LIMIT_SECONDS = 0.5
FIRST_ITERATION_LIMIT_SECONDS = 4.0


@dataclass(frozen=True)
class Job:
    """The same work on both sides; `{size}` is its length in iterations or env steps."""

    peer: str
    ours: str
    size: int = 0
    quick_size: int = 0
    seeds: int = 0
    """Minimum number of seeds, also with fewer `--repeats`."""
    steps_per_size: int = 1
    """Env steps per unit of size."""
    optimizer_steps_per_size: int = 0
    """Minimum for ours, which must also never do fewer than the peer."""


JOBS = {
    "grid5000": Job(
        peer="peer_rllib.py --iterations {size}",
        ours=f"{PPO_CARTPOLE} {GRID5000} --iterations {{size}}",
        size=10,
        quick_size=1,
        seeds=3,
        steps_per_size=4000,
        optimizer_steps_per_size=960,
    ),
    "zoo": Job(
        peer="peer_sb3.py zoo --steps {size}",
        ours=f"{PPO_CARTPOLE} {_ZOO} --total-steps {{size}}",
        size=100_000,
        quick_size=10_000,
    ),
    "zoo to 475": Job(
        peer="peer_sb3.py zoo --steps 100000 --stop-return 475",
        ours=f"{PPO_CARTPOLE} {_ZOO} --total-steps 100000 --stop-return 475",
        seeds=15,
    ),
    "solve": Job(
        peer="peer_sb3.py zoo --steps 100000 --stop-return 475",
        ours="--algo ppo --env CartPole-v1 --stop-return 475",
        seeds=5,
    ),
    "throughput": Job(
        peer="peer_sb3.py throughput --steps {size}",
        ours=f"{PPO_CARTPOLE} {_WIDE} --total-steps {{size}}",
        size=245_760,
        quick_size=81_920,
    ),
    "recurrent": Job(
        peer="peer_sb3.py recurrent --steps {size}",
        ours=f"{_RECURRENT} --total-steps {{size}}",
        size=50_000,
        quick_size=10_000,
    ),
    "recurrent, one LSTM": Job(
        peer="peer_sb3.py recurrent-shared --steps {size}",
        ours=f"{_RECURRENT} --total-steps {{size}}",
        size=50_000,
        quick_size=10_000,
    ),
    "userenv": Job(
        peer="peer_sb3.py userenv --steps {size}",
        ours=f"--preset none --algo ppo --env benchmarks/cartpole_scalar.py:CartPole {_ZOO} --total-steps {{size}}",
        size=50_000,
        quick_size=10_000,
    ),
}


@dataclass
class Bench:
    """The options of a part, and its results besides the rows."""

    repeats: int
    quick: bool
    again: bool
    """Measure again, without earlier results."""
    runs_directory: Path
    """For temporary runs."""
    records: dict[str, list[Record]] = field(default_factory=dict)
    """By job, the record of every run."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Further tables by title, as lines of figures."""
    suite: dict[str, Any] | None = None
    """The `suite.json` of a `paceline bench suite`."""
    text: str = ""
    """Markdown for the page."""

    def size(self, job: Job) -> int:
        return job.quick_size if self.quick else job.size

    def pairs(self, name: str) -> Pairs:
        """Peer, ours, peer, ours, …, with one seed per pair."""
        job = JOBS[name]
        seeds = self.repeats if self.quick else max(self.repeats, job.seeds)
        size, pairs = self.size(job), []
        for seed in range(1, seeds + 1):
            theirs = {**peer(job.peer.format(size=size), seed, 900), "job": name}
            say(f"{name}, seed {seed}: {theirs['system']} {theirs['train_seconds']:.2f} s")
            mine = {**ours(job.ours.format(size=size), seed, 900, self.runs_directory), "job": name}
            say(f"{name}, seed {seed}: {mine['system']} {mine['train_seconds']:.2f} s")
            pairs.append((theirs, mine))
        self.records[name] = [record for pair in pairs for record in pair]
        return pairs

    @cached_property
    def gflops(self) -> float:
        return sgemm_gflops()

    def floor(self, pairs: Pairs) -> dict[str, Any]:
        """The time of the matrix products of learning, and our times as multiples of it."""
        floors = [mine["learning_flop"] / (self.gflops * 1e9) for _, mine in pairs]
        times = [mine["train_seconds"] / floor for (_, mine), floor in zip(pairs, floors, strict=True)]
        return {"floor_seconds": median(floors), "times_floor": times}

    def row(self, job: str, measure: str, key: str, pairs: Pairs, factor: float, **more: Any) -> Row:
        missing = -math.inf if more.get("better") == "higher" else math.inf
        theirs, mine = (
            [missing if pair[side][key] is None else float(pair[side][key]) for pair in pairs] for side in (0, 1)
        )
        return Row(job, measure, peer=theirs, ours=mine, factor=factor, **more)

    def speed(self, name: str, factor: float, pairs: Pairs, measure: str = "env steps/s") -> Row:
        """Speed of the whole job, valid only if both sides did all the work."""
        about: dict[str, Any] = {
            **self.floor(pairs),
            # A quick run may do slightly less: untrained episodes are short, so more slots are resets.
            "problems": [] if self.quick else less_work(JOBS[name], self.size(JOBS[name]), pairs),
        }
        if measure == "env steps/s":
            return self.row(name, measure, "steps_per_second", pairs, factor, better="higher", digits=0, **about)
        return self.row(name, measure, "train_seconds", pairs, factor, digits=2, **about)


def grid5000(bench: Bench, name: str = "grid5000", factor: float = 8) -> list[Row]:
    pairs = bench.pairs(name)
    seconds = bench.speed(name, factor, pairs, "training, s")
    if bench.quick:  # too short to learn anything
        return [seconds]
    return [seconds, bench.row(name, "return, last 100", "return_last100", pairs, 1, better="higher")]


def zoo(bench: Bench) -> list[Row]:
    speed = bench.speed("zoo", 5, bench.pairs("zoo"))
    pairs = bench.pairs("zoo to 475")
    return [speed, bench.row("zoo", "env steps to 475", "solved_steps", pairs, 1, digits=0, by_chance=True)]


def solve(bench: Bench) -> list[Row]:
    pairs = bench.pairs("solve")
    return [bench.row("solve", "seconds to 475", "solved_seconds", pairs, 6, digits=2, **bench.floor(pairs))]


def throughput(bench: Bench) -> list[Row]:
    return [bench.speed("throughput", 4, bench.pairs("throughput"))]


def userenv(bench: Bench) -> list[Row]:
    return [bench.speed("userenv", 2, bench.pairs("userenv"))]


def recurrent(bench: Bench) -> list[Row]:
    """RecurrentPPO as published, with two LSTMs, and with one that policy and value share, as ours do."""
    rows = []
    for name in ("recurrent", "recurrent, one LSTM"):
        pairs = bench.pairs(name)
        problems = [] if bench.quick else less_work(JOBS[name], bench.size(JOBS[name]), pairs)
        key, better = "steps_per_second", "higher"
        rows.append(bench.row(name, "env steps/s", key, pairs, 8, better=better, digits=0, problems=problems))
    return rows


def startup(bench: Bench) -> list[Row]:
    first = [first_iteration_seconds(bench.runs_directory) for _ in range(bench.repeats)]
    answers = [help_seconds() for _ in range(max(3, bench.repeats))]
    return [
        Row("startup", "`paceline --help`, s", answers, limit=HELP_LIMIT_SECONDS, digits=2),
        Row("startup", "first iteration done, s", first, limit=FIRST_ITERATION_LIMIT_SECONDS, digits=2),
    ]


def memory(bench: Bench) -> list[Row]:
    """Peak memory of one long run, and its growth over the last four fifths."""
    size = 1_000_000 if bench.quick else 5_000_000
    record = {**ours(MEMORY_RUN.format(size=size), 1, 1800, bench.runs_directory), "job": "memory"}
    bench.records["memory"] = [record]
    newest = max(bench.runs_directory.glob("run-*"), key=lambda path: path.name)
    rows = [row for row in read_metrics(newest) if row.get("memory_bytes")]
    early = next(row["memory_bytes"] for row in rows if row["env_steps"] >= size // 5)
    growth = 100 * (rows[-1]["memory_bytes"] / early - 1)
    say(f"memory: {record['peak_memory_bytes'] / 1e6:.0f} MB at most, {growth:+.1f} % over {size:,} steps")
    return [
        Row("memory", "most, MB", [record["peak_memory_bytes"] / 1e6], limit=MEMORY_LIMIT_MB, digits=0),
        Row("memory", f"growth to {size:,} steps, %", [growth], limit=MEMORY_GROWTH_PERCENT),
    ]


def less_work(job: Job, size: int, pairs: Pairs) -> list[str]:
    """The runs that did less than the agreed work."""
    problems = []
    steps, optimizer_steps = size * job.steps_per_size, size * job.optimizer_steps_per_size
    for theirs, mine in pairs:
        for record in (theirs, mine):
            if record["env_steps"] < steps:
                who = f"{record['system']}, seed {record['seed']}"
                problems.append(f"{who}: {record['env_steps']} of {steps} env steps")
        wanted = max(optimizer_steps, theirs["optimizer_steps"])
        if mine["optimizer_steps"] < wanted:
            problems.append(f"ours, seed {mine['seed']}: {mine['optimizer_steps']} of {wanted} optimizer steps")
    return problems


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
