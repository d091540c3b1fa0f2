"""Procgen on the CPU: how much of what the parts allow a whole run reaches. Writes results/procgen.{md,json}.

Stepping, acting and learning are measured alone, with the threads of a run, before and after each run. A run whose
parts take turns is no faster than 1 / (epochs / learn + 1 / act + 1 / step); of the IMPALA-CNN, learning alone is the
bound. What is measured takes the place of what the results held of the same job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from measuring import HERE, ROOT, Record, machine, ours
from paceline.config import RunConfig
from paceline.engine.replica import Replica
from paceline.model.policy import Policy
from paceline.resolve import parse_sets, resolve_tree
from run import facts_of, say
from tables import Row, number, spread

SHARE = 0.8
MEMORY_BYTES = 2.5e9
_SETS = {
    "nature": [],
    "impala": ["model.cnn=impala", "model.hidden=[256]", "model.shared=true", "ppo.epochs=3"],
}
ITERATIONS = {"nature": 10, "impala": 3}
_CPU = "--algo ppo --env coinrun --device cpu"
PARTS = ("step", "act", "learn")


def rate(work: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows a second: the median of calls for so long, after one to warm up."""
    work()
    took: list[float] = []
    while sum(took) < seconds or len(took) < 3:
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return rows / statistics.median(took)


def parts(config: RunConfig, seconds: float) -> dict[str, float]:
    """Each alone: all environments step, the network acts for all of them, and learns from one minibatch."""
    envs, minibatch = config.env.envs_per_worker, config.ppo.minibatch_size
    replica = Replica(config, envs=envs)
    policy, rng = replica.policy, np.random.default_rng(0)
    frames = np.concatenate([env.reset() for env in replica.envs])
    actions = [rng.integers(0, 15, (env.num_envs, 1)) for env in replica.envs]

    def step() -> None:
        for env, action in zip(replica.envs, actions, strict=True):
            env.send(action)
        for env in replica.envs:
            env.receive()

    def act() -> None:
        policy.act(frames, policy.head.noise(rng, (envs,)))

    x = frames[rng.integers(0, len(frames), minibatch)]
    found = {"step": rate(step, envs, seconds), "act": rate(act, envs, seconds)}
    found["learn"] = rate(lambda: _learn(policy, x), minibatch, 2 * seconds)
    replica.close()
    return found


def _learn(policy: Policy, x: Any) -> None:
    """Forward, the simplest loss there is, backward."""
    for part in policy.passes(len(x)):
        policy.learn(x[part], lambda out: out * np.float32(1e-3), lambda value: value, add=part.start > 0)


def bound_of(name: str, epochs: int, rates: dict[str, float]) -> float:
    learning = epochs / rates["learn"]
    return 1 / learning if name == "impala" else 1 / (learning + 1 / rates["act"] + 1 / rates["step"])


def speed(name: str, repeats: int, seconds: float, runs: Path) -> dict[str, Any]:
    sets = _SETS[name]
    config, _ = resolve_tree(parse_sets([*sets, "engine.device=cpu"], {"env": {"id": "coinrun"}}), preset="procgen-cpu")
    words = " ".join([f"{_CPU} --preset procgen-cpu --iterations {ITERATIONS[name]}", *(f"--set {s}" for s in sets)])
    alone, records = [parts(config, seconds)], []
    for seed in range(1, repeats + 1):
        records.append(ours(words, seed, 900, runs))
        alone.append(parts(config, seconds))
        say(
            f"{name}, seed {seed}: {records[-1]['steps_per_second']:,.0f} steps/s; "
            + ", ".join(f"{k} {v:,.0f}" for k, v in alone[-1].items())
        )
    around = [{part: (a[part] + b[part]) / 2 for part in PARTS} for a, b in pairwise(alone)]
    bounds = [bound_of(name, config.ppo.epochs, rates) for rates in around]
    return {"parts": alone, "bounds": bounds, "runs": records}


