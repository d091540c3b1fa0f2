"""What a sweep says: lines on the terminal, and the files that are there at every moment."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from ray import tune

from paceline.config import UserError
from paceline.engine.ray_cluster import Cluster
from paceline.engine.signals import STOPPED_EARLY
from paceline.run.console import PlainConsole, duration
from paceline.run.directory import RunDirectory, write_text
from paceline.tune import table
from paceline.tune.plan import EARLY, FAILED, FINAL, PENDING, RUNNING, STOPPED, Sweep, Trial
from paceline.tune.space import combinations

LINE_SECONDS = 30.0  # between two lines of progress


class Scribe(tune.Callback):
    """What happens to the trials, on the terminal and in the files."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        inside = sweep.folder.is_relative_to(Path.cwd())
        self._shown = sweep.folder.relative_to(Path.cwd()) if inside else sweep.folder
        self._console = PlainConsole(sys.stdout)
        self._trials = {trial.name: trial for trial in sweep.trials}
        self._began = time.monotonic()
        self._next = self._began + LINE_SECONDS

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles what it is given, to restore it one day, and we do not ask it to."""
        return {}

    # -- beginning and end ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        sweep = self._sweep
        points = len({trial.point for trial in sweep.trials})
        left = sum(trial.status == PENDING for trial in sweep.trials)
        self._say(f"tune       {self._shown}")
        self._say(
            f"search     {sweep.search}, {points} point(s), {len(sweep.trials)} trial(s), {left} to run, "
            f"{sweep.mode} of {sweep.metric}"
        )
        for key, said in sweep.space.items():
            self._say(f"           {key}: {said}")
        if sweep.search in ("random", "asha") and points == combinations(sweep.domains):
            self._say(f"           there are only {points} combinations, and these are all of them")
        self._write()

    def where(self, cluster: Cluster, places: int | None) -> None:
        if places is not None:
            self._say(f"trials     {places} at once, on a Ray of our own")
        else:
            hosts = ", ".join(node.address for node in cluster.nodes)
            self._say(f"trials     on {cluster.cpus:g} CPUs of the Ray cluster at {cluster.address}: {hosts}")

    def finish(self, reason: str | None) -> int:
        sweep = self._sweep
        for trial in sweep.trials:
            if trial.status == RUNNING:
                trial.status = STOPPED if reason else FAILED
                trial.error = "" if reason else "it ended without a word"
                self._refresh(trial)
        if all(trial.status in FINAL for trial in sweep.trials):
            reason = None  # it came too late
        if reason is None and any(trial.status == STOPPED for trial in sweep.trials):
            reason = "the allocation ends"  # which trials notice, too
        self._write()
        judged = table.judge(sweep)
        self._say("")
        self._say(table.table(sweep))
        self._say(f"table      {self._shown / 'trials.csv'}")
        if judged:
            table.write_best(sweep, judged[0])
            best = judged[0]
            partly = "" if best.whole else ", and not all of its seeds ran to their end"
            self._say(f"best       {sweep.metric} {table.number(best.mean)}: {table.describe(best.values)}{partly}")
            self._say(f"train it   paceline train --config {shlex.quote(str(self._shown / 'best.yaml'))}")
            self._draw()
        failed = [trial.name for trial in sweep.trials if trial.status == FAILED]
        if failed:
            self._say(f"failed     {', '.join(failed)}: see {self._shown / 'logs'}; --retry tries them again")
        if reason is not None:
            self._say(f"stopped    {reason}")
            self._say(f"continue   paceline tune --resume {shlex.quote(str(self._shown))}")
            return STOPPED_EARLY
        self._say(f"tune       {self._shown}")
        return 0 if judged else 1

    # -- what Tune calls ------------------------------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        found = self._trials[str(trial)]
        if found.status != RUNNING:
            again = f" from step {found.steps:,}" if found.steps else ""
            self._say(f"{found.name}  starts{again}: {table.describe(found.values)}")
        found.status = RUNNING
        self._write()

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        found = self._trials[str(trial)]
        found.location = f"{result.get('hostname', '?')}:{result.get('pid', '?')}"
        if result.get("values") is not None and result["values"] != found.values:
            self._say(f"{found.name}  takes over weights, with {table.describe(result['values'])}")
            found.values = result["values"]
            self._write()
        if "env_steps" in result:
            found.steps, found.iteration = result["env_steps"], result["iteration"]
            found.seconds, found.return_mean = result["seconds"], result["return_mean"]
            found.score = result.get("score", found.score)
        if result.get("done") and "status" in result:
            found.status, found.error = result["status"], result.get("error", "")
            if "traceback" in result:
                write_text(self._sweep.folder / "logs" / f"{found.name}.txt", result["traceback"])
            self._ended(found)
        elif time.monotonic() > self._next:
            self._next = time.monotonic() + LINE_SECONDS
            self._progress()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Also of those that have said so themselves."""
        found = self._trials[str(trial)]
        if found.status == RUNNING:
            found.status = EARLY
            self._ended(found)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(f"{trial}  lost its process or its host, and starts again from its last checkpoint")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        found = self._trials[str(trial)]
        error = trial.get_pickled_error() or trial.get_error()
        said = str(error).strip().splitlines() or ["its process was lost"]
        found.status, found.error = FAILED, f"{type(error).__name__}: {said[0]}"
        write_text(self._sweep.folder / "logs" / f"{found.name}.txt", "\n".join(said) + "\n")
        self._refresh(found)
        self._ended(found)

    # -- the rest -------------------------------------------------------------------------------------------------

    def _ended(self, trial: Trial) -> None:
        over = sum(other.status in FINAL for other in self._sweep.trials)
        score = f", {self._sweep.metric} {table.number(trial.score)}" if trial.score is not None else ""
        error = f": {trial.error}" if trial.error else ""
        self._say(
            f"[{over}/{len(self._sweep.trials)}] {trial.name}  {trial.status}{error} after {trial.steps:,} steps, "
            f"{duration(trial.seconds)}{score}, on {trial.location or 'no host'}"
        )
        self._write()

    def _progress(self) -> None:
        counts = {s: sum(t.status == s for t in self._sweep.trials) for s in (RUNNING, *FINAL, PENDING)}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        steps = sum(trial.steps for trial in self._sweep.trials)
        self._say(f"{duration(time.monotonic() - self._began)}  {told}; {steps:,} steps")
        self._write()

    def _refresh(self, trial: Trial) -> None:
        """From the run itself, which has gone on since it last reported."""
        summary = RunDirectory(self._sweep.folder / trial.name).read_summary()
        trial.steps = summary.get("env_steps") or trial.steps
        trial.iteration = summary.get("iterations") or trial.iteration
        trial.seconds = summary.get("wall_seconds") or trial.seconds

    def _draw(self) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self._say("picture    none: matplotlib is not installed (pip install 'paceline[report]')")
            return
        from paceline.tune.figure import draw

        try:
            self._say(f"picture    {self._shown / draw(self._sweep).name}")
        except UserError as error:
            self._say(f"picture    none: {error}")

    def _write(self) -> None:
        self._sweep.save()
        table.write_tables(self._sweep)

    def _say(self, text: str) -> None:
        self._console.note(text)
