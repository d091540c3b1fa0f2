"""The Python interface. The command line is a thin layer over it."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.agent import Agent
from paceline.config import RunConfig, UserError
from paceline.engine import make_engine
from paceline.engine.base import Engine
from paceline.engine.loop import Loop, Outcome, Watch
from paceline.engine.sizes import fit
from paceline.plugins import absolute
from paceline.resolve import (
    merge,
    names_envs,
    read_file,
    resolve_tree,
    tidy,
    to_tree,
    to_yaml,
    validate,
    without_auto,
)
from paceline.run import checkpoint, provenance
from paceline.run.console import make_console
from paceline.run.directory import RunDirectory, write_json, write_text
from paceline.run.metrics import METRICS
from paceline.run.tree import unpack
from paceline.ship import Parcel
from paceline.ship import unpack as unpack_code

UNSAVED = ("out", "name", "preset")  # where a run is, and where its settings once came from
RESUMABLE = ("stop", "eval", "checkpoint", "engine")  # what may be changed when a run is continued


class Run(RunDirectory):
    """A run directory and how the training in it ended. Also a path: `Path(run)`, `open(run / ...)`."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.path)
        self.outcome = outcome

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def summary(self) -> dict[str, Any]:
        return self.read_summary()


def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    preset: str | None = None,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    quiet: bool = True,
    began: float | None = None,
    watch: Watch | None = None,
    parcel: Parcel | None = None,
) -> Run:
    """Train and return the run.

    `config`: a nested dict such as `{"env": "CartPole-v1", "seed": 1}`, a YAML file, or a `RunConfig` (taken as it is,
    without a preset). `resume`: a run to continue, or "auto" for the one of this name if it exists.
    `init_from`: a run or checkpoint whose weights to start from. `watch`: called after each iteration with the loop; a
    text ends the run there, resumably. `parcel`: the user's code, where the machine that names it is another one.
    """
    began = time.perf_counter() if began is None else began
    given = dict(read_file(config)) if isinstance(config, str | Path) else config
    if resume is not None:
        found = _to_resume(given, resume)
        if found is not None:
            directory, which = found
            if preset not in (None, "none") and str(resume) != "auto":
                raise UserError(f"--preset {preset} is for a new run; --resume continues one with its own settings")
            if init_from is not None and str(resume) != "auto":
                raise UserError("--resume continues a run with its own weights; --init-from starts a new one: give one")
            tree = to_tree(given) if isinstance(given, RunConfig) else given
            return _continue(directory, which, tree, quiet=quiet, began=began, watch=watch, parcel=parcel)
    chosen: str | None = None
    may_lower = False
    if not isinstance(given, RunConfig):
        may_lower = not names_envs(given, preset)
        given, chosen = resolve_tree(given, preset=preset)
    _check_metric(given)
    config, sizes = fit(_absolute(given), may_lower=may_lower)
    return _begin(
        config,
        sizes,
        chosen,
        init_from,
        reuse=str(resume) == "auto",
        quiet=quiet,
        began=began,
        watch=watch,
        parcel=parcel,
    )


def load(run: str | Path | Run, checkpoint_name: str | None = None, *, seed: int = 0) -> Agent:
    """The agent of a run (its best checkpoint, else its last; or `checkpoint_name`) or of a checkpoint folder."""
    return Agent(checkpoint.find(Path(run), checkpoint_name), seed=seed)


def _begin(
    config: RunConfig,
    sizes: list[str],
    preset: str | None,
    init_from: str | Path | None,
    *,
    reuse: bool,
    quiet: bool,
    began: float,
    watch: Watch | None,
    parcel: Parcel | None,
) -> Run:
    engine = make_engine(
        _located(config, parcel)
    )  # first: what is wrong with the input shows before anything is written
    try:
        if init_from is not None:
            source = Agent(checkpoint.find(Path(init_from)))
            engine.load_policy(source.policy.state())
        engine.start()
        directory = RunDirectory.create(config.out, config.name, config.algo, config.env.id, reuse=reuse)
        with _locked(directory):
            write_text(directory.config_path, to_yaml(config))
            write_json(directory.provenance_path, provenance.collect(sys.argv))
            lines = [
                f"run        {directory.path}",
                *engine.describe(),
                *sizes,
                f"preset     {preset} (--preset none turns it off)" if preset else "preset     none",
            ]
            if init_from is not None:
                lines.append(f"weights    from {source.path}")
            return _train(config, engine, directory, lines, None, quiet=quiet, began=began, watch=watch)
    finally:
        engine.close()


def _continue(
    directory: RunDirectory,
    which: str,
    given: Mapping[str, Any],
    *,
    quiet: bool,
    began: float,
    watch: Watch | None,
    parcel: Parcel | None,
) -> Run:
    saved = validate(directory.read_config())
    changes = without_auto({k: v for k, v in given.items() if k not in UNSAVED})
    changed = validate(merge(to_tree(saved), tidy(changes)))
    config = _absolute(changed)
    if "rllib" in {saved.engine.name, config.engine.name} and saved.engine.name != config.engine.name:
        raise UserError(
            f"engine.name={config.engine.name} differs from the run {directory.path}, which has {saved.engine.name}: "
            "RLlib's checkpoints are read by RLlib alone (--init-from starts a new run from its weights)"
        )
    before, after = _fixed(saved), {**_fixed(changed), **_fixed(config, to_tree(config))}
    if before != after:
        key, was, new = _first_difference(before, after)
        raise UserError(
            f"{key}={new} differs from the run {directory.path}, which has {was}; --resume continues it as it was, and "
            f"only {', '.join(RESUMABLE)} can be changed (--init-from starts a new run from its weights)"
        )
    _check_metric(config)
    with _locked(directory):
        arrays, content = checkpoint.load(checkpoint.find(directory.path, which))
        state = unpack(arrays, {key: content[key] for key in ("engine", "loop")})
        engine = make_engine(_located(config, parcel), resumes=state["loop"]["resumes"] + 1)
        try:
            write_text(directory.config_path, to_yaml(config))
            lines = [f"run        {directory.path}", *engine.describe()]
            return _train(config, engine, directory, lines, state, quiet=quiet, began=began, watch=watch)
        finally:
            engine.close()


