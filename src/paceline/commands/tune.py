"""`paceline tune`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from paceline.commands.flags import Flag
from paceline.commands.run_settings import SettingsVerb, run_flags


class TuneVerb(SettingsVerb):
    """Search for good settings, with many trials at once, on Ray Tune.

    Search for good settings. Each trial is a run, with the settings given as for train (--env, --config, --set …) and
    others drawn from the search space; the best ones are written to best.yaml.
    """

    settings: Annotated[dict[str, Any], run_flags(without=("engine.workers", "engine.name"))]
    config: Annotated[str | None, Flag("FILE")] = None
    """A YAML file of settings that all trials share."""
    space: Annotated[str | None, Flag("FILE")] = None
    """The search space: a YAML file with KEY: [a, b] or KEY: {uniform|log|int: [low, high]} on each line."""
    search: Literal["grid", "random", "asha", "pbt"] | None = None
    """Default: grid for lists, random for ranges."""
    trials: Annotated[int | None, Flag("N")] = None
    """Points to draw from the space; with pbt, the size of the population."""
    seeds: Annotated[int | None, Flag("N")] = None
    """Runs per point; their mean is the score of the point."""
    parallel: Annotated[int | None, Flag("K")] = None
    """Trials at once; default: one per core."""
    gpus: Annotated[float, Flag("X", least=0)] = 0.0
    """Share of a GPU for each trial."""
    metric: Annotated[str | None, Flag("NAME")] = None
    """The metric whose last value scores a trial (default: return_mean)."""
    mode: Literal["max", "min"] | None = None
    """Whether higher or lower scores are better; default: max."""
    interval: Annotated[str | None, Flag("STEPS")] = None
    """asha: steps before trials are first compared; pbt: steps between exchanges."""
    stop_after: Annotated[str | None, Flag("TIME")] = None
    """Save and stop the whole search after this long; --resume continues it."""
    resume: Annotated[str | None, Flag("DIR|auto")] = None
    """Continue a search; `auto`: the search with this --name, if it exists."""
    retry: bool = False
    """With --resume: also run the trials that failed before."""

    def run(self) -> int:
        from paceline.tune.tune_command import run_tune

        names = ("space", "search", "trials", "seeds", "metric", "mode", "interval")
        return run_tune(
            self.given(),
            preset=self.preset,
            asked={name: getattr(self, name) for name in names if getattr(self, name) is not None},
            resume=self.resume,
            retry=self.retry,
            parallel=self.parallel,
            gpus=self.gpus,
            stop_after=self.stop_after,
        )
