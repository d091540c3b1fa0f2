"""`paceline compare`."""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.commands.flags import Argument, Flag, Verb


class CompareVerb(Verb):
    """Compare runs of any algorithm or engine: table, statistics, figure.

    Group runs that differ only in their seed, compare the groups at the same number of steps (or the same wall time),
    and say which is better and how certain that is.
    """

    runs: Annotated[tuple[str, ...], Argument("RUN|DIR")]
    """Runs, or folders of runs."""
    by: Annotated[str | None, Flag("A,B")] = None
    """Group by these: algo, engine, workers, env, folder, run, or a setting."""
    at: Literal["steps", "time"] = "steps"
    """Compare at equal steps or at equal wall time."""
    metric: Annotated[str, Flag("M")] = "return"
    """return, eval (evaluations during training and by `paceline evaluate`), or a metric in metrics.jsonl."""
    threshold: Annotated[float | None, Flag("R")] = None
    """The return that counts as solved; default: the environment's own."""
    mixed: bool = False
    """Compare over several environments, by normalised scores; those without a known range only by themselves."""
    range: Annotated[tuple[str, ...], Flag("ENV=A,B")] = ()
    """With --mixed: the returns that score 0 and 1."""
    out: Annotated[str | None, Flag("DIR")] = None
    """Write compare.md, .json, .csv and .png into this folder."""

    def run(self) -> int:
        from paceline.report.compare import run_compare

        return run_compare(
            self.runs,
            by=self.by.split(",") if self.by else None,
            at=self.at,
            metric=self.metric,
            threshold=self.threshold,
            mixed=self.mixed,
            ranges=self.range,
            out=self.out,
        )
