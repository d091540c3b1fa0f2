"""The verbs. Heavy libraries are imported by the verb that needs them: `paceline --help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

BEGAN = time.perf_counter()
FAILED, BAD_INPUT = 1, 2

# Flag → key of the config. Everything else is set by --set KEY=VALUE or in a file.
TRAIN_FLAGS: dict[str, tuple[str, str]] = {
    "--algo": ("algo", "ppo, a2c, a3c, impala, dqn; with --engine rllib: ppo, impala, dqn, sac"),
    "--env": ("env.id", "Gymnasium id, package.module:EnvId or path/to/file.py:ClassName"),
    "--total-steps": ("stop.total_steps", "stop after this many environment steps (100000, 100k, 1M)"),
    "--iterations": ("stop.iterations", "stop after this many iterations"),
    "--max-time": ("stop.max_time", "stop after this long (90s, 30m, 1h30m, 01:30:00)"),
    "--stop-return": ("stop.return_mean", "stop when the mean return is reached and confirmed by evaluation"),
    "--workers": (
        "engine.workers",
        "PPO, A2C: processes that collect and learn; A3C, IMPALA, DQN, RLlib: actors beside the learner",
    ),
    "--envs-per-worker": ("env.envs_per_worker", "environments stepped together"),
    "--engine": ("engine.name", "auto, local, ray, rllib"),
    "--device": ("engine.device", "auto, cpu, cuda"),
    "--threads": ("engine.threads", "threads for the arithmetic; 0 chooses"),
    "--seed": ("seed", "the same seed gives the same run"),
    "--out": ("out", "folder of the run directories (default: runs)"),
    "--name": ("name", "name of the run directory"),
}
NOT_OF_TUNE = ("--workers", "--engine")  # a trial is one process


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit 2."""
        print(f"paceline: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if not arguments:
        parser.print_help()
        raise SystemExit(0)
    if arguments[0] == "train" and any(word in ("-h", "--help") for word in arguments):
        _print_train_help(parser)
    options = parser.parse_args(arguments)
    from paceline.config import UserError

    try:
        raise SystemExit(options.run(options))
    except UserError as error:
        print(f"paceline: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("paceline: interrupted before anything was started", file=sys.stderr)
        raise SystemExit(FAILED) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(FAILED) from None
    except Exception as error:
        _explain(error)
        raise SystemExit(FAILED) from None


def make_parser() -> Parser:
    parser = Parser(
        prog="paceline", description="Train, evaluate and compare deep-RL agents, from a laptop to a cluster."
    )
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    _add_train(verbs)
    _add_evaluate(verbs)
    envs = verbs.add_parser("envs", help="what is installed; `envs check ID` tries one out")
    envs.add_argument("action", nargs="?", choices=["check"], help="check: the contract, a random episode, steps/s")
    envs.add_argument("id", nargs="?", help="the environment to check")
    envs.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in train: env.kwargs={a: 1}")
    envs.set_defaults(run=_envs)
    from paceline.verbs import add_bench, add_compare

    add_bench(verbs, Parser)
    _add_tune(verbs)
    plot = verbs.add_parser("plot", help="draw return, losses, entropy and throughput of runs")
    plot.add_argument("runs", nargs="+", metavar="RUN")
    plot.add_argument("--smooth", type=int, default=1, metavar="K", help="moving average over K rows")
    plot.add_argument("-o", "--output", required=True, metavar="FILE", help="a .png, .svg or .pdf file")
    plot.set_defaults(run=_plot)
    from paceline.report.command import add_dashboard, add_report

    add_report(verbs)
    add_dashboard(verbs)
    add_compare(verbs)
    export = verbs.add_parser("export", help="a trained agent as one file that needs nothing of paceline")
    export.add_argument("target", metavar="RUN|CHECKPOINT")
    export.add_argument("--format", choices=["onnx"], default="onnx", help="default: onnx")
    export.add_argument("--checkpoint", metavar="best|last|STEP", help="default: best if there is one, else last")
    export.add_argument("-o", "--output", metavar="FILE", help="default: policy.onnx in the run")
    export.set_defaults(run=_export)
    from paceline.launch.jobs import add_jobs
    from paceline.launch.status import add_status
    from paceline.launch.submit import add_submit

    add_submit(verbs)
    add_jobs(verbs)
    add_status(verbs)
    doctor = verbs.add_parser(
        "doctor",
        help="what would go wrong on this machine or these hosts, and what to do",
        description="Looks at this machine; inside an allocation, or with --hosts, at all hosts and what is between.",
    )
    doctor.add_argument("--hosts", metavar="FILE", help="hosts to reach by ssh, as for launch")
    doctor.add_argument("--interface", metavar="IF", help="network between the hosts, as for launch")
    doctor.add_argument("--out", default="runs", help="the folder the runs would go to")
    doctor.set_defaults(run=_doctor)
    from paceline.launch.launch import add_launch
    from paceline.launch.private import add_cluster

    add_launch(verbs)
    add_cluster(verbs)
    return parser


def _add_train(verbs: Any) -> None:
    train = verbs.add_parser(
        "train",
        help="train an agent",
        description="Train an agent. Every setting has a key: --set KEY=VALUE sets it, --config reads a YAML file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, (key, text) in TRAIN_FLAGS.items():
        train.add_argument(flag, dest=f"flag:{key}", default=argparse.SUPPRESS, metavar="X", help=text)
    train.add_argument("--config", metavar="FILE", help="a YAML file of settings")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; may be repeated")
    train.add_argument("--preset", metavar="NAME", help="settings to start from; none turns the automatic one off")
    train.add_argument(
        "--resume", metavar="RUN|auto", help="continue a run (or one of its checkpoints); auto: the named one"
    )
    train.add_argument("--init-from", metavar="RUN", help="start a new run from the weights of another")
    train.add_argument("--quiet", action="store_true", help="print the run directory, nothing else")
    train.set_defaults(run=_train)


def _add_evaluate(verbs: Any) -> None:
    evaluate = verbs.add_parser("evaluate", help="play episodes with a trained agent")
    evaluate.add_argument("target", metavar="RUN|CHECKPOINT")
    evaluate.add_argument("--checkpoint", metavar="best|last|STEP", help="default: best if there is one, else last")
    evaluate.add_argument("--episodes", type=int, default=None, metavar="N", help="default: 100, or 1 for a video")
    evaluate.add_argument(
        "--stochastic", action="store_true", help="sample actions instead of taking the most likely one"
    )
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--levels", choices=["train", "test", "both"], help="of Procgen; default: both")
    evaluate.add_argument("--video", metavar="FILE", help="film it: a .mp4 or .gif file; needs no display")
    evaluate.add_argument("--render", action="store_true", help="show it in a window")
    evaluate.add_argument("--random", action="store_true", help="uniformly random actions: the baseline")
    evaluate.set_defaults(run=_evaluate)


def _add_tune(verbs: Any) -> None:
    tune = verbs.add_parser(
        "tune",
        help="search for good settings: many trials at once, on Ray Tune",
        description="Search for settings. Every trial is a run of its own, with the settings given as for train "
        "(--env, --config, --set …) and those drawn from the space; the best become best.yaml.",
    )
    for flag, (key, text) in TRAIN_FLAGS.items():
        if flag not in NOT_OF_TUNE:
            tune.add_argument(flag, dest=f"flag:{key}", default=argparse.SUPPRESS, metavar="X", help=text)
    tune.add_argument("--config", metavar="FILE", help="a YAML file of settings that all trials share")
    tune.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; may be repeated")
    tune.add_argument("--preset", metavar="NAME", help="settings to start from; none turns the automatic one off")
    tune.add_argument(
        "--space", metavar="FILE", help="a YAML file, KEY: [a, b] or {uniform|log|int: [low, high]} on each line"
    )
    tune.add_argument(
        "--search", choices=["grid", "random", "asha", "pbt"], help="default: grid for lists, random for ranges"
    )
    tune.add_argument("--trials", type=int, metavar="N", help="how many points are drawn; pbt: size of the population")
    tune.add_argument("--seeds", type=int, metavar="N", help="runs of each point, which is judged by their mean")
    tune.add_argument("--parallel", type=int, metavar="K", help="trials at once; default: as many as there are cores")
    tune.add_argument("--gpus", type=float, default=0.0, metavar="X", help="the share of a GPU that each trial has")
    tune.add_argument("--metric", metavar="NAME", help="to judge by, as it is last (default: return_mean)")
    tune.add_argument("--mode", choices=["max", "min"], help="default: max")
    tune.add_argument(
        "--interval", metavar="STEPS", help="asha: until trials are first compared; pbt: between exchanges"
    )
    tune.add_argument("--stop-after", metavar="TIME", help="save and stop the whole search after this long, resumably")
    tune.add_argument("--resume", metavar="DIR|auto", help="continue a search; auto: the named one, if it exists")
    tune.add_argument("--retry", action="store_true", help="with --resume: also trials that failed before")
    tune.set_defaults(run=_tune)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a file, `--set` and flags, as a tree."""
    from paceline.resolve import parse_sets, put, read_file

    given = parse_sets(options.set, read_file(options.config) if options.config else None)
    for name, value in vars(options).items():
        if name.startswith("flag:"):
            put(given, name.removeprefix("flag:"), value)
    return given


def _train(options: argparse.Namespace) -> int:
    from paceline.resolve import resolve_tree, tidy, validate

    given = _given(options)
    if options.resume is None:
        config, _ = resolve_tree(given, preset=options.preset)  # before torch is imported: bad input answers at once
        threads = config.engine.threads
    else:
        threads = validate({key: value for key, value in tidy(given).items() if key == "engine"}).engine.threads
    if threads:
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = str(threads)

    from paceline.api import train

    run = train(
        given,
        preset=options.preset,
        resume=options.resume,
        init_from=options.init_from,
        quiet=options.quiet,
        began=BEGAN,
    )
    return run.outcome.exit_code


def _evaluate(options: argparse.Namespace) -> int:
    from paceline.config import UserError
    from paceline.evaluate import evaluate, record_video, render

    if options.random and options.stochastic:
        raise UserError("--random is always sampled; --stochastic is about the agent: give one of them")
    if options.video or options.render:
        if options.random:
            raise UserError("--random has no video: it is a baseline in numbers")
        if options.levels == "both":
            raise UserError("--levels both: a film is of train or of test levels")
        path, mean = record_video(
            options.target,
            options.video,
            which=options.checkpoint,
            episodes=1 if options.episodes is None else options.episodes,
            stochastic=options.stochastic,
            seed=options.seed,
            levels=options.levels,
        )
        print(f"return {mean:.2f}" + (f", filmed in {path}" if path else ""))
        return 0
    rows = evaluate(
        options.target,
        which=options.checkpoint,
        episodes=100 if options.episodes is None else options.episodes,
        stochastic=options.stochastic,
        seed=options.seed,
        random=options.random,
        levels=options.levels,
    )
    print(render(rows))
    return 0


def _envs(options: argparse.Namespace) -> int:
    from paceline.config import EnvConfig, UserError
    from paceline.env import catalog

    if options.action is None:
        print(catalog.render(catalog.families()))
        return 0
    if options.id is None:
        raise UserError("envs check needs an environment: paceline envs check CartPole-v1")
    from paceline.env.check import check_env
    from paceline.env.make import make_scalar
    from paceline.resolve import parse_sets, put, validate

    tree = parse_sets(options.set)
    put(tree, "env.id", options.id)
    config: EnvConfig = validate(tree).env
    report = check_env(lambda: make_scalar(config), options.id)
    print(report.text())
    return FAILED if report.problems else 0


def _plot(options: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.config import UserError

    if options.smooth < 1:
        raise UserError(f"--smooth {options.smooth}: at least 1")
    from paceline.report.plots import plot_runs

    print(plot_runs([Path(run) for run in options.runs], Path(options.output), smooth=options.smooth))
    return 0


def _export(options: argparse.Namespace) -> int:
    from paceline.export import export

    print(export(options.target, options.output, which=options.checkpoint).text())
    return 0


def _tune(options: argparse.Namespace) -> int:
    from paceline.tune.command import run_tune

    names = ("space", "search", "trials", "seeds", "metric", "mode", "interval")
    return run_tune(
        _given(options),
        preset=options.preset,
        asked={name: getattr(options, name) for name in names if getattr(options, name) is not None},
        resume=options.resume,
        retry=options.retry,
        parallel=options.parallel,
        gpus=options.gpus,
        stop_after=options.stop_after,
    )


def _doctor(options: argparse.Namespace) -> int:
    from paceline.launch.rounds import run_doctor

    return run_doctor(options.out, options.hosts, options.interface)


def _print_train_help(parser: Parser) -> NoReturn:
    """The flags, then every key with its default and meaning, from the config itself."""
    from paceline.resolve import keys

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            print(action.choices["train"].format_help())
    print("keys (--set KEY=VALUE, or nested in a YAML file), [default], meaning:")
    for key, kind, default, meaning in keys():
        print(f"  {key}  [{default}]  {kind}\n      {meaning}")
    raise SystemExit(0)


def _explain(error: Exception) -> None:
    """What is not the user's fault but has a reason: one line, and where it happened when that is not our own error."""
    own = type(error).__module__.startswith("paceline.")
    if isinstance(error, OSError) and not own:
        where = f" ({error.filename})" if error.filename else ""
        advice = "look at the disk and the folder; a run goes on from its last checkpoint with --resume"
        print(f"paceline: failed: {error.strerror or error}{where}: {advice}", file=sys.stderr)
        return
    if not own:
        import traceback

        traceback.print_exception(error)
    name = "" if own else f"{type(error).__name__}: "
    print(f"paceline: failed: {name}{error}", file=sys.stderr)


def _version() -> str:
    from paceline import __version__

    return f"paceline {__version__}"


if __name__ == "__main__":
    main()
