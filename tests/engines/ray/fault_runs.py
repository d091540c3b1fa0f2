"""Runs on Ray in their own processes, for tests that break them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ENDLESS = "train --env CartPole-v1 --engine ray --workers 2 --name x --total-steps 100M"
Start = Callable[..., subprocess.Popen[str]]


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The worker processes of the run that have started."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        try:
            if child.name().startswith("ray::Worker"):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def to_file(folder: Path) -> dict[str, Any]:
    """Write to a file: a full pipe would block the run."""
    return {"stdout": (folder / "out.txt").open("a"), "stderr": subprocess.STDOUT}


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    family = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
    process.wait(timeout=seconds)
    out = (Path.cwd() / "out.txt").read_text()
    limit = time.monotonic() + 15
    while any(psutil.pid_exists(pid) for pid in family) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not [pid for pid in family if psutil.pid_exists(pid)]
    return int(process.returncode), out


def iterations(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, "the condition did not become true"
        time.sleep(0.05)
    return value
