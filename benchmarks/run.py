"""Speed against the peers: measures, judges against the bars, writes results/latest.{md,json}. `make bench` runs it.

Peer and ours take turns, one process at a time, so that a slow minute of the machine falls on both. Medians are
judged; the worst pair is shown beside them. Exit status: 0 all bars held, 1 one was missed or not measured, 2 set-up.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from measuring import (
    HERE,
    OURS,
    PEERS_PYTHON,
    ROOT,
    BenchError,
    Record,
    first_iteration_seconds,
    help_seconds,
    machine,
    ours,
    peer,
    read_metrics,
    sgemm_gflops,
    shown,
    versions,
)
from tables import Row, bars_table, commands, work_table

Pairs = list[tuple[Record, Record]]
"""Peer and ours, with the same seed, one right after the other."""

_PPO_CARTPOLE = "--preset none --algo ppo --env CartPole-v1"
_ZOO = (
    "--envs-per-worker 8 --set ppo.rollout_steps=32 --set ppo.epochs=20 --set ppo.minibatch_size=256 "
    "--set ppo.learning_rate=1e-3 --set ppo.learning_rate_schedule=linear --set ppo.clip=0.2 "
    "--set ppo.clip_schedule=linear --set ppo.gamma=0.98 --set ppo.gae_lambda=0.8 --set model.hidden=[64,64]"
)
# RLlib's defaults where the job names nothing: no gradient clipping, weight 1 for the value. 1028 slots an environment,
# not 1000: the slot after an episode is its reset, and ten iterations are to hold 40,000 true steps.
_GRID5000 = (
    "--envs-per-worker 4 --set ppo.rollout_steps=1028 --set ppo.epochs=30 --set ppo.minibatch_size=128 "
    "--set ppo.learning_rate=3e-4 --set ppo.gamma=0.99 --set ppo.gae_lambda=1.0 --set ppo.clip=0.3 "
    "--set ppo.max_grad_norm=0 --set ppo.value_coef=1.0 "
    "--set model.hidden=[256,256] --set model.activation=tanh --set model.shared=false"
)
_WIDE = (
    "--envs-per-worker 64 --set ppo.rollout_steps=128 --set ppo.epochs=4 --set ppo.minibatch_size=2048 "
    "--set model.hidden=[64,64]"
)
MEMORY_RUN = f"{_PPO_CARTPOLE} {_WIDE} --total-steps {{size}}"
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
    """At least this many, whatever `--repeats` says."""
    steps_per_size: int = 1
    """Env steps that one unit of size stands for."""
    optimizer_steps_per_size: int = 0
    """That ours has to do at least; beside it, never fewer than the peer."""


JOBS = {
    "grid5000": Job(
        peer="peer_rllib.py --iterations {size}",
        ours=f"{_PPO_CARTPOLE} {_GRID5000} --iterations {{size}}",
        size=10,
        quick_size=1,
        seeds=3,
        steps_per_size=4000,
        optimizer_steps_per_size=960,
    ),
    "zoo": Job(
        peer="peer_sb3.py zoo --steps {size}",
        ours=f"{_PPO_CARTPOLE} {_ZOO} --total-steps {{size}}",
        size=100_000,
        quick_size=10_000,
    ),
    "zoo to 475": Job(
        peer="peer_sb3.py zoo --steps 100000 --stop-return 475",
        ours=f"{_PPO_CARTPOLE} {_ZOO} --total-steps 100000 --stop-return 475",
        seeds=15,
    ),
    "solve": Job(
        peer="peer_sb3.py zoo --steps 100000 --stop-return 475",
        ours="--algo ppo --env CartPole-v1 --stop-return 475",
        seeds=5,
    ),
    "throughput": Job(
        peer="peer_sb3.py throughput --steps {size}",
        ours=f"{_PPO_CARTPOLE} {_WIDE} --total-steps {{size}}",
        size=245_760,
        quick_size=81_920,
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
    repeats: int
    quick: bool
    runs_directory: Path
    gflops: float
    records: dict[str, list[Record]] = field(default_factory=dict)

    def size(self, job: Job) -> int:
        return job.quick_size if self.quick else job.size

    def pairs(self, name: str) -> Pairs:
        """Peer, ours, peer, ours, …: one seed a pair."""
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

    def floor(self, pairs: Pairs) -> float:
        flop: float = median(mine["learning_flop"] for _, mine in pairs)
        return flop / (self.gflops * 1e9)

    def row(self, job: str, measure: str, key: str, pairs: Pairs, factor: float, **more: Any) -> Row:
        missing = -math.inf if more.get("better") == "higher" else math.inf
        theirs, mine = (
            [missing if pair[side][key] is None else float(pair[side][key]) for pair in pairs] for side in (0, 1)
        )
        return Row(job, measure, peer=theirs, ours=mine, factor=factor, **more)

    def speed(self, name: str, factor: float, pairs: Pairs, measure: str = "env steps/s") -> Row:
        """The whole job's, valid only if both did all of it."""
        about: dict[str, Any] = {
            "floor_seconds": self.floor(pairs),
            # A quick run may miss by a hair: untrained episodes are short, so that more of the slots are resets.
            "problems": [] if self.quick else less_work(JOBS[name], self.size(JOBS[name]), pairs),
        }
        if measure == "env steps/s":
            return self.row(name, measure, "steps_per_second", pairs, factor, better="higher", digits=0, **about)
        return self.row(name, measure, "train_seconds", pairs, factor, digits=2, **about)

    def grid5000(self) -> list[Row]:
        pairs = self.pairs("grid5000")
        seconds = self.speed("grid5000", 8, pairs, "training, s")
        if self.quick:  # too short to have learnt anything
            return [seconds]
        return [seconds, self.row("grid5000", "return, last 100", "return_last100", pairs, 1, better="higher")]

    def zoo(self) -> list[Row]:
        speed = self.speed("zoo", 5, self.pairs("zoo"))
        pairs = self.pairs("zoo to 475")
        return [speed, self.row("zoo", "env steps to 475", "solved_steps", pairs, 1, digits=0, by_chance=True)]

    def solve(self) -> list[Row]:
        pairs = self.pairs("solve")
        floor = self.floor(pairs)
        return [self.row("solve", "seconds to 475", "solved_seconds", pairs, 6, digits=2, floor_seconds=floor)]

    def throughput(self) -> list[Row]:
        return [self.speed("throughput", 4, self.pairs("throughput"))]

    def userenv(self) -> list[Row]:
        return [self.speed("userenv", 2, self.pairs("userenv"))]

    def startup(self) -> list[Row]:
        first = [first_iteration_seconds(self.runs_directory) for _ in range(self.repeats)]
        answers = [help_seconds() for _ in range(max(3, self.repeats))]
        return [
            Row("startup", "`paceline --help`, s", answers, limit=HELP_LIMIT_SECONDS, digits=2),
            Row("startup", "first iteration done, s", first, limit=FIRST_ITERATION_LIMIT_SECONDS, digits=2),
        ]

    def memory(self) -> list[Row]:
        """Of one long run, the growth over its last four fifths."""
        size = 1_000_000 if self.quick else 5_000_000
        record = {**ours(MEMORY_RUN.format(size=size), 1, 1800, self.runs_directory), "job": "memory"}
        self.records["memory"] = [record]
        newest = max(self.runs_directory.glob("run-*"), key=lambda path: path.name)
        rows = [row for row in read_metrics(newest) if row.get("memory_bytes")]
        early = next(row["memory_bytes"] for row in rows if row["env_steps"] >= size // 5)
        growth = 100 * (rows[-1]["memory_bytes"] / early - 1)
        say(f"memory: {record['peak_memory_bytes'] / 1e6:.0f} MB at most, {growth:+.1f} % over {size:,} steps")
        return [
            Row("memory", "most, MB", [record["peak_memory_bytes"] / 1e6], limit=MEMORY_LIMIT_MB, digits=0),
            Row("memory", f"growth to {size:,} steps, %", [growth], limit=MEMORY_GROWTH_PERCENT),
        ]


def less_work(job: Job, size: int, pairs: Pairs) -> list[str]:
    """Ways in which the two sides did not do the agreed work."""
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


def _git_commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=20).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or "none"
    return f"{commit}, with changes" if git("status", "--porcelain") else commit


