"""`paceline bench throughput`: where the time of one run goes, against what this machine could do of it.

The run is an ordinary one, or one that exists. `--profile` adds a flame graph of a second run (py-spy) and a trace of
one iteration (torch).
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.ceilings import Ceilings, measure
from paceline.bench.make import Interrupts, Screen, make_folder, reason, run_words
from paceline.bench.results import machine, machines, table
from paceline.bench.study import RunData, load_run
from paceline.config import RunConfig, UserError
from paceline.resolve import validate
from paceline.run.directory import RunDirectory, write_json, write_text

PROFILE_RATE = 100  # samples a second: a few per cent of the speed
PROFILE_SECONDS = 900.0


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    share: float
    """Of the wall time of one process."""
    rate: str
    """What it achieved."""
    ceiling: str
    of_ceiling: float | None


def run_throughput(
    run: str | None, words: Sequence[str], *, out: str | None = None, profile: bool = False, command: str = ""
) -> int:
    """Print and write `throughput.md` and `.json`; the exit status."""
    folder = Path(out or "runs/throughput").expanduser()
    if run:
        RunDirectory.open(run)
    make_folder(folder)
    path = Path(run).expanduser() if run else _train(folder, words)
    data = load_run(path)
    if not data.usable:
        raise UserError(f"{path}: no rows to take figures from; {'; '.join(data.problems) or data.state}")
    config = validate(data.config)
    if data.engine == "rllib" and config.algo not in ("ppo", "impala", "dqn"):
        raise UserError(f"{path}: {config.algo} is RLlib's own, whose network is not known here; ppo, impala or dqn")
    ceilings = measure(config, _envs(config, data.workers))
    parts = account(data, config, ceilings)
    text = page(data, parts, ceilings)
    write_json(
        folder / "throughput.json",
        {
            "command": command,
            "run": str(path),
            "machine": machine(RunDirectory(path)),
            "parts": [dataclasses.asdict(part) for part in parts],
            "ceilings": dataclasses.asdict(ceilings),
            "verdict": data.verdict,
        },
    )
    write_text(folder / "throughput.md", f"# Throughput\n\n```sh\n{command}\n```\n\n{text}")
    print(f"\n{text}\nwritten    {folder / 'throughput.md'} and .json")
    if profile:
        _flame(folder, data)
        _trace(folder, config, data.workers)
    return 0


def account(run: RunData, config: RunConfig, ceilings: Ceilings) -> list[Part]:
    """By part, of one process: the mean worker, or the learner and (for env and act) the mean actor."""
    split, workers = run.time_split, max(1, run.workers)
    actors = run.summary.get("actor_time_split") or split
    wall = sum(split.values())
    steps = run.env_steps / workers
    learning = 1 if actors is not split or run.engine == "rllib" else workers
    rows = learned_rows(run, config) / learning
    peak = ceilings.net_gflops if ceilings.conv_gflops is None else ceilings.conv_gflops
    shape = "matrix products of its size" if ceilings.conv_gflops is None else "convolutions"

    def part(name: str, seconds: float, rate: str, ceiling: str, of: float | None) -> Part:
        return Part(name, seconds, seconds / wall if wall else 0.0, rate, ceiling, of)

    def arithmetic(name: str, seconds: float, flop: float) -> Part:
        rate = flop / seconds / 1e9 if seconds else 0.0
        return part(name, seconds, f"{rate:,.1f} GFLOP/s", f"{peak:,.1f} GFLOP/s, {shape}", rate / peak)

    env, act = (actors.get(name, 0.0) for name in ("env", "act"))
    learn, sync = (split.get(name, 0.0) for name in ("learn", "sync"))
    stepping = steps / env if env else 0.0
    alone = ceilings.env_steps_per_second
    found = [part("env", env, f"{stepping:,.0f} steps/s", f"{alone:,.0f} steps/s, stepping alone", stepping / alone)]
    found.append(arithmetic("act", act, steps * ceilings.forward_flop))
    # Each observation is written once, and read once for each time it is learned from.
    moved = (steps + rows) * ceilings.observation_bytes
    copy = moved / 1e9 / ceilings.copy_gbytes_per_second
    rate = f"{moved / 1e6:,.0f} MB of observations"
    found.append(part("copy *", copy, rate, f"{ceilings.copy_gbytes_per_second:,.1f} GB/s, memory", None))
    found.append(arithmetic("learn", learn, 3.0 * rows * ceilings.forward_flop))
    moved = float(run.summary.get("bytes_moved") or 0) / workers
    network = ceilings.network_gbytes_per_second
    speed = moved / sync / 1e9 if sync else 0.0
    trip = f"{network:,.2f} GB/s, {ceilings.round_trip_microseconds:,.0f} µs there and back, 127.0.0.1"
    found.append(part("sync", sync, f"{speed:,.3f} GB/s" if moved else "–", trip, speed / network if moved else None))
    found.append(part("log", split.get("idle", 0.0) + split.get("save", 0.0), "–", "–", None))
    found += [part(name, split[name], "–", "–", None) for name in ("eval", "start") if split.get(name)]
    return found


def learned_rows(run: RunData, config: RunConfig) -> float:
    """Rows that went through the network to learn, each as often as it did."""
    if config.algo == "dqn":
        trained = run.last("steps_trained")
        return trained if trained == trained else float(run.summary.get("optimizer_steps") or 0) * config.dqn.batch_size
    return float(run.env_steps) * (config.ppo.epochs if config.algo == "ppo" else 1)


def page(run: RunData, parts: Sequence[Part], ceilings: Ceilings) -> str:
    rows = [
        [
            part.name,
            f"{part.seconds:,.2f}",
            f"{100 * part.share:.0f} %",
            part.rate,
            part.ceiling,
            "–" if part.of_ceiling is None else f"{100 * part.of_ceiling:.0f} %",
        ]
        for part in parts
    ]
    which = f"{run.algo} on {run.env}, engine {run.engine}, {run.workers} worker{'s' if run.workers != 1 else ''}"
    lines = [
        f"`{run.path}`: {which}: {run.steps_per_second:,.0f} steps/s, {run.env_steps:,} steps.",
        *machines([machine(RunDirectory(run.path))]),
        table(["part", "seconds", "of the time", "achieved", "ceiling of this machine", "of the ceiling"], rows),
        "Seconds are those of one process: the mean worker, or the learner with, for env and act, its mean actor. "
        "\\* calculated, and inside env, act and learn. One row through the network forward: "
        f"{ceilings.forward_flop:,} FLOP, learning from it three times that; {ceilings.threads} thread(s); "
        f"matrix products of 1024 x 1024: {ceilings.gemm_gflops:,.0f} GFLOP/s. "
        "Log: rows, checkpoints, and what no other part has.",
    ]
    if run.verdict:
        lines.append(f"Verdict: {run.verdict}.")
    if run.problems:
        lines.append("To be known: " + "; ".join(run.problems))
    return "\n\n".join(lines) + "\n"


def _envs(config: RunConfig, workers: int) -> int:
    """Of one worker."""
    shared = config.algo in ("ppo", "a2c") and config.engine.scaling == "strong"
    return max(1, config.env.envs_per_worker // workers) if shared else max(1, config.env.envs_per_worker)


def _name() -> str:
    return time.strftime("run-%Y%m%d-%H%M%S")


def _train(folder: Path, words: Sequence[str]) -> Path:
    """An ordinary run."""
    name = _name()
    screen, interrupts = Screen(1), Interrupts()
    with interrupts.installed():
        screen.begin(1, name)
        train = ["train", *words, "--out", str(folder), "--name", name]
        code, said = run_words(train, folder / "logs" / f"{name}.log", screen, interrupts)
        screen.end("done" if code == 0 else "ended")
    if code:
        raise UserError(f"the run {folder / name} ended with {code}: {reason(code, said)}")
    return folder / name


def _flame(folder: Path, run: RunData) -> None:
    tool = shutil.which("py-spy", path=None) or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        print("flame      not drawn: py-spy is not installed; pip install py-spy")
        return
    target, name = folder / "flame.svg", f"{_name()}-profiled"
    train = [sys.executable, "-m", "paceline.cli", "train", "--config", str(run.path / "config.yaml")]
    train += ["--out", str(folder), "--name", name, "--quiet"]
    words = [tool, "record", "-o", str(target), "-r", str(PROFILE_RATE), "--subprocesses", "--", *train]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=PROFILE_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"flame      not drawn: still at work after {PROFILE_SECONDS:.0f} s; give a shorter run")
        return
    if target.is_file():
        print(f"flame      {target}")
    else:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        print(f"flame      not drawn: {shlex.join(words[:2])} said: {said}")


def _trace(folder: Path, config: RunConfig, workers: int) -> None:
    """One iteration of one process, after one to warm up."""
    from torch.profiler import ProfilerActivity, profile

    from paceline.engine.replica import Replica

    replica = Replica(config, envs=_envs(config, workers), on_device=False)
    try:
        assert replica.collector is not None
        replica.collector.start()
        replica.learn(replica.collect()[0], 1.0)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            replica.learn(replica.collect()[0], 1.0)
        found.export_chrome_trace(str(folder / "trace.json"))
    finally:
        replica.close()
    print(f"trace      {folder / 'trace.json'}: open it at chrome://tracing or ui.perfetto.dev")
    heavy: Any = found.key_averages()
    print(heavy.table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))
