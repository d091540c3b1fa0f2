"""Placing a command on machines, and finding out what would go wrong there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launch.scheduler import Scheduler

    SCHEDULERS: dict[str, Scheduler]


def __getattr__(name: str) -> Any:
    """`SCHEDULERS`, by name, made when somebody asks: a process on each of a thousand hosts imports this package."""
    if name != "SCHEDULERS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline.launch.cobalt import Cobalt
    from paceline.launch.oar import Oar
    from paceline.launch.pbs import Pbs
    from paceline.launch.slurm import Slurm

    made: list[Scheduler] = [Slurm(), Oar(), Pbs(), Cobalt()]
    return globals().setdefault("SCHEDULERS", {scheduler.name: scheduler for scheduler in made})
