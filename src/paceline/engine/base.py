"""What an engine is to the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.engine.clock import Clock
from paceline.rollout.batch import Episode

Lane = dict[str, float]
"""Seconds of each part of one process's time."""


class TrainingError(RuntimeError):
    """The run cannot go on, and it is not the fault of its input."""


@dataclass
class Iteration:
    """What one round of collecting and learning brought: counted are the steps that entered the update, no others."""

    env_steps: int
    metrics: dict[str, float]
    episodes: list[Episode] = field(default_factory=list)
    env_metrics: list[dict[str, float]] = field(default_factory=list)


class Engine(ABC):
    """Brings batches and learning together. Never sees a loss, a stop rule or a file."""

    name: str
    workers: int
    threads: int
    parameters: int
    cores: int
    device: str = "cpu"
    """Where the network learns: `cpu`, or the name of a GPU."""
    nodes: int = 1
    optimizer_steps: int = 0
    straggling_seconds: float = 0.0
    """That the average worker has waited for slower ones at the end of collecting."""

    @abstractmethod
    def describe(self) -> list[str]:
        """What was chosen, line by line."""

    @abstractmethod
    def start(self, state: dict[str, Any] | None = None) -> bool:
        """Begin, from `state` if given. True: exactly there. False: the environments start afresh."""

    @abstractmethod
    def load_policy(self, arrays: dict[str, Any]) -> None:
        """Begin with the weights of another run; before `start`."""

    @abstractmethod
    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        """`remaining`: the part of the budget that is left. The time spent is added to the clock."""

    @abstractmethod
    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        """Separate environments, the normaliser as it is; the same `number` gives the same episodes."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Arrays and JSON: all that the next iteration depends on."""

    @abstractmethod
    def usage(self) -> tuple[int, float]:
        """Memory in bytes and CPU seconds so far of all processes of the run."""

    def log_to(self, folder: Path) -> None:
        """Where other processes of the run may print to."""
        return

    def keep_in(self, folder: Path) -> None:
        """Where there is room for what does not fit in memory."""
        return

    def notes(self) -> list[str]:
        """What happened since the last call that a user should know: a worker lost, one that came back."""
        return []

    def actor_lane(self) -> Lane | None:
        """The mean of those who collect for a learner, where there are such."""
        return None

    def accounts(self) -> dict[str, Any]:
        """For the summary: nodes, workers, and where their time went."""
        return {"nodes": self.nodes}

    @abstractmethod
    def close(self) -> None: ...
