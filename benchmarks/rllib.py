"""The overhead of `--engine rllib`: the Grid'5000 job by it and by RLlib alone, one iteration of each in turns.

Machines are noisy over minutes, so both run in this process and on one Ray, each with its own env runner. An iteration
of ours includes everything from one call of `train()` to the next: metrics, episodes, files and checkpoints. The number
of RLlib's minibatches depends on where episodes were cut, so times are compared per optimizer step. The first iteration
of each is a warm-up and does not count.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline
from measuring import HERE
from paceline.config.resolve import merge, read_file
from paceline.engines.rllib.rllib_engine import RllibEngine
from peer_rllib import settings
from ppo import Bench, say
from tables import Row

SHARE = 0.5  # CPUs per env runner, so that both fit into a Ray made for one
SEED = 1
MOST_OVERHEAD = 1.05


class Turns:
    """Replaces the engine's `iterate`: one iteration of the script, then one of the engine."""

    def __init__(self, folder: Path) -> None:
        self.script: list[dict[str, float]] = []
        self.ours: list[dict[str, float]] = []
        self._folder = folder
        self._algorithm: Any = None
        self._steps = 0
        self._began: tuple[float, int] | None = None
        self._own, self._close = RllibEngine.iterate, RllibEngine.close
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def end_ours(self) -> None:
        if self._began is not None:
            began, steps = self._began
            self.ours.append({"seconds": time.perf_counter() - began, "optimizer_steps": self._steps - steps})
            self._began = None

    def iterate(self, engine: RllibEngine, *arguments: Any) -> Any:
        self.end_ours()
        if self._algorithm is None:
            theirs = settings(SEED, 1, self._folder / "returns.txt").env_runners(num_cpus_per_env_runner=SHARE)
            self._algorithm = theirs.build_algo()
        began, steps = time.perf_counter(), self._steps
        result = self._algorithm.train()
        seconds = time.perf_counter() - began
        sampled = int(result["env_runners"]["num_env_steps_sampled"])
        self.script.append({"seconds": seconds, "optimizer_steps": self._steps - steps, "env_steps": sampled})
        self._began = time.perf_counter(), self._steps
        return self._own(engine, *arguments)

    def close(self, engine: RllibEngine) -> None:
        """Stopping Ray is not part of an iteration."""
        self.end_ours()
        self._close(engine)


def measure(iterations: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(Path(folder))
        RllibEngine.iterate = lambda engine, *a: turns.iterate(engine, *a)  # type: ignore[method-assign]
        RllibEngine.close = lambda engine: turns.close(engine)  # type: ignore[assignment, method-assign]
        engine = {"name": "rllib", "workers": 1, "threads": 1, "rllib": {"num_cpus_per_env_runner": SHARE}}
        changes = {"engine": engine, "stop": {"iterations": iterations}, "out": folder, "name": "run", "seed": SEED}
        run = paceline.train(merge(read_file(HERE.parent / "configs/grid5000.yaml"), changes))
        rows = run.read_metrics()
    before = 0
    for own, row in zip(turns.ours, rows, strict=True):
        own["env_steps"], before = row["env_steps"] - before, row["env_steps"]
    return turns.ours, turns.script


def overhead(bench: Bench) -> list[Row]:
    turns = zip(*measure(3 if bench.quick else 12), strict=True)
    problems, theirs, mine = [], [], []
    for a, b in turns:
        if a["env_steps"] != b["env_steps"] or abs(a["optimizer_steps"] / b["optimizer_steps"] - 1) > 0.05:
            problems.append(f"not the same work: {a} and {b}")
        mine.append(1000 * a["seconds"] / a["optimizer_steps"])
        theirs.append(1000 * b["seconds"] / b["optimizer_steps"])
        say(f"rllib: {b['seconds']:.2f} s by itself, {a['seconds']:.2f} s in our loop")
    row = Row(
        "rllib", "ms an optimizer step", mine[1:], theirs[1:], factor=1 / MOST_OVERHEAD, digits=2, problems=problems
    )
    return [row]
