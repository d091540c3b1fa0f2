"""The Python interface. The command line is a thin layer over it."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.agent import Agent
from paceline.code_bundle import CodeBundle
from paceline.code_bundle import unpack as unpack_code
from paceline.config import ALGORITHMS, RunConfig, StopConfig, UserError
from paceline.config.resolve import (
    merge,
    names_envs,
    portable,
    read_file,
    resolve_tree,
    tidy,
    to_tree,
    to_yaml,
    validate,
    without_auto,
)
from paceline.engines import make_engine
from paceline.run import checkpoint, provenance
from paceline.run.console import make_console
from paceline.run.directory import RunDirectory, write_json, write_text
from paceline.run.metrics import check_metric
from paceline.run.state_tree import unpack
from paceline.training.engine import EXACT, Engine, Levels
from paceline.training.loop import Loop, OnIteration
from paceline.training.memory import fit_to_memory, fitting_in_memory
from paceline.training.signals import interrupted_by, run_begins
from paceline.training.stopping import Outcome

UNSAVED = ("out", "name", "preset")  # not saved: where the run is, and where its settings came from
RESUMABLE = ("stop", "eval", "checkpoint", "engine")  # may change when a run is resumed


class Run(RunDirectory):
    """A run directory and how training in it ended. It is also a path: `Path(run)`, `open(run / ...)`."""

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
    keep_schedule: bool = False,
    began: float | None = None,
    watch: OnIteration | None = None,
    code_bundle: CodeBundle | None = None,
    resolved: tuple[RunConfig, str | None] | None = None,
) -> Run:
    """Train and return the run.

    `config`: a nested dict such as `{"env": "CartPole-v1", "seed": 1}`, a YAML file, or a `RunConfig`, which is used
    without a preset. `resume`: a run to continue, or "auto" for the run of this name if it exists. `init_from`: a run
    or checkpoint whose weights to start from. `keep_schedule`: a resumed run with another budget keeps its schedules,
    which stay at their last values when the old budget is used up. `watch`: called with the loop after each iteration;
    a returned text ends the run there, resumably. `code_bundle`: the user's code, if this machine does not have it.
    `began`: the `time.perf_counter()` at which the run began. `resolved`: the result of `resolve_tree` for `config`, if
    known.
    """
    session = _Session(quiet, time.perf_counter() if began is None else began, watch, code_bundle)
    given = dict(read_file(config)) if isinstance(config, str | Path) else config
    auto = str(resume) == "auto"
    if resume is not None and (found := _to_resume(given, resume)) is not None:
        if preset not in (None, "none") and not auto:
            raise UserError(f"--preset {preset} is for a new run; --resume continues a run with its own settings")
        if init_from is not None and not auto:
            raise UserError("--resume continues a run, --init-from starts a new one: give only one of them")
        changes: Mapping[str, Any]
        if isinstance(given, RunConfig):
            changes = {key: value for key, value in to_tree(given).items() if key not in UNSAVED}
        else:
            changes = given
        return session.resume(*found, changes, may_fall_back=auto, keep_schedule=keep_schedule)
    if keep_schedule and not auto:
        raise UserError("--keep-schedule is for a run that is continued: add --resume RUN")
    if isinstance(given, RunConfig):
        resolved, may_lower, given = (given, None), False, {}
    else:
        resolved = resolved or resolve_tree(given, preset=preset)
        may_lower = not names_envs(given, preset)
    config, name = resolved
    _check_metric(config)
    config, sizes = fit_to_memory(portable(config), may_lower=may_lower, given=given)
    chosen = f"preset     {name} (--preset none turns it off)" if name else "preset     none"
    return session.begin(config, [*sizes, chosen], init_from, reuse=auto)


def load(run: str | Path | Run, checkpoint_name: str | None = None, *, seed: int = 0) -> Agent:
    """The agent of a run (its best checkpoint, else its last; or `checkpoint_name`) or of a checkpoint folder."""
    return Agent(checkpoint.find(Path(run), checkpoint_name), seed=seed)


@dataclass(frozen=True)
class _Session:
    """One call of `train`, with those of its arguments that new and resumed runs share."""

    quiet: bool
    began: float
    watch: OnIteration | None
    code_bundle: CodeBundle | None

    def begin(self, config: RunConfig, notes: list[str], init_from: str | Path | None, *, reuse: bool) -> Run:
        settings, here = to_yaml(config), Path.cwd()  # an environment may change the folder
        source = None if init_from is None else checkpoint.find(Path(init_from))
        engine = self._make_engine(config)  # errors in the input show before anything is written
        try:
            if source is not None:
                engine.load_policy(Agent(here / source).policy.state())
                notes = [*notes, f"weights    from {source}"]
            with fitting_in_memory(config):
                engine.start()
            run_begins()
            directory = RunDirectory.create(
                config.out, config.name, config.algorithm_name, config.env.id, reuse=reuse, base=here
            )
            try:
                with directory.locked():
                    write_text(directory.config_path, settings)
                    write_json(directory.provenance_path, provenance.collect(sys.argv))
                    return self._train(config, engine, directory, notes)
            except (UserError, OSError) as error:  # bad input that the first steps showed, or a full disk
                resumable = isinstance(error, OSError) and checkpoint.available(directory.path)
                if not resumable and not directory.read_metrics():
                    directory.discard()
                raise
        finally:
            engine.close()

    def resume(
        self,
        directory: RunDirectory,
        which: str,
        given: Mapping[str, Any],
        *,
        may_fall_back: bool,
        keep_schedule: bool,
    ) -> Run:
        """`may_fall_back`: if the checkpoint does not load, continue from the newest one that does."""
        config = _changed(directory, given)
        directory = RunDirectory(directory.path.absolute(), directory.path)  # an environment may change the folder
        _check_metric(config)
        if keep_schedule and config.engine.name == "rllib":
            raise UserError("--keep-schedule is not for --engine rllib: RLlib computes its schedules from the budget")
        with directory.locked():
            try:
                return self._continue(config, directory, which, may_fall_back, keep_schedule)
            except BaseException:
                if (name := interrupted_by()) is None:
                    raise
                path = shlex.quote(str(directory.shown))
                reason = f"{name} received before training began"
                _record(directory, "stopped", reason)
                make_console(self.quiet).finish([f"stopped: {reason}", f"continue   paceline train --resume {path}"])
                return Run(Outcome("stopped", reason, directory.shown))

    def _continue(
        self, config: RunConfig, directory: RunDirectory, which: str, may_fall_back: bool, keep_schedule: bool
    ) -> Run:
        path, content, state = _load(directory, which, may_fall_back)
        engine = self._make_engine(config, resumes=state["loop"]["resumes"] + 1)

        def restore(loop: Loop) -> list[str]:
            saved = StopConfig.model_validate(content["config"]["stop"])
            levels, moved = loop.restore(state, saved, keep_schedule=keep_schedule)
            _record_resume(directory, loop, path.name, levels)
            return [_resumed_line(loop, levels), *moved]

        try:
            write_text(directory.config_path, to_yaml(config))
            return self._train(config, engine, directory, [], restore)
        finally:
            engine.close()

    def _make_engine(self, config: RunConfig, *, resumes: int = 0) -> Engine:
        """Only the engine uses the unpacked code: the run keeps the names that the user gave."""
        with fitting_in_memory(config):
            return make_engine(
                config if self.code_bundle is None else unpack_code(self.code_bundle, config), resumes=resumes
            )

    def _train(
        self,
        config: RunConfig,
        engine: Engine,
        directory: RunDirectory,
        notes: list[str],
        restore: Callable[[Loop], list[str]] = lambda loop: [],
    ) -> Run:
        """`restore`: continues a run; returns lines about it."""
        lines = [f"run        {directory.shown}", *engine.describe(), *notes]
        console = make_console(self.quiet, total_steps=config.stop.total_steps)
        try:
            engine.log_to(directory.logs_path)
            engine.set_scratch_dir(directory.path / "replay")
            loop = Loop(config, engine, directory, console, self.began, self.watch)
            lines += restore(loop)
            console.start(lines)
            outcome = loop.run()
            console.finish(_last_lines(loop.summary(outcome.status), outcome, directory.shown))
            moved = directory.shown.absolute() != directory.path  # then the path that the user gave means another
            return Run(outcome if moved else replace(outcome, path=directory.shown))
        finally:
            console.close()


def _load(directory: RunDirectory, which: str, may_fall_back: bool) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A checkpoint of a run: its path, its content, and the state of engine and loop."""
    try:
        path = checkpoint.find(directory.path, which)
        arrays, content = checkpoint.load(path)
    except UserError as error:
        if not may_fall_back:
            raise
        path, arrays, content = checkpoint.load_newest(directory.path)
        text = f"{error}; continuing from {path}"
        directory.log(text)
        print(f"paceline: warning: {text}", file=sys.stderr)
    return path, content, unpack(arrays, {key: content[key] for key in ("engine", "loop")})


