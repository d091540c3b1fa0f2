"""`paceline bench`: many runs, made and read together."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.commands.flags import Argument, Flag, SettingFlags, Verb, VerbGroup, flag_name, words
from paceline.commands.job_options import JobVerb, job_flags
from paceline.commands.run_settings import SettingsVerb, run_flags

if TYPE_CHECKING:
    from paceline.bench.batch_jobs import Request


class SuiteVerb(Verb):
    """Train games x algorithms x seeds and give normalised scores.

    Train and evaluate games x algorithms x seeds, one run after the other, each as `paceline train` would; write
    suite.json and suite.md. Run the command again to make the missing runs.
    """

    suite: Annotated[str, Flag("NAME|FILE")]
    """procgen-easy, classic, atari-small, mujoco, or a YAML file."""
    algos: Annotated[str, Flag("A,B")] = "ppo"
    """Algorithms."""
    seeds: Annotated[int, Flag("N")] = 3
    """Runs of each: seeds 0 to N-1."""
    games: Annotated[str | None, Flag("A,B")] = None
    """Default: all games of the suite."""
    total_steps: Annotated[str | None, Flag("N")] = None
    """Steps of each run (100000, 100k, 1M), instead of the suite's."""
    episodes: Annotated[int | None, Flag("N")] = None
    """Episodes of each evaluation, instead of the suite's."""
    set: Annotated[tuple[str, ...], Flag("KEY=VALUE")] = ()
    """Any setting, for every run."""
    out: Annotated[str | None, Flag("DIR")] = None
    """Folder of the runs and the table (default: runs/NAME)."""
    retry: bool = False
    """Also repeat runs that failed before."""
    dry_run: bool = False
    """Print the commands, start nothing."""

    def run(self) -> int:
        from paceline.bench.suite import run_suite
        from paceline.config import UserError, parse_count

        steps = None if self.total_steps is None else parse_count(self.total_steps)
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise UserError(f"--total-steps {self.total_steps}: expected a number of steps such as 100000, 100k or 1M")
        return run_suite(
            self.suite,
            algos=self.algos.split(","),
            seeds=self.seeds,
            games=None if self.games is None else self.games.split(","),
            total_steps=steps,
            episodes=self.episodes,
            sets=self.set,
            out=self.out,
            retry=self.retry,
            dry_run=self.dry_run,
        )


METAVARS = {"config": "FILE", "preset": "NAME", "workers": "1,2,4", "nodes": "1,2", "scaling": "strong,weak"}
METAVARS |= {"max_time": "TIME", "stop_return": "R", "threshold": "R"}


def matrix_flags() -> SettingFlags:
    from paceline.bench.scaling import Matrix

    names = (name for name in Matrix.model_fields if name not in ("about", "settings"))
    return SettingFlags(Matrix, {name: (flag_name(name),) for name in names}, metavars=METAVARS)


class ScalingVerb(JobVerb):
    """Measure how more workers help: speed-up, efficiency, time to a return, and what limits them.

    Train with each number of workers, engine, algorithm and seed, one run after the other, or with --on each as a job;
    write scaling.json, .md, .csv and .png. Run the command again to make the missing runs.
    """

    groups = {"jobs: with --on, or a --profile that names a scheduler, each run is a job": ("on", "profile", "job")}

    study: Annotated[str | None, Flag("FILE")] = None
    """A YAML file with any of these settings."""
    matrix: Annotated[dict[str, Any], matrix_flags()]
    set: Annotated[tuple[str, ...], Flag("KEY=VALUE")] = ()
    """Any setting, for every run."""
    hosts: Annotated[str | None, Flag("FILE")] = None
    """With --nodes: hosts to reach by ssh, as for launch."""
    rehearse: bool = False
    """With --nodes: simulate the hosts with processes on this machine."""
    out: Annotated[str | None, Flag("DIR")] = None
    """Folder of the runs and the tables (default: runs/scaling)."""
    retry: bool = False
    """Also repeat runs that failed before."""
    dry_run: bool = False
    """Print the commands, start nothing."""
    job: Annotated[dict[str, Any], job_flags(without=("name", "nodes"))]

    def run(self) -> int:
        from paceline.bench.scaling import flags_of, load_matrix, run_scaling

        title = Path(self.study).stem if self.study else "scaling"
        code = run_scaling(
            load_matrix(self.study, flags_of(self.matrix)),
            title=title,
            words=words(self, "study", "matrix", "set", "hosts", "out", "rehearse", "on", "profile", "job"),
            out=self.out,
            sets=self.set,
            hosts=self.hosts,
            rehearse=self.rehearse,
            request=self._request(),
            retry=self.retry,
            dry_run=self.dry_run,
        )
        if not self.dry_run:
            from paceline.report.figures import draw_scaling

            draw_scaling(Path(self.out or f"runs/{title}").expanduser())
        return code

    def _request(self) -> Request | None:
        """What each job asks for; None where the runs are made here."""
        from paceline.bench.batch_jobs import Request
        from paceline.config import UserError

        if self.on is None and self.profile is None:
            for name, value in self.job.items():
                raise UserError(
                    f"{flag_name(name)} {value} is an option for jobs: also give --on SCHEDULER or --profile SITE"
                )
            return None
        return Request(*self.requested(), tuple(words(self, "on", "profile", "job")))


