"""Procgen on the CPU: how much of what the parts allow a whole run reaches. Writes results/procgen.{md,json}.

Stepping, acting and learning are measured alone, in one process and with the threads of a run: then no run whose parts
take turns can be faster than 1 / (epochs / learn + 1 / act + 1 / step). Of the IMPALA-CNN learning alone is the bound.
Runs and parts take turns, and each figure is a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from measuring import HERE, machine, ours
from paceline.engine.replica import Replica
from paceline.model.policy import Policy
from paceline.resolve import resolve_tree
from run import facts_of, say

SHARE = 0.8
MEMORY_BYTES = 2.5e9
_NATURE = "--algo ppo --env coinrun --preset procgen-cpu"
_IMPALA = f"{_NATURE} --set model.cnn=impala --set model.hidden=[256] --set model.shared=true --set ppo.epochs=3"
JOBS: dict[str, tuple[str, dict[str, Any], int]] = {
    "nature": (_NATURE, {}, 5),
    "impala": (
        _IMPALA,
        {"model": {"cnn": "impala", "hidden": [256], "shared": True}, "ppo": {"epochs": 3}},
        2,
    ),
}


def rate(work: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows a second: the median of calls for so long, after one to warm up."""
    work()
    took: list[float] = []
    while sum(took) < seconds or len(took) < 3:
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return rows / statistics.median(took)


def parts(settings: dict[str, Any], seconds: float) -> dict[str, float]:
    config, _ = resolve_tree({"env": "coinrun", **settings}, preset="procgen-cpu")
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
        half = len(frames) // len(replica.envs)
        for k in range(len(replica.envs)):
            policy.act(frames[k * half : (k + 1) * half], policy.head.noise(rng, (half,)))

    x = frames[rng.integers(0, len(frames), minibatch)]
    found = {"step": rate(step, envs, seconds), "act": rate(act, envs, seconds)}
    found["learn"] = rate(lambda: _learn(policy, x), minibatch, 2 * seconds)
    replica.close()
    return found | {"epochs": config.ppo.epochs}


def _learn(policy: Policy, x: Any) -> None:
    """Forward, the simplest loss there is, backward."""
    for part in policy.passes(len(x)):
        policy.learn(x[part], lambda out: out * np.float32(1e-3), lambda value: value, add=part.start > 0)


def measure(name: str, repeats: int, seconds: float, runs: Path) -> dict[str, Any]:
    words, settings, iterations = JOBS[name]
    slots = 32 * 128
    rows = []
    for seed in range(1, repeats + 1):
        alone = parts(settings, seconds)
        bound = 1 / (alone["epochs"] / alone["learn"] + 1 / alone["act"] + 1 / alone["step"])
        if name == "impala":
            bound = alone["learn"] / alone["epochs"]
        record = ours(f"{words} --total-steps {slots * iterations}", seed, 900, runs)
        row = {**alone, "bound": bound, "run": record["steps_per_second"], "memory": record["peak_memory_bytes"]}
        say(f"{name}, seed {seed}: " + ", ".join(f"{k} {v:,.0f}" for k, v in row.items()))
        rows.append({**row, "share": row["run"] / bound, "command": record["command"]})
    middle: dict[str, Any] = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "command"}
    return {"job": name, **middle, "command": rows[0]["command"], "rows": rows}


def table(found: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    here = facts["machine"]
    where = f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB; load before: {here['load_before']}"
    lines = ["# Procgen on the CPU", "", f"{facts['date']}, commit {facts['commit']}. {where}.", ""]
    lines += ["| network | step | act | learn, one pass | bound | run | share of the bound | bar | memory |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in found:
        verdict = "pass" if row["share"] >= SHARE and row["memory"] < MEMORY_BYTES else "**FAIL**"
        numbers = " | ".join(f"{row[key]:,.0f}" for key in ("step", "act", "learn", "bound", "run"))
        lines.append(
            f"| {row['job']} | {numbers} | {row['share']:.2f} | ≥ {SHARE} {verdict} | {row['memory'] / 1e9:.2f} GB |"
        )
    lines += [
        "",
        "Rows a second; parts alone, then whole runs of a few iterations. The bound of `nature` is its parts in",
    ]
    lines += ["turn, that of `impala` learning alone.", "", "```sh", *(row["command"] for row in found), "```", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Procgen on the CPU, against what its parts allow.")
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each part")
    options = parser.parse_args()
    facts = facts_of("benchmarks/procgen.py", machine(), {})
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(name, options.repeats, options.seconds, Path(folder)) for name in options.only]
    text = table(found, facts)
    (HERE / "results" / "procgen.md").write_text(text)
    (HERE / "results" / "procgen.json").write_text(json.dumps({"facts": facts, "jobs": found}, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