def _resumed_line(loop: Loop, levels: Levels) -> str:
    """The level of the environments, and of all other parts that are not exact."""
    others = [f"{part} {level}" for part, level in levels.items() if part != "environments" and level != EXACT]
    parts = [f"environments {levels['environments']}", *others]
    return f"resumed    at {loop.counters.env_steps:,} steps, {'; '.join(parts)}"


def _record_resume(directory: RunDirectory, loop: Loop, checkpoint_name: str, levels: Levels) -> None:
    """Add a resume to `resume.json`."""
    path = directory.path / "resume.json"
    words = {part: level.partition(":")[0] for part, level in levels.items()}
    level = words["environments"] if set(words.values()) == {EXACT} or words["environments"] != EXACT else "partial"
    try:
        history = json.loads(path.read_text())["history"]
    except (OSError, ValueError, KeyError, TypeError):  # the first one, or written by an earlier version
        history = []
    entry = {
        "resume": loop.resumes,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": checkpoint_name,
        "env_steps": loop.counters.env_steps,
        "level": level,
        "parts": levels,
    }
    write_json(path, {"resumes": loop.resumes, "level": level, "history": [*history, entry]})


def _status(directory: RunDirectory) -> dict[str, Any]:
    try:
        return directory.read_status()
    except UserError:  # damaged
        return {}


