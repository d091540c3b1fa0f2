"""Reports a search: lines on the terminal, and files that are up to date at every moment."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from ray import tune

from paceline.config import UserError
from paceline.engines.ray.ray_cluster import RayCluster
from paceline.run.console import Console, duration
from paceline.run.directory import RunDirectory, write_text
from paceline.training.signals import STOPPED_EARLY
from paceline.tune import table
from paceline.tune.space import combinations
from paceline.tune.sweep_plan import EARLY, FAILED, FINAL, PENDING, RUNNING, STOPPED, Sweep, Trial

LINE_SECONDS = 30.0  # between two lines of progress
REPORTED = ("steps", "iteration", "seconds", "return_mean", "score", "values")


class SweepProgress(tune.Callback):
    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        is_below = sweep.folder.is_relative_to(Path.cwd())
        self._shown = sweep.folder.relative_to(Path.cwd()) if is_below else sweep.folder
        self._say = Console(sys.stdout).note
        self._trials = {trial.name: trial for trial in sweep.trials}
        self._began = time.monotonic()
        self._next = self._began + LINE_SECONDS

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks so that it can restore a search, which paceline does from its own files."""
        return {}

    def begin(self) -> None:
        sweep = self._sweep
        points = len({trial.point for trial in sweep.trials})
        pending = sum(trial.status == PENDING for trial in sweep.trials)
        self._say(f"tune       {self._shown}")
        self._say(
            f"search     {sweep.search}, {points} point(s), {len(sweep.trials)} trial(s), {pending} to run, "
            f"{sweep.mode} of {sweep.metric}"
        )
        for key, domain in sweep.space.items():
            self._say(f"           {key}: {domain}")
        if sweep.search in ("random", "asha") and points == combinations(sweep.domains):
            self._say(f"           there are only {points} combinations; all of them are tried")
        self._write()

    def connected(self, cluster: RayCluster, parallel: int) -> None:
        if cluster.is_own:
            self._say(f"trials     {parallel} at once on this machine")
        else:
            hosts = ", ".join(node.address for node in cluster.nodes)
            self._say(f"trials     on {cluster.cpus:g} CPUs of the Ray cluster at {cluster.address}: {hosts}")

    def finish(self, reason: str | None) -> int:
        """Returns the exit code. `reason`: why the search was stopped."""
        sweep = self._sweep
        for trial in sweep.trials:
            if trial.status == RUNNING:
                trial.status = STOPPED if reason else FAILED
                trial.error = "" if reason else "its process ended without a result"
                self._refresh(trial)
        if all(trial.status in FINAL for trial in sweep.trials):
            reason = None  # the request to stop came too late
        elif reason is None and any(trial.status == STOPPED for trial in sweep.trials):
            reason = "the allocation ends"  # which trials notice by themselves
        self._write()
        ranked = table.rank_points(sweep)
        self._say(f"\n{table.table(sweep)}")
        self._say(f"table      {self._shown / 'trials.csv'}")
        if ranked:
            best = ranked[0]
            table.write_best(sweep, best)
            partly = "" if best.complete else " (not all of its seeds ran to their end)"
            self._say(f"best       {sweep.metric} {table.number(best.mean)}: {table.describe(best.values)}{partly}")
            self._say(f"train it   paceline train --config {shlex.quote(str(self._shown / 'best.yaml'))}")
            self._say(f"picture    {self._draw()}")
        failed = [trial.name for trial in sweep.trials if trial.status == FAILED]
        if failed:
            self._say(f"failed     {', '.join(failed)}: see {self._shown / 'logs'}; --retry tries them again")
        if reason is not None:
            self._say(f"stopped    {reason}")
            self._say(f"continue   paceline tune --resume {shlex.quote(str(self._shown))}")
            return STOPPED_EARLY
        self._say(f"tune       {self._shown}")
        return 0 if ranked else 1

    # -- Tune calls these -----------------------------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        found = self._trials[str(trial)]
        if found.status != RUNNING:
            start = f" from step {found.steps:,}" if found.steps else ""
            self._say(f"{found.name}  starts{start}: {table.describe(found.values)}")
        found.status = RUNNING
        self._write()

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        found = self._trials[str(trial)]
        found.location = f"{result.get('hostname', '?')}:{result.get('pid', '?')}"
        changed = result.get("values", found.values) != found.values
        vars(found).update({key: result[key] for key in REPORTED if key in result})
        if changed:
            self._say(f"{found.name}  takes over weights, with {table.describe(found.values)}")
            self._write()
        if result.get("done") and "status" in result:
            found.status, found.error = result["status"], result.get("error", "")
            if "traceback" in result:
                write_text(self._sweep.folder / "logs" / f"{found.name}.txt", result["traceback"])
            self._ended(found)
        elif time.monotonic() > self._next:
            self._next = time.monotonic() + LINE_SECONDS
            counts = {s: sum(t.status == s for t in self._sweep.trials) for s in (RUNNING, *FINAL, PENDING)}
            states = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
            steps = sum(trial.steps for trial in self._sweep.trials)
            self._say(f"{duration(time.monotonic() - self._began)}  {states}; {steps:,} steps")
            self._write()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial that ran to its end has reported that already; the others were stopped by the scheduler."""
        found = self._trials[str(trial)]
        if found.status == RUNNING:
            found.status = EARLY
            self._ended(found)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(f"{trial}  lost its process or its host, and starts again from its last checkpoint")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        found = self._trials[str(trial)]
        error = trial.get_pickled_error() or trial.get_error()
        lines = str(error).strip().splitlines() or ["its process was lost"]
        found.status, found.error = FAILED, f"{type(error).__name__}: {lines[0]}"
        write_text(self._sweep.folder / "logs" / f"{found.name}.txt", "\n".join(lines) + "\n")
        self._refresh(found)
        self._ended(found)

    # -------------------------------------------------------------------------------------------------------------

    def _ended(self, trial: Trial) -> None:
        ended = sum(other.status in FINAL for other in self._sweep.trials)
        score = f", {self._sweep.metric} {table.number(trial.score)}" if trial.score is not None else ""
        error = f": {trial.error}" if trial.error else ""
        self._say(
            f"[{ended}/{len(self._sweep.trials)}] {trial.name}  {trial.status}{error} after {trial.steps:,} steps, "
            f"{duration(trial.seconds)}{score}, on {trial.location or 'no host'}"
        )
        self._write()

    def _refresh(self, trial: Trial) -> None:
        """Read the run's own summary, which is newer than its last report."""
        summary = RunDirectory(self._sweep.folder / trial.name).read_summary()
        trial.steps = summary.get("env_steps") or trial.steps
        trial.iteration = summary.get("iterations") or trial.iteration
        trial.seconds = summary.get("wall_seconds") or trial.seconds

    def _draw(self) -> str:
        try:
            from paceline.tune.figure import draw

            return str(self._shown / draw(self._sweep).name)
        except ModuleNotFoundError:
            return "none: matplotlib is not installed (pip install 'paceline[report]')"
        except UserError as error:
            return f"none: {error}"

    def _write(self) -> None:
        self._sweep.save()
        table.write_tables(self._sweep)
