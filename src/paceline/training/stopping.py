"""When a run ends: at the first iteration boundary where a budget or goal is reached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import StopConfig, UserError
from paceline.training.signals import STOPPED_EARLY

GOAL_MISSED = 1
RETRY_SHARE = 0.02  # after a failed confirmation, wait for this share of the iterations so far
DEADLINE = "PACELINE_DEADLINE"
DEADLINE_SECONDS = 20.0  # left after the last save, to shut everything down


@dataclass
class Counters:
    iteration: int = 0
    env_steps: int = 0
    agent_steps: int = 0  # with several agents
    episodes: int = 0
    env_restarts: int = 0


def progress(budget: StopConfig, counters: Counters, seconds: float) -> float:
    """Used share of a budget, 0 to 1."""
    used = [
        counters.env_steps / budget.total_steps if budget.total_steps else 0.0,
        counters.iteration / budget.iterations if budget.iterations else 0.0,
        seconds / budget.max_time if budget.max_time else 0.0,
    ]
    return min(1.0, max(used))


class Stopping:
    def __init__(self, config: StopConfig) -> None:
        self._config = config
        self.retry_at = 0
        self.goal_missed = False
        """Whether the budget is used up without the goal that the run must reach."""

    def progress(self, counters: Counters, seconds: float) -> float:
        """Used share of the budget, 0 to 1."""
        return progress(self._config, counters, seconds)

    def reason(
        self,
        counters: Counters,
        seconds: float,
        row: dict[str, Any],
        returns: Sequence[float],
        confirm: Callable[[int], float],
    ) -> str | None:
        """Why to stop now, or None. `confirm(episodes)` evaluates the policy and returns the mean return."""
        goal = budget = self._used_up(counters, seconds)
        if budget is None or self._config.must_reach:
            self.retry_at = self.retry_at if budget is None else 0  # there is no later try
            goal = self._goal(counters, row, returns, confirm)
        self.goal_missed = budget is not None and goal is None
        return f"{budget}; the goal was not reached" if self.goal_missed else goal

    def _used_up(self, counters: Counters, seconds: float) -> str | None:
        config = self._config
        if config.total_steps is not None and counters.env_steps >= config.total_steps:
            return f"{counters.env_steps:,} of {config.total_steps:,} steps done"
        if config.iterations is not None and counters.iteration >= config.iterations:
            return f"{counters.iteration:,} of {config.iterations:,} iterations done"
        if config.max_time is not None and seconds >= config.max_time:
            return f"{config.max_time:g} s are over"
        return None

    def _goal(
        self, counters: Counters, row: dict[str, Any], returns: Sequence[float], confirm: Callable[[int], float]
    ) -> str | None:
        config = self._config
        if config.metric_rule is not None:
            name, compare, bound = config.metric_rule
            value = row.get(name)
            if value is not None and compare(value, bound):
                return f"{name} = {value:g} ({config.metric})"
        return self._solved(counters, returns, confirm)

    def _solved(self, counters: Counters, returns: Sequence[float], confirm: Callable[[int], float]) -> str | None:
        config = self._config
        if config.return_mean is None or len(returns) < config.return_window or counters.iteration < self.retry_at:
            return None
        mean = sum(returns[-config.return_window :]) / config.return_window
        if mean < config.return_mean:
            return None
        text = f"return {mean:.1f} over the last {config.return_window} episodes"
        if config.confirm_episodes == 0:
            return text
        confirmed = confirm(config.confirm_episodes)
        if confirmed >= config.return_mean:
            return f"{text}, {confirmed:.1f} in {config.confirm_episodes} evaluation episodes"
        self.retry_at = counters.iteration + max(1, round(RETRY_SHARE * counters.iteration))
        return None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `status` is `done`, or `stopped` if it ended early and can be resumed."""

    status: str
    reason: str
    path: Path
    goal_missed: bool = False
    """It is done, but did not reach the goal that it must reach (`stop.must_reach`)."""

    @property
    def exit_code(self) -> int:
        if self.goal_missed:
            return GOAL_MISSED
        return 0 if self.status == "done" else STOPPED_EARLY


class Deadline:
    """The end of the allocation, set by the launcher or the job script. The run must be saved by then."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        text = environ.get(DEADLINE, "")
        try:
            self.at = float(text) if text else math.inf
        except ValueError:
            raise UserError(f"{DEADLINE}={text}: expected seconds since the epoch, as printed by `date +%s`") from None

    def reason(self, iteration_seconds: float, save_seconds: float) -> str | None:
        """Why to stop now; None if another iteration and save still fit, even at twice the time of the last."""
        left = self.at - time.time()
        if left > 2 * iteration_seconds + 2 * save_seconds + DEADLINE_SECONDS:
            return None
        return f"the allocation ends in {max(0.0, left):.0f} s"