def _record(directory: RunDirectory, state: str, reason: str) -> None:
    with suppress(OSError):  # the disk may be what failed
        directory.write_status(**(_status(directory) | {"state": state, "reason": reason}))


def _last_lines(summary: dict[str, Any], outcome: Outcome, shown: Path) -> list[str]:
    rate, cpu, path = summary["steps_per_second"] or 0.0, summary["cpu_percent"], shlex.quote(str(shown))
    cores = "CPU unknown" if cpu is None else f"{cpu / 100:.1f} cores on average"
    stopped = outcome.status == "stopped"
    restarts = summary["env_restarts"]
    failed = [f"failures   {restarts:,} environment(s) failed and were started again"] if restarts else []
    return [
        f"{outcome.status}: {outcome.reason}; {summary['env_steps']:,} steps in {summary['train_seconds']:.2f} s "
        f"({rate:,.0f} steps/s), {summary['optimizer_steps']:,} optimizer steps",
        f"used       {summary['peak_memory_bytes'] / 1e9:.1f} GB of memory at most, {cores}",
        *failed,
        f"verdict    {summary['verdict']}",
        f"continue   paceline train --resume {path}" if stopped else f"evaluate   paceline evaluate {path}",
        f"run        {shown}",
    ]


def _to_resume(given: Any, resume: str | Path) -> tuple[RunDirectory, str] | None:
    """The run to continue and the name of its checkpoint; None for `auto` if there is none yet."""
    if str(resume) != "auto":
        path = Path(resume)
        if path.parent.name == "checkpoints":
            return RunDirectory.open(path.parent.parent), path.name
        return RunDirectory.open(resume), "last"
    where = given
    if not isinstance(given, RunConfig):
        where = validate({key: value for key, value in given.items() if key in ("out", "name")})
    if where.name is None:
        raise UserError("--resume auto needs --name: the run to continue if it exists, or to start if it does not")
    path = Path(where.out).expanduser() / where.name
    if not path.exists():
        return None
    directory = RunDirectory.open(path)
    if checkpoint.can_only_start_again(path):
        with directory.locked():
            kept = path.rename(path.with_name(f"{path.name}-damaged-{secrets.token_hex(2)}"))
        print(f"paceline: warning: the first checkpoint of {path} does not load, and it has no other; the run starts "
              f"again, and what there was is in {kept}", file=sys.stderr)  # fmt: skip
        return None
    return (directory, "last") if checkpoint.available(path) else None  # it ended before its first checkpoint


