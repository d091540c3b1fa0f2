"""What is measured, and the three files each row goes to: `metrics.jsonl`, `progress.csv` and TensorBoard's events."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from paceline.run.directory import RunDirectory, plain, read_lines, replacing


@dataclass(frozen=True)
class Metric:
    description: str
    group: str
    """Prefix of its tag in TensorBoard; empty: not drawn there."""
    volatile: bool = False
    """Differs between two runs that are otherwise the same: times, rates, memory."""


def _times(**parts: str) -> dict[str, Metric]:
    return {f"time_{name}_seconds": Metric(f"Time spent so far: {what}", "time", True) for name, what in parts.items()}


METRICS: dict[str, Metric] = {
    "iteration": Metric("Rounds of collecting and learning so far", "progress"),
    "env_steps": Metric("Environment steps that entered an update so far", ""),  # the x axis of all others
    "episodes": Metric("Episodes finished so far", "progress"),
    "optimizer_steps": Metric("Optimizer steps so far", "progress"),
    "wall_seconds": Metric("Time since the run began, all of it", "time", True),
    "train_seconds": Metric("Time since training began: all but the start", "time", True),
    "steps_per_second": Metric("Environment steps per second over the whole training time", "time", True),
    "iteration_steps_per_second": Metric("Environment steps per second in this iteration", "time", True),
    "return_mean": Metric("Return, mean of the last 100 episodes", "rollout"),
    "return_std": Metric("Return, standard deviation over the last 100 episodes", "rollout"),
    "return_min": Metric("Return, least of the last 100 episodes", "rollout"),
    "return_max": Metric("Return, greatest of the last 100 episodes", "rollout"),
    "length_mean": Metric("Steps of an episode, mean of the last 100", "rollout"),
    "length_std": Metric("Steps of an episode, standard deviation over the last 100", "rollout"),
    "length_min": Metric("Steps of an episode, least of the last 100", "rollout"),
    "length_max": Metric("Steps of an episode, greatest of the last 100", "rollout"),
    # The losses and what is measured with them are means over the last pass over the rollout.
    "policy_loss": Metric("Loss of the policy in the last pass over the rollout", "train"),
    "value_loss": Metric("Loss of the value in the last pass over the rollout", "train"),
    "entropy": Metric("Entropy of the policy", "train"),
    "total_loss": Metric("Weighted sum of the losses: what is minimised", "train"),
    "approx_kl": Metric("How far the update moved the policy (estimated KL divergence)", "train"),
    "clip_fraction": Metric("Share of rows whose probability ratio was clipped", "train"),
    "explained_variance": Metric("Share of the variance of the returns that the value foresaw; 1 is perfect", "train"),
    "gradient_norm": Metric("Length of the gradient before it is clipped", "train"),
    "learning_rate": Metric("Step size of the optimizer", "train"),
    "clip": Metric("How far the probability ratio may move from 1", "train"),
    "epochs_done": Metric("Passes over the rollout before the KL limit, if any, ended them", "train"),
    "value_mean": Metric("Value at collection, mean of the rollout", "train"),
    "importance_mean": Metric("IMPALA: probability ratio of the learner's policy to the actor's, mean", "train"),
    "q_mean": Metric("DQN: value of the actions drawn from replay, mean", "train"),
    "q_min": Metric("DQN: value of the actions drawn from replay, least", "train"),
    "q_max": Metric("DQN: value of the actions drawn from replay, greatest", "train"),
    "td_error_mean": Metric("DQN: size of the temporal-difference error, mean", "train"),
    "epsilon": Metric("DQN: share of random actions", "train"),
    "priority_beta": Metric("DQN: how much of prioritised drawing the importance weights make up for", "train"),
    "target_updates": Metric("DQN: updates of the target network so far", "train"),
    "steps_sampled": Metric("DQN: steps put into the replay so far", "train"),
    "steps_trained": Metric("DQN: rows learned from so far, each as often as it was drawn", "train"),
    "replay_rows": Metric("DQN: steps that the replay holds", "train"),
    "policy_lag_mean": Metric("Updates between the weights that acted and those that learned, mean", "workers", True),
    "policy_lag_max": Metric("Updates between the weights that acted and those that learned, most", "workers", True),
    "queued_rollouts": Metric("Rollouts or gradients that wait for the learner", "workers", True),
    "queued_bytes": Metric("What these take in the object store", "workers", True),
    "bytes_moved": Metric(
        "Bytes of gradients, rollouts and weights moved between processes in this iteration", "workers", True
    ),
    "workers_healthy": Metric("Workers at work", "workers", True),
    "workers_lost": Metric("Workers lost so far", "workers", True),
    "workers_restarted": Metric("Workers replaced so far", "workers", True),
    **_times(
        start="before the first iteration",
        env="stepping environments",
        act="choosing actions",
        learn="learning",
        sync="exchanging gradients or weights",
        eval="evaluating",
        save="writing checkpoints",
        idle="the rest: logging, waiting",
    ),
    "memory_bytes": Metric("Memory of all processes of the run", "system", True),
    "cpu_percent": Metric("CPU use of all processes of the run; 100 is one core", "system", True),
    "timestamp": Metric("When the row was written, in seconds since 1970", "", True),
}

EVAL_METRICS: dict[str, Metric] = {
    "iteration": METRICS["iteration"],
    "env_steps": METRICS["env_steps"],
    "episodes": Metric("Episodes of this evaluation", ""),
    "return_mean": Metric("Return, mean", "eval"),
    "return_std": Metric("Return, standard deviation", "eval"),
    "return_min": Metric("Return, least", "eval"),
    "return_max": Metric("Return, greatest", "eval"),
    "return_median": Metric("Return, median", "eval"),
    "return_iqm": Metric("Return, mean of the middle half", "eval"),
    "return_ci_low": Metric("Return, lower end of the 95 % interval of the mean", "eval"),
    "return_ci_high": Metric("Return, upper end of the 95 % interval of the mean", "eval"),
    "length_mean": Metric("Steps of an episode, mean", "eval"),
    "length_std": Metric("Steps of an episode, standard deviation", "eval"),
    "length_min": Metric("Steps of an episode, least", "eval"),
    "length_max": Metric("Steps of an episode, greatest", "eval"),
    "eval_seconds": Metric("How long the evaluation took", "", True),
    "kind": Metric("By `paceline evaluate` only: deterministic, stochastic or random actions", ""),
    "checkpoint": Metric("By `paceline evaluate` only: the checkpoint that played", ""),
    "seed": Metric("By `paceline evaluate` only: of the episodes", ""),
    "levels": Metric("By `paceline evaluate` of Procgen only: train (those of the run) or test (all there are)", ""),
    "return_normalized": Metric("The same: mean return on the scale of the Procgen paper, by mode and game", ""),
    "generalization_gap": Metric("The same, with the test levels: mean return on the train levels less this one", ""),
}

_encode = json.JSONEncoder(allow_nan=False).encode
_ORDER = {name: place for place, name in enumerate(METRICS)}
_Number = float | int | None


def _columns(names: Iterable[str]) -> list[str]:
    """In the order of METRICS, then what environments supply."""
    for name in names:
        if name not in _ORDER and not name.startswith("env/"):
            raise ValueError(f"metric {name!r} is not in METRICS and does not begin with env/")
    return sorted(names, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))


def _number(value: Any) -> _Number:
    """A number for JSON; None for what is missing, NaN or infinite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    number = value.item()  # numpy's and torch's scalars
    return number if isfinite(number) else None


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


