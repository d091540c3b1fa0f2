"""Workers killed, stopped, broken or stuck at any time: the run goes on, counts exactly, and leaves nothing."""

from __future__ import annotations

import json
import os
import random
import re
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

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
AUDITED = Path(audited.__file__)
ENDLESS = "train --env CartPole-v1 --engine ray --workers 2 --name x --total-steps 100M"
Start = Callable[..., subprocess.Popen[str]]


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the run that do its work, and have begun with it."""
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
    """A pipe that nobody reads would stop the run."""
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
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.05)
    return value


@pytest.fixture
def audited_run(here: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[str]]:
    monkeypatch.setenv("PACELINE_AUDIT", str(here / "audit"))

    def run(algo: str, *words: str, env: str = "paceline/Numbered-v0", **sets: Any) -> subprocess.Popen[str]:
        line = f"train --algo {algo} --env {env} --preset none --engine ray --name x --envs-per-worker 4".split()
        # Long episodes: each has a seed of 32 bits, and of tens of thousands two would be alike now and then.
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
    """The summary of a run whose trained transitions are unique and as many as it counted."""
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
    code, out = finish(process, 60)
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
    code, out = finish(process, 60)
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
    assert once.exists() and summary["workers_lost"] == 1 and summary["workers_restarted"] == 1, out
    assert summary["workers_healthy"] == 2, out


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_an_environment_that_fails_everywhere_ends_the_run_with_its_traceback_once(
    algo: str, here: Path, start: Start
) -> None:
    words = f"train --algo {algo} --env paceline/Faulty-v0 --preset none --engine ray --workers 2 --name x".split()
    began = time.monotonic()
    process = start(*words, "--set", "env.kwargs={how: raise, after: 300}", **to_file(here))
    code, out = finish(process, 120)
    assert code == 1 and out.count("Traceback (most recent call last)") <= 2 and "Faulty" in out, out
    assert time.monotonic() - began < 90


def test_the_driver_is_killed(here: Path, start: Start) -> None:
    words = ENDLESS.split()
    process = start(*words, **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 3)
    family = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 4
    commands = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in family)
    folders = {Path(found) for found in re.findall(r"/tmp/pl-\w+", commands)}
    assert folders and all(folder.exists() for folder in folders)
    process.kill()
    process.wait(timeout=10)
    limit = time.monotonic() + 60  # Ray's helpers look for their parent from time to time only
    while (left := [pid for pid in family if psutil.pid_exists(pid)]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left
    wait_for(lambda: not any(folder.exists() for folder in folders))  # the token is in it
    again = start("train", "--resume", "runs/x", "--engine", "local", "--workers", "1", "--iterations", "200")
    assert again.wait(timeout=60) == 0


def test_a_signal_saves_and_stops(here: Path, start: Start) -> None:
    words = ENDLESS.split()
    process = start(*words, **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 3)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process, 30)
    assert code == 99 and "paceline train --resume" in out, out