def facts_of(command: str, here: dict[str, Any], libraries: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([command, *sys.argv[1:]]),
        "commit": _git_commit(),
        "machine": here,
        "versions": libraries,
    }


def write_results(bench: Bench, rows: list[Row], facts: dict[str, Any], name: str) -> Path:
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    path = results / f"{name}.md"
    libraries = [", ".join(f"{name} {number}" for name, number in side.items()) for side in facts["versions"].values()]
    here, nl = facts["machine"], "\n"
    path.write_text(
        f"""# Speed against the peers

{facts["date"]}, commit {facts["commit"]}. {here["cpu"]}, {here["cores"]} cores, {here["memory_gib"]} GiB; load before:
{here["load_before"]}. Made by `{facts["command"]}`{"; a quick look, not for quoting" if bench.quick else ""}.

{bars_table(rows)}
{"".join(f"{nl}**{failure.splitlines()[0]}**{nl}" for failure in facts["failures"])}
Median (least–most). The ratio is that of the medians, over 1 where ours is better. The arithmetic floor is the
matrix products of learning alone at {bench.gflops:.0f} GFLOP/s, this machine's sgemm 128×256×256 on one thread: a
program that does the same work on one thread in 32 bits can hardly be faster.

{work_table(bench.records)}

Ours: {libraries[0]}. Peers: {libraries[1]}.

{commands(bench.records)}
"""
    )
    content = {**facts, "gflops": bench.gflops, "rows": [row.as_dict() for row in rows], "runs": bench.records}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path