def throughput_flags() -> SettingFlags:
    flags = run_flags(only=("algo", "env.id", "engine.name", "engine.workers", "stop.max_time"))
    return replace(flags, help={**flags.help, "stop.max_time": "Training time of the run (default: 10s)."})


class ThroughputVerb(SettingsVerb):
    """Show where the time of one run goes, compared with what this machine can do.

    Train for a short time (or read RUN), measure the ceilings of this machine, and show both side by side.
    """

    target: Annotated[str | None, Argument("RUN")] = None
    """An existing run; default: a new one."""
    settings: Annotated[dict[str, Any], throughput_flags()]
    profile: bool = False
    """Also write a flame graph (py-spy) and a torch trace."""
    out: Annotated[str | None, Flag("DIR")] = None
    """Folder of the run and the tables (default: runs/throughput)."""

    def run(self) -> int:
        from paceline.bench.throughput import run_throughput
        from paceline.config import UserError
        from paceline.config.resolve import resolve_tree

        train = words(self, "config", "preset", "settings", "set")
        if self.target and train:
            raise UserError(f"RUN and {train[0]}: an existing run has its own settings; give one of them")
        resolve_tree(self.given(), preset=self.preset)  # reports bad input before anything is written
        shown = [*([self.target] if self.target else train), *words(self, "profile")]
        command = shlex.join(["paceline", "bench", "throughput", *shown])
        if "stop.max_time" not in self.settings:
            train += ["--max-time", "10s"]
        return run_throughput(self.target, train, out=self.out, profile=self.profile, command=command)


class ForecastVerb(Verb):
    """Simulate more workers than were measured: what they bring, where it bends and why.

    Fit the parts of finished runs (collecting, stragglers, learning, exchange, driver, the learner's queue), best of a
    scaling study, and simulate other numbers of workers and nodes. Nothing is trained.
    """

    runs: Annotated[tuple[str, ...], Argument("RUN|DIR")]
    """Finished runs, or folders of runs such as that of `bench scaling`."""
    workers: Annotated[str, Flag("64,512,4096")]
    """Numbers of workers to simulate, over all nodes."""
    nodes: Annotated[str, Flag("1,16")] = "1"
    """Numbers of nodes."""
    cores: Annotated[int | None, Flag("N", least=1)] = None
    """Cores of each node; default: one for every worker."""
    latency: Annotated[float, Flag("MS")] = 0.1
    """Milliseconds from node to node, if no run has several nodes."""
    bandwidth: Annotated[float, Flag("GBIT")] = 10.0
    """Gbit/s of a node's link."""
    hold_out: Annotated[str | None, Flag("8,16")] = None
    """Predict these measured numbers of workers from the others (default: the largest of three or more)."""
    json: bool = False
    """Print JSON, not tables."""
    out: Annotated[str | None, Flag("DIR")] = None
    """Write forecast.md, .json and .png into this folder."""

    def run(self) -> int:
        from paceline.bench.forecast import run_forecast

        result = run_forecast(
            self.runs,
            workers=self.workers,
            nodes=self.nodes,
            cores=self.cores,
            latency_milliseconds=self.latency,
            gigabits=self.bandwidth,
            hold_out=self.hold_out,
            as_json=self.json,
            out=self.out,
        )
        if self.out is not None:
            from paceline.report.forecast_figure import draw_forecast

            draw_forecast(result, Path(self.out).expanduser() / "forecast.png")
        return 0


BENCH = VerbGroup(
    "Run a benchmark: a suite of games, a scaling study, the throughput of one run; forecast more workers.",
    "KIND",
    {"suite": SuiteVerb, "scaling": ScalingVerb, "forecast": ForecastVerb, "throughput": ThroughputVerb},
)
