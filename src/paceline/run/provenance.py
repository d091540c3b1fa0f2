"""Provenance of a run: versions, machine, code and command. By allow-list, since the environment may hold secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline import machine
from paceline.schedulers import SCHEDULERS

GIT_SECONDS = 2.0
PACKAGES = (
    "torch", "numpy", "gymnasium", "ray", "envpool", "ale-py", "mujoco", "Box2D", "pydantic", "safetensors",
    "tensorboard", "psutil",
)  # fmt: skip
VARIABLES = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *(name for each in SCHEDULERS.values() for name in (*each.id_variables, each.hosts_variable)),
)


def collect(argv: list[str]) -> dict[str, Any]:
    """The content of `provenance.json`. It imports no large package."""
    return {
        "paceline": _version("paceline"),
        "started_at": datetime.now(UTC).isoformat(),
        "argv": list(argv),
        "working_directory": str(Path.cwd()),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu_model": cpu_model(),
        "cores": machine.cores(),
        "memory_bytes": machine.memory_limit_bytes(),
        "git": git(Path.cwd()),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def git(folder: Path) -> dict[str, Any] | None:
    """The commit checked out in `folder` and whether tracked files differ from it; None outside a repository."""
    deadline = time.monotonic() + GIT_SECONDS
    commit = _git(folder, deadline, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, deadline, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}  # None: git took too long


def _git(folder: Path, deadline: float, *arguments: str) -> str | None:
    try:
        # Do not take the index lock from a working user, and do not start a file system monitor.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