def measure(
    script: str,
    blocks: Mapping[str, Callable[[Bench], list[Row]]],
    only: Sequence[str],
    repeats: int,
    quick: bool,
    name: str,
) -> int:
    """These blocks, into `results/NAME.{md,json}`; the exit code of the script."""
    facts: dict[str, Any] = facts_of(f"benchmarks/{script}", machine(), versions())
    rows: list[Row] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as runs:
        bench = Bench(repeats, quick, Path(runs), sgemm_gflops())
        for block in only:
            try:
                rows += blocks[block](bench)
            except BenchError as error:  # the other bars are still worth knowing
                failures.append(f"{block} was not measured: {error}")
                say(failures[-1])
    path = write_results(bench, rows, {**facts, "failures": failures}, name)
    print(bars_table(rows))
    print(f"\nWritten to {path.relative_to(ROOT)} and {path.with_suffix('.json').name}.")
    return int(bool(failures) or not all(row.passed for row in rows))


def main() -> int:
    blocks: dict[str, Callable[[Bench], list[Row]]] = {
        "grid5000": Bench.grid5000,
        "zoo": Bench.zoo,
        "solve": Bench.solve,
        "throughput": Bench.throughput,
        "userenv": Bench.userenv,
        "startup": Bench.startup,
        "memory": Bench.memory,
    }
    parser = argparse.ArgumentParser(description="Measures paceline against Stable-Baselines3 and RLlib.")
    names = list(blocks)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="JOB", help=", ".join(names))
    parser.add_argument("--repeats", type=int, help="pairs of runs a job, at least 2 (default: 3, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it works")
    options = parser.parse_args()
    repeats = options.repeats or (2 if options.quick else 3)
    if repeats < 2:
        parser.error("--repeats is at least 2: one pair says nothing about the noise")
    for path, target in ((OURS, "setup"), (PEERS_PYTHON, "bench-setup")):
        if not path.exists():
            parser.error(f"{shown([str(path)])} is missing; run `make {target}` first")
    return measure("run.py", blocks, options.only, repeats, options.quick, "quick" if options.quick else "latest")


if __name__ == "__main__":
    sys.exit(main())