def _located(config: RunConfig, parcel: Parcel | None) -> RunConfig:
    """For the engine alone: the run keeps the names that the user gave."""
    return config if parcel is None else unpack_code(parcel, config)


@contextmanager
def _locked(directory: RunDirectory) -> Iterator[None]:
    directory.lock()
    try:
        yield
    finally:
        directory.unlock()


def _train(
    config: RunConfig,
    engine: Engine,
    directory: RunDirectory,
    lines: list[str],
    state: dict[str, Any] | None,
    *,
    quiet: bool,
    began: float,
    watch: Watch | None,
) -> Run:
    console = make_console(quiet, total_steps=config.stop.total_steps)
    try:
        engine.log_to(directory.logs_path)
        engine.keep_in(directory.path / "replay")
        loop = Loop(config, engine, directory, console, began, watch)
        if state is not None:
            exact = loop.restore(state)
            level = "exact" if exact else "restarted (unfinished episodes are dropped, envs are reseeded)"
            lines.append(f"resumed    at {loop.counters.env_steps:,} steps, environments {level}")
            write_json(directory.path / "resume.json", {"resumes": loop.resumes, "level": level.split()[0]})
        console.start(lines)
        outcome = loop.run()
        console.finish(_closing(loop, outcome))
        return Run(outcome)
    finally:
        console.close()


def _closing(loop: Loop, outcome: Outcome) -> list[str]:
    summary = loop.summary(outcome.status)
    rate = summary["steps_per_second"] or 0.0
    lines = [
        f"{outcome.status}: {outcome.reason}; {summary['env_steps']:,} steps in {summary['train_seconds']:.2f} s "
        f"({rate:,.0f} steps/s), {summary['optimizer_steps']:,} optimizer steps",
        f"used       {summary['peak_memory_bytes'] / 1e9:.1f} GB of memory at most, {_cpu(summary['cpu_percent'])}",
        f"verdict    {summary['verdict']}",
    ]
    if outcome.status == "stopped":
        lines.append(f"continue   paceline train --resume {shlex.quote(str(outcome.path))}")
    else:
        lines.append(f"evaluate   paceline evaluate {shlex.quote(str(outcome.path))}")
    lines.append(f"run        {outcome.path}")
    return lines


def _cpu(cpu_percent: float | None) -> str:
    return "CPU unknown" if cpu_percent is None else f"{cpu_percent / 100:.1f} cores on average"


def _to_resume(given: Any, resume: str | Path) -> tuple[RunDirectory, str] | None:
    """The run to continue and its checkpoint; None: `auto`, and there is none yet."""
    if str(resume) != "auto":
        path = Path(resume)
        if path.parent.name == "checkpoints":
            return RunDirectory.open(path.parent.parent), path.name
        return RunDirectory.open(resume), "last"
    config = (
        given if isinstance(given, RunConfig) else validate({k: v for k, v in given.items() if k in ("out", "name")})
    )
    if config.name is None:
        raise UserError("--resume auto needs --name: the run to continue if it exists, or to start if it does not")
    path = Path(config.out).expanduser() / config.name
    if not path.exists():
        return None
    directory = RunDirectory.open(path)
    return (directory, "last") if checkpoint.available(path) else None  # it ended before its first checkpoint


def _fixed(config: RunConfig, tree: dict[str, Any] | None = None) -> dict[str, Any]:
    """What cannot be changed when a run is continued, in the order of the config."""
    tree = config.model_dump(by_alias=True, mode="json") if tree is None else tree
    return {key: value for key, value in tree.items() if key not in (*RESUMABLE, *UNSAVED)}


def _first_difference(before: Any, after: Any) -> tuple[str, Any, Any]:
    """The dotted key of the first value that differs, and the two values."""
    key = next(key for key in after if before.get(key) != after[key])
    if isinstance(before.get(key), dict) and isinstance(after[key], dict) and before[key].keys() == after[key].keys():
        rest, was, new = _first_difference(before[key], after[key])
        return f"{key}.{rest}", was, new
    return key, before.get(key), after[key]


def _check_metric(config: RunConfig) -> None:
    """A rule about a metric that no row has would be ignored in silence."""
    rule = config.stop.metric_rule
    if rule is not None and rule[0] not in METRICS and not rule[0].startswith("env/"):
        near = difflib.get_close_matches(rule[0], METRICS, 1) or ["return_mean"]
        raise UserError(
            f"stop.metric={config.stop.metric}: there is no metric {rule[0]!r}; did you mean {near[0]!r}? "
            "What an environment reports begins with env/"
        )


def _absolute(config: RunConfig) -> RunConfig:
    """With the files of the user named absolutely, so that the run can be read from any folder."""
    tree = to_tree(config)
    tree["env"]["id"] = absolute(config.env.id)
    tree["env"]["wrappers"] = [
        absolute(w) if isinstance(w, str) else {absolute(name): args for name, args in w.items()}
        for w in config.env.wrappers
    ]
    if config.model.class_:
        tree["model"]["class"] = absolute(config.model.class_)
    return validate(tree)
