"""The speed-up by more workers.

The peer of a run with many workers is the same run with one worker. The peer of one worker on Ray is the same run
without Ray, and that of the Grid'5000 job is RLlib with as many workers. They run in turns, as in ppo.py.
"""

from __future__ import annotations

from dataclasses import replace

import ppo
from measuring import Record, first_iteration_seconds, ours
from ppo import GRID5000, JOBS, PPO_CARTPOLE, Bench, Pairs, say
from tables import Row

_SMALL = "--set model.hidden=[64,64]"
_BURN = (
    "--preset none --algo ppo --env paceline/FixedCost-v0 --set 'env.kwargs={cost_seconds: 0.00005, busy: true}' "
    "--envs-per-worker 8 --set ppo.rollout_steps=128 --set ppo.epochs=4 --set ppo.minibatch_size=256 "
    f"{_SMALL} --engine ray --set engine.scaling=weak"
)
_SLEEP = (
    "--preset none --env paceline/FixedCost-v0 --set 'env.kwargs={cost_seconds: 0.005}' --envs-per-worker 1 "
    "--engine ray"
)
_SLEEP_ALGO = {
    "ppo": "--algo ppo --set ppo.rollout_steps=128 --set ppo.epochs=4 --set ppo.minibatch_size=128 "
    f"--set engine.scaling=weak {_SMALL}",
    "impala": f"--algo impala --set impala.rollout_steps=128 --set impala.batch_size=512 {_SMALL}",
}
_UNEVEN = (
    "--preset none --env paceline/FixedCost-v0 --set 'env.kwargs={cost_seconds: 0.001, cost_max_seconds: 0.01}' "
    "--envs-per-worker 1 --engine ray --workers 8"
)
# Eight environments per worker. 257 slots each: the slot after an episode is its reset, and ten iterations must hold
# 40,000 real steps.
_GRID_OF_TWO = GRID5000.replace("--envs-per-worker 4", "--envs-per-worker 16").replace("steps=1028", "steps=257")
JOBS["grid5000 x 2"] = replace(
    JOBS["grid5000"],
    peer="peer_rllib.py --iterations {size} --env-runners 2",
    ours=f"{PPO_CARTPOLE} {_GRID_OF_TWO} --iterations {{size}} --workers 2",
)
START_LIMIT_SECONDS = 12.0
SLEEPING_STEPS = 200.0  # steps per second of an environment that sleeps 5 ms per step


def pairs(bench: Bench, name: str, base: str, more: str, seeds: int) -> Pairs:
    """Run `base` and `more` in turns."""
    found: Pairs = []
    for seed in range(1, seeds + 1):
        pair: list[Record] = []
        for words in (base, more):
            record = {**ours(words, seed, 600, bench.runs_directory), "job": name}
            say(f"{name}, seed {seed}: {record['steps_per_second']:,.0f} steps/s: {words}")
            pair.append(record)
        found.append((pair[0], pair[1]))
    bench.records[name] = [record for pair in found for record in pair]
    return found


def faster(bench: Bench, name: str, base: str, more: str, factor: float) -> list[Row]:
    found = pairs(bench, name, base, more, bench.repeats)
    return [bench.row(name, "env steps/s", "steps_per_second", found, factor, better="higher", digits=0)]


def two_workers(bench: Bench) -> list[Row]:
    size = 60_000 if bench.quick else 200_000
    base, more = f"{_BURN} --workers 1 --total-steps {size}", f"{_BURN} --workers 2 --total-steps {2 * size}"
    return faster(bench, "two workers", base, more, 1.75)


def grid5000(bench: Bench) -> list[Row]:
    return ppo.grid5000(bench, "grid5000 x 2", factor=10)


def sleeping(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for algo, factor in (("impala", 28.0), ("ppo", 24.0)):
        words = f"{_SLEEP} {_SLEEP_ALGO[algo]}"
        iterations = 4 if bench.quick else 30
        base = f"{words} --workers 1 --total-steps {128 * iterations}"
        more = f"{words} --workers 32 --total-steps {32 * 128 * iterations}"
        found = pairs(bench, f"sleeping, {algo}", base, more, bench.repeats)
        ones = [record["steps_per_second"] / SLEEPING_STEPS for record, _ in found]
        name = f"sleeping, {algo}"
        rows.append(Row(name, "one worker, of 200 steps/s", ones, limit=0.9, better="higher", digits=3))
        rows.append(bench.row(name, "env steps/s", "steps_per_second", found, factor, better="higher", digits=0))
    return rows


def one_worker(bench: Bench) -> list[Row]:
    words = "--algo ppo --env CartPole-v1 --threads 1 --total-steps " + ("50000" if bench.quick else "200000")
    return faster(bench, "one worker", f"{words} --engine local", f"{words} --engine ray --workers 1", 0.8)


def uneven(bench: Bench) -> list[Row]:
    steps = 8 * 128 * (6 if bench.quick else 30)
    words = f"{_UNEVEN} --total-steps {steps}"
    return faster(bench, "uneven steps", f"{words} {_SLEEP_ALGO['ppo']}", f"{words} {_SLEEP_ALGO['impala']}", 1.5)


def start(bench: Bench) -> list[Row]:
    seconds = [
        first_iteration_seconds(bench.runs_directory, "--engine", "ray", "--workers", "2") for _ in range(bench.repeats)
    ]
    return [Row("start", "2 workers on Ray, first iteration done, s", seconds, limit=START_LIMIT_SECONDS, digits=2)]


def sixty_four(bench: Bench) -> list[Row]:
    """64 workers start, train and stop; memory per worker."""
    words = f"{_SLEEP} {_SLEEP_ALGO['impala']} --workers 64 --total-steps {64 * 128 * (2 if bench.quick else 8)}"
    record = {**ours(words, 1, 600, bench.runs_directory), "job": "64 workers"}
    bench.records["64 workers"] = [record]
    say(f"64 workers: {record['steps_per_second']:,.0f} steps/s, {record['worker_memory_bytes'] / 1e6:.0f} MB a worker")
    return [
        Row("64 workers", "env steps/s", [record["steps_per_second"]], limit=0.0, better="higher", digits=0),
        Row("64 workers", "memory of a worker, MB", [record["worker_memory_bytes"] / 1e6], limit=400, digits=0),
    ]
