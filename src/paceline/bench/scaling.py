"""`paceline bench scaling`: workers x nodes x engines x algorithms x environments x seeds, and their speed-up.

Each run is an ordinary `paceline train`. With `nodes` it runs under its own `paceline launch`, and with a scheduler as
its own job.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from paceline.bench import scaling_tables
from paceline.bench.planned_run import PlannedRun, algorithm_choice, check_once, check_sets, read_yaml, sets_for
from paceline.bench.runner import Benchmark, Entry, Interrupts, Screen, run_benchmark
from paceline.config import ALGORITHMS, Positive, Seconds, Section, UserError, algorithm_class, algorithm_name
from paceline.config.algorithms import DEFAULT_ALGORITHM
from paceline.config.resolve import read_file
from paceline.envs.solved import solved_return
from paceline.ray_node import LAUNCHED
from paceline.results.run_files import FAILED, FINISHED
from paceline.results.runs import load_run
from paceline.results.scaling_figures import QUEUED, run_figures, scaling_result, settings_difference, write_csv

if TYPE_CHECKING:
    from paceline.bench.batch_jobs import JobQueue, Request

BUDGETS = {
    "iterations": "stop.iterations",
    "total_steps": "stop.total_steps",
    "max_time": "stop.max_time",
    "stop_return": "stop.return_mean",
}
# Settings that the matrix decides, and the flag that does.
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
_LISTS = ("envs", "algos", "engines", "workers", "nodes", "scaling")


class Matrix(Section):
    """A scaling benchmark, as a YAML file. Each key but `about` and `settings` has a flag, which overrides the file."""

    about: str = ""
    config: str | None = None
    """A YAML file of settings, as for `paceline train --config`."""
    settings: dict[str, Any] = {}
    """Settings of all runs, nested as in such a file; they override it."""
    preset: str | None = None
    """As in `paceline train`."""
    envs: list[str] = []
    """Environments; default: the one in `config`, otherwise CartPole-v1."""
    algos: list[str] = []
    """Algorithms; default: that of `config`, else ppo."""
    engines: list[Literal["auto", "local", "ray", "rllib"]] = ["auto"]
    """Engines: auto, local, ray, rllib."""
    workers: list[Positive] = [1, 2]
    """Numbers of workers, on all nodes together."""
    nodes: list[Positive] = []
    """Numbers of hosts, taken from the allocation, --hosts or the job; default: this host, one host for a job."""
    seeds: Annotated[Positive, Field(le=1_000)] = 3
    """Runs of each configuration: seeds 0 to N-1."""
    scaling: list[Literal["strong", "weak"]] = ["strong"]
    """`strong`: the same work for any number of workers. `weak`: the same work for each worker."""
    iterations: Positive | None = None
    """Stop each run after this many iterations."""
    total_steps: Positive | None = None
    """Stop each run after this many environment steps; with weak scaling, steps of each worker."""
    max_time: Seconds | None = None
    """Stop each run after this much time (90s, 30m)."""
    stop_return: float | None = None
    """Stop each run when this return is reached and confirmed by evaluation."""
    threshold: float | None = None
    """Report the time to this return; default: `stop_return`, otherwise the environment's reward threshold."""

    @model_validator(mode="after")
    def _check(self) -> Matrix:
        for name in ("engines", "workers", "scaling"):
            if not getattr(self, name):
                raise ValueError(f"{name}: none given")
        for name in _LISTS:
            check_once(f"--{name}", getattr(self, name))
        return self

    @property
    def budget(self) -> dict[str, Any]:
        return {key: value for name, key in BUDGETS.items() if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class ScalingRun(PlannedRun):
    """One run of the matrix."""

    engine: str
    workers: int
    nodes: int | None
    scaling: str
    budget: tuple[tuple[str, Any], ...]
    start_file: str | None
    launch: tuple[str, ...]
    request: Request | None = field(default=None, compare=False)

    changeable: ClassVar[tuple[str, ...]] = ("eval", "checkpoint", "out", "name")

    @property
    def name(self) -> str:
        env = re.sub(r"[^A-Za-z0-9.+=@-]+", "-", self.env.rpartition("/")[2]).strip("-.") or "env"
        parts = [env, algorithm_name(self.algo), self.engine, *(["weak"] if self.scaling == "weak" else [])]
        return "-".join([*parts, *([f"n{self.nodes}"] if self.nodes else []), f"w{self.workers}", f"s{self.seed}"])

    @property
    def planned(self) -> dict[str, Any]:
        engine = {} if self.engine == "auto" else {"engine.name": self.engine}
        return {**engine, "engine.workers": self.workers, **dict(self.budget)}

    @property
    def config_file(self) -> str | None:
        return self.start_file

    @property
    def settings(self) -> dict[str, Any]:
        """With the steps per worker, if they grow with the workers."""
        found = super().settings
        steps = found["stop.total_steps"]
        return {**found, "stop.total_steps": steps // self.workers} if steps and self.scaling == "weak" else found

    @property
    def commands(self) -> dict[str, list[str]]:
        return {"training": self.words}

    @property
    def words(self) -> list[str]:
        """The whole command, without `paceline`."""
        if self.request is not None:
            return self.request.submit_words(self.name, self.nodes or 1, self.train_words)
        if not self.launch:
            return self.train_words
        log = ["--log", str(self.out / "launch" / self.name)]
        return ["launch", *self.launch, *log, "--", sys.executable, "-m", "paceline.commands.main", *self.train_words]


def plan_scaling(
    matrix: Matrix,
    *,
    out: Path,
    sets: Sequence[str] = (),
    hosts: str | None = None,
    rehearse: bool = False,
    request: Request | None = None,
) -> list[ScalingRun]:
    """The runs in the order they are made: all of one seed before the next, so that a table is complete early.

    All settings are checked here, before the first run.
    """
    base = read_file(matrix.config) if matrix.config else {}
    envs = matrix.envs or [_env_of(base)]
    nodes_per_run: list[int | None] = [*matrix.nodes] or [None]
    algos = algorithm_choice(matrix.algos or [str(base.get("algo") or DEFAULT_ALGORITHM)], list(ALGORITHMS))
    if not matrix.budget and not base.get("stop"):
        raise UserError("a scaling benchmark needs a budget: --iterations, --total-steps, --max-time or --stop-return")
    if hosts or rehearse:
        flag = f"--{'hosts' if hosts else 'rehearse'}"
        if not matrix.nodes:
            raise UserError(f"{flag} needs --nodes, the number of hosts that each run takes")
        if request is not None:
            raise UserError(f"{flag}: the jobs of --on get their hosts from the scheduler")
    if matrix.nodes and LAUNCHED in os.environ:
        raise UserError("--nodes: this command runs inside `paceline launch`; start it outside")
    check_sets(sets, DECIDED, algos)
    runs = [
        ScalingRun(
            algo=algo,
            env=env,
            seed=seed,
            preset=matrix.preset,
            sets=(*sets_for(algo, algos, matrix.settings, sets), *_scaling_sets(algo, scaling)),
            out=out,
            engine=engine,
            workers=workers,
            nodes=nodes,
            scaling=scaling,
            budget=tuple(_budget(matrix.budget, workers, scaling).items()),
            start_file=matrix.config,
            launch=() if request is not None else _launch_words(nodes, hosts, rehearse),
            request=request,
        )
        for seed in range(matrix.seeds)
        for env in envs
        for algo in algos
        for engine in matrix.engines
        for scaling in matrix.scaling
        for nodes in nodes_per_run
        for workers in sorted(matrix.workers)
        if not nodes or workers >= nodes
    ]
    if not runs:
        dropped = ", ".join(f"{workers} on {nodes}" for nodes in matrix.nodes for workers in matrix.workers)
        raise UserError(
            f"--workers on --nodes {dropped}: each node needs a worker, so no run is left; give more workers"
        )
    envs_by_name: dict[str, str] = {}
    for run in runs:
        if envs_by_name.setdefault(run.name, run.env) != run.env:
            raise UserError(
                f"--envs {envs_by_name[run.name]},{run.env}: runs of both would be called {run.name}; use one command "
                "and --out for each"
            )
        _ = run.config
    return runs


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
    """Make what is missing, or with `request` submit it and read the jobs that have ended. Write `scaling.json`, `.md`
    and `.csv`, and return the exit status."""
    folder = Path(out or f"runs/{title}").expanduser()
    runs = plan_scaling(matrix, out=folder, sets=sets, hosts=hosts, rehearse=rehearse, request=request)
    threshold = matrix.stop_return if matrix.threshold is None else matrix.threshold
    queue = None
    if request is not None:
        from paceline.bench.batch_jobs import JobQueue

        queue = JobQueue(request, runs)
    benchmark = ScalingBenchmark(folder, title, matrix.about, runs, words, threshold, queue)
    return run_benchmark(benchmark, retry=retry, dry_run=dry_run)


def load_matrix(file: str | None, flags: dict[str, Any]) -> Matrix:
    """A file, overridden by the given flags."""
    found = read_yaml("--study", file, Matrix) if file else Matrix()
    budgets = [name for name in BUDGETS if name in flags]
    # A budget of the command line replaces the file's instead of adding to it.
    kept = {name: value for name, value in found.model_dump().items() if not (budgets and name in BUDGETS)}
    return Matrix.model_validate({**kept, **flags})


def flags_of(given: dict[str, str]) -> dict[str, Any]:
    """The flags of the command line as keys of a matrix."""
    flags: dict[str, Any] = {}
    for name, text in given.items():
        value: Any = [word.strip() for word in text.split(",") if word.strip()] if name in _LISTS else text
        try:
            Matrix.model_validate({name: value})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"--{name.replace('_', '-')} {text}: {reason}") from None
        flags[name] = value
    return flags


class ScalingBenchmark(Benchmark[ScalingRun]):
    kind = "scaling"
    no_result = "it succeeded and left no figures"
    text = scaling_tables

    def __init__(
        self,
        folder: Path,
        title: str,
        about: str,
        runs: Sequence[ScalingRun],
        words: Sequence[str],
        threshold: float | None,
        queue: JobQueue | None = None,
    ) -> None:
        self.threshold, self.queue = threshold, queue
        super().__init__(folder, title, about, runs, words)
        for run in runs:
            self._check_comparable(run)

    def _check_comparable(self, run: ScalingRun) -> None:
        """UserError if an earlier run of the same series has other settings: a table would compare them."""
        for other in self.entries.values():
            difference = settings_difference(self.entries[run.name], other)
            if difference is not None and other["state"] != "missing":
                raise UserError(
                    f"--out {self.folder} has the run {other['name']} with {difference} as {run.name}: they would be "
                    "compared; choose another --out, or give the settings it was made with"
                )

    def read(self, run: ScalingRun, before: Entry | None) -> Entry:
        entry = read_entry(run, before, self.threshold)
        if self.queue is not None:
            return self.queue.with_job(run, entry, before)
        if before is not None and before["state"] in QUEUED and entry["state"] != "done":
            raise UserError(
                f"the run {run.name} is in a queue ({before['reason']}): give --on as before, or `paceline cancel "
                f"{before['job']}` first"
            )
        return entry

    def make(self, run: ScalingRun, entry: Entry, screen: Screen, interrupts: Interrupts) -> tuple[int, str | None]:
        if self.queue is None:
            return super().make(run, entry, screen, interrupts)
        self.queue.submit(run, run.nodes or 1)
        return 0, None

    def result(self) -> dict[str, Any]:
        return scaling_result(self.title, self.about, self.commands, list(self.entries.values()))

    @property
    def failure_hint(self) -> str:
        return super().failure_hint if self.queue is None else "see `paceline logs JOB`"

    def write(self) -> dict[str, Any]:
        if self.queue is not None:
            self.queue.copy_timelines(self.runs)
        result = super().write()
        write_csv(self.folder / "scaling.csv", result["runs"])
        return result


def read_entry(run: ScalingRun, before: Entry | None, threshold: float | None = None) -> Entry:
    """The entry of a run, from its directory. `state`: done, failed, interrupted or missing."""
    keys = ("name", "env", "algo", "engine", "scaling", "nodes", "workers", "seed", "settings")
    entry: Entry = {
        **{key: getattr(run, key) for key in keys},
        "state": "missing",
        "reason": None,
        "command": shlex.join(["paceline", *run.words]),
    }
    data = load_run(run.path) if (run.path / "config.yaml").is_file() else None
    if data is not None:
        if data.state == FINISHED and data.usable:
            limit = solved_return(run.env) if threshold is None else threshold
            return {**entry, "state": "done", "reason": data.reason or None, **run_figures(data, limit)}
        if data.state == FINISHED:
            entry["state"], entry["reason"] = "failed", "; ".join(data.problems)
        else:
            entry["state"] = "failed" if data.state == FAILED else "interrupted"
            entry["reason"] = data.reason or None
    if before is not None and before["state"] == "failed" and before.get("settings", run.settings) == run.settings:
        entry["state"], entry["reason"] = "failed", before["reason"]
    return entry


def _env_of(base: dict[str, Any]) -> str:
    env = base.get("env")
    return str((env.get("id") if isinstance(env, dict) else env) or "CartPole-v1")


def _scaling_sets(algo: str, scaling: str) -> tuple[str, ...]:
    # The actors of the other algorithms are independent: each always has as many environments.
    return ("engine.scaling=weak",) if scaling == "weak" and algorithm_class(algo).sharing == "replicas" else ()


def _budget(budget: dict[str, Any], workers: int, scaling: str) -> dict[str, Any]:
    steps = budget.get("stop.total_steps")
    return {**budget, "stop.total_steps": steps * workers} if steps and scaling == "weak" else budget


def _launch_words(nodes: int | None, hosts: str | None, rehearse: bool) -> tuple[str, ...]:
    if nodes is None:
        return ()
    if rehearse:
        return ("--rehearse", str(nodes))
    return (*(("--hosts", hosts) if hosts else ()), "--nodes", str(nodes))
