"""What the loop does between iterations, and when: evaluate, save, end."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.training.stopping import Counters, Stopping

MARGIN = 1.2  # the next iteration is expected to be at most this many times the mean


def evaluation_due(config: RunConfig, steps_before: float, steps: float) -> bool:
    every = config.eval.every_steps
    return every > 0 and steps // every > steps_before // every


def save_due(config: RunConfig, iteration: int, unsaved_seconds: float) -> bool:
    every = config.checkpoint
    if every.every_iterations and iteration % every.every_iterations == 0:
        return True
    return every.every_seconds > 0 and unsaved_seconds >= every.every_seconds


def pause_expected(
    config: RunConfig, counters: Counters, stopping: Stopping, train_seconds: float, unsaved_seconds: float
) -> bool:
    """Whether one of them will probably follow the next iteration."""
    if not counters.iteration:
        return False
    share = MARGIN / counters.iteration
    return (
        stopping.progress(counters, train_seconds) * (1 + share) >= 1
        or evaluation_due(config, counters.env_steps, counters.env_steps * (1 + share))
        or save_due(config, counters.iteration + 1, unsaved_seconds + share * train_seconds)
    )
