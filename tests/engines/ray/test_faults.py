"""Runs survive workers that are killed, stopped, broken or stuck, count steps exactly and leave nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import audited
from fault_runs import Start, finish, iterations, to_file, wait_for, workers_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
AUDITED = Path(audited.__file__)
ODD = Path(__file__).parents[2] / "odd_envs.py"


@pytest.fixture
def audited_run(here: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[str]]:
    monkeypatch.setenv("PACELINE_AUDIT", str(here / "audit"))

    def run(algo: str, *words: str, env: str = "paceline/Numbered-v0", **sets: Any) -> subprocess.Popen[str]:
        line = f"train --algo {algo} --env {env} --preset none --engine ray --name x --envs-per-worker 4".split()
        # Long episodes: among tens of thousands of 32-bit seeds, two would be equal now and then.
        changes = {
            "env.kwargs": "{length: 200}",
            "model.class": f"{AUDITED}:Net",
            "checkpoint.every_seconds": 2,
            **sets,
        }
        sets_words = [word for key, value in changes.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        return start(*line, *words, *sets_words, **to_file(here))

    return run


def check(here: Path) -> dict[str, Any]:
    """The summary, after checking that the trained transitions are unique and as many as counted."""
    summary: dict[str, Any] = json.loads((here / "runs/x/summary.json").read_text())
    rows = audited.read(here / "audit")
    assert len(rows) == summary["env_steps"] and len(set(rows)) == len(rows)
    return summary


@pytest.mark.parametrize("algo", ["ppo", "a2c", "impala", "a3c"])
def test_random_kills(algo: str, here: Path, audited_run: Callable[..., subprocess.Popen[str]]) -> None:
    sets = {f"{algo}.rollout_steps": 16, **({"ppo.minibatch_size": 64} if algo == "ppo" else {})}
    process = audited_run(algo, "--workers", "2", "--max-time", "20s", **sets)
    wait_for(lambda: iterations(here / "runs/x") > 3)
    dice, killed = random.Random(7), 0
    while process.poll() is None and killed < 4:
        targets = workers_of(process)
        if len(targets) >= 2:
            os.kill(dice.choice(targets).pid, signal.SIGKILL)
            killed += 1
        time.sleep(dice.uniform(1.0, 5.0))
    code, out = finish(process, 120)
    assert code == 0, out
    summary = check(here)
    assert summary["status"] == "done" and summary["workers_lost"] >= killed >= 3, out
    assert summary["workers_restarted"] >= 1 and "died" in (here / "runs/x/logs/events.log").read_text()


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_stopped_worker_is_given_up(algo: str, here: Path, audited_run: Callable[..., subprocess.Popen[str]]) -> None:
    process = audited_run(algo, "--workers", "2", "--max-time", "18s", **{"env.step_timeout_seconds": 4})
    wait_for(lambda: iterations(here / "runs/x") > 3)
    target = next(worker for worker in workers_of(process))
    os.kill(target.pid, signal.SIGSTOP)
    code, out = finish(process, 120)
    assert code == 0, out
    summary = check(here)
    assert summary["workers_lost"] >= 1 and "no progress for 4 s" in out, out
    assert not psutil.pid_exists(target.pid)


@pytest.mark.parametrize("how", ["raise", "hang", "exit"])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_an_environment_that_fails_once(how: str, algo: str, here: Path, start: Start) -> None:
    once = here / "taken"
    words = f"train --algo {algo} --env paceline/Faulty-v0 --preset none --engine ray --workers 2 --name x".split()
    kwargs = f"{{how: {how}, after: 200, once: {once}}}"
    sets = ["--set", f"env.kwargs={kwargs}", "--set", "env.step_timeout_seconds=3", "--envs-per-worker", "2"]
    process = start(*words, *sets, "--max-time", "12s", **to_file(here))
    code, out = finish(process, 90)
    assert code == 0, out
    summary = json.loads((here / "runs/x/summary.json").read_text())
    lost = 0 if how == "raise" else 1  # an error is dealt with inside the worker
    assert once.exists() and summary["workers_lost"] == lost and summary["workers_restarted"] == lost, out
    assert summary["env_restarts"] == 1 - lost and summary["workers_healthy"] == 2, out
    if lost:
        assert "1 of 2 workers at work" in out and "all 2 workers are at work again" in out


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_an_environment_that_fails_everywhere_ends_the_run_with_its_traceback_once(
    algo: str, here: Path, start: Start
) -> None:
    words = f"train --algo {algo} --env paceline/Faulty-v0 --preset none --engine ray --workers 2 --name x".split()
    began = time.monotonic()
    sets = ["--set", "env.kwargs={how: raise, after: 3}", "--set", "env.restart_on_error=2"]
    process = start(*words, *sets, **to_file(here))
    code, out = finish(process, 120)
    assert code == 1 and "the first error was" in out and "this probe env fails after 3 steps" in out, out
    assert out.count("Traceback (most recent call last)") <= 2
    assert time.monotonic() - began < 90


@pytest.mark.parametrize(
    ("algo", "how", "rate"),
    [("ppo", "raise", 0.02), ("ppo", "exit", 0.004), ("impala", "raise", 0.02), ("impala", "exit", 0.004)],
)
def test_a_flaky_simulator(algo: str, how: str, rate: float, here: Path, start: Start) -> None:
    """It fails in some of its steps, and now and then in both workers at the same time."""
    words = f"train --algo {algo} --env {ODD}:Flaky --preset none --engine ray --workers 2 --name x".split()
    sets = {"env.kwargs": f"{{rate: {rate}, how: {how}, cost_seconds: 0.02}}", f"{algo}.rollout_steps": 16}
    sets |= {"env.envs_per_worker": 2, "stop.max_time": "25s"}
    process = start(*words, *(word for key in sets for word in ("--set", f"{key}={sets[key]}")), **to_file(here))
    code, out = finish(process, 120)
    summary = json.loads((here / "runs/x/summary.json").read_text())
    assert code == 0 and summary["status"] == "done", out
    if how == "raise":
        assert summary["env_restarts"] > 10 and summary["workers_lost"] == 0, out
        assert out.count("the simulator exploded") == 1, out
    else:
        assert summary["workers_lost"] > 0 and summary["workers_restarted"] > 0, out
