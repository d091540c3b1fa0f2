"""`paceline bench throughput`: where the time of one run goes, against what this machine could do of it.

The run is an ordinary one, or one that exists. `--profile` adds a flame graph of a second run (py-spy) and a trace of
one iteration (torch).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.ceilings import Ceilings, measure
from paceline.bench.make import Interrupts, Screen, make_folder, reason, run_words
from paceline.bench.results import machine, machines, table
from paceline.bench.study import RunData, load_run
from paceline.config import RunConfig, UserError
from paceline.machine import cores
from paceline.resolve import validate
from paceline.run.directory import RunDirectory, write_json, write_text
from paceline.run.provenance import cpu_model

PROFILE_RATE = 100  # samples a second: a few per cent of the speed
PROFILE_SECONDS = 900.0
PROFILE_TRAINING_SECONDS = 60.0
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float | None
    """None: not known."""
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
    ceilings = measure(config, _envs(config, data.workers), _cores(config, data))
    elsewhere = other_machine(data)
    parts = account(data, config, ceilings, elsewhere)
    text = page(data, parts, ceilings, elsewhere)
    write_json(
        folder / "throughput.json",
        {
            "command": command,
            "run": str(path),
            "machine": machine(RunDirectory(path)),
            "parts": [dataclasses.asdict(part) for part in parts],
            "ceilings": dataclasses.asdict(ceilings),
            "other_machine": elsewhere,
            "verdict": data.verdict,
        },
    )
    write_text(folder / "throughput.md", f"# Throughput\n\n```sh\n{command}\n```\n\n{text}")
    print(f"\n{text}\nwritten    {folder / 'throughput.md'} and .json")
    if profile:
        _flame(folder, data)
        _trace(folder, config, data)
    return 0


def account(run: RunData, config: RunConfig, ceilings: Ceilings, elsewhere: str = "") -> list[Part]:
    """By part, of one process: the mean worker, or the learner and (for env and act, of A3C also learn) the mean
    actor. `elsewhere`: see `other_machine`."""
    split, workers = run.time_split, max(1, run.workers)
    actors = run.summary.get("actor_time_split") or split
    wall = sum(split.values())
    steps = run.env_steps / workers
    gradients = config.algo == "a3c"  # which the actors compute
    learning = 1 if (actors is not split and not gradients) or run.engine == "rllib" else workers
    rows = learned_rows(run, config) / learning
    peak = ceilings.net_gflops if ceilings.conv_gflops is None else ceilings.conv_gflops
    shape = "matrix products of its size" if ceilings.conv_gflops is None else "convolutions"
    on_gpu = () if run.device == "cpu" else ("act", "learn", "copy *") if run.engine == "local" else ("learn", "copy *")

    def part(name: str, seconds: float | None, rate: str, ceiling: str, of: float | None) -> Part:
        why = "another machine" if elsewhere else f"on {run.device}" if name in on_gpu else ""
        if why and ceiling != "–":
            ceiling, of = f"– ({why})", None
        return Part(name, seconds, seconds / wall if wall and seconds else 0.0, rate, ceiling, of)

    def arithmetic(name: str, seconds: float, flop: float) -> Part:
        rate = flop / seconds / 1e9 if seconds else 0.0
        return part(name, seconds, f"{rate:,.1f} GFLOP/s", f"{peak:,.1f} GFLOP/s, {shape}", rate / peak)

    env, act = (actors.get(name, 0.0) for name in ("env", "act"))
    learn, sync = (actors if gradients else split).get("learn", 0.0), split.get("sync", 0.0)
    stepping = steps / env if env else 0.0
    alone = ceilings.env_steps_per_second
    found = [part("env", env, f"{stepping:,.0f} steps/s", f"{alone:,.0f} steps/s, stepping alone", stepping / alone)]
    found.append(arithmetic("act", act, steps * ceilings.forward_flop))
    # Each observation is written once, and read once for each time it is learned from.
    moved = (steps + rows) * ceilings.observation_bytes
    copy = None if elsewhere or "copy *" in on_gpu else moved / 1e9 / ceilings.copy_gbytes_per_second
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
    passes = run.column("epochs_done")  # fewer than asked for, where the KL limit ends them
    passes = np.where(np.isfinite(passes), passes, config.ppo.epochs if config.algo == "ppo" else 1)
    passes = passes + (config.impala.replay_ratio if config.algo == "impala" else 0.0)
    return float(np.diff(run.column("env_steps"), prepend=0.0) @ passes)


def other_machine(run: RunData) -> str:
    """What the run was made on, where that is not this machine, whose ceilings then say nothing of it."""
    here = (cpu_model(), cores())
    there = (run.provenance.get("cpu_model"), run.provenance.get("cores"))
    return "" if here == there else f"{there[0]}, {there[1]} cores, and this is {here[0]}, {here[1]} cores"


def page(run: RunData, parts: Sequence[Part], ceilings: Ceilings, elsewhere: str = "") -> str:
    rows = [
        [
            part.name,
            "–" if part.seconds is None else f"{part.seconds:,.2f}",
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
        "Seconds are those of one process: the mean worker, or the learner with, for env and act (of A3C also learn), "
        "its mean actor. "
        "\\* calculated, and inside env, act and learn. One row through the network forward: "
        f"{ceilings.forward_flop:,} FLOP, learning from it three times that; {ceilings.threads} thread(s); "
        f"matrix products of 1024 x 1024: {ceilings.gemm_gflops:,.0f} GFLOP/s. "
        "Log: rows, checkpoints, and what no other part has.",
    ]
    if elsewhere:
        lines.append(f"No ceilings: the run was made on {elsewhere}.")
    if run.verdict:
        lines.append(f"Verdict: {run.verdict}.")
    if run.problems:
        lines.append("To be known: " + "; ".join(run.problems))
    return "\n\n".join(lines) + "\n"


def _envs(config: RunConfig, workers: int) -> int:
    """Of one worker."""
    shared = config.algo in ("ppo", "a2c") and config.engine.scaling == "strong"
    return max(1, config.env.envs_per_worker // workers) if shared else max(1, config.env.envs_per_worker)


def _cores(config: RunConfig, run: RunData) -> int:
    """Of one process, as the engines share them out; 0: all."""
    from paceline.algo import ALGORITHMS
    from paceline.engine.rllib_settings import threads_of

    if run.engine == "local":
        return 0
    if run.engine == "rllib":
        return threads_of(config, run.workers)
    learners = 0 if ALGORITHMS[config.algo].schedule == "replicas" else config.engine.learners
    return max(1, cores() * run.nodes // (run.workers + learners))


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
    limit = min(max(run.train_seconds, 1.0), PROFILE_TRAINING_SECONDS)
    train += ["--max-time", f"{limit:.0f}s", "--out", str(folder), "--name", name, "--quiet"]
    words = [tool, "record", "-o", str(target), "-r", str(PROFILE_RATE), "--subprocesses", "--", *train]
    # A group of its own: what py-spy started ends with it.
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
    )
    try:
        said = " ".join(process.communicate(timeout=PROFILE_SECONDS)[0].split())[-300:]
    except subprocess.TimeoutExpired:
        print(f"flame      not drawn: still at work after {PROFILE_SECONDS:.0f} s; give a shorter run")
        return
    finally:
        _end_group(process)
    if target.is_file():
        print(f"flame      {target}")
    else:
        print(f"flame      not drawn: {shlex.join(words[:2])} said: {said}")


def _end_group(process: subprocess.Popen[str]) -> None:
    """Whatever is left of it: a run saves when it is asked to end, and is killed if that takes too long."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel still holds it
        process.wait(GRACE_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def _trace(folder: Path, config: RunConfig, run: RunData) -> None:
    """One iteration of one process, after one to warm up."""
    from torch.profiler import ProfilerActivity, profile

    from paceline.engine.replica import Replica

    replica = Replica(config, envs=_envs(config, run.workers), cores=_cores(config, run), on_device=False)
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
