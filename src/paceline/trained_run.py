"""A run, from Python: its numbers, its curves, its agent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import paceline
from paceline.agent import Agent
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory
from paceline.training.stopping import Outcome


class Run(RunDirectory):
    """A run directory: what `paceline.train` returns, or `paceline.Run("runs/NAME")`. It is also a path: `Path(run)`,
    `open(run / "summary.json")`."""

    def __init__(self, path: str | Path, outcome: Outcome | None = None) -> None:
        super().__init__(Path(path) if outcome is not None else RunDirectory.open(path).path)
        self._outcome = outcome

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        outcome, summary = self.outcome, self.summary
        mean = summary.get("return_mean")
        result = "no finished episode" if mean is None else f"return {mean:.2f}"
        return f"<Run {self.path}: {outcome.status}, {result} after {summary.get('env_steps', 0):,} steps>"

    @property
    def outcome(self) -> Outcome:
        """How training ended: `status` (running, done, stopped or failed) and `reason`."""
        if self._outcome is not None:
            return self._outcome
        status = self.read_status()
        return Outcome(status.get("state", "running"), status.get("reason", ""), self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return self.read_summary()

    @property
    def config(self) -> dict[str, Any]:
        """All settings, nested as in `config.yaml`."""
        return self.read_config()

    @property
    def metrics(self) -> Any:
        """A table with a row for each iteration: a pandas frame if pandas is installed, else a list of dicts."""
        return _table(self.read_metrics())

    @property
    def evaluations(self) -> Any:
        """A table of the evaluations, as `metrics` is."""
        return _table(self.read_eval())

    def load(self, which: str | None = None) -> Agent:
        """The agent of the best checkpoint, else of the last; `which`: best, last or a step."""
        return Agent(checkpoint.find(self.path, which))

    def evaluate(self, **options: Any) -> list[dict[str, Any]]:
        """Play episodes; see `paceline.evaluate`."""
        return paceline.evaluate(self, **options)

    def plot(self, output: str | Path | None = None, *, smooth: int = 1) -> Any:
        """Draw return, losses, entropy and speed. Returns a matplotlib figure; with `output` (.png, .svg or .pdf), the
        path that it was written to. `smooth`: moving average over this many rows."""
        return paceline.plot([self.path], output, smooth=smooth)


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
