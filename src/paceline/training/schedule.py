"""How far the schedules of a run have come, and what a new budget changes about it."""

from __future__ import annotations

from typing import Any

from paceline.config import RunConfig, StopConfig
from paceline.training.stopping import Counters, progress

BUDGETS = ("total_steps", "iterations", "max_time")


class Schedule:
    """Annealed settings follow the share of a budget that is left: the budget of the run, or an earlier one that was
    kept (`--keep-schedule`). When that is used up, they stay at their last values."""

    def __init__(self, budget: StopConfig) -> None:
        self.budget = budget
        self.remaining = 1.0
        """In the last iteration."""

    def next(self, counters: Counters, seconds: float) -> float:
        """The share that is left for the next iteration."""
        left = 1.0 - progress(self.budget, counters, seconds)
        return left if left > 0 else self.remaining

    def state(self) -> dict[str, Any]:
        return {"budget": _budgets(self.budget), "remaining": self.remaining}

    def restore(
        self, state: dict[str, Any] | None, saved: StopConfig, counters: Counters, seconds: float, *, keep: bool
    ) -> tuple[float, float] | None:
        """Continue from a checkpoint that was saved with the budget `saved`. If the run has another one by now, the
        schedules follow it unless `keep`; returns the share left of the old one and of the new one then."""
        new, self.budget, self.remaining = self.budget, saved, 1 / max(1, counters.iteration)
        if state is not None:  # None: of an earlier version, as if all iterations had been equal
            self.budget, self.remaining = StopConfig(**state["budget"]), state["remaining"]
        if keep or _budgets(new) == _budgets(saved):
            return None
        before, self.budget = self.next(counters, seconds), new
        return before, self.next(counters, seconds)


def describe_move(config: RunConfig, before: float, after: float) -> list[str]:
    """A line about the settings whose values differ between two shares of a budget that are left."""
    old, new = (config.algorithm.schedules(config.hyper, left) for left in (before, after))
    moved = [f"{name} {old[name]:.3g} → {new[name]:.3g}" for name in old if old[name] != new[name]]
    hint = "" if config.engine.name == "rllib" else "; --keep-schedule keeps them on the old one"
    return [f"schedules  follow the new budget: {', '.join(moved)}{hint}"] if moved else []


def _budgets(stop: StopConfig) -> dict[str, Any]:
    return {name: getattr(stop, name) for name in BUDGETS}
