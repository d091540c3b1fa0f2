"""When a run is over: the first budget or goal that is reached, at the end of an iteration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import StopConfig, UserError

RETRY_SHARE = 0.02  # after a failed confirmation wait for so many more iterations
DEADLINE = "PACELINE_DEADLINE"
DEADLINE_SECONDS = 20.0  # between the last save and the end of the allocation, for all that has to be taken down


@dataclass
class Counters:
    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0


class Stopping:
    def __init__(self, config: StopConfig) -> None:
        self._config = config
        self.retry_at = 0

    def progress(self, counters: Counters, seconds: float) -> float:
        """The part of the budget that is used, 0 to 1."""
        config = self._config
        used = [
            counters.env_steps / config.total_steps if config.total_steps else 0.0,
            counters.iteration / config.iterations if config.iterations else 0.0,
            seconds / config.max_time if config.max_time else 0.0,
        ]
        return min(1.0, max(used))

    def reason(
        self,
        counters: Counters,
        seconds: float,
        row: dict[str, Any],
        returns: Sequence[float],
        confirm: Callable[[int], float],
    ) -> str | None:
        """Why to stop now, or None. `confirm` evaluates that many episodes and returns their mean return."""
        config = self._config
        if config.total_steps is not None and counters.env_steps >= config.total_steps:
            return f"{counters.env_steps:,} of {config.total_steps:,} steps done"
        if config.iterations is not None and counters.iteration >= config.iterations:
            return f"{counters.iteration:,} of {config.iterations:,} iterations done"
        if config.max_time is not None and seconds >= config.max_time:
            return f"{config.max_time:g} s are over"
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


class Deadline:
    """The end of the allocation, as the launcher or a job's script tells it: by then the run has to be saved."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        said = environ.get(DEADLINE, "")
        try:
            self.at = float(said) if said else math.inf
        except ValueError:
            raise UserError(f"{DEADLINE}={said}: seconds since the epoch, as `date +%s` prints them") from None

    def reason(self, iteration_seconds: float, save_seconds: float) -> str | None:
        """Why to stop now, or None: another iteration and a save, each twice as slow as the last, still fit."""
        left = self.at - time.time()
        if left > 2 * iteration_seconds + 2 * save_seconds + DEADLINE_SECONDS:
            return None
        return f"the allocation ends in {max(0.0, left):.0f} s"