def _changed(directory: RunDirectory, given: Mapping[str, Any]) -> RunConfig:
    """The settings of a run with the changes in `given`, of which only `RESUMABLE` sections are allowed."""
    saved = validate(directory.read_config())
    _check_place(directory, saved, given)
    changes = tidy(without_auto({key: value for key, value in given.items() if key not in UNSAVED}))
    for key in ("algo", *ALGORITHMS):
        if changes.get(key, saved.algo) != saved.algo and key != saved.algo:
            name, value = (key, changes[key]) if key == "algo" else _leaf(key, changes[key])
            raise UserError(_unchangeable(name, value, saved.algo if key == "algo" else "none", directory))
    changed = validate(merge(to_tree(saved), changes))
    config = portable(changed)
    if "rllib" in {saved.engine.name, config.engine.name} and saved.engine.name != config.engine.name:
        raise UserError(
            f"engine.name={config.engine.name} differs from the run {directory.path}, which has {saved.engine.name}: "
            "only RLlib reads RLlib's checkpoints (--init-from starts a new run from its weights)"
        )
    before, after = _fixed(saved), _fixed(config)
    if before != after:
        key, was, new = _first_difference(before, after)
        raise UserError(_unchangeable(key, new, was, directory))
    return config


def _check_place(directory: RunDirectory, saved: RunConfig, given: Mapping[str, Any]) -> None:
    """Refuse another name, folder or preset: a run that is continued stays where it is, with the settings it has."""
    where = directory.path.absolute()
    for key, actual in (("name", where.name), ("out", str(where.parent.resolve())), ("preset", saved.preset)):
        value = given.get(key)
        there = str(Path(str(value)).expanduser().resolve()) if key == "out" else value
        if value is not None and there != actual and value != getattr(saved, key):
            raise UserError(f"--{key} {value}: --resume continues the run {directory.path} as it is; leave out --{key}")


def _unchangeable(key: str, new: Any, was: Any, directory: RunDirectory) -> str:
    return (
        f"{key}={new} differs from the run {directory.path}, which has {was}; --resume continues it as it was, and "
        f"only {', '.join(RESUMABLE)} can be changed (--init-from starts a new run from its weights)"
    )


def _leaf(key: str, value: Any) -> tuple[str, Any]:
    """The first setting of a section, by its dotted key."""
    if isinstance(value, Mapping) and value:
        name, inner = next(iter(value.items()))
        return _leaf(f"{key}.{name}", inner)
    return key, value


def _fixed(config: RunConfig) -> dict[str, Any]:
    """The settings that must not change when a run is resumed."""
    tree = config.model_dump(by_alias=True, mode="json")
    return {key: value for key, value in tree.items() if key not in (*RESUMABLE, *UNSAVED)}


def _first_difference(before: Any, after: Any) -> tuple[str, Any, Any]:
    """The dotted key of the first value that differs, and the two values."""
    key = next(key for key in after if before.get(key) != after[key])
    if isinstance(before.get(key), dict) and isinstance(after[key], dict) and before[key].keys() == after[key].keys():
        rest, was, new = _first_difference(before[key], after[key])
        return f"{key}.{rest}", was, new
    return key, before.get(key), after[key]


def _check_metric(config: RunConfig) -> None:
    """Refuse a stop rule about an unknown metric, which would never apply."""
    rule = config.stop.metric_rule
    if rule is not None:
        check_metric(rule[0], config.algo, f"stop.metric={config.stop.metric}")
