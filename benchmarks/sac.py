"""SAC and TD3 compared with Stable-Baselines3 at its best number of threads, and with the arithmetic of both cores.

The peer with one thread, the peer with two, and paceline run in turns, as in ppo.py. In each round the faster peer
counts. The floor is the time of the matrix products of all updates at the rate that two threads reach together, each
with the products of a hidden layer.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from measuring import BenchError, Record, ours, peer
from ppo import Bench, say
from tables import Row

OBSERVATIONS, ACTIONS, HIDDEN, BATCH = 17, 6, (256, 256), 256  # HalfCheetah-v5
STARTS = 256  # steps with random actions, without updates
TIMES_FLOOR = 1.6
OURS = (
    "--preset none --algo {algo} --env HalfCheetah-v5 --envs-per-worker {envs} --set {algo}.updates_per_step={ratio} "
    f"--set model.hidden=[{HIDDEN[0]},{HIDDEN[1]}] --set model.activation=relu --set {{algo}}.batch_size={BATCH} "
    f"--set {{algo}}.buffer_size=100000 --set {{algo}}.learning_starts={STARTS} --set {{algo}}.rounds={{rounds}} "
    "--total-steps {steps}"
)
PRODUCTS = """
import sys, time, torch
torch.set_num_threads(1)
a, b, c = torch.randn({batch}, {width}), torch.randn({width}, {width}), torch.empty({batch}, {width})
best = 1e9
sys.stdin.readline()
for _ in range(60):
    start = time.perf_counter()
    for _ in range(60):
        torch.mm(a, b, out=c)
    best = min(best, (time.perf_counter() - start) / 60)
print(2 * {batch} * {width} * {width} / best / 1e9)
"""


@dataclass(frozen=True)
class Job:
    peer: str
    algo: str
    envs: int
    factor: float
    rounds: int
    updates: int = 1000
    quick_updates: int = 60


JOBS = {
    "sac": Job("sac", "sac", 1, factor=2.5, rounds=256),
    "td3": Job("td3", "td3", 1, factor=1.8, rounds=256),
    "sac, 8 envs": Job("sac-wide", "sac", 8, factor=3.0, rounds=32),
}


def products(inputs: int, outputs: int) -> list[int]:
    """Multiplications of each layer of a network, for one row."""
    return [a * b for a, b in pairwise([inputs, *HIDDEN, outputs])]


def flop_per_update(algo: str) -> float:
    """Of the matrix products of an update: 0.577 GFLOP for SAC, 0.413 for TD3 on average."""
    critic, outputs = products(OBSERVATIONS + ACTIONS, 1), 2 * ACTIONS if algo == "sac" else ACTIONS
    actor = products(OBSERVATIONS, outputs)
    through = sum(critic[1:]) + ACTIONS * HIDDEN[0]  # the gradient of a value with respect to the action
    learn_actor, learn_critic = 3 * sum(actor) - actor[0], 3 * sum(critic) - critic[0]
    judge = sum(critic)
    if algo == "sac":  # both critics judge the actor's actions
        rows = sum(actor) + 2 * judge + 2 * learn_critic + learn_actor + 2 * (judge + through)
    else:  # the first critic does, in every second update
        rows = sum(actor) + 2 * judge + 2 * learn_critic + (learn_actor + judge + through) / 2
    return 2.0 * BATCH * rows


def gflops_of_both_cores() -> float:
    """Of two processes at once, with a thread each: two cores of a virtual machine may share one."""
    script = PRODUCTS.format(batch=BATCH, width=HIDDEN[0])
    pair = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for process in pair:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(float(process.communicate(timeout=60)[0]) for process in pair)
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"the matrix products could not be measured: {error}") from None
    finally:
        for process in pair:
            process.kill()
            process.wait(20)


def updates_per_second(record: Record) -> float:
    """With the steps of the environments that belong to them; the steps before the first update take next to no
    time, and would count in steps per second."""
    return float(record["optimizer_steps"] / record["train_seconds"])


def _compare(bench: Bench, name: str) -> list[Row]:
    job = JOBS[name]
    updates = job.quick_updates if bench.quick else job.updates
    steps = STARTS + updates * job.envs
    mine: list[Record] = []
    theirs: list[list[Record]] = []
    arguments = OURS.format(algo=job.algo, envs=job.envs, ratio=1 / job.envs, rounds=job.rounds, steps=steps)
    rate = gflops_of_both_cores()
    bench.gflops = rate
    for seed in range(1, bench.repeats + 1):
        with_threads = [
            {**peer(f"peer_sb3_sac.py {job.peer} --steps {steps} --threads {count}", seed, 300), "job": name}
            for count in (1, 2)
        ]
        theirs.append(with_threads)
        mine.append({**ours(arguments, seed, 300, bench.runs_directory), "job": name})
        speeds = ", ".join(f"{updates_per_second(record):.0f}" for record in (*with_threads, mine[-1]))
        say(f"{name}, seed {seed}: {speeds} updates/s (peer with 1 and 2 threads, ours)")
    bench.records[name] = [record for pair in theirs for record in pair] + mine
    best = [max(map(updates_per_second, pair)) for pair in theirs]
    own = [updates_per_second(record) for record in mine]
    floor = [record["optimizer_steps"] * flop_per_update(job.algo) / (rate * 1e9) for record in mine]
    times = [record["train_seconds"] / least for record, least in zip(mine, floor, strict=True)]
    problems = [
        f"{record['system']}, seed {record['seed']}: {record['optimizer_steps']} of {updates} optimizer steps"
        for record in (*(record for pair in theirs for record in pair), *mine)
        if record["optimizer_steps"] < updates
    ]
    about = {"floor_seconds": median(floor), "times_floor": times, "problems": problems}
    speed = Row(
        name, "updates/s, each with its env steps", own, best, better="higher", factor=job.factor, digits=0, **about
    )
    if job.envs > 1:
        return [speed]
    return [speed, Row(name, "training, times the floor", [median(times)], limit=TIMES_FLOOR, digits=2)]


def sac(bench: Bench) -> list[Row]:
    return _compare(bench, "sac")


def td3(bench: Bench) -> list[Row]:
    return _compare(bench, "td3")


def wide(bench: Bench) -> list[Row]:
    return _compare(bench, "sac, 8 envs")
