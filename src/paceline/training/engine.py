"""The interface between the training loop and an engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.machine import Usage
from paceline.rollout.batch import Episode
from paceline.training.clock import Clock

TimeSplit = dict[str, float]
"""Seconds of one process by part, see `clock.PARTS`."""
Levels = dict[str, str]
"""How each part of a run was restored: `exact`, or one word (`restarted`, `partial`, `empty`, `dropped`) and why."""
EXACT = "exact"
RESTARTED = "restarted: unfinished episodes are dropped, envs are reseeded"


class TrainingError(RuntimeError):
    """The run cannot continue, for a reason other than bad input."""


@dataclass
class Iteration:
    """The outcome of collecting and learning once. `env_steps` counts the steps that entered the update."""

    env_steps: int
    metrics: dict[str, float]
    episodes: list[Episode] = field(default_factory=list)
    env_metrics: list[dict[str, float]] = field(default_factory=list)
    agent_steps: int = 0  # with several agents: rows that entered the update
    env_restarts: int = 0  # environments that failed and were started again
    env_error: str = ""  # with restarts: an error behind them, with its traceback

    def check_finite(self, number: int, env_id: str) -> None:
        """Raise `TrainingError` if the loss or the gradient is no number. They are absent until learning starts."""
        loss, norm = self.metrics.get("total_loss", 0.0), self.metrics.get("gradient_norm", 0.0)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                f"the loss is {loss} and the gradient {norm} at iteration {number}: lower the learning rate, turn on "
                "env.normalize_observation and env.normalize_reward, or run "
                f"`paceline envs check {env_id}`; the last checkpoint is complete"
            )


class Engine(ABC):
    """Collects rollouts and has the algorithm learn from them. It knows no loss, stop rule or run directory."""

    name: str
    workers: int
    threads: int
    parameters: int
    cores: int
    device: str = "cpu"
    """Where the network learns: `cpu`, or the name of a GPU."""
    nodes: int = 1
    optimizer_steps: int = 0
    rests_next: bool = False
    """Set by the loop: after the next iteration it will probably evaluate, save or end, so nothing should be collected
    ahead."""
    straggling_seconds: float = 0.0
    """Time the average worker has spent waiting for slower ones at the end of rollouts."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Lines that tell the user what was chosen."""

    @abstractmethod
    def start(self, state: dict[str, Any] | None = None) -> Levels:
        """Begin, or continue from `state`. Returns how each part of it was restored."""

    @abstractmethod
    def load_policy(self, arrays: dict[str, Any]) -> None:
        """Use the weights of another run. Call before `start`."""

    @abstractmethod
    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        """Run one iteration and add its time to the clock. `remaining`: unused share of the budget, 0 to 1."""

    @abstractmethod
    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        """Play in separate environments, normalisers frozen. The same `number` gives the same episodes."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything the next iteration depends on, as arrays and JSON."""

    def state_before(self) -> tuple[dict[str, Any], Iteration] | None:
        """For another thread, while `iterate` runs and before the process ends: the state from before the iteration,
        without environments. The iteration has what was learned from by then, if anything. None: not known."""
        return None

    @abstractmethod
    def change(self, changes: Mapping[str, Any]) -> None:
        """From the next iteration on, use other settings of the algorithm and other attributes of the training
        environments (`env.NAME`), also in processes that start later."""

    @abstractmethod
    def usage(self) -> Usage:
        """Of all processes of the run."""

    def stepping_usage(self, total: Usage) -> Usage | None:
        """The part of `total` of the processes that step environments; None if it is unknown."""
        return total

    def log_to(self, folder: Path) -> None:
        """Set the folder for the output of other processes of the run."""
        return

    def set_scratch_dir(self, folder: Path) -> None:
        """Set the folder for data that does not fit in memory."""
        return

    def notes(self) -> list[str]:
        """Events since the last call that the user should know about, such as a lost worker."""
        return []

    def actor_time_split(self) -> TimeSplit | None:
        """Mean over the actors, for engines with a separate learner."""
        return None

    def accounts(self) -> dict[str, Any]:
        """Entries for the summary: nodes, workers, and where their time went."""
        return {"nodes": self.nodes}

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Call it, perhaps in another thread, as soon as there is a `failure`. The process may end before `iterate`
        returns."""
        return

    def failure(self) -> str | None:
        """Why the engine cannot go on for long, if something that it needs, such as Ray, has died."""
        return None

    @abstractmethod
    def close(self) -> None: ...


def restored(environments: bool, other: Levels) -> Levels:
    """The levels of a run whose weights and optimizer are restored. `other`: parts that not every run has."""
    return {"weights": EXACT, "optimizer": EXACT, "environments": EXACT if environments else RESTARTED, **other}
