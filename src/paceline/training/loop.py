"""The training loop, the same for every algorithm and engine: iterate, log, evaluate, save, stop.

An *iteration* is one rollout and the learning from it. An *env step* is one valid step of one environment that entered
an update.
"""

from __future__ import annotations

import functools
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunConfig, StopConfig, printable
from paceline.config.resolve import to_tree
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import env_metrics, per_agent, statistics, team_row
from paceline.run import checkpoint
from paceline.run.console import Console
from paceline.run.directory import RunDirectory
from paceline.run.metrics import MetricsWriter, metrics_of
from paceline.run.state_tree import pack
from paceline.stats import summarize
from paceline.training.callbacks import Callback, Steering
from paceline.training.clock import Clock
from paceline.training.engine import Engine, Iteration, Levels, TrainingError
from paceline.training.memory import is_out_of_memory, out_of_memory
from paceline.training.pauses import evaluation_due, pause_expected, save_due
from paceline.training.run_summary import WINDOW, summarize_run
from paceline.training.schedule import Schedule, describe_move
from paceline.training.signals import STOPPED_EARLY, StopSignals
from paceline.training.stopping import Counters, Deadline, Outcome, Stopping
from paceline.training.usage import UsageMeter
from paceline.training.watchdog import Watchdog, grace_seconds

OnIteration = Callable[["Loop"], str | None]
"""Called after each iteration but the last. A returned text is the reason to stop, resumably."""