class _Lines:
    """Appends whole lines, each in the hands of the system at once. A line that does not fit is taken back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, text: str) -> None:
        start, rest = self._file.tell(), memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(start)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


class _Events:
    """TensorBoard's event file, one event of many scalars per row. Torch's writer would bring torch with it."""

    INTERVAL_SECONDS = 0.25

    def __init__(self, folder: Path, purge_from: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_class, self._summary_class = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names: a resumed run's must come after all earlier ones.
        earlier = [int(m[1]) for p in folder.iterdir() if (m := re.match(r"events\.out\.tfevents\.(\d+)\.", p.name))]
        stamp = max([int(time.time()), *(number + 1 for number in earlier)])
        path = folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(path.open("wb"))
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_from is not None:
            # A log that starts at a step tells TensorBoard to forget what earlier files say from that step on.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=purge_from, session_log=start))
        self._writer.flush()
        self._pending: tuple[dict[str, _Number], float] | None = None
        self._next = 0.0

    def add(self, row: dict[str, _Number]) -> None:
        """The record's checksum is computed in Python and takes longer than all else here: at most 4 rows a second
        are written. The latest is kept and written by `flush`, so that the end of a curve is never missing."""
        self._pending = (row, time.time())
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        if self._pending is None:
            return
        (row, wall_time), self._pending = self._pending, None
        self._next = time.monotonic() + self.INTERVAL_SECONDS
        self.scalars(row, wall_time, lambda name: METRICS[name].group if name in METRICS else None)

    def scalars(self, row: dict[str, Any], wall_time: float, group: Callable[[str], str | None]) -> None:
        """`group(name)`: the prefix of the tag, "" to leave it out, None if the name is a whole tag."""
        values = []
        for name, value in row.items():
            prefix = group(name)
            if prefix != "" and isinstance(value, int | float):
                tag = name if prefix is None else f"{prefix}/{name}"
                values.append(self._summary_class.Value(tag=tag, simple_value=value))
        summary = self._summary_class(value=values)
        self._write(self._event_class(wall_time=wall_time, step=int(row.get("env_steps") or 0), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


class MetricsWriter:
    """Appends rows to the metrics files of a run.

    `resume_iteration`: continue after this iteration; what the files say of later ones is cut.
    """

    def __init__(self, run: RunDirectory, *, resume_iteration: int | None = None) -> None:
        self._run = run
        self._columns: list[str] = []
        self._purge_from: int | None = None
        if resume_iteration is not None:
            last_step = _cut(run.metrics_path, resume_iteration)
            _cut(run.eval_path, resume_iteration)
            self._purge_from = last_step + 1  # the point of the checkpoint itself stays
            self._rewrite_progress()
        self._metrics = _Lines(run.metrics_path)
        self._progress = _Lines(run.progress_path)
        self._events = _Events(run.tb_path, self._purge_from)

    def write(self, row: dict[str, _Number]) -> None:
        numbers = {name: _number(value) for name, value in row.items()}
        numbers.setdefault("timestamp", time.time())
        if not numbers.keys() <= set(self._columns):
            columns = _columns({*self._columns, *numbers})  # before anything is written: it may refuse a name
        else:
            columns = self._columns
        self._metrics.write(_encode(numbers) + "\n")
        if columns is self._columns:
            self._progress.write(_csv_line([numbers.get(name) for name in columns]))
        else:
            # A row brought a new column: the file is made anew from metrics.jsonl, which holds this row too.
            self._progress.close()
            self._rewrite_progress()
            self._progress = _Lines(self._run.progress_path)
        self._events.add(numbers)

    def write_eval(self, row: dict[str, Any]) -> None:
        numbers: dict[str, Any] = plain(row)
        lines = _Lines(self._run.eval_path)  # evaluations are rare: no file is kept open, or made for none
        try:
            lines.write(_encode(numbers) + "\n")
        finally:
            lines.close()
        self._events.flush()
        groups = {name: metric.group for name, metric in EVAL_METRICS.items()} | {"iteration": ""}
        self._events.scalars(numbers, time.time(), lambda name: groups.get(name, "eval"))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._metrics.close()
        self._progress.close()
        self._events.close()

    def _rewrite_progress(self) -> None:
        """`progress.csv` from `metrics.jsonl`, a row at a time: they may be a million."""
        self._columns = _columns({name for row in read_lines(self._run.metrics_path) for name in row})
        with replacing(self._run.progress_path) as file:
            table = csv.writer(file, lineterminator="\n")
            if self._columns:
                table.writerow(self._columns)
            table.writerows([row.get(name) for name in self._columns] for row in read_lines(self._run.metrics_path))


def _cut(path: Path, iteration: int) -> int:
    """Drop the rows of later iterations, and a torn last line. Returns the last env step that remains, -1 if none."""
    last_step = -1
    if path.exists():
        with replacing(path) as file:
            for row in read_lines(path):
                if (row.get("iteration") or 0) <= iteration:
                    last_step = max(last_step, row.get("env_steps") or 0)
                    file.write(_encode(row) + "\n")
    return last_step
