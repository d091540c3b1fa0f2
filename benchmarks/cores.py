"""How well one machine's cores are used: jobs with 1 worker, a quarter of the cores and all of them.

    python benchmarks/cores.py                  about 5 minutes on 16 cores; writes cores.json
    python benchmarks/cores.py --only burn start --workers 1 2 --out before.json

Each run is an ordinary `paceline train` in a process of its own. It gives its speed, where its time went, the seconds
from the command to the first iteration and the memory of a worker. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import machine
from paceline.run.directory import write_json

LIMIT_SECONDS = 240.0
_SMALL = "--set model.hidden=[64,64]"
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A command, with SIZE for its budget."""

    words: str
    size: int
    weak: bool = False
    """Whether the budget grows with the workers."""
    local: bool = False
    """Whether to run it without workers, too."""
    only_all: bool = False
    """Whether to run it with all cores alone."""


JOBS = {
    "burn": Job(
        "--preset none --algo ppo --env paceline/FixedCost-v0 --set 'env.kwargs={cost_seconds: 0.00005, busy: true}' "
        "--envs-per-worker 8 --set ppo.rollout_steps=128 --set ppo.epochs=4 --set ppo.minibatch_size=256 "
        f"{_SMALL} --set engine.scaling=weak --total-steps SIZE",
        100_000,
        weak=True,
    ),
    "throughput": Job(
        "--preset none --algo ppo --env CartPole-v1 --envs-per-worker 64 --set ppo.rollout_steps=128 "
        "--set ppo.epochs=4 --set ppo.minibatch_size=2048 "
        f"{_SMALL} --set engine.scaling=weak --total-steps SIZE",
        800_000,
        weak=True,
    ),
    "preset": Job("--algo ppo --env CartPole-v1 --total-steps SIZE", 300_000, local=True),
    "grid5000": Job("--config configs/grid5000.yaml --iterations SIZE", 5),
    "impala": Job(
        "--preset none --algo impala --env paceline/FixedCost-v0 --set 'env.kwargs={cost_seconds: 0.005}' "
        f"--envs-per-worker 1 --set impala.rollout_steps=64 --set impala.batch_size=512 {_SMALL} "
        "--total-steps SIZE",
        1_000,
        weak=True,
        only_all=True,
    ),
}


def train(words: str, runs: Path) -> Record:
    """One run: its summary, and the seconds from the command to the first row of metrics.jsonl."""
    name = f"run-{time.time_ns()}"
    argv = [sys.executable, "-m", "paceline", "train", *shlex.split(words), "--out", str(runs), "--name", name]
    argv += ["--seed", "1", "--quiet"]
    environment = {key: value for key, value in os.environ.items() if key.split("_")[0] not in ("OMP", "MKL")}
    metrics, began, first = runs / name / "metrics.jsonl", time.perf_counter(), None
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None and time.perf_counter() - began < LIMIT_SECONDS:
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.02)
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        if process.returncode:
            output.seek(0)
            return {"failure": f"exit status {process.returncode}: {output.read()[-600:]}"}
    summary = json.loads((runs / name / "summary.json").read_text())
    split: dict[str, float] = summary["time_split"]
    seconds = sum(split.values()) - split["start"] - split["eval"]
    parts = {part: spent / seconds for part, spent in split.items() if part not in ("start", "eval")}
    return {
        "command": shlex.join(["paceline", "train", *shlex.split(words)]),
        "steps_per_second": summary["env_steps"] / seconds,
        "train_seconds": seconds,
        "first_iteration_seconds": first,
        "worker_memory_bytes": summary.get("worker_memory_bytes", 0),
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "split": parts,
        "verdict": summary["verdict"],
    }


def measure(job: Job, workers: list[int], runs: Path, shrink: int) -> dict[str, Record]:
    found: dict[str, Record] = {}
    numbers = workers[-1:] if job.only_all else workers
    for number in [0, *numbers] if job.local else numbers:
        size = max(1, job.size // shrink) * (number if job.weak else 1)
        words = job.words.replace("SIZE", str(size))
        engine = f"--engine ray --workers {number}" if number else "--engine local --threads 1"
        found[str(number) if number else "local"] = record = train(f"{words} {engine}", runs)
        print(f"  {number or 'local'}: {record.get('failure') or line(record)}", file=sys.stderr, flush=True)
    return found


def line(record: Record) -> str:
    split = "  ".join(f"{part} {share:.0%}" for part, share in record["split"].items() if share >= 0.005)
    return (
        f"{record['steps_per_second']:12,.0f} steps/s {record['train_seconds']:7.2f} s   "
        f"first iteration {record['first_iteration_seconds'] or 0:5.1f} s   "
        f"worker {record['worker_memory_bytes'] / 1e6:4.0f} MB, "
        f"all {record['peak_memory_bytes'] / 1e9:.1f} GB   {split}"
    )


def table(results: dict[str, dict[str, Record]]) -> str:
    lines = []
    for job, records in results.items():
        base = next((r["steps_per_second"] for r in records.values() if "failure" not in r), None)
        for number, record in records.items():
            if "failure" in record:
                lines.append(f"{job:11} {number:>5}  failed: {record['failure'].splitlines()[-1]}")
            else:
                lines.append(f"{job:11} {number:>5}  {record['steps_per_second'] / base:6.2f}x {line(record)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = machine.cores()
    default = sorted({1, max(1, cores // 4), cores})
    parser.add_argument("--only", nargs="+", choices=[*JOBS], default=[*JOBS])
    parser.add_argument("--workers", nargs="+", type=int, default=default, help="ascending; the last: all cores")
    parser.add_argument("--shrink", type=int, default=1, help="divide the budgets by this, to test the script")
    parser.add_argument("--out", type=Path, default=Path("cores.json"))
    options = parser.parse_args()
    results: dict[str, dict[str, Record]] = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="paceline-cores-") as runs:
        for name in options.only:
            print(name, file=sys.stderr, flush=True)
            results[name] = measure(JOBS[name], options.workers, Path(runs), options.shrink)
            write_json(options.out, {"cores": cores, "results": results})
    print(table(results))
    print(f"{time.perf_counter() - began:.0f} s on {cores} cores; written to {options.out}")


if __name__ == "__main__":
    main()
