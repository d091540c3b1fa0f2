"""All metrics, and the three files that each row is written to: `metrics.jsonl`, `progress.csv`, TensorBoard events."""

from __future__ import annotations

import csv
import difflib
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

from paceline.config import UserError, algorithm_class
from paceline.config.algorithm_settings import scheduled
from paceline.run.directory import RunDirectory, plain, read_lines, replacing


@dataclass(frozen=True)
class Metric:
    description: str
    group: str
    """Prefix of its tag in TensorBoard; empty: not written there."""
    volatile: bool = False
    """Differs between two otherwise equal runs: times, rates, memory."""


def _times(**parts: str) -> dict[str, Metric]:
    return {f"time_{name}_seconds": Metric(f"Time spent so far: {what}", "time", True) for name, what in parts.items()}


def _spread(name: str, what: str, group: str, of: str = "") -> dict[str, Metric]:
    """Mean, standard deviation, minimum and maximum of `what`."""
    kinds = {"mean": "mean", "std": "standard deviation", "min": "minimum", "max": "maximum"}
    return {f"{name}_{short}": Metric(f"{what}, {long}{of}", group) for short, long in kinds.items()}


METRICS: dict[str, Metric] = {
    "iteration": Metric("Iterations (collecting and learning) so far", "progress"),
    "env_steps": Metric("Environment steps used for learning so far", ""),  # the x axis of all others
    "agent_steps": Metric("With several agents: steps of all agents used for learning so far", "progress"),
    "episodes": Metric("Episodes finished so far", "progress"),
    "env_restarts": Metric("Environments that failed and were started again so far", "progress", True),
    "optimizer_steps": Metric("Optimizer steps so far", "progress"),
    "wall_seconds": Metric("Time since the run began", "time", True),
    "train_seconds": Metric("Time since training began: `wall_seconds` without the start", "time", True),
    "steps_per_second": Metric("Environment steps per second of training time so far", "time", True),
    "iteration_steps_per_second": Metric("Environment steps per second in this iteration", "time", True),
    **_spread("return", "Return", "rollout", " of the last 100 episodes"),
    **_spread("length", "Episode length in steps", "rollout", " of the last 100 episodes"),
    "return_episodes": Metric(
        "How many episodes these are from: at first fewer than 100, and mostly short ones", "rollout"
    ),
    "return_per_agent_mean": Metric(
        "With several agents: return of one agent, mean over the agents of each of these episodes; `return_mean` is of "
        "their sum",
        "rollout",
    ),
    # Losses and the metrics computed with them are means over the last epoch.
    "policy_loss": Metric("Policy loss, mean over the last epoch", "train"),
    "value_loss": Metric("Value loss, mean over the last epoch", "train"),
    "entropy": Metric("Entropy of the policy", "train"),
    "total_loss": Metric("Weighted sum of the losses, which is minimised", "train"),
    "approx_kl": Metric("KL divergence between the policies before and after the update, estimated", "train"),
    "clip_fraction": Metric("Share of rows whose probability ratio was clipped", "train"),
    "explained_variance": Metric("Share of the returns' variance that the value predicts; 1 is perfect", "train"),
    "gradient_norm": Metric("Norm of the gradient before clipping", "train"),
    "learning_rate": Metric("Learning rate of the optimizer", "train"),
    "clip": Metric("Clipping range of the probability ratio around 1", "train"),
    "epochs_done": Metric("Epochs in this iteration; fewer than configured if the KL limit stopped them", "train"),
    "value_mean": Metric("Value when the rollout was collected, mean", "train"),
    "policy_lag_mean": Metric("Updates between the weights that acted and those that learned, mean", "workers", True),
    "policy_lag_max": Metric("Updates between the weights that acted and those that learned, maximum", "workers", True),
    "queued_rollouts": Metric("Rollouts or gradients waiting for the learner", "workers", True),
    "queued_bytes": Metric("Their size in the object store", "workers", True),
    "bytes_moved": Metric(
        "Bytes of gradients, rollouts and weights moved between processes in this iteration", "workers", True
    ),
    "workers_healthy": Metric("Healthy workers", "workers", True),
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

_BY_COMMAND = "By `paceline evaluate` only: "
EVAL_METRICS: dict[str, Metric] = {
    "iteration": METRICS["iteration"],
    "env_steps": METRICS["env_steps"],
    "episodes": Metric("Episodes of this evaluation", ""),
    **_spread("return", "Return", "eval"),
    "return_per_agent_mean": Metric(
        "With several agents: return of one agent, mean; `return_mean` is of the sum", "eval"
    ),
    "return_median": Metric("Return, median", "eval"),
    "return_iqm": Metric("Return, interquartile mean", "eval"),
    "return_ci_low": Metric("Return, lower end of the 95 % confidence interval of the mean", "eval"),
    "return_ci_high": Metric("Return, upper end of the 95 % confidence interval of the mean", "eval"),
    **_spread("length", "Episode length in steps", "eval"),
    "eval_seconds": Metric("Duration of the evaluation", "", True),
    "kind": Metric(f"{_BY_COMMAND}deterministic, stochastic, random or constant actions", ""),
    "action": Metric(f"{_BY_COMMAND}the constant action", ""),
    "env_settings": Metric(f"{_BY_COMMAND}settings of the environment that differ from those of the run", ""),
    "solved_return": Metric(f"{_BY_COMMAND}the run's `stop.return_mean`, or what Gymnasium calls solved", ""),
    "solved": Metric(f"{_BY_COMMAND}whether the mean return reaches it", ""),
    "checkpoint": Metric(f"{_BY_COMMAND}the evaluated checkpoint", ""),
    "seed": Metric(f"{_BY_COMMAND}the seed of the episodes", ""),
    "env_restarts": Metric(f"{_BY_COMMAND}environments that failed and were started again, if any", ""),
    "levels": Metric(f"{_BY_COMMAND}for Procgen, train (the levels of the run) or test (all levels)", ""),
    "return_normalized": Metric(f"{_BY_COMMAND}for Procgen, mean return on the scale of its paper", ""),
    "generalization_gap": Metric(
        f"{_BY_COMMAND}for Procgen, in the row of the test levels: mean return on the train levels minus this one", ""
    ),
}

PREFIXES = ("env/", "policy/", "callback/")
"""Of metrics that have no fixed names: those of environments and callbacks, and `policy/NAME/METRIC` of one of several
policies."""
MAX_ROWS = 50_000
"""Beyond this number of iterations the files keep every second row, then every fourth, and so on."""
_encode = json.JSONEncoder(allow_nan=False).encode
_Number = float | int | None


def metrics_of(algo: str) -> dict[str, Metric]:
    """All metrics of a run of this algorithm, in the order of their columns: its own come after the common losses."""
    algorithm = algorithm_class(algo)
    fields = algorithm.Settings.model_fields
    annealed = {name: fields[name].description or "" for name in scheduled(algorithm.Settings) if name not in METRICS}
    own = {name: Metric(meaning, "train") for name, meaning in (annealed | algorithm.metrics).items()}
    names = list(METRICS)
    here = names.index("policy_lag_mean")
    return {name: METRICS[name] for name in names[:here]} | own | {name: METRICS[name] for name in names[here:]}


def check_metric(name: str, algo: str, key: str) -> None:
    """Refuse a metric that no row of a run of this algorithm can have. `key`: the setting that names it."""
    known = metrics_of(algo)
    if name not in known and not name.startswith(PREFIXES):
        near = difflib.get_close_matches(name, known, 1) or ["return_mean"]
        raise UserError(
            f"{key}: there is no metric {name!r}; did you mean {near[0]!r}? Metrics of an environment start with env/"
        )


def _number(value: Any) -> _Number:
    """A number for JSON; None for NaN, infinities and missing values."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    number = value.item()  # a scalar of numpy or torch
    return number if isfinite(number) else None


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


class _Lines:
    """Appends complete lines without buffering. A line that does not fit on the disk is removed again."""

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
    """TensorBoard's event file, with one event of many scalars per row. Torch's writer would import torch."""

    INTERVAL_SECONDS = 0.25
    INTERVAL_SHARE = 1e-4  # of the time so far: a run of days writes fewer

    def __init__(self, folder: Path, purge_from: int | None, known: dict[str, Metric]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_class, self._summary_class = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names, so the file of a resumed run must sort last.
        earlier = [int(m[1]) for p in folder.iterdir() if (m := re.match(r"events\.out\.tfevents\.(\d+)\.", p.name))]
        stamp = max([int(time.time()), *(number + 1 for number in earlier)])
        path = folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(path.open("wb"))
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_from is not None:
            # This event makes TensorBoard ignore everything from this step on in earlier files.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=purge_from, session_log=start))
        self._writer.flush()
        self._known = known
        self._pending: tuple[dict[str, _Number], float] | None = None
        self._began, self._next = time.monotonic(), 0.0

    def add(self, row: dict[str, _Number]) -> None:
        """Write at most 4 rows a second, and fewer in long runs: the checksum of a record is slow Python code, and the
        file must not grow without end. `flush` writes the latest row, so that the end of a curve is never missing."""
        self._pending = (row, time.time())
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        if self._pending is None:
            return
        (row, wall_time), self._pending = self._pending, None
        now = time.monotonic()
        self._next = now + max(self.INTERVAL_SECONDS, self.INTERVAL_SHARE * (now - self._began))
        self.scalars(row, wall_time, lambda name: self._known[name].group if name in self._known else None)

    def scalars(self, row: dict[str, Any], wall_time: float, group: Callable[[str], str | None]) -> None:
        """`group(name)`: the prefix of the tag, "" to skip the metric, None if its name is the tag."""
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

    `resume_iteration`: continue after this iteration; rows of later ones are removed. A run of many iterations keeps
    those whose number is a multiple of a `stride`, and the last one.
    """

    def __init__(
        self, run: RunDirectory, *, resume_iteration: int | None = None, known: dict[str, Metric] = METRICS
    ) -> None:
        self._run, self._known = run, known
        self._columns: list[str] = []
        self._purge_from: int | None = None
        if resume_iteration is not None:
            last_step = _cut(run.metrics_path, resume_iteration)
            _cut(run.eval_path, resume_iteration)
            self._purge_from = last_step + 1  # keep the point of the checkpoint itself
            self._rewrite_progress()
        self._metrics = _Lines(run.metrics_path)
        self._progress = _Lines(run.progress_path)
        self._events = _Events(run.tb_path, self._purge_from, known)
        self._stride = stride(resume_iteration or 0)
        self._skipped: dict[str, _Number] | None = None  # the latest row, if the files do not have it

    def write(self, row: dict[str, _Number]) -> None:
        numbers = {name: _number(value) for name, value in row.items()}
        numbers.setdefault("timestamp", time.time())
        iteration = int(numbers.get("iteration") or 0)
        if stride(iteration) > self._stride:
            self._thin(iteration)
        if iteration % self._stride:
            self._skipped = numbers
        else:
            self._append(numbers)
        self._events.add(numbers)

    def _thin(self, iteration: int) -> None:
        """Drop every second row. Readers see another file, as after a resume."""
        self._stride = stride(iteration)
        _rewrite(self._run.metrics_path, lambda row: not (row.get("iteration") or 0) % self._stride)
        self._metrics.close()
        self._metrics = _Lines(self._run.metrics_path)
        self._reopen_progress()

    def _append(self, numbers: dict[str, _Number]) -> None:
        self._skipped = None
        new_columns = not numbers.keys() <= set(self._columns)
        if new_columns:
            self._sorted(numbers)  # before anything is written: it raises for an unknown name
        self._metrics.write(_encode(numbers) + "\n")
        if new_columns:
            self._reopen_progress()  # from metrics.jsonl, which already holds this row
        else:
            self._progress.write(_csv_line([numbers.get(name) for name in self._columns]))

    def _reopen_progress(self) -> None:
        self._progress.close()
        self._rewrite_progress()
        self._progress = _Lines(self._run.progress_path)

    def write_eval(self, row: dict[str, Any]) -> None:
        numbers: dict[str, Any] = plain(row)
        lines = _Lines(self._run.eval_path)  # evaluations are rare: keep no file open, and create none without them
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
        try:
            if self._skipped is not None:
                self._append(self._skipped)
        finally:
            self._metrics.close()
            self._progress.close()
            self._events.close()

    def _sorted(self, names: Iterable[str]) -> list[str]:
        """As columns: known metrics in their order, then those of environments."""
        order = {name: place for place, name in enumerate(self._known)}
        for name in names:
            if name not in order and not name.startswith(PREFIXES):
                raise ValueError(f"metric {name!r} is not in METRICS or the algorithm's `metrics`; does it need env/?")
        return sorted(names, key=lambda name: (order.get(name, len(order)), name))

    def _rewrite_progress(self) -> None:
        """Write `progress.csv` from `metrics.jsonl`, row by row: there may be a million."""
        self._columns = self._sorted({name for row in read_lines(self._run.metrics_path) for name in row})
        with replacing(self._run.progress_path) as file:
            table = csv.writer(file, lineterminator="\n")
            if self._columns:
                table.writerow(self._columns)
            table.writerows([row.get(name) for name in self._columns] for row in read_lines(self._run.metrics_path))


def stride(iteration: int) -> int:
    """The smallest power of two that leaves at most `MAX_ROWS` rows of this many iterations."""
    rows = -(-iteration // MAX_ROWS)
    return 1 << max(0, rows - 1).bit_length()


def _cut(path: Path, iteration: int) -> int:
    """Remove rows of later iterations and an incomplete last line. Returns the last remaining env step, or -1."""
    last_step = -1

    def is_earlier(row: dict[str, Any]) -> bool:
        nonlocal last_step
        earlier = (row.get("iteration") or 0) <= iteration
        last_step = max(last_step, row.get("env_steps") or 0) if earlier else last_step
        return bool(earlier)

    if path.exists():
        _rewrite(path, is_earlier)
    return last_step


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Replace a file of rows by one with those to keep, row by row: there may be many."""
    with replacing(path) as file:
        for row in read_lines(path):
            if keep(row):
                file.write(_encode(row) + "\n")
