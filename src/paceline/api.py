"""The Python interface. The command line is a thin layer over it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent import Agent
from paceline.code_bundle import CodeBundle
from paceline.code_bundle import unpack as unpack_code
from paceline.config import RunConfig, StopConfig, UserError
from paceline.config.plugins import refuse_in_import
from paceline.config.resolve import (
    names_envs,
    portable,
    read_file,
    resolve_tree,
    to_tree,
    to_yaml,
)
from paceline.engines import make_engine
from paceline.resuming import UNSAVED, changed_config, load_state, record_resume, resumed_line, run_to_resume
from paceline.run import checkpoint, provenance
from paceline.run.console import Quiet, make_console
from paceline.run.directory import RunDirectory, write_json, write_text
from paceline.run.kept_objects import keep_objects
from paceline.run.metrics import check_metric
from paceline.trained_run import Run
from paceline.training.callbacks import Callback, make_callbacks
from paceline.training.engine import Engine
from paceline.training.loop import Loop, OnIteration
from paceline.training.memory import fit_to_memory, fitting_in_memory
from paceline.training.signals import interrupted_by, run_begins
from paceline.training.stopping import Outcome


def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    preset: str | None = None,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    quiet: Quiet = True,
    keep_schedule: bool = False,
    began: float | None = None,
    watch: OnIteration | None = None,
    callbacks: Sequence[Callback] = (),
    code_bundle: CodeBundle | None = None,
    resolved: tuple[RunConfig, str | None] | None = None,
) -> Run:
    """Train and return the run.

    `config`: a nested dict such as `{"env": "CartPole-v1", "seed": 1}`, a YAML file, or a `RunConfig`, which is used
    without a preset. `resume`: a run to continue, or "auto" for the run of this name if it exists. `init_from`: a run
    or checkpoint whose weights to start from. `quiet`: print nothing; `run`: only the run directory. `keep_schedule`: a
    resumed run with another budget keeps its schedules, which stay at their last values when the old budget is used up.
    `watch`: called with the loop after each iteration; a returned text ends the run there, resumably. `callbacks`: see
    `paceline.Callback`; they come after those that the settings name. `code_bundle`: the user's code, if this machine
    does not have it. `began`: the `time.perf_counter()` at which the run began. `resolved`: the result of
    `resolve_tree` for `config`, if known.
    """
    refuse_in_import()
    session = _Session(quiet, time.perf_counter() if began is None else began, watch, code_bundle, callbacks)
    given = dict(read_file(config)) if isinstance(config, str | Path) else config
    auto = str(resume) == "auto"
    if resume is not None and (found := run_to_resume(given, resume)) is not None:
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
    """The agent of a run (its best checkpoint, else its last; or `checkpoint_name`), of a checkpoint folder, or of a
    file that `agent.save` wrote. `seed`: of sampled actions."""
    return Agent(checkpoint.find(Path(run), checkpoint_name), seed=seed)


@dataclass(frozen=True)
class _Session:
    """One call of `train`, with those of its arguments that new and resumed runs share."""

    quiet: Quiet
    began: float
    watch: OnIteration | None
    code_bundle: CodeBundle | None
    callbacks: Sequence[Callback]

    def begin(self, config: RunConfig, notes: list[str], init_from: str | Path | None, *, reuse: bool) -> Run:
        settings, here = to_yaml(config), Path.cwd()  # an environment may change the folder
        callbacks = make_callbacks(config, self.callbacks)
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
                    keep_objects(directory.path, to_tree(config))
                    write_json(directory.provenance_path, provenance.collect(sys.argv))
                    return self._train(config, engine, directory, callbacks, notes)
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
        config = changed_config(directory, given)
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
                return Run(directory.shown, Outcome("stopped", reason, directory.shown))

    def _continue(
        self, config: RunConfig, directory: RunDirectory, which: str, may_fall_back: bool, keep_schedule: bool
    ) -> Run:
        callbacks = make_callbacks(config, self.callbacks)
        path, content, state = load_state(directory, which, may_fall_back)
        engine = self._make_engine(config, resumes=state["loop"]["resumes"] + 1)

        def restore(loop: Loop) -> list[str]:
            saved = StopConfig.model_validate(content["config"]["stop"])
            levels, moved = loop.restore(state, saved, keep_schedule=keep_schedule)
            record_resume(directory, loop, path.name, levels)
            return [resumed_line(loop, levels), *moved]

        try:
            write_text(directory.config_path, to_yaml(config))
            keep_objects(directory.path, to_tree(config))
            return self._train(config, engine, directory, callbacks, [], restore)
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
        callbacks: list[Callback],
        notes: list[str],
        restore: Callable[[Loop], list[str]] = lambda loop: [],
    ) -> Run:
        """`restore`: continues a run; returns lines about it."""
        lines = [f"run        {directory.shown}", *engine.describe(), *notes]
        console = make_console(self.quiet, total_steps=config.stop.total_steps)
        try:
            engine.log_to(directory.logs_path)
            engine.set_scratch_dir(directory.path / "replay")
            loop = Loop(config, engine, directory, console, self.began, self.watch, callbacks)
            lines += restore(loop)
            console.start(lines)
            outcome = loop.run()
            console.finish(_last_lines(loop.summary(outcome.status), outcome, directory.shown))
            moved = directory.shown.absolute() != directory.path  # then the path that the user gave means another
            outcome = outcome if moved else replace(outcome, path=directory.shown)
            return Run(outcome.path, outcome)
        finally:
            console.close()


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


def _check_metric(config: RunConfig) -> None:
    """Refuse a stop rule about an unknown metric, which would never apply."""
    rule = config.stop.metric_rule
    if rule is not None:
        check_metric(rule[0], config.algo, f"stop.metric={config.stop.metric}")
