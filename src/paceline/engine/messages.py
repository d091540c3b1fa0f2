"""What the driver and its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.config import RunConfig

LEARNER = 1_000_000  # slots of learners begin here


def role(slot: int) -> str:
    return f"worker {slot}" if slot < LEARNER else f"learner {slot - LEARNER}"


@dataclass(frozen=True)
class Order:
    """What a worker is to be."""

    config: RunConfig
    parcel: Any  # the user's code, see ship.py
    slot: int
    envs: int  # 0: a learner
    restarts: int = 0
    resumes: int = 0
    cores: int = 1
    spaces: dict[str, Any] | None = None
    log: str | None = None  # where it prints to
    folder: str | None = None  # where a learner has room for what does not fit in memory
    workers: int = 1  # actors beside each other
    host: str = ""  # of the driver: another one has no business with the driver's files


@dataclass(frozen=True)
class Facts:
    """What a worker says of itself once it is ready."""

    pid: int
    host: str
    node: str  # its id
    cores: int
    versions: dict[str, str]
    stepping: str
    threads: int
    parameters: int
    capacity_bytes: int
    spaces: dict[str, Any]
    lines: list[str]
    device: str = "cpu"  # where it learns, or the name of a GPU
    problem: str | None = None  # the user can mend it
    address: str = ""  # filled in by the driver


@dataclass
class Report:
    """The outcome of one call: what was done, where the time went since the last report, what it costs."""

    env_steps: int = 0
    episodes: list[Any] = field(default_factory=list)
    env_metrics: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    version: int = 0
    optimizer_steps: int = 0
    fingerprint: int = 0
    bytes_moved: int = 0
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    lags: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the user
    missing: list[int] = field(default_factory=list)  # rollouts that were lost on the way


@dataclass(frozen=True)
class Pulse:
    """A look at a busy worker."""

    ticks: int
    waiting: bool  # for other members of its group
