"""The loop: take a batch, learn from it, log, evaluate, save, stop. There is one, for every algorithm and engine.

Words: an *iteration* is one rollout and the learning from it; an *env step* is one valid step of one environment that
entered an update; an *incarnation* is one process that worked on the run (a resumed run has several).
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunConfig
from paceline.engine.base import Engine, Iteration, TrainingError
from paceline.engine.clock import Clock
from paceline.engine.signals import STOPPED_EARLY, StopSignals
from paceline.engine.stopping import Counters, Deadline, Stopping
from paceline.resolve import to_tree
from paceline.rollout.batch import Episode
from paceline.run import checkpoint
from paceline.run.console import Console
from paceline.run.directory import RunDirectory
from paceline.run.metrics import MetricsWriter
from paceline.run.tree import pack
from paceline.stats import summarize
from paceline.verdict import Verdict, verdict

WINDOW = 100  # episodes in the reported return
SAMPLE_SECONDS = 2.0  # memory and CPU are read this often, the status is written this often


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, or `stopped` early and resumable."""

    status: str
    reason: str
    path: Path

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "done" else STOPPED_EARLY


def is_out_of_memory(error: BaseException) -> bool:
    """Of the machine or of a GPU: torch has no type of its own for the former."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said


class Loop:
    def __init__(self, config: RunConfig, engine: Engine, run: RunDirectory, console: Console, began: float) -> None:
        self.config, self.engine, self.run_directory, self.console = config, engine, run, console
        self.counters = Counters()
        self.stopping = Stopping(config.stop)
        self.deadline = Deadline(os.environ)
        self.clock = Clock(began)
        self.resumes = 0
        self.recent: deque[Episode] = deque(maxlen=max(WINDOW, config.stop.return_window))
        self.evaluations = 0
        self.best_return: float | None = None
        self.row: dict[str, Any] = {}
        self._peak_memory = self._memory = 0
        self._cpu_percent: float | None = None
        self._cpu_mark = (0.0, 0.0)
        self._cpu_seconds_before = 0.0
        self._cpu_now = 0.0
        self._sample_at = -math.inf
        self._saved_at = self._save_seconds = 0.0

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with StopSignals() as signals:
            writer = MetricsWriter(
                self.run_directory, resume_iteration=self.counters.iteration if self.resumes else None
            )
            try:
                return self._run(signals, writer)
            except BaseException as error:
                with suppress(OSError):  # the disk may be what failed
                    self._write_status("failed", f"{type(error).__name__}: {error}")
                raise
            finally:
                writer.close()

    def _run(self, signals: StopSignals, writer: MetricsWriter) -> Outcome:
        self.clock.ready()
        self._cpu_now = self.engine.usage()[1]
        self._cpu_mark = (self._cpu_now, time.perf_counter())
        if self.resumes == 0:
            self._save()  # from here on the run can be resumed
        status, reason = "done", self._reason(writer)
        while reason is None:
            steps_before, began = self.counters.env_steps, time.perf_counter()
            self._iterate(writer)
            if self._due_evaluation(steps_before):
                self._evaluate(writer, self.config.eval.episodes, stochastic=self.config.eval.stochastic)
            reason = self._reason(writer)
            if reason is None and signals.received:
                status, reason = "stopped", f"{signals.received} received"
            if reason is None:
                near = self.deadline.reason(time.perf_counter() - began, self._save_seconds)
                status, reason = ("stopped", near) if near is not None else (status, None)
            if reason is None and self._due_save():
                self._save()
        self._sample(force=True)
        self._save(status)
        self._write_status(status, reason)
        return Outcome(status, reason, self.run_directory.path)

    def _iterate(self, writer: MetricsWriter) -> None:
        began, clock = time.perf_counter(), self.clock
        remaining = 1.0 - self.stopping.progress(self.counters, clock.train_seconds)
        try:
            done = self.engine.iterate(remaining, clock)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            keys = ["env.envs_per_worker", f"{self.config.algo}.rollout_steps"]
            largest = {"ppo": "minibatch_size", "impala": "batch_size", "dqn": "replay_size"}.get(self.config.algo)
            keys += [f"{self.config.algo}.{largest}"] if largest else []
            raise TrainingError(
                f"out of memory at iteration {self.counters.iteration + 1}: lower {', '.join(keys[:-1])} or "
                f"{keys[-1]}. The last checkpoint is whole: start from its weights with --init-from "
                f"{self.run_directory.path}, or --resume it as it is where there is more memory "
                f"({' '.join(str(error).split())[:160]})"
            ) from error
        self.counters.iteration += 1
        self.counters.env_steps += done.env_steps
        self.counters.episodes += len(done.episodes)
        self.recent.extend(done.episodes)
        self._sample()
        self.row = self._make_row(done, done.env_steps / (time.perf_counter() - began))
        for note in self.engine.notes():
            self._note(note)
        self._check_finite(done.metrics)
        writer.write(self.row)
        progress = self.stopping.progress(self.counters, clock.train_seconds)
        eta = clock.train_seconds * (1 - progress) / progress if progress else None
        self.console.iteration(self.row, progress, eta)

    def _note(self, text: str) -> None:
        """To be seen now and found later."""
        self.console.note(text)
        self.run_directory.log(f"iteration {self.counters.iteration}: {text}")

    def _make_row(self, done: Iteration, rate: float) -> dict[str, Any]:
        clock, counters = self.clock, self.counters
        row: dict[str, Any] = {
            "iteration": counters.iteration,
            "env_steps": counters.env_steps,
            "episodes": counters.episodes,
            "optimizer_steps": self.engine.optimizer_steps,
            "wall_seconds": clock.wall_seconds,
            "train_seconds": clock.train_seconds,
            "steps_per_second": counters.env_steps / clock.train_seconds,
            "iteration_steps_per_second": rate,
            **self._episode_statistics(),
            **done.metrics,
            **{f"time_{part}_seconds": seconds for part, seconds in clock.split().items()},
            "memory_bytes": self._memory,
            "cpu_percent": self._cpu_percent,
            "timestamp": time.time(),
        }
        for name in sorted({name for metrics in done.env_metrics for name in metrics}):
            row[f"env/{name}"] = float(np.mean([m[name] for m in done.env_metrics if name in m]))
        return row

    def _episode_statistics(self) -> dict[str, float]:
        window = list(self.recent)[-WINDOW:]
        row: dict[str, float] = {}
        for name, values in (("return", [e.total for e in window]), ("length", [e.length for e in window])):
            if values:
                array = np.asarray(values, np.float64)
                row |= {
                    f"{name}_mean": float(array.mean()),
                    f"{name}_std": float(array.std()),
                    f"{name}_min": float(array.min()),
                    f"{name}_max": float(array.max()),
                }
        return row

    def _check_finite(self, metrics: dict[str, float]) -> None:
        loss, norm = (metrics.get(name, 0.0) for name in ("total_loss", "gradient_norm"))  # none before learning starts
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                f"the loss is {loss} and the gradient {norm} at iteration "
                f"{self.counters.iteration}: lower the learning rate, turn on env.normalize_observation and "
                f"env.normalize_reward, or run `paceline envs check {self.config.env.id}`; the last checkpoint is whole"
            )

    # -- stopping and evaluating ------------------------------------------------------------------------------------

    def _reason(self, writer: MetricsWriter) -> str | None:
        def confirm(episodes: int) -> float:
            return float(self._evaluate(writer, episodes, stochastic=False)["return_mean"])

        returns = [episode.total for episode in self.recent]
        return self.stopping.reason(self.counters, self.clock.train_seconds, self.row, returns, confirm)

    def _due_evaluation(self, steps_before: int) -> bool:
        every = self.config.eval.every_steps
        return every > 0 and self.counters.env_steps // every > steps_before // every

    def _evaluate(self, writer: MetricsWriter, episodes: int, *, stochastic: bool) -> dict[str, Any]:
        began = time.perf_counter()
        played = self.engine.evaluate(episodes, stochastic=stochastic, number=self.evaluations)
        seconds = time.perf_counter() - began
        self.clock.add("eval", seconds)
        self.evaluations += 1
        row: dict[str, Any] = {"iteration": self.counters.iteration, "env_steps": self.counters.env_steps}
        row |= summarize([e.total for e in played], [e.length for e in played])
        row["eval_seconds"] = seconds
        writer.write_eval(row)
        self.console.evaluation(row)
        if self.best_return is None or row["return_mean"] > self.best_return:
            self.best_return = row["return_mean"]
            self._save(best=True)
        return row

    # -- saving and resuming ----------------------------------------------------------------------------------------

    def _due_save(self) -> bool:
        config = self.config.checkpoint
        if config.every_iterations and self.counters.iteration % config.every_iterations == 0:
            return True
        return config.every_seconds > 0 and time.perf_counter() - self._saved_at >= config.every_seconds

    def _save(self, status: str = "running", *, best: bool = False) -> None:
        began = time.perf_counter()
        with self.clock.measure("save"):
            arrays, tree = pack({"engine": self.engine.state(), "loop": self._state()})
            tree["config"] = to_tree(self.config)
            keep = self.config.checkpoint.keep
            checkpoint.save(self.run_directory, self.counters.env_steps, arrays, tree, keep=keep, best=best)
            self._saved_at = time.perf_counter()
        self.run_directory.write_summary(self.summary(status))
        self._save_seconds = time.perf_counter() - began

    def _state(self) -> dict[str, Any]:
        return {
            "counters": vars(self.counters).copy(),
            "recent": [[e.total, e.length] for e in self.recent],
            "evaluations": self.evaluations,
            "best_return": self.best_return,
            "retry_at": self.stopping.retry_at,
            "resumes": self.resumes,
            "time": self.clock.split(),
            "peak_memory_bytes": self._peak_memory,
            "cpu_seconds": self._cpu_seconds(),
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Continue from the state of a checkpoint. True: exact; False: environments start afresh."""
        loop = state["loop"]
        self.counters = Counters(**loop["counters"])
        self.recent.extend(Episode(total, length) for total, length in loop["recent"])
        self.evaluations, self.best_return = loop["evaluations"], loop["best_return"]
        self.stopping.retry_at = loop["retry_at"]
        self.resumes = loop["resumes"] + 1
        self.clock = Clock(self.clock._began, loop["time"])
        self._peak_memory = loop["peak_memory_bytes"]
        self._cpu_seconds_before = loop["cpu_seconds"]
        return self.engine.start(state["engine"])

    # -- reporting --------------------------------------------------------------------------------------------------

    def _sample(self, *, force: bool = False) -> None:
        """Memory of all our processes and CPU use; reading them costs milliseconds, so not at every iteration."""
        now = time.perf_counter()
        if not force and now < self._sample_at:
            return
        self._memory, self._cpu_now = self.engine.usage()
        # With many processes it takes long: a hundredth of the time at most.
        self._sample_at = now + max(SAMPLE_SECONDS, 100 * (time.perf_counter() - now))
        self._peak_memory = max(self._peak_memory, self._memory)
        elapsed = now - self._cpu_mark[1]
        self._cpu_percent = 100.0 * (self._cpu_now - self._cpu_mark[0]) / elapsed if elapsed > 0 else None
        self._write_status("running", "")

    def _cpu_seconds(self) -> float:
        return self._cpu_seconds_before + self._cpu_now - self._cpu_mark[0]

    def _write_status(self, state: str, reason: str) -> None:
        counters = self.counters
        self.run_directory.write_status(
            state=state, reason=reason, iteration=counters.iteration, env_steps=counters.env_steps, resumes=self.resumes
        )

    def verdict(self) -> Verdict:
        """What bounds the run so far."""
        engine, clock = self.engine, self.clock
        training = max(clock.train_seconds, 1e-9)
        return verdict(
            clock.split(),
            engine.actor_lane(),
            algo=self.config.algo,
            workers=engine.workers,
            nodes=engine.nodes,
            cpu_share=self._cpu_seconds() / training / engine.cores,
            cores=engine.cores,
            straggling=engine.straggling_seconds / training,
            device=engine.device,
            overlap=self.config.engine.overlap,
            share=engine.name != "rllib",
        )

    def summary(self, status: str) -> dict[str, Any]:
        counters, clock, config = self.counters, self.clock, self.config
        statistics = self._episode_statistics()
        return {
            "status": status,
            "algo": config.algo,
            "env": config.env.id,
            "engine": self.engine.name,
            "workers": self.engine.workers,
            "threads": self.engine.threads,
            "device": self.engine.device,
            "seed": config.seed,
            "env_steps": counters.env_steps,
            "iterations": counters.iteration,
            "episodes": counters.episodes,
            "optimizer_steps": self.engine.optimizer_steps,
            "parameters": self.engine.parameters,
            "wall_seconds": clock.wall_seconds,
            "train_seconds": clock.train_seconds,
            "steps_per_second": counters.env_steps / clock.train_seconds if counters.env_steps else None,
            "time_split": clock.split(),
            **{name: statistics.get(name) for name in ("return_mean", "return_std", "length_mean")},
            "best_return": self.best_return,
            "peak_memory_bytes": self._peak_memory,
            "cpu_percent": 100.0 * self._cpu_seconds() / clock.train_seconds if clock.train_seconds > 0 else None,
            "resumed": self.resumes,
            **self.engine.accounts(),
            "verdict": self.verdict().text,
        }
