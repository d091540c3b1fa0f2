"""The verbs `bench` and `compare`: their flags. What they need is imported when they run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.launch.submit import add_job_options, asked, given_options

if TYPE_CHECKING:
    from paceline.bench.jobs import Request

# Key of a scaling study → how its value is shown, and what it means. Lists are separated by commas.
SCALING_FLAGS: dict[str, tuple[str, str]] = {
    "--config": ("FILE", "settings to start from, as for train"),
    "--preset": ("NAME", "as for train"),
    "--envs": ("A,B", "default: that of --config, else CartPole-v1"),
    "--algos": ("A,B", "default: that of --config, else ppo"),
    "--engines": ("A,B", "auto, local, ray, rllib (default: auto)"),
    "--workers": ("1,2,4", "of all nodes together (default: 1,2)"),
    "--nodes": ("1,2", "hosts that a run takes, of the allocation, of --hosts or of its job"),
    "--seeds": ("N", "runs of each: seeds 0 to N-1 (default: 3)"),
    "--scaling": ("strong,weak", "the same work for all, or for each worker (default: strong)"),
    "--iterations": ("N", "budget of a run"),
    "--total-steps": ("N", "budget of a run; with weak scaling, of each worker"),
    "--max-time": ("T", "budget of a run (90s, 30m)"),
    "--stop-return": ("R", "run until this return is reached and confirmed"),
    "--threshold": ("R", "report the time to this return; default: what the environment calls solved"),
}


def add_bench(verbs: Any, parser: type[argparse.ArgumentParser]) -> None:
    bench = verbs.add_parser("bench", help="many runs of one kind, made and read together")
    kinds = bench.add_subparsers(title="kinds", metavar="KIND", required=True, parser_class=parser)
    suite = kinds.add_parser(
        "suite",
        help="games x algorithms x seeds, with normalised scores",
        description="Train and evaluate games x algorithms x seeds, one run after the other, each as `paceline train` "
        "would; write suite.json and suite.md. The same command again makes what is missing.",
    )
    suite.add_argument(
        "--suite", required=True, metavar="NAME|FILE", help="procgen-easy, classic, atari-small, or a YAML file"
    )
    suite.add_argument("--algos", default="ppo", metavar="A,B", help="default: ppo")
    suite.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each: seeds 0 to N-1 (default: 3)")
    suite.add_argument("--games", metavar="A,B", help="default: all of the suite")
    suite.add_argument("--total-steps", metavar="X", help="budget of a run (100000, 100k, 1M) instead of the suite's")
    suite.add_argument("--episodes", type=int, metavar="N", help="of each evaluation, instead of the suite's")
    suite.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in train, for every run")
    suite.add_argument("--out", metavar="DIR", help="folder of the runs and the table (default: runs/NAME)")
    suite.add_argument("--retry", action="store_true", help="also runs that failed before")
    suite.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    suite.set_defaults(run=_bench_suite)
    _add_scaling(kinds)
    _add_throughput(kinds)


def _add_scaling(kinds: Any) -> None:
    scaling = kinds.add_parser(
        "scaling",
        help="what more workers bring: speed-up, efficiency, time to a return, what bounds it",
        description="Train with each number of workers, engine, algorithm and seed, one run after the other, or with "
        "--on each as a job; write scaling.json, .md, .csv and .png. The same command again makes what is missing.",
    )
    scaling.add_argument("--study", metavar="FILE", help="a YAML file with any of these settings")
    for flag, (meta, text) in SCALING_FLAGS.items():
        scaling.add_argument(flag, dest=f"flag:{flag[2:].replace('-', '_')}", metavar=meta, help=text)
    scaling.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in train, for every run")
    scaling.add_argument("--hosts", metavar="FILE", help="with --nodes: hosts to reach by ssh, as for launch")
    scaling.add_argument("--rehearse", action="store_true", help="with --nodes: as processes on this machine")
    scaling.add_argument("--out", metavar="DIR", help="folder of the runs and the tables (default: runs/scaling)")
    scaling.add_argument("--retry", action="store_true", help="also runs that failed before")
    scaling.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    jobs = scaling.add_argument_group("jobs", "with --on, or a --profile that names a scheduler: a job for each run")
    add_job_options(jobs, leave_out=("name", "nodes"))
    scaling.set_defaults(run=_bench_scaling)


def _add_throughput(kinds: Any) -> None:
    throughput = kinds.add_parser(
        "throughput",
        help="where the time of one run goes, against what this machine can do",
        description="Trains for a short time (or takes RUN as it is), measures the ceilings of this machine, and puts "
        "both beside each other.",
    )
    throughput.add_argument("target", nargs="?", metavar="RUN", help="a run there is; default: a new one")
    for flag, meta, text in (
        ("--config", "FILE", "settings to start from, as for train"),
        ("--preset", "NAME", "as for train"),
        ("--algo", "X", "as for train"),
        ("--env", "X", "as for train"),
        ("--engine", "X", "as for train"),
        ("--workers", "N", "as for train"),
        ("--max-time", "T", "length of the run (default: 10s)"),
    ):
        throughput.add_argument(flag, metavar=meta, help=text)
    throughput.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in train")
    throughput.add_argument("--profile", action="store_true", help="also a flame graph (py-spy) and a torch trace")
    throughput.add_argument("--out", metavar="DIR", help="folder of the run and the tables (default: runs/throughput)")
    throughput.set_defaults(run=_bench_throughput)


def add_compare(verbs: Any) -> None:
    compare = verbs.add_parser(
        "compare",
        help="runs of any algorithm or engine beside each other: table, statistics, figure",
        description="Groups runs that differ in their seed alone, brings them to the same number of steps (or time), "
        "and says which group is better and how sure that is.",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN|DIR")
    compare.add_argument(
        "--by", metavar="A,B", help="group by these: algo, engine, workers, env, folder, run, a setting"
    )
    compare.add_argument("--at", choices=["steps", "time"], default="steps", help="compare at equal steps or wall time")
    compare.add_argument(
        "--metric", default="return", metavar="M", help="return, eval, or a name of metrics.jsonl (default: return)"
    )
    compare.add_argument("--threshold", type=float, metavar="R", help="solved; default: what the environment says")
    compare.add_argument("--mixed", action="store_true", help="several environments, by normalised scores")
    compare.add_argument(
        "--range", action="append", default=[], metavar="ENV=A,B", help="with --mixed: what counts as 0 and as 1"
    )
    compare.add_argument("--out", metavar="DIR", help="write compare.md, .json, .csv and .png there")
    compare.set_defaults(run=_compare)


def _bench_suite(options: argparse.Namespace) -> int:
    from paceline.bench.suite import run_suite
    from paceline.config import UserError, parse_count

    steps = None if options.total_steps is None else parse_count(options.total_steps)
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise UserError(f"--total-steps {options.total_steps}: a number of steps such as 100000, 100k or 1M")
    return run_suite(
        options.suite,
        algos=options.algos.split(","),
        seeds=options.seeds,
        games=None if options.games is None else options.games.split(","),
        total_steps=steps,
        episodes=options.episodes,
        sets=options.set,
        out=options.out,
        retry=options.retry,
        dry_run=options.dry_run,
    )


def _bench_scaling(options: argparse.Namespace) -> int:
    from paceline.bench.scaling import Matrix, flags_of, load_matrix, run_scaling

    flags = {name.removeprefix("flag:"): value for name, value in vars(options).items() if name.startswith("flag:")}
    given = {name: value for name, value in flags.items() if value is not None}
    matrix: Matrix = load_matrix(options.study, flags_of(given))
    words = ["--study", options.study] if options.study else []
    for name, value in given.items():
        words += [_flag(name), value]
    words += [word for item in options.set for word in ("--set", item)]
    for flag, value in (("--hosts", options.hosts), ("--out", options.out)):
        words += [flag, value] if value else []
    words += ["--rehearse"] if options.rehearse else []
    request = _request(options)
    words += request.words if request else []
    title = Path(options.study).stem if options.study else "scaling"
    code = run_scaling(
        matrix,
        title=title,
        words=words,
        out=options.out,
        sets=options.set,
        hosts=options.hosts,
        rehearse=options.rehearse,
        request=request,
        retry=options.retry,
        dry_run=options.dry_run,
    )
    if not options.dry_run:
        from paceline.report.figures import draw_scaling

        draw_scaling(Path(options.out or f"runs/{title}").expanduser())
    return code


def _request(options: argparse.Namespace) -> Request | None:
    """What the jobs of a study ask for; None where it is made here."""
    from paceline.bench.jobs import Request
    from paceline.config import UserError

    given = given_options(options)
    if options.on is None and options.profile is None:
        for name, value in given.items():
            raise UserError(f"{_flag(name)} {value}: is for jobs; give --on SCHEDULER, or a --profile")
        return None
    words = [word for flag in ("on", "profile") if (value := getattr(options, flag)) for word in (f"--{flag}", value)]
    for name, value in given.items():
        words += [word for one in (value if isinstance(value, list) else [value]) for word in (_flag(name), one)]
    return Request(*asked(options), tuple(words))


def _bench_throughput(options: argparse.Namespace) -> int:
    import shlex

    from paceline.bench.cell import FLAGS
    from paceline.bench.throughput import run_throughput
    from paceline.config import UserError
    from paceline.resolve import parse_sets, put, read_file, resolve_tree

    given = parse_sets(options.set, read_file(options.config) if options.config else None)
    words = ["--config", options.config] if options.config else []
    words += ["--preset", options.preset] if options.preset else []
    for key in ("algo", "env.id", "engine.name", "engine.workers", "stop.max_time"):
        value = getattr(options, FLAGS[key][2:].replace("-", "_"))
        if value is not None:
            words += [FLAGS[key], value]
            put(given, key, value)
    words += [word for item in options.set for word in ("--set", item)]
    if options.target and words:
        raise UserError(f"RUN and {words[0]}: a run that is there has its settings; give one of them")
    resolve_tree(given, preset=options.preset)  # bad input answers before anything is written
    shown = [*([options.target] if options.target else words), *(["--profile"] if options.profile else [])]
    command = shlex.join(["paceline", "bench", "throughput", *shown])
    if options.max_time is None:
        words += ["--max-time", "10s"]
    return run_throughput(options.target, words, out=options.out, profile=options.profile, command=command)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _compare(options: argparse.Namespace) -> int:
    from paceline.report.compare import run_compare

    return run_compare(
        options.runs,
        by=options.by.split(",") if options.by else None,
        at=options.at,
        metric=options.metric,
        threshold=options.threshold,
        mixed=options.mixed,
        ranges=options.range,
        out=options.out,
    )