def memory(runs: Path) -> dict[str, Any]:
    """The rollout of the Procgen paper, with its network."""
    record = ours(f"{_CPU} --preset procgen-paper --iterations 1", 1, 900, runs)
    say(f"memory: {record['peak_memory_bytes'] / 1e9:.2f} GB at most, {record['steps_per_second']:,.0f} steps/s")
    return {"runs": [record]}


JOBS: dict[str, Callable[[int, float, Path], dict[str, Any]]] = {
    "nature": lambda repeats, seconds, runs: speed("nature", repeats, seconds, runs),
    "impala": lambda repeats, seconds, runs: speed("impala", repeats, seconds, runs),
    "memory": lambda repeats, seconds, runs: memory(runs),
}


def row_of(name: str, found: dict[str, Any]) -> Row:
    records: list[Record] = found["runs"]
    if name == "memory":
        most = [record["peak_memory_bytes"] / 1e9 for record in records]
        return Row("memory", "64 x 256 steps, most, GB", most, limit=MEMORY_BYTES / 1e9, digits=2)
    speeds = [record["steps_per_second"] for record in records]
    measure = "env steps/s"
    return Row(name, measure, speeds, peer=found["bounds"], factor=SHARE, better="higher", digits=0)


def page(jobs: dict[str, dict[str, Any]]) -> str:
    lines = ["# Procgen on the CPU", ""]
    lines += [
        "| job | measure | bound | run | share (worst) | bar | verdict | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in jobs.items():
        row = row_of(name, found)
        share = f"{row.ratio:.2f} ({row.worst_ratio:.2f})" if row.peer else "–"
        bar = f"≥ {SHARE:g}" if row.peer else row.bar
        cells = [name, row.measure, spread(row.peer, row.digits), spread(row.ours, row.digits), share, bar]
        lines.append(f"| {' | '.join([*cells, 'pass' if row.passed else '**FAIL**', found['facts']['date']])} |")
    lines += ["", "Median (least–most). The parts alone, rows a second:", ""]
    lines += ["| job | step | act | learn, one pass | memory of a run, GB |", "|---|---|---|---|---|"]
    for name, found in jobs.items():
        rates = [spread([alone[part] for alone in found.get("parts", [])], 0) for part in PARTS]
        most = max(record["peak_memory_bytes"] for record in found["runs"])
        lines.append(f"| {' | '.join([name, *rates, number(most / 1e9, 2)])} |")
    lines += [
        "",
        "The bound of `nature` is its parts in turn, that of `impala` learning alone. Runs and parts take turns.",
        "",
    ]
    for name, found in jobs.items():
        facts, here = found["facts"], found["facts"]["machine"]
        where = f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB; load before: {here['load_before']}"
        lines.append(f"- `{name}`: commit {facts['commit']}. {where}. Made by `{facts['command']}`.")
    commands = dict.fromkeys(found["runs"][0]["command"] for found in jobs.values())
    return "\n".join([*lines, "", "```sh", *commands, "```", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description="Procgen on the CPU, against what its parts allow.")
    parser.add_argument(
        "--only", nargs="+", choices=list(JOBS), default=list(JOBS), metavar="JOB", help=", ".join(JOBS)
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs of each job (default: 2)")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each part (default: 4)")
    options = parser.parse_args()
    path = HERE / "results" / "procgen.json"
    jobs: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for name in options.only:
            facts = facts_of("benchmarks/procgen.py", machine(), {})
            jobs[name] = {"facts": facts, **JOBS[name](options.repeats, options.seconds, Path(folder))}
    jobs = {name: jobs[name] for name in JOBS if name in jobs}
    path.with_suffix(".md").write_text(page(jobs))
    path.write_text(json.dumps(jobs, indent=1) + "\n")
    print(page(jobs))
    print(f"Written to {path.with_suffix('.md').relative_to(ROOT)} and {path.name}.")
    return int(not all(row_of(name, found).passed for name, found in jobs.items()))


if __name__ == "__main__":
    sys.exit(main())
