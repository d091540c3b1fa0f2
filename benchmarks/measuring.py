"""Run one command with a time limit, and read what it measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from paceline import machine
from paceline.run import provenance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS_PYTHON = HERE / ".venv" / "bin" / "python"
OURS = Path(sys.executable).parent / "paceline"

Record = dict[str, Any]
"""What one training run did, with the same keys for every system; see `peer_sb3.run`."""

# The matrix product of the widest job on one thread. The best of many counts, because it serves as a lower bound.
_SGEMM = """
import time, torch
torch.set_num_threads(1)
a, b, c = torch.randn(128, 256), torch.randn(256, 256), torch.empty(128, 256)
best = 1e9
for _ in range(30):
    start = time.perf_counter()
    for _ in range(200):
        torch.mm(a, b, out=c)
    best = min(best, (time.perf_counter() - start) / 200)
print(2 * 128 * 256 * 256 / best / 1e9)
"""
_VERSIONS = """
import json, sys
from importlib.metadata import version
python = ".".join(map(str, sys.version_info[:3]))
print(json.dumps({"python": python, **{name: version(name) for name in sys.argv[1:]}}))
"""


class BenchError(Exception):
    """A measurement failed; the text is for the user."""


def shown(argv: list[str]) -> str:
    """The command as typed in the repository."""
    words = [str(Path(word).relative_to(ROOT)) if word.startswith(f"{ROOT}/") else word for word in argv]
    return shlex.join(words)


def _environment() -> dict[str, str]:
    """Without variables that set the number of threads: each system chooses its own."""
    return {name: value for name, value in os.environ.items() if not re.fullmatch(r"(OMP|MKL|OPENBLAS)_.*", name)}


@contextmanager
def _running(argv: list[str], stdout: int, stderr: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in its own process group, which is ended on every exit path."""
    process = subprocess.Popen(
        argv, stdout=stdout, stderr=stderr, text=True, cwd=ROOT, env=_environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # RLlib's script also stops Ray
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def output_of(argv: list[str], limit_seconds: float, *, show: bool = False) -> str:
    """The standard output of a command; BenchError if it fails or exceeds the limit. `show`: print its progress."""
    with tempfile.TemporaryFile("w+") as stderr, _running(argv, subprocess.PIPE, None if show else stderr) as process:
        try:
            output, _ = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            raise BenchError(f"still running after {limit_seconds:g} s: {shown(argv)}") from None
        if process.returncode:
            stderr.seek(0)
            tail = "\n".join((output + stderr.read()).strip().splitlines()[-15:])
            raise BenchError(f"exit status {process.returncode}: {shown(argv)}\n{tail}")
    return output


def peer(script_and_arguments: str, seed: int, limit_seconds: float) -> Record:
    script, *arguments = shlex.split(script_and_arguments)
    argv = [str(PEERS_PYTHON), str(HERE / script), *arguments, "--seed", str(seed)]
    record: Record = json.loads(output_of(argv, limit_seconds).strip().splitlines()[-1])
    return {**record, "command": shown(argv)}


def ours(arguments: str, seed: int, limit_seconds: float, runs: Path) -> Record:
    name = f"run-{time.time_ns()}"
    words = [*shlex.split(arguments), "--seed", str(seed), "--quiet"]
    output_of([str(OURS), "train", *words, "--out", str(runs), "--name", name], limit_seconds)
    return {**read_run(runs / name), "seed": seed, "command": shown([str(OURS), "train", *words])}


def read_run(directory: Path) -> Record:
    summary = json.loads((directory / "summary.json").read_text())
    config = yaml.safe_load((directory / "config.yaml").read_text())
    split: dict[str, float] = summary["time_split"]
    # Like the peers' timers: from the start of training to its end, without evaluation. Metrics and checkpoints count,
    # although the peers write none.
    seconds = sum(split.values()) - split["start"] - split["eval"]
    steps: int = summary["env_steps"]
    stop = config["stop"]
    # Only reaching the return can end a run before its budget.
    solved = stop.get("return_mean") is not None and steps < stop["total_steps"]
    return {
        "system": f"paceline {version('paceline')}",
        "env_steps": steps,
        "optimizer_steps": summary["optimizer_steps"],
        "train_seconds": seconds,
        "steps_per_second": steps / seconds,
        "return_last100": summary["return_mean"],
        "solved_seconds": seconds if solved else None,
        "solved_steps": steps if solved else None,
        "parameters": summary["parameters"],
        "threads": summary["threads"],
        "time_split": split,
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "worker_memory_bytes": summary.get("worker_memory_bytes"),
        "verdict": summary["verdict"],
        "learning_flop": steps * config.get("ppo", {}).get("epochs", 1) * flop_per_row(config["model"]["hidden"]),
    }


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def help_seconds() -> float:
    started = time.perf_counter()
    output_of([str(OURS), "--help"], 60)
    return time.perf_counter() - started


def first_iteration_seconds(runs: Path, *more: str) -> float:
    """From starting the command to the first row of metrics.jsonl."""
    name = f"first-{time.time_ns()}"
    argv = [str(OURS), "train", "--env", "CartPole-v1", "--iterations", "3", "--out", str(runs), "--name", name]
    argv += more
    metrics = runs / name / "metrics.jsonl"
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, _running(argv, output.fileno(), subprocess.STDOUT) as process:
        while not (metrics.exists() and metrics.stat().st_size):
            ended, waited = process.poll() is not None, time.perf_counter() - started
            if (ended and not metrics.exists()) or waited > 120:
                output.seek(0)
                raise BenchError(f"no iteration after {waited:.0f} s: {shown(argv)}\n{output.read()[-2000:]}")
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        process.wait(120)
    return seconds


def flop_per_row(hidden: list[int], inputs: int = 4, outputs: tuple[int, ...] = (2, 1)) -> int:
    """Operations of learning, for one tower per output: forward, weight gradient and input gradient."""
    total = 0
    for output in outputs:
        widths = [inputs, *hidden, output]
        products = [2 * a * b for a, b in pairwise(widths)]
        total += 3 * sum(products) - products[0]  # the gradient of the observation is not computed
    return total


def sgemm_gflops() -> float:
    return float(output_of([sys.executable, "-c", _SGEMM], 120))


def _commit() -> str:
    """The commit, and whether files other than the results differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()

    if shutil.which("git") is None:
        return "none"
    others = [".", ":!benchmarks/results", ":!docs/benchmarks.md"]
    changes = git("status", "--porcelain", "--untracked-files=no", "--", *others)
    return (git("rev-parse", "--short=12", "HEAD") or "none") + (", with changes" if changes else "")


def origin(command: str, gpu: bool) -> dict[str, Any]:
    """When, where, from which code and with which versions."""
    collected = provenance.collect([])
    packages = collected["packages"]
    here = {
        "cpu": collected["cpu_model"],
        "cores": collected["cores"],
        "memory_gib": round(collected["memory_bytes"] / 2**30, 1),
        "load_before": round((machine.load_average() or (0.0,))[0], 2),
    }
    if gpu:
        import torch

        here["gpu"] = torch.cuda.get_device_name()
    ours = {name: packages[name] for name in ("torch", "numpy", "gymnasium", "ray", "envpool") if name in packages}
    versions: dict[str, dict[str, str]] = {
        "ours": {"paceline": collected["paceline"], "python": collected["python"], **ours},
        "peers": {},
    }
    if PEERS_PYTHON.exists():
        words = ["stable_baselines3", "ray", "torch", "numpy", "gymnasium"]
        versions["peers"] = json.loads(output_of([str(PEERS_PYTHON), "-c", _VERSIONS, *words], 60))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "commit": _commit(),
        "machine": here,
        "versions": versions,
    }
