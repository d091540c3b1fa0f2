"""Runs on a Ray of our own: the same as local ones, exact after losses, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import paceline
from paceline.api import Run
from paceline.run import checkpoint

pytestmark = pytest.mark.timeout(180)

Tree = dict[str, Any]
SMALL: Tree = {
    "env": {"id": "CartPole-v1", "envs_per_worker": 8},
    "ppo": {"rollout_steps": 32, "minibatch_size": 64, "epochs": 3},
    "seed": 3,
}


def merged(*trees: Tree) -> Tree:
    result: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = {**result[key], **value} if both else value
    return result


def train(*changes: Tree, **options: Any) -> Run:
    return paceline.train(merged(SMALL, {"engine": {"threads": 1}}, *changes), preset="none", **options)


def weights(run: Run, which: str = "last") -> dict[str, Any]:
    arrays, _ = checkpoint.load(checkpoint.find(run.path, which))
    return {name: value for name, value in arrays.items() if name.startswith("engine.algorithm")}


def ray_processes() -> set[int]:
    """Everything of Ray on this machine, but for what other tests' clusters run in namespaces of their own."""
    names = ("raylet", "gcs_server", "ray::", "log_monitor", "dashboard")
    found = set()
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if any(name in (process.info["name"] or "") or f"/ray/{name}" in words for name in names):
            found.add(process.info["pid"])
    return found


@pytest.fixture(autouse=True)
def nothing_stays(here: Path) -> Iterator[None]:
    before, memory, folders = ray_processes(), set(Path("/dev/shm").glob("*paceline*")), set(Path("/tmp").glob("pl-*"))
    yield
    limit = time.monotonic() + 20
    while (left := ray_processes() - before) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left
    assert set(Path("/dev/shm").glob("*paceline*")) <= memory and set(Path("/tmp").glob("pl-*")) <= folders


# -- the same as in one process ---------------------------------------------------------------------------------------

KINDS: dict[str, Tree] = {
    "ppo": {"stop": {"iterations": 4}},
    "normalised": {
        "env": {"normalize_observation": True, "normalize_reward": True},
        "ppo": {"target_kl": 0.01},
        "stop": {"iterations": 4},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_gives_the_weights_of_the_local_engine(kind: str, here: Path) -> None:
    local = train(KINDS[kind], {"name": "local", "engine": {"name": "local"}})
    remote = train(KINDS[kind], {"name": "ray", "engine": {"name": "ray", "workers": 1}})
    mine, theirs = weights(local), weights(remote)
    assert mine.keys() == theirs.keys() and mine
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    assert local.summary["env_steps"] == remote.summary["env_steps"]
    assert (remote.summary["engine"], remote.summary["workers"], remote.summary["nodes"]) == ("ray", 1, 1)


def test_resume_across_engines_and_worker_counts(here: Path) -> None:
    two = {"engine": {"name": "ray", "workers": 2}, "stop": {"iterations": 3}, "name": "x"}
    first = train(two)
    whole = train(two, {"stop": {"iterations": 5}, "name": "whole"})
    for changes, level in (
        ({}, "exact"),
        ({"name": "local", "workers": 1}, "restarted"),
        ({"name": "ray"}, "restarted"),
    ):
        engine = {**two["engine"], **changes}
        more = 5 if level == "exact" else train_iterations(first) + 1
        again = paceline.train({"engine": engine, "stop": {"iterations": more}}, resume=first.path)
        assert again.summary["iterations"] == more
        assert (again / "resume.json").read_text().count(level) == 1
        if level == "exact":
            mine, theirs = weights(again), weights(whole)
            for name in mine:
                np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def train_iterations(run: Run) -> int:
    return int(run.summary["iterations"])
