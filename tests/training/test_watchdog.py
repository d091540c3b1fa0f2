"""A run that is told to stop and cannot, since its simulator hangs or its iteration is too long, is saved anyway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import UserError
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory
from paceline.training.watchdog import GRACE_SECONDS, grace_seconds

# Hangs as soon as a file appears: in Python, or in a C function that signals do not interrupt.
HANGING = """
import ctypes, pathlib, time
import gymnasium, numpy as np

def block():
    mutex = ctypes.create_string_buffer(64)  # a mutex as pthread_mutex_init makes it on Linux
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, how="sleep"):
        self.how, self.steps = how, 0
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        if pathlib.Path("hang").exists():
            pathlib.Path("hangs").touch()
            block() if self.how == "block" else time.sleep(1e6)
        time.sleep(0.001)
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}
"""
SETS = {
    "ppo": ["ppo.rollout_steps=8", "ppo.minibatch_size=16", "ppo.epochs=1"],
    "dqn": ["dqn.rollout_steps=4", "dqn.rounds=40", "dqn.learning_starts=16", "dqn.replay_size=5000"],
}


def run_until(text: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(process.communicate())


def begin(start: Callable[..., Any], algo: str, how: str, grace: str = "3", *more: str) -> Any:
    Path("hanging.py").write_text(textwrap.dedent(HANGING))
    words = ["--env", "hanging.py:Env", "--algo", algo, "--preset", "none", "--name", "x", "--envs-per-worker", "2"]
    sets = [*SETS[algo], f"env.kwargs={{how: {how}}}", "checkpoint.every_seconds=0"]
    words += [*more, *(word for item in sets for word in ("--set", item))]
    return start("train", *words, env={**os.environ, "PACELINE_GRACE_SECONDS": grace})


@pytest.mark.parametrize(
    ("algo", "how"),
    [("ppo", "block"), ("dqn", "block"), pytest.param("ppo", "sleep", marks=pytest.mark.faults)],
)
def test_a_simulator_that_hangs(algo: str, how: str, here: Path, start: Callable[..., Any]) -> None:
    process = begin(start, algo, how)
    run_until("Iteration 3 ", process)
    Path("hang").touch()
    while not Path("hangs").exists():
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 99, err
    assert (
        "SIGTERM received" in err
        and "saved the state from before it" in err
        and "--resume /" in err
        and "/runs/x" in err
    )
    run = RunDirectory(Path("runs/x"))
    status, last = run.read_status(), run.read_metrics()[-1]
    assert status["state"] == run.read_summary()["status"] == "stopped" and "did not end in time" in status["reason"]
    _, state = checkpoint.load(checkpoint.find(run.path, "last"))
    counters = state["loop"]["counters"]
    assert counters["iteration"] == last["iteration"] >= 3 and counters["env_steps"] >= last["env_steps"]
    if algo == "dqn":  # in the middle of its rounds: what was learned from is counted, once
        assert counters["env_steps"] == state["engine"]["algorithm"]["counts"][1] == status["env_steps"]
    else:
        assert counters["env_steps"] == last["env_steps"]
    Path("hang").unlink()
    more = paceline.train({"stop": {"iterations": counters["iteration"] + 2}}, resume=run.path)
    assert [row["iteration"] for row in more.read_metrics()] == list(range(1, counters["iteration"] + 3))
    parts = json.loads((run.path / "resume.json").read_text())["history"][-1]["parts"]
    assert parts["weights"] == "exact" and parts["environments"].startswith("restarted")
    assert parts.get("replay", "exact") == "exact"


SLOW_LEARNER = """
import time
from paceline.algorithms.ppo import PPO

class Slow(PPO):
    class Settings(PPO.Settings):
        pass
    def begin_update(self, batch, remaining):
        pending = super().begin_update(batch, remaining)
        with open("learned", "a") as file:
            file.write("x")
        time.sleep(1.2 if self.version < 2 else 1e6)
        return pending
"""


def test_learning_that_is_longer_than_the_time_left(here: Path, start: Callable[..., Any]) -> None:
    """The weights change meanwhile; those from before the update are saved."""
    Path("slow.py").write_text(textwrap.dedent(SLOW_LEARNER))
    words = "--algo slow.py:Slow --env CartPole-v1 --preset none --name x --set checkpoint.every_seconds=0"
    words += " --set slow.rollout_steps=8 --set slow.minibatch_size=16 --set slow.epochs=1"
    process = start("train", *words.split(), env={**os.environ, "PACELINE_GRACE_SECONDS": "4"})
    run_until("Iteration 2 ", process)
    while Path("learned").read_text() != "xxx":
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 99 and "saved the state from before it" in err
    _, state = checkpoint.load(checkpoint.find(Path("runs/x"), "last"))
    assert state["loop"]["counters"]["iteration"] == state["engine"]["algorithm"]["version"] == 2
    steps = RunDirectory(Path("runs/x")).read_metrics()[-1]["optimizer_steps"]
    assert state["engine"]["algorithm"]["optimizer_steps"] == steps


@pytest.mark.faults
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_workers_that_hang(algo: str, here: Path, start: Callable[..., Any]) -> None:
    """The driver has the state after the last complete update; the replay is lost with the learner that holds it."""
    process = begin(start, algo, "block", "8", "--workers", "2", "--set", "env.step_timeout_seconds=600")
    run_until("Iteration 3 ", process)
    Path("hang").touch()
    while not Path("hangs").exists():
        time.sleep(0.01)
    time.sleep(1)  # the queue of rollouts is used up
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 99 and "saved the state from before it" in err, err
    run = RunDirectory(Path("runs/x"))
    _, state = checkpoint.load(checkpoint.find(run.path, "last"))
    counters, last = state["loop"]["counters"], run.read_metrics()[-1]
    assert counters["iteration"] == last["iteration"] >= 3 and counters["env_steps"] == last["env_steps"]
    assert state["engine"]["algorithm"]["optimizer_steps"] == last["optimizer_steps"]
    Path("hang").unlink()
    again = {"stop": {"iterations": last["iteration"] + 1}, "engine": {"name": "local", "workers": 1}}
    paceline.train(again, resume=run.path)
    parts = json.loads((run.path / "resume.json").read_text())["history"][-1]["parts"]
    assert parts["weights"] == "exact" and parts.get("replay", "empty").startswith("empty")


@pytest.mark.faults
def test_the_end_of_the_allocation_within_an_iteration(here: Path, start: Callable[..., Any]) -> None:
    process = begin(start, "ppo", "block", grace="600")
    run_until("Iteration 2 ", process)
    process.kill()
    process.communicate()
    Path("hang").touch()
    deadline = str(time.time() + 16)
    process = start("train", "--resume", "runs/x", env={**os.environ, "PACELINE_DEADLINE": deadline})
    _, err = process.communicate(timeout=40)
    assert process.returncode == 99 and "the allocation ends" in err


def test_a_short_iteration_ends_first(here: Path, start: Callable[..., Any]) -> None:
    process = begin(start, "ppo", "sleep", grace="20")
    run_until("Iteration 2 ", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 99 and "did not end in time" not in err and "stopped: SIGTERM received" in out


def test_the_time_that_a_site_gives() -> None:
    assert grace_seconds({}) == GRACE_SECONDS and grace_seconds({"PACELINE_GRACE_SECONDS": "10"}) == 10
    for text in ("soon", "-1", "0", "nan"):
        with pytest.raises(UserError, match="PACELINE_GRACE_SECONDS"):
            grace_seconds({"PACELINE_GRACE_SECONDS": text})
