from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.config import EnvConfig
from paceline.envs import async_vector
from paceline.envs.async_vector import AsyncVector
from paceline.envs.make import make_scalar
from paceline.envs.restarts import EnvError
from paceline.envs.sync_vector import SyncVector

ODD = Path(__file__).parents[1] / "odd_envs.py"


def maker(name: str, **kwargs: Any) -> Any:
    return functools.partial(make_scalar, EnvConfig(id=f"{ODD}:{name}", kwargs=kwargs))


def actions(steps: int, num_envs: int, seed: int = 5) -> Any:
    return np.random.default_rng(seed).integers(3, size=(steps, num_envs, 1))


def env_processes() -> list[psutil.Process]:
    """Our children, without the resource tracker that multiprocessing keeps beside them."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert wait_until_gone([p.pid for p in env_processes()], 5.0)


def both_step(one: Any, other: Any, acts: Any) -> None:
    for t, act in enumerate(acts):
        for left, right in zip(one.step(act), other.step(act), strict=True):
            np.testing.assert_array_equal(left, right, err_msg=f"at step {t}")


def test_it_is_the_sync_vector_bit_for_bit() -> None:
    makers = [maker("Script")] * 5
    sync = SyncVector(makers, seed=4, worker=2)
    several = AsyncVector(makers, processes=2, timeout_seconds=20.0, seed=4, worker=2)
    try:
        assert len(env_processes()) == 2
        np.testing.assert_array_equal(several.reset(), sync.reset())
        both_step(several, sync, actions(40, 5))
        assert several.finished_metrics == sync.finished_metrics and len(sync.finished_metrics) > 20
        several.reseed(8, 0, 3)
        sync.reseed(8, 0, 3)
        np.testing.assert_array_equal(several.reset(), sync.reset())
        both_step(several, sync, actions(20, 5))

        # Signals are the parent's to answer: a child that is told to stop too goes on.
        for child in env_processes():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                child.send_signal(number)
        both_step(several, sync, actions(5, 5))

        # Saved here, restored in other processes, which were given another seed.
        state, seen = several.state(), several.step(actions(1, 5)[0])[0].copy()
        assert state is not None
        later = several.state()
        assert later is not None
        sync.step(actions(1, 5)[0])
        other = AsyncVector(makers, processes=2, timeout_seconds=20.0, seed=99)
        try:
            assert other.restore(state, seen) is False  # the observation of another step
            assert other.restore(later, seen) is True
            both_step(other, sync, actions(20, 5, seed=6))
        finally:
            other.close()
    finally:
        several.close()


def test_where_one_share_cannot_be_restored_all_start_afresh() -> None:
    makers = [maker("Script"), maker("Script"), maker("Script", seeded=False)]
    options: dict[str, Any] = {"processes": 3, "timeout_seconds": 20.0}
    first = AsyncVector(makers, seed=4, **options)
    try:
        first.reset()
        seen = first.step(actions(1, 3)[0])[0].copy()
        state = first.state()
    finally:
        first.close()
    assert state is not None
    fresh = SyncVector(makers[:2], seed=4, resumes=1)
    again = AsyncVector(makers, seed=4, resumes=1, **options)
    try:
        assert again.restore(state, seen) is False
        np.testing.assert_array_equal(again.reset()[:2], fresh.reset())
        assert again.restore({"shares": state["shares"][:2]}, seen) is False  # of another number of processes
    finally:
        again.close()


def test_a_step_that_hangs_is_an_error_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_vector, "CLOSE_SECONDS", 0.5)
    makers = [maker("Fixed", length=0), maker("Fixed", length=0), maker("Trouble", kind="hang", at=3)]
    env = AsyncVector(makers, processes=3, timeout_seconds=1.0, seed=0)
    pids = [p.pid for p in env_processes()]
    assert len(pids) == 3
    env.reset()
    env.step(np.zeros((3, 1), np.int64))
    env.step(np.zeros((3, 1), np.int64))
    with pytest.raises(EnvError, match="environments 2-2 did not answer within 1 s"):
        env.step(np.zeros((3, 1), np.int64))
    assert wait_until_gone(pids, 30.0)


@pytest.mark.parametrize("kind", ["raise", "exit", "reset"])
def test_a_failure_is_an_error_with_its_reason(kind: str) -> None:
    trouble = maker("TroubleAtReset") if kind == "reset" else maker("Trouble", kind=kind, at=2)
    env = AsyncVector([maker("Fixed", length=0), trouble], processes=2, timeout_seconds=20.0, seed=0)
    pids = [p.pid for p in env_processes()]
    with pytest.raises(EnvError) as caught:
        env.reset()
        env.step(np.zeros((2, 1), np.int64))
        env.step(np.zeros((2, 1), np.int64))
    text = str(caught.value)
    if kind == "exit":
        assert "exit code 7" in text
    else:
        assert "Traceback" in text and "odd_envs.py" in text
        assert ("no level could be loaded" if kind == "reset" else "the simulator exploded") in text
    assert wait_until_gone(pids, 1.0)
    with pytest.raises(EnvError):  # it is closed: no stale arrays are handed out
        env.step(np.zeros((2, 1), np.int64))


def test_a_replay_has_the_time_of_all_its_steps() -> None:
    """Each step of the episode has the limit of a step, not all of them together."""
    config = EnvConfig(id="paceline/FixedCost-v0", kwargs={"cost_seconds": 0.02}, frame_stack=2)
    makers = [functools.partial(make_scalar, config)]
    first = AsyncVector(makers, processes=1, timeout_seconds=0.35, seed=4)
    try:
        first.reset()
        for _ in range(25):
            seen = first.step(np.zeros((1, 1), np.int64))[0].copy()
        state = first.state()
        assert state is not None
        assert first.restore(state, seen) is True
    finally:
        first.close()


def test_a_program_that_forgets_to_close_it_still_ends() -> None:
    code = PARENT.replace("sys.stdin.read()", "keep = sys.modules; keep['kept'] = env")
    result = subprocess.run(
        [sys.executable, "-c", code, str(ODD), "9", "2"], capture_output=True, text=True, timeout=20
    )
    assert result.returncode == 0, result.stderr
    assert wait_until_gone([int(word) for word in result.stdout.split()], 1.0)


PARENT = """
import functools, sys, numpy as np
from paceline.config import EnvConfig
from paceline.envs.async_vector import AsyncVector
from paceline.envs.make import make_scalar
from paceline.envs.restarts import EnvError
config = EnvConfig(id=sys.argv[1] + ":Trouble", kwargs={"kind": "hang", "at": int(sys.argv[2])})
env = AsyncVector([functools.partial(make_scalar, config)] * 2, processes=2, timeout_seconds=60.0, seed=0)
env.reset()
print(*(own.process.pid for own in env._processes), flush=True)
for _ in range(int(sys.argv[3])):
    env.step(np.zeros((2, 1), np.int64))
sys.stdin.read()
"""


@pytest.mark.parametrize(("hang_at", "steps"), [(9, 3), (1, 1)], ids=["idle", "hanging"])
def test_children_die_with_a_parent_that_is_killed(hang_at: int, steps: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ODD), str(hang_at), str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
            time.sleep(0.5)  # into the step
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        try:
            assert wait_until_gone(pids, 5.0)
        finally:
            for pid in pids:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
