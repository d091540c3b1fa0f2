"""`paceline train --seeds`: one run for each seed, continued by the same command."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.run.directory import RunDirectory

SMALL = ("--env", "CartPole-v1", "--preset", "none", "--set", "ppo.rollout_steps=8", "--set", "env.envs_per_worker=2")


def finished(folder: str = "runs") -> dict[str, str]:
    """Each run and when it last wrote its status."""
    runs = (RunDirectory(path.parent) for path in sorted(Path(folder).glob("*/config.yaml")))
    return {run.path.name: run.read_status()["updated_at"] for run in runs if run.read_status()["state"] == "done"}


def test_each_seed_is_a_run_and_the_same_command_makes_what_is_missing(here: Path, cli: Callable[..., Any]) -> None:
    words = ("train", *SMALL, "--iterations", 2, "--name", "try", "--quiet")
    first = cli(*words, "--seeds", "0,4")
    assert first.code == 0, first.err
    before = finished()
    assert list(before) == ["try-0", "try-4"]
    assert [RunDirectory(Path("runs") / name).read_config()["seed"] for name in before] == [0, 4]
    assert "runs/try-4" in first.out and "over 2 seeds" in first.out
    again = cli(*words, "--seeds", "4-5")
    assert again.code == 0, again.err
    assert finished() | before == finished()  # what was finished is as it was
    assert list(finished()) == ["try-0", "try-4", "try-5"]
    refused = cli(*words, "--seeds", "0-9", "--set", "ppo.gamma=0.5")
    assert refused.code == 2 and "runs/try-0 has ppo.gamma=0.99, not 0.5" in refused.err and len(finished()) == 3


def test_what_does_not_go_together(here: Path, cli: Callable[..., Any]) -> None:
    for words, named in (
        (("--seed", 1), "--seed 1 and --seeds 0-1: give one of them"),
        (("--resume", "runs/a"), "--resume runs/a continues one run"),
        (("--set", "ppo.gama=1"), "did you mean 'ppo.gamma'"),
    ):
        result = cli("train", "--seeds", "0-1", *words)
        assert result.code == 2 and named in result.err and result.err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_signal_stops_the_run_and_those_after_it(here: Path, start: Callable[..., Any]) -> None:
    process = start("train", *SMALL, "--max-time", 60, "--seeds", "0-1", "--name", "long", "--quiet")
    rows = Path("runs/long-0/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (rows.exists() and rows.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 99 and "stopped: SIGTERM; the same command continues" in out
    assert RunDirectory(Path("runs/long-0")).read_status()["state"] == "stopped"
    assert not Path("runs/long-1").exists()


def test_the_table_of_runs(here: Path, cli: Callable[..., Any], write_run: Callable[..., Path]) -> None:
    assert "no runs yet" in cli("runs").out and json.loads(cli("runs", "--json").out) == []
    write_run(here / "runs" / "a", best=123.0)
    write_run(here / "runs" / "deep" / "b", seed=3, state="failed", reason="no memory")
    (here / "runs" / "deep" / "b" / "summary.json").write_text("{")
    write_run(here / "runs" / "c", rows=0)
    status = here / "runs" / "c" / "status.json"
    status.write_text(status.read_text().replace("2026-01-02", "2026-01-03"))
    head, first, *others = cli("runs").out.splitlines()
    assert head.split() == ["run", "algo", "env", "seed", "state", "steps", "return", "age"]
    assert first.split()[:7] == ["runs/c", "ppo", "CartPole-v1", "0", "finished", "0", "–"]  # the most recent one
    assert sorted(line.split()[0] for line in others) == ["runs/a", "runs/deep/b"]
    rows = {row["run"]: row for row in json.loads(cli("runs", "--json").out)}
    assert rows["runs/deep/b"]["state"] == "failed" and rows["runs/deep/b"]["seed"] == 3
    assert rows["runs/a"]["return_mean"] == pytest.approx(123.0, rel=0.1) and rows["runs/a"]["env_steps"] == 20_000
    assert rows["runs/c"]["age_seconds"] < rows["runs/a"]["age_seconds"]
    assert cli("runs", "nowhere").code == 2