class Loop:
    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        run: RunDirectory,
        console: Console,
        began: float,
        on_iteration: OnIteration | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.config, self.engine, self.run_directory, self.console = config, engine, run, console
        self.on_iteration = on_iteration
        self.steering = Steering(callbacks, self)
        self.counters = Counters()
        self.stopping = Stopping(config.stop)
        self.schedule = Schedule(config.stop)
        self.deadline = Deadline(os.environ)
        self.clock = Clock(began)
        self.resumes = 0
        self.recent: deque[Episode] = deque(maxlen=max(WINDOW, config.stop.return_window))
        self.evaluations = 0
        self.best_return: float | None = None
        self.row: dict[str, Any] = {}
        self._env_error = ""  # the first one, once it is shown
        self.usage = UsageMeter(engine)
        self._saved_at = self._save_seconds = 0.0
        self._guard = threading.Lock()  # held while counters and checkpoints change: the watchdog may do that, too
        self._iterating = self._ended = False
        self._counted: Iteration | None = None
        self._saved_steps = -1
        self._status_lock = threading.RLock()  # reentrant: a signal's handler writes the status too

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        watchdog = Watchdog(self._end_now, lambda: self._save_seconds, self.deadline, grace_seconds(os.environ))
        with StopSignals(before_end=functools.partial(self._write_status, "stopped")) as signals, watchdog:
            writer = MetricsWriter(
                self.run_directory,
                resume_iteration=self.counters.iteration if self.resumes else None,
                known=metrics_of(self.config.algo),
            )
            self.engine.on_failure(self._engine_failed)
            try:
                return self._run(signals, writer)
            except BaseException as error:
                if self.steering.failed_in not in ("", "on_checkpoint"):
                    self.save("failed")
                failure = self.engine.failure() if isinstance(error, Exception) else None
                cause = error if failure is None else TrainingError(failure)
                with suppress(OSError):  # the disk may be what failed
                    self._write_status("failed", f"{type(cause).__name__}: {cause}")
                if cause is error:
                    raise
                raise cause from error
            finally:
                writer.close()

    def _run(self, signals: StopSignals, writer: MetricsWriter) -> Outcome:
        self.clock.ready()
        self.usage.begin()
        self._write_status("running", "")  # before the first checkpoint: a run that can be resumed has a status
        self.steering.tell("on_start")
        if self.resumes == 0:
            self.save()  # from here on the run can be resumed
        status, reason = "done", self._done_reason(writer)
        if reason is None and signals.received:  # during the start
            status, reason = "stopped", f"{signals.received} received"
        while reason is None:
            steps_before, began = self.counters.env_steps, time.perf_counter()
            self._iterate(writer)
            if evaluation_due(self.config, steps_before, self.counters.env_steps):
                self._evaluate(writer, self.config.eval.episodes)
            reason = self._done_reason(writer)
            if reason is None:
                reason = self._early_reason(signals, time.perf_counter() - began)
                status = "done" if reason is None else "stopped"
            unsaved_seconds = time.perf_counter() - self._saved_at
            if reason is None and save_due(self.config, self.counters.iteration, unsaved_seconds):
                self.save()
        self._sample(force=True)
        self.save(status)
        self.steering.tell("on_end", reason)
        with self._guard:
            self._ended = True
            self._write_status(status, reason)
        return Outcome(status, reason, self.run_directory.path, status == "done" and self.stopping.goal_missed)

    def _iterate(self, writer: MetricsWriter) -> None:
        began, clock = time.perf_counter(), self.clock
        self.schedule.remaining = self.schedule.next(self.counters, clock.train_seconds)
        unsaved_seconds = time.perf_counter() - self._saved_at
        self.engine.rests_next = bool(self.steering.members) or pause_expected(
            self.config, self.counters, self.stopping, clock.train_seconds, unsaved_seconds
        )
        self._iterating = True
        try:
            done = self.engine.iterate(self.schedule.remaining, clock)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            path = self.run_directory.shown
            raise TrainingError(out_of_memory(self.config, self.counters.iteration + 1, path, error)) from error
        with self._guard:
            self._iterating = False
            self.counters.iteration += 1
            self._count(done)
        self._sample()
        self.row = self._make_row(done, done.env_steps / (time.perf_counter() - began))
        notes = self.engine.notes()
        if done.env_error and not self._env_error:
            self._env_error = done.env_error
            notes.append(self.run_directory.write_env_error(done.env_error))
        for note in map(printable, notes):
            self.console.note(note)
            self.run_directory.log(f"iteration {self.counters.iteration}: {note}")
        done.check_finite(self.counters.iteration, self.config.env.id)
        try:
            for episode in done.episodes:
                self.steering.tell("on_episode", episode)
            self.steering.tell("on_iteration", self.row)
        finally:
            self.row |= self.steering.logged
            writer.write(self.row)
        progress = self.stopping.progress(self.counters, clock.train_seconds)
        eta = clock.train_seconds * (1 - progress) / progress if progress else None
        self.console.iteration(self.row, progress, eta)

    def _count(self, done: Iteration) -> None:
        self._counted = done
        self.counters.env_steps += done.env_steps
        self.counters.agent_steps += done.agent_steps
        self.counters.episodes += len(done.episodes)
        self.counters.env_restarts += done.env_restarts
        self.recent.extend(done.episodes)

    def _make_row(self, done: Iteration, rate: float) -> dict[str, Any]:
        counters, wall = self.counters, self.clock.wall_seconds
        split = self.clock.split(wall)
        training = wall - split["start"]
        row: dict[str, Any] = {
            "iteration": counters.iteration,
            "env_steps": counters.env_steps,
            "episodes": counters.episodes,
            "env_restarts": counters.env_restarts,
            "optimizer_steps": self.engine.optimizer_steps,
            "wall_seconds": wall,
            "train_seconds": training,
            "steps_per_second": counters.env_steps / training,
            "iteration_steps_per_second": rate,
            **statistics(list(self.recent)[-WINDOW:]),
            **team_row(counters.agent_steps, list(self.recent)[-WINDOW:]),
            **done.metrics,
            **{f"time_{part}_seconds": seconds for part, seconds in split.items()},
            "memory_bytes": self.usage.memory,
            "cpu_percent": self.usage.cpu_percent,
            "timestamp": time.time(),
        }
        for name in sorted({name for metrics in done.env_metrics for name in metrics}):
            row[f"env/{name}"] = float(np.mean([m[name] for m in done.env_metrics if name in m]))
        return row

    # -- stopping and evaluating ------------------------------------------------------------------------------------

    def _done_reason(self, writer: MetricsWriter) -> str | None:
        """Which budget or goal is reached, if any."""

        def confirm(episodes: int) -> float:
            return float(self._evaluate(writer, episodes)["return_mean"])

        if self.steering.stop_reason is not None:
            return self.steering.stop_reason
        returns = [episode.total for episode in self.recent]
        return self.stopping.reason(self.counters, self.clock.train_seconds, self.row, returns, confirm)

    def _early_reason(self, signals: StopSignals, iteration_seconds: float) -> str | None:
        """Why to stop before the run is done, if at all."""
        if signals.received:
            return f"{signals.received} received"
        reason = self.engine.failure() or self.deadline.reason(iteration_seconds, self._save_seconds)
        return self.on_iteration(self) if reason is None and self.on_iteration is not None else reason

    @property
    def _evaluation_kind(self) -> str:
        """All evaluations of a run are of one kind, also those that confirm a return: `best` compares them."""
        return "stochastic" if self.config.eval.stochastic else "deterministic"

    def _evaluate(self, writer: MetricsWriter, episodes: int) -> dict[str, Any]:
        began = time.perf_counter()
        played = self.engine.evaluate(episodes, stochastic=self.config.eval.stochastic, number=self.evaluations)
        seconds = time.perf_counter() - began
        self.clock.add("eval", seconds)
        self.evaluations += 1
        row: dict[str, Any] = {"iteration": self.counters.iteration, "env_steps": self.counters.env_steps}
        row |= summarize([e.total for e in played], [e.length for e in played])
        row |= env_metrics(played) | (per_agent(played) if self.counters.agent_steps else {})
        row["eval_seconds"] = seconds
        writer.write_eval(row)
        self.console.evaluation(row)
        self.steering.tell("on_evaluation", row)
        if self.best_return is None or row["return_mean"] > self.best_return:
            self.best_return = row["return_mean"]
            self.save(best=True)
        elif self.counters.env_steps in checkpoint.best_steps(self.run_directory, self.config.checkpoint.keep_best):
            self.save()
        return row

    # -- saving and resuming ----------------------------------------------------------------------------------------

    def save(self, status: str = "running", *, best: bool = False) -> None:
        began = time.perf_counter()
        with self._guard:
            with self.clock.measure("save"):
                path = self._write_checkpoint(self.engine.state(), best=best)
                self._saved_at = time.perf_counter()
            self.run_directory.write_summary(self.summary(status))
        self._save_seconds = time.perf_counter() - began
        self.steering.tell("on_checkpoint", path)

    def _write_checkpoint(self, engine_state: dict[str, Any], *, best: bool = False) -> Path:
        arrays, tree = pack({"engine": engine_state, "loop": self._state()})
        tree["config"] = to_tree(self.config)
        steps, config = self.counters.env_steps, self.config.checkpoint
        path = checkpoint.save(
            self.run_directory, steps, arrays, tree, keep=config.keep, best=best, keep_best=config.keep_best
        )
        self._saved_steps = steps
        return path

    def _end_now(self, reason: str) -> None:
        """In the watchdog's thread: save what there is and end the process, since the main thread does not in time."""
        self._guard.acquire()  # for ever: the main thread must not save any more
        if self._ended:
            return self._guard.release()
        try:
            reason += f"; {self._save_now()}"
        except Exception as error:
            reason += f"; saving failed, use the last checkpoint ({type(error).__name__}: {error})"
        with suppress(Exception):
            self._write_status("stopped", reason)
            self.run_directory.log(reason)
            self.run_directory.write_summary(self.summary("stopped"))
        with suppress(OSError):
            path = shlex.quote(str(self.run_directory.path))
            os.write(2, f"\n{reason}\ncontinue   paceline train --resume {path}\n".encode())
        os._exit(STOPPED_EARLY)

    def _save_now(self) -> str:
        """Save the state from before the iteration that is running, or the present one between two iterations."""
        number, state = self.counters.iteration, None
        late = f"iteration {number + 1} did not end in time"
        said = f"{late}: saved the state from before it" if self._iterating else f"saved after iteration {number}"
        if not self._iterating:
            state = self.engine.state()
        elif before := self.engine.state_before():
            state = before[0]
            if before[1] is not self._counted:
                self._count(before[1])
        if self.counters.env_steps == self._saved_steps:
            return said  # the last checkpoint is this state, and has the environments, too
        if state is not None:
            self._write_checkpoint(state)
        return f"{late}: use the last checkpoint" if state is None else said

    def _state(self) -> dict[str, Any]:
        return {
            "counters": vars(self.counters).copy(),
            "recent": [[e.total, e.length, e.agents, e.policies] for e in self.recent],
            "evaluations": self.evaluations,
            "best_return": self.best_return,
            "best_kind": self._evaluation_kind,
            "retry_at": self.stopping.retry_at,
            "schedule": self.schedule.state(),
            "resumes": self.resumes,
            "time": self.clock.split(),
            "callbacks": self.steering.state(),
            **self.usage.state(),
        }

    def restore(self, state: dict[str, Any], saved: StopConfig, *, keep_schedule: bool) -> tuple[Levels, list[str]]:
        """Continue from a checkpoint, saved with the stop rules `saved`. Returns how its parts were restored, and lines
        about schedules that moved."""
        loop = state["loop"]
        self.counters = Counters(**loop["counters"])
        self._saved_steps = self.counters.env_steps
        for total, length, *of_team in loop["recent"]:
            self.recent.append(Episode(total, length, 0, *of_team))
        self.evaluations = loop["evaluations"]
        if loop.get("best_kind", self._evaluation_kind) == self._evaluation_kind:  # otherwise it is not comparable
            self.best_return = loop["best_return"]
        self.stopping.retry_at = loop["retry_at"]
        self.resumes = loop["resumes"] + 1
        self.clock = Clock(self.clock.began, loop["time"])
        self.usage.restore(loop)
        seconds = sum(loop["time"].values()) - loop["time"]["start"]
        moved = self.schedule.restore(loop.get("schedule"), saved, self.counters, seconds, keep=keep_schedule)
        lines = describe_move(self.config, *moved) if moved else []
        lines += self.steering.restore(loop.get("callbacks", {"names": [], "changes": {}}))
        return self.engine.start(state["engine"]), lines

    # -- reporting --------------------------------------------------------------------------------------------------

    def _sample(self, *, force: bool = False) -> None:
        if self.usage.sample(force=force):
            self._write_status("running", "")
            self.run_directory.write_summary(self.summary("running"), sync=False)

    def _engine_failed(self, reason: str) -> None:
        """In another thread. Whatever the run still manages to do is recorded later."""
        with suppress(OSError):
            self._write_status("failed", reason)
            os.write(2, f"\n{reason}\n".encode())

    def _write_status(self, state: str, reason: str) -> None:
        counted = {"iteration": self.counters.iteration, "env_steps": self.counters.env_steps}
        with self._status_lock:
            if state != "running" or self.engine.failure() is None:
                self.run_directory.write_status(state=state, reason=reason, **counted, resumes=self.resumes)

    def summary(self, status: str) -> dict[str, Any]:
        return summarize_run(self, status)
