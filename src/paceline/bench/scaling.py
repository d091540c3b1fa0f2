"""`paceline bench scaling`: workers x nodes x engines x algorithms x environments x seeds, and what more workers bring.

Each run is an ordinary `paceline train`; with `nodes` under a `paceline launch` of its own, on so many hosts, or with a
scheduler a job of its own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError, model_validator

from paceline.bench import scaling_results
from paceline.bench.cell import PlannedRun, choice, read_yaml, sets_for
from paceline.bench.make import QUEUED, STOPPED, Entry, Interrupts, Ledger, Screen, drive, reason, run_words
from paceline.config import SECTIONS, Positive, Seconds, Section, UserError
from paceline.launch.node import LAUNCHED
from paceline.resolve import read_file

if TYPE_CHECKING:
    from paceline.bench.jobs import Queue, Request

ENGINES = ("auto", "local", "ray", "rllib")
SYNCHRONOUS = ("ppo", "a2c")
BUDGETS = {
    "iterations": "stop.iterations",
    "total_steps": "stop.total_steps",
    "max_time": "stop.max_time",
    "stop_return": "stop.return_mean",
}
# What the matrix decides, by the flag that does.
DECIDED = {
    "algo": "--algos",
    "env": "--envs",
    "env.id": "--envs",
    "seed": "--seeds",
    "engine.name": "--engines",
    "engine.workers": "--workers",
    "engine.scaling": "--scaling",
    "out": "--out",
    "name": "--out",
    "preset": "--preset",
    **{key: f"--{name.replace('_', '-')}" for name, key in BUDGETS.items()},
}


class Matrix(Section):
    """A study. The command line has a flag for each key but `about` and `settings`, which goes before the file."""

    about: str = ""
    config: str | None = None
    """A YAML file of settings, as `paceline train --config` takes it."""
    settings: dict[str, Any] = {}
    """Settings of all runs, nested as in such a file, over it."""
    preset: str | None = None
    """As in `paceline train`."""
    envs: list[str] = []
    """None: that of `config`, else CartPole-v1."""
    algos: list[str] = []
    """None: that of `config`, else ppo."""
    engines: list[Literal["auto", "local", "ray", "rllib"]] = ["auto"]
    workers: list[Positive] = [1, 2]
    """Of all nodes together."""
    nodes: list[Positive] = []
    """Hosts of the allocation, of --hosts or of its job that a run may use. None: it runs where the command does, a job
    on one host."""
    seeds: Positive = 3
    """Runs of each: seeds 0 to N-1."""
    scaling: list[Literal["strong", "weak"]] = ["strong"]
    """`strong`: the same work for any number of workers. `weak`: the same for each worker."""
    iterations: Positive | None = None
    total_steps: Positive | None = None
    """With weak scaling, of each worker."""
    max_time: Seconds | None = None
    stop_return: float | None = None
    """Time to this return, confirmed by evaluation."""
    threshold: float | None = None
    """The return whose time is reported. None: `stop_return`, else what the environment calls solved."""

    @model_validator(mode="after")
    def _check(self) -> Matrix:
        for name in ("engines", "workers", "scaling"):
            if not getattr(self, name):
                raise ValueError(f"{name}: none given")
        return self

    @property
    def budget(self) -> dict[str, Any]:
        return {key: value for name, key in BUDGETS.items() if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Point(PlannedRun):
    """One run of the matrix."""

    engine: str
    workers: int
    nodes: int | None
    scaling: str
    limits: tuple[tuple[str, Any], ...]
    start_file: str | None
    launch: tuple[str, ...]
    request: Request | None = field(default=None, compare=False)

    movable: ClassVar[tuple[str, ...]] = ("eval", "checkpoint", "out", "name")

    @property
    def name(self) -> str:
        env = re.sub(r"[^A-Za-z0-9.+=@-]+", "-", self.env.rpartition("/")[2]).strip("-.") or "env"
        parts = [env, self.algo, self.engine, *(["weak"] if self.scaling == "weak" else [])]
        return "-".join([*parts, *([f"n{self.nodes}"] if self.nodes else []), f"w{self.workers}", f"s{self.seed}"])

    @property
    def budget(self) -> dict[str, Any]:
        engine = {} if self.engine == "auto" else {"engine.name": self.engine}
        return {**engine, "engine.workers": self.workers, **dict(self.limits)}

    @property
    def file(self) -> str | None:
        return self.start_file

    @property
    def settings(self) -> dict[str, Any]:
        """With the steps of each worker, where they grow with the workers."""
        found = super().settings
        steps = found["stop.total_steps"]
        return {**found, "stop.total_steps": steps // self.workers} if steps and self.scaling == "weak" else found

    @property
    def words(self) -> list[str]:
        """Of the whole command, without `paceline`."""
        if self.request is not None:
            return self.request.submit_words(self.name, self.nodes or 1, self.train_words)
        if not self.launch:
            return self.train_words
        log = ["--log", str(self.out / "launch" / self.name)]
        return ["launch", *self.launch, *log, "--", sys.executable, "-m", "paceline.cli", *self.train_words]


def plan_scaling(
    matrix: Matrix,
    *,
    out: Path,
    sets: Sequence[str] = (),
    hosts: str | None = None,
    rehearse: bool = False,
    request: Request | None = None,
) -> list[Point]:
    """The runs in the order they are made: all of a seed before the next, so that a table is whole early. Every setting
    is checked here, before the first run."""
    base = read_file(matrix.config) if matrix.config else {}
    machines: list[int | None] = [*matrix.nodes] or [None]
    envs = matrix.envs or [_env_of(base)]
    algos = choice("--algos", matrix.algos or [str(base.get("algo") or "ppo")], list(SECTIONS))
    if not matrix.budget and not base.get("stop"):
        raise UserError("a scaling study needs a budget: --iterations, --total-steps, --max-time or --stop-return")
    if (hosts or rehearse) and not matrix.nodes:
        raise UserError(f"--{'hosts' if hosts else 'rehearse'} is for --nodes: how many of them each run takes")
    if (hosts or rehearse) and request is not None:
        raise UserError(f"--{'hosts' if hosts else 'rehearse'}: the jobs of --on have their hosts from the scheduler")
    if matrix.nodes and LAUNCHED in os.environ:
        raise UserError("--nodes: this is inside `paceline launch`, start the study outside of it")
    for item in sets:
        key = item.partition("=")[0].strip()
        if key in DECIDED:
            raise UserError(f"--set {item}: in a scaling study {DECIDED[key]} decides that, not --set")
    points = [
        Point(
            algo=algo,
            env=env,
            seed=seed,
            preset=matrix.preset,
            sets=tuple(_sets(matrix, algo, scaling, sets)),
            out=out,
            engine=engine,
            workers=workers,
            nodes=nodes,
            scaling=scaling,
            limits=tuple(_limits(matrix.budget, workers, scaling).items()),
            start_file=matrix.config,
            launch=() if request is not None else _launch(nodes, hosts, rehearse),
            request=request,
        )
        for seed in range(matrix.seeds)
        for env in dict.fromkeys(envs)
        for algo in algos
        for engine in dict.fromkeys(matrix.engines)
        for scaling in dict.fromkeys(matrix.scaling)
        for nodes in dict.fromkeys(machines)
        for workers in sorted(set(matrix.workers))
        if not nodes or workers >= nodes
    ]
    if not points:
        dropped = ", ".join(f"{workers} on {nodes}" for nodes in matrix.nodes for workers in matrix.workers)
        raise UserError(
            f"--workers on --nodes {dropped}: each node needs a worker, and no run is left; give more workers"
        )
    envs_of: dict[str, str] = {}
    for point in points:
        if envs_of.setdefault(point.name, point.env) != point.env:
            raise UserError(
                f"--envs {envs_of[point.name]},{point.env}: runs of both would be called {point.name}; study them one "
                "by one, each with a --out of its own"
            )
        _ = point.config
    return points


def run_scaling(
    matrix: Matrix,
    *,
    title: str,
    words: Sequence[str],
    out: str | None = None,
    sets: Sequence[str] = (),
    hosts: str | None = None,
    rehearse: bool = False,
    request: Request | None = None,
    retry: bool = False,
    dry_run: bool = False,
) -> int:
    """Make what is missing, or with `request` submit it and read what has ended. Write `scaling.json`, `.md` and
    `.csv`, and return the exit status."""
    folder = Path(out or f"runs/{title}").expanduser()
    points = plan_scaling(matrix, out=folder, sets=sets, hosts=hosts, rehearse=rehearse, request=request)
    threshold = matrix.stop_return if matrix.threshold is None else matrix.threshold
    queue = None
    if request is not None:
        from paceline.bench.jobs import Queue

        queue = Queue(request, points)
    ledger = ScalingLedger(folder, title, matrix.about, points, words, threshold, queue)
    return drive(ledger, retry=retry, dry_run=dry_run)


def load_matrix(file: str | None, flags: dict[str, Any]) -> Matrix:
    """A file, and the flags that were given over it."""
    found = read_yaml("--study", file, Matrix) if file else Matrix()
    budgets = [name for name in BUDGETS if name in flags]
    # A budget of the command line takes the place of the file's, not a second one beside it.
    kept = {name: value for name, value in found.model_dump().items() if not (budgets and name in BUDGETS)}
    return Matrix.model_validate({**kept, **flags})


def flags_of(given: dict[str, str]) -> dict[str, Any]:
    """The words of the command line as keys of a matrix."""
    lists = ("envs", "algos", "engines", "workers", "nodes", "scaling")
    flags: dict[str, Any] = {}
    for name, text in given.items():
        value: Any = [word.strip() for word in text.split(",") if word.strip()] if name in lists else text
        try:
            Matrix.model_validate({name: value})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"--{name.replace('_', '-')} {text}: {reason}") from None
        flags[name] = value
    return flags


class ScalingLedger(Ledger[Point]):
    kind = "scaling"

    def __init__(
        self,
        folder: Path,
        title: str,
        about: str,
        cells: Sequence[Point],
        words: Sequence[str],
        threshold: float | None,
        queue: Queue | None = None,
    ) -> None:
        self.threshold, self.queue = threshold, queue
        super().__init__(folder, title, about, cells, words)
        for cell in cells:
            self._check_alike(cell)

    def _check_alike(self, cell: Point) -> None:
        """With the runs of earlier calls, that are shown beside it: those of one series differ in their size alone."""
        for other in self.entries.values():
            word = scaling_results.difference(self.entries[cell.name], other)
            if word is not None and other["state"] != "missing":
                raise UserError(
                    f"--out {self.folder} has the run {other['name']} with {word} as {cell.name}: they would be "
                    "compared; choose another --out, or give the settings it was made with"
                )

    def read(self, cell: Point, before: Entry | None) -> Entry:
        entry = scaling_results.read(cell, before, self.threshold)
        if self.queue is not None:
            return self.queue.judge(cell, entry, before)
        if before is not None and before["state"] in QUEUED and entry["state"] != "done":
            raise UserError(
                f"the run {cell.name} is in a queue ({before['reason']}): give --on as before, or `paceline cancel "
                f"{before['job']}` first"
            )
        return entry

    def make(self, cell: Point, entry: Entry, screen: Screen, interrupts: Interrupts) -> tuple[int, str | None]:
        if self.queue is not None:
            self.queue.submit(cell, cell.nodes or 1)
            return 0, None
        code, said = run_words(cell.words, cell.out / "logs" / f"{cell.name}.log", screen, interrupts)
        if code == STOPPED or interrupts.received:
            return STOPPED, None
        if code:
            return code, reason(code, said)
        return 0, None if self.read(cell, None)["state"] == "done" else "it ended well and left no figures"

    @property
    def where_failed(self) -> str:
        return super().where_failed if self.queue is None else "see `paceline logs JOB`"

    def commands_of(self, cell: Point) -> list[list[str]]:
        return [cell.words]

    def line(self, entry: Entry) -> str:
        return scaling_results.line(entry)

    def collect(self) -> dict[str, Any]:
        return scaling_results.collect(self.title, self.about, self.commands, list(self.entries.values()))

    def page(self, result: dict[str, Any]) -> str:
        return scaling_results.page(result)

    def tables(self, result: dict[str, Any]) -> str:
        return scaling_results.tables(result)

    def write(self) -> dict[str, Any]:
        if self.queue is not None:
            self.queue.keep_timelines(self.cells)
        result = super().write()
        scaling_results.write_csv(self.folder / "scaling.csv", result)
        return result


def _env_of(base: dict[str, Any]) -> str:
    env = base.get("env")
    return str((env.get("id") if isinstance(env, dict) else env) or "CartPole-v1")


def _sets(matrix: Matrix, algo: str, scaling: str, sets: Sequence[str]) -> list[str]:
    # Actors of the others wait for nobody: each has as many environments in any case.
    grows = ["engine.scaling=weak"] if scaling == "weak" and algo in SYNCHRONOUS else []
    return [*sets_for(algo, matrix.settings, sets), *grows]


def _limits(budget: dict[str, Any], workers: int, scaling: str) -> dict[str, Any]:
    steps = budget.get("stop.total_steps")
    return {**budget, "stop.total_steps": steps * workers} if steps and scaling == "weak" else budget


def _launch(nodes: int | None, hosts: str | None, rehearse: bool) -> tuple[str, ...]:
    if nodes is None:
        return ()
    if rehearse:
        return ("--rehearse", str(nodes))
    return (*(("--hosts", hosts) if hosts else ()), "--nodes", str(nodes))
