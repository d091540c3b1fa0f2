"""The messages between the driver and its workers."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.code_bundle import CodeBundle
from paceline.machine import Usage

PACKAGES = ("paceline", "torch", "numpy", "gymnasium")  # versions must be the same everywhere
LEARNER = 1_000_000  # slots of learners begin here


def role(slot: int) -> str:
    return f"worker {slot}" if slot < LEARNER else f"learner {slot - LEARNER}"


def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to set itself up."""

    settings: dict[str, Any]
    """A plain tree: an algorithm's settings class may be in the user's code, which is installed first."""
    code_bundle: CodeBundle
    slot: int
    """The worker's number; a replacement takes over the slot."""
    envs: int  # 0: a learner
    restarts: int
    resumes: int
    cores: int
    workers: int  # actors or replicas of the run
    driver_host: str  # the run directory is only on this host
    log: str | None = None  # file for its output
    scratch_dir: str | None = None  # for a learner's data that does not fit in memory
    spaces: dict[str, Any] | None = None  # for a learner
    changes: dict[str, Any] = field(default_factory=dict)
    """What callbacks have changed so far."""


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker reports once it is ready."""

    pid: int
    host: str
    node: str  # Ray's id
    cores: int
    versions: dict[str, str]
    stepping: str = ""
    threads: int = 1
    parameters: int = 0
    agents: int = 0  # of each environment; 0 for a single one
    capacity_bytes: int = 0  # of the largest tensor it exchanges
    spaces: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    device: str = "cpu"  # where it learns: `cpu` or the name of a GPU
    problem: str | None = None  # bad input that only showed on the worker
    address: str = ""  # filled in by the driver


@dataclass
class Report:
    """The outcome of one call: what was done, the time it took and the worker's resource use."""

    env_steps: int = 0  # of a rollout; of an update: of all its rollouts
    agent_steps: int = 0
    episodes: list[Any] = field(default_factory=list)
    env_metrics: list[dict[str, float]] = field(default_factory=list)
    env_restarts: int = 0
    env_error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    keep_seconds: float = 0.0  # to keep the state before a rollout that was collected ahead
    version: int = 0
    optimizer_steps: int = 0
    fingerprint: int = 0  # of the weights
    bytes_moved: int = 0
    usage: Usage = field(default_factory=Usage)
    lags: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the user
    missing: list[int] = field(default_factory=list)  # indices of payloads that were lost
