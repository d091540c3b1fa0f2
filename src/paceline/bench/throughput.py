"""`paceline bench throughput`: where the time of one run goes, compared with the ceilings of this machine.

It makes an ordinary run, or takes an existing one. `--profile` adds a flame graph of a second run (py-spy) and a trace
of one iteration (torch).
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
from paceline.bench.runner import Interrupts, Screen, failure_reason, make_folder, run_words
from paceline.config import RunConfig, UserError, algorithm_name
from paceline.config.resolve import validate
from paceline.machine import cores
from paceline.results.runs import RunData, load_run
from paceline.results.text import UNKNOWN, count, machine_lines, percent, table
from paceline.run.directory import RunDirectory, missing_folders, remove_empty, write_json, write_text
from paceline.run.provenance import cpu_model

BAD_INPUT = 2
PROFILE_RATE = 100  # samples per second; costs a few percent of the speed
PROFILE_SECONDS = 900.0
PROFILE_TRAINING_SECONDS = 60.0
GRACE_SECONDS = 10.0


class ThroughputError(RuntimeError):
    """The run that was to be measured failed."""


@dataclass(frozen=True)
class TimePart:
    name: str
    seconds: float | None
    """None: unknown."""
    share: float
    """Share of the wall time of one process."""
    rate: str
    """The rate it achieved."""
    ceiling: str
    of_ceiling: float | None


def run_throughput(
    run: str | None, words: Sequence[str], *, out: str | None = None, profile: bool = False, command: str = ""
) -> int:
    """Print and write `throughput.md` and `.json`; return the exit status."""
    folder = Path(out or "runs/throughput").expanduser()
    if run:
        RunDirectory.open(run)
    path = Path(run).expanduser() if run else _train(folder, words)
    make_folder(folder)
    data = load_run(path)
    if not data.usable:
        raise UserError(f"{path}: no rows to measure ({'; '.join(data.problems) or data.state})")
    config = validate(data.config)
    if not config.algorithm.native:
        raise UserError(f"{path}: {config.algo} is available only in RLlib, so paceline does not know its network")
    ceilings = measure(config, _envs(config, data.workers), _cores(config, data))
    elsewhere = other_machine(data)
    parts = account(data, config, ceilings, elsewhere)
    text = page(data, parts, ceilings, elsewhere)
    write_json(
        folder / "throughput.json",
        {
            "command": command,
            "run": str(path),
            "machine": data.machine,
            "parts": [dataclasses.asdict(part) for part in parts],
            "ceilings": dataclasses.asdict(ceilings),
            "other_machine": elsewhere,
            "verdict": data.verdict,
        },
    )
    write_text(folder / "throughput.md", f"# Throughput\n\n```sh\n{command}\n```\n\n{text}")
    print(f"\n{text}\nwritten    {folder / 'throughput.md'} and .json")
    if profile:
        _flame_graph(folder, data)
        _trace(folder, config, data)
    return 0


def account(run: RunData, config: RunConfig, ceilings: Ceilings, elsewhere: str = "") -> list[TimePart]:
    """The parts of the time of one process: the mean worker, or the learner with the mean actor for env and act (for
    A3C also learn). `elsewhere`: see `other_machine`."""
    split, workers = run.time_split, max(1, run.workers)
    actors = run.summary.get("actor_time_split") or split
    wall = sum(split.values())
    steps = run.env_steps / workers
    gradients = config.algorithm.sharing == "gradients"  # which the actors compute
    learning = 1 if (actors is not split and not gradients) or run.engine == "rllib" else workers
    rows = learned_rows(run, config) / learning
    peak = ceilings.net_gflops if ceilings.conv_gflops is None else ceilings.conv_gflops
    shape = "matrix products of its size" if ceilings.conv_gflops is None else "convolutions"
    on_gpu = () if run.device == "cpu" else ("act", "learn", "copy *") if run.engine == "local" else ("learn", "copy *")

    def part(name: str, seconds: float | None, rate: str, ceiling: str, of: float | None) -> TimePart:
        why = "another machine" if elsewhere else f"on {run.device}" if name in on_gpu else ""
        if why and ceiling != "–":
            ceiling, of = f"– ({why})", None
        return TimePart(name, seconds, seconds / wall if wall and seconds else 0.0, rate, ceiling, of)

    def arithmetic(name: str, seconds: float, flop: float) -> TimePart:
        rate = flop / seconds / 1e9 if seconds else 0.0
        return part(name, seconds, f"{rate:,.1f} GFLOP/s", f"{peak:,.1f} GFLOP/s, {shape}", rate / peak)

    env, act = (actors.get(name, 0.0) for name in ("env", "act"))
    learn, sync = (actors if gradients else split).get("learn", 0.0), split.get("sync", 0.0)
    stepping = steps / env if env else 0.0
    alone = ceilings.env_steps_per_second
    found = [part("env", env, f"{stepping:,.0f} steps/s", f"{alone:,.0f} steps/s, stepping alone", stepping / alone)]
    found.append(arithmetic("act", act, steps * ceilings.forward_flop))
    # Each observation is written once, and read each time it is learned from.
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
    """Rows that went through the network in learning, counted once per pass."""
    hyper = config.hyper
    if config.algorithm.sharing == "replay":
        trained = run.last("steps_trained")
        steps = float(run.summary.get("optimizer_steps") or 0)
        return trained if trained == trained else steps * hyper.rows_per_step(hyper.rollout_steps)
    passes = run.column("epochs_done")  # the KL limit may end them early
    passes = np.where(np.isfinite(passes), passes + hyper.replayed(), hyper.passes() + hyper.replayed())
    return float(np.diff(run.column("env_steps"), prepend=0.0) @ passes)


def other_machine(run: RunData) -> str:
    """The machine of the run if it is not this one, whose ceilings do not apply then; else empty."""
    here = (cpu_model(), cores())
    there = (run.provenance.get("cpu_model"), run.provenance.get("cores"))
    return "" if here == there else f"{there[0]}, {there[1]} cores; this machine is {here[0]}, {here[1]} cores"


def page(run: RunData, parts: Sequence[TimePart], ceilings: Ceilings, elsewhere: str = "") -> str:
    rows = [
        [
            part.name,
            UNKNOWN if part.seconds is None else f"{part.seconds:,.2f}",
            percent(part.share),
            part.rate,
            part.ceiling,
            percent(part.of_ceiling),
        ]
        for part in parts
    ]
    which = f"{algorithm_name(run.algo)} on {run.env}, engine {run.engine}, {count(run.workers, 'worker')}"
    lines = [
        f"`{run.path}`: {which}: {run.steps_per_second:,.0f} steps/s, {run.env_steps:,} steps.",
        *machine_lines([run.machine]),
        table(["part", "seconds", "of the time", "achieved", "ceiling of this machine", "of the ceiling"], rows),
        "Seconds are those of one process: the mean worker, or the learner, with its mean actor for env and act (for "
        "A3C also learn). \\* Calculated; it is part of env, act and learn. A forward pass of the network takes "
        f"{ceilings.forward_flop:,} FLOP per row, learning three times that; {count(ceilings.threads, 'thread')}; "
        f"matrix products of 1024 x 1024: {ceilings.gemm_gflops:,.0f} GFLOP/s. "
        "Log: rows, checkpoints, and the time that is in no other part.",
    ]
    if elsewhere:
        lines.append(f"No ceilings: the run was made on {elsewhere}.")
    if run.verdict:
        lines.append(f"Verdict: {run.verdict}.")
    if run.problems:
        lines.append("Remarks: " + "; ".join(run.problems))
    return "\n\n".join(lines) + "\n"


def _envs(config: RunConfig, workers: int) -> int:
    """Environments of one worker."""
    shared = config.algorithm.sharing == "replicas" and config.engine.scaling == "strong"
    return max(1, config.env.envs_per_worker // workers) if shared else max(1, config.env.envs_per_worker)


def _cores(config: RunConfig, run: RunData) -> int:
    """Cores of one process, as the engines assign them; 0: all."""
    from paceline.engines.rllib.settings import threads_of

    if run.engine == "local":
        return 0
    if run.engine == "rllib":
        return threads_of(config, run.workers)
    learners = 0 if config.algorithm.sharing == "replicas" else config.engine.learners
    return max(1, cores() * run.nodes // (run.workers + learners))


def _run_name() -> str:
    return time.strftime("run-%Y%m%d-%H%M%S")


def _train(folder: Path, words: Sequence[str]) -> Path:
    """Make an ordinary run. UserError if its settings are refused, which leaves no files."""
    name, made = _run_name(), missing_folders(folder / "logs")
    log = folder / "logs" / f"{name}.log"
    make_folder(folder)
    screen, interrupts = Screen(1), Interrupts()
    with interrupts.installed():
        screen.begin(1, name)
        train = ["train", *words, "--out", str(folder), "--name", name]
        code, lines = run_words(train, log, screen, interrupts)
        if code != BAD_INPUT:
            screen.end("done" if code == 0 else "ended")
    if code == BAD_INPUT:
        log.unlink()
        remove_empty(made)
        raise UserError(failure_reason(code, lines))
    if code:
        raise ThroughputError(f"the run {folder / name} ended with exit code {code}: {failure_reason(code, lines)}")
    return folder / name


def _flame_graph(folder: Path, run: RunData) -> None:
    tool = shutil.which("py-spy", path=None) or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        print("flame      not drawn: py-spy is not installed; pip install py-spy")
        return
    target, name = folder / "flame.svg", f"{_run_name()}-profiled"
    train = [sys.executable, "-m", "paceline.commands.main", "train", "--config", str(run.path / "config.yaml")]
    limit = min(max(run.train_seconds, 1.0), PROFILE_TRAINING_SECONDS)
    train += ["--max-time", f"{limit:.0f}s", "--out", str(folder), "--name", name, "--quiet"]
    words = [tool, "record", "-o", str(target), "-r", str(PROFILE_RATE), "--subprocesses", "--", *train]
    # Its own process group, so that what py-spy started ends with it.
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
    )
    try:
        output = " ".join(process.communicate(timeout=PROFILE_SECONDS)[0].split())[-300:]
    except subprocess.TimeoutExpired:
        print(f"flame      not drawn: still running after {PROFILE_SECONDS:.0f} s; give a shorter run")
        return
    finally:
        _end_group(process)
    if target.is_file():
        print(f"flame      {target}")
    else:
        print(f"flame      not drawn: {shlex.join(words[:2])} printed: {output}")


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ask what is left of the process group to save and stop, and kill it if that takes too long."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in the kernel
        process.wait(GRACE_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def _trace(folder: Path, config: RunConfig, run: RunData) -> None:
    """Trace one iteration of one process, after a warm-up iteration."""
    from torch.profiler import ProfilerActivity, profile

    from paceline.engines.actor_learner import ActorLearner

    replica = ActorLearner(config, envs=_envs(config, run.workers), cores=_cores(config, run), on_device=False)
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
