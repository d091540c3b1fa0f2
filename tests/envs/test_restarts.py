"""Environments that fail are started again, one by one or with their process, until all of them fail at once."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.config import EnvConfig, UserError
from paceline.envs import async_vector, restarts
from paceline.envs.async_vector import AsyncVector
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.restarts import EnvError, Restarts
from paceline.envs.sync_vector import SyncVector
from paceline.envs.vector import VectorEnv

ODD = Path(__file__).parents[1] / "odd_envs.py"
ACT = np.zeros((3, 1), np.int64)


def maker(name: str = "Breaks", **kwargs: Any) -> Any:
    return functools.partial(make_scalar, EnvConfig(id=f"{ODD}:{name}", kwargs=kwargs))


def three(**broken: Any) -> list[Any]:
    """Two good ones around one that breaks."""
    return [maker(after=10**9), maker(**broken), maker(after=10**9)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(async_vector, "CLOSE_SECONDS", 0.5)
    yield
    deadline = time.monotonic() + 5
    while (left := children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def children() -> list[psutil.Process]:
    family = psutil.Process().children(recursive=True)
    return [p for p in family if p.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(p.cmdline())]


def steps_until(env: VectorEnv, wanted: list[int], seconds: float = 60.0) -> list[list[int]]:
    """Step until the environments `wanted` have failed and work again. Returns who failed at each step."""
    failed: list[list[int]] = []
    deadline = time.monotonic() + seconds
    while not any(wanted == sorted(f) for f in failed) or failed[-1]:
        assert time.monotonic() < deadline, failed[-20:]
        env.step(ACT)
        failed.append(env.failed[:])
        env.failed.clear()
        time.sleep(0.001)
    return failed


@pytest.mark.parametrize("how", ["raise", "sys.exit"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_the_failed_environment_begins_another_episode(kind: str, how: str) -> None:
    truth = SyncVector(three(after=12, how="truncate"), seed=4)
    options: dict[str, Any] = {"seed": 4, "restart_on_error": 3}
    makers = three(after=12, how=how)
    env: VectorEnv = SyncVector(makers, **options)
    if kind == "async":
        env = AsyncVector(makers, processes=1, timeout_seconds=20.0, **options)
    try:
        np.testing.assert_array_equal(env.reset(), truth.reset())
        for t in range(60):
            obs, reward, terminated, truncated = env.step(ACT)
            seen, given, _, cut = truth.step(ACT)
            np.testing.assert_array_equal(obs, seen, err_msg=f"at step {t}")
            np.testing.assert_array_equal(reward, given)
            assert not terminated.any() and not truncated.any()
            assert env.failed == ([1] if t % 13 == 12 else []) and cut.any() == (t % 13 == 11)
            env.failed.clear()
        assert env.env_restarts == 4
        end = "SystemExit: 0" if how == "sys.exit" else "RuntimeError: the simulator exploded"
        assert env.first_error.endswith(end) and env.first_error.count("Traceback") == 1
        # A restarted environment is saved and restored like any other.
        state, last = env.state(), env.step(ACT)[0].copy()
        later = env.state()
        assert state is not None and later is not None
        other = SyncVector(three(after=12, how="raise"), restart_on_error=3, seed=9)
        own = later if kind == "sync" else later["shares"][0]
        assert other.restore(own, last)
        for _ in range(20):
            np.testing.assert_array_equal(other.step(ACT)[0], env.step(ACT)[0])
    finally:
        env.close()


def test_without_restarts_the_error_is_the_environments_own() -> None:
    env = SyncVector(three(after=2), seed=0)
    env.reset()
    env.step(ACT)
    env.step(ACT)
    with pytest.raises(RuntimeError, match="the simulator exploded"):
        env.step(ACT)


def test_one_that_always_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(restarts, "time", clock)
    env = SyncVector(three(after=0), seed=0, restart_on_error=2)
    env.reset()
    steps, at = 0, [0]
    while len(at) < 6:
        obs = env.step(ACT)[0]
        steps += 1
        clock.now += restarts.PAUSE_SECONDS / 3
        assert env.failed == [1]
        env.failed.clear()
        assert (env.state() is None) == (1 in env._restarts.down)
        if env.env_restarts > len(at):
            at.append(steps)
    assert obs[0, 1] == obs[2, 1] == steps and np.all(np.diff(np.diff(at)[1:]) > 0)  # longer and longer pauses


@pytest.mark.parametrize("after", [0, 4], ids=["first step", "soon"])
def test_if_all_fail_soon_after_fresh_starts_the_error_is_raised(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.002)
    env = SyncVector([maker(after=after)] * 3, seed=0, restart_on_error=2)
    env.reset()
    with pytest.raises(EnvError, match=r"failed 3 times in a row(.|\n)*restart_on_error=2(.|\n)*exploded"):
        for _ in range(1000):
            env.step(ACT)
    assert env.env_restarts <= 9


def test_bad_input_is_not_tried_again() -> None:
    env = SyncVector(three(after=10**9), seed=0, restart_on_error=3)
    env.reset()

    def step(action: Any) -> Any:
        raise UserError("this env is of an old API")

    env.envs[1].step = step  # type: ignore[method-assign]
    with pytest.raises(UserError, match="old API"):
        env.step(ACT)


def test_an_environment_that_cannot_be_made_for_a_while() -> None:
    """A licence server that is down, for instance: nothing but time helps."""
    good = maker(after=3)
    env = SyncVector([good], seed=0, restart_on_error=8)
    attempts = iter([OSError("no licence")] * 4)

    def later() -> Any:
        error = next(attempts, None)
        if error is not None:
            raise error
        return good()

    env._makers = [later]
    env.reset()
    act = ACT[:1]
    for _ in range(3):
        env.step(act)
    while not env.env_restarts:
        env.step(act)
    env.failed.clear()
    obs = env.step(act)[0]
    assert obs[0, 1] == 1 and not env.failed and "exploded" in env.first_error


def test_counting_forgets_failures_that_are_far_apart() -> None:
    counts = Restarts(2, 1)
    for _ in range(5):
        counts.fail(0, "a", fresh=False)
        counts.fail(1, "b", fresh=False)
        counts.started(0)
        counts.started(1)
    counts.fail(0, "c", fresh=True)
    with pytest.raises(EnvError, match="d"):
        counts.fail(1, "d", fresh=True)
    assert counts.first_error == "a"


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "killed", "hang"])
def test_a_process_that_dies_or_hangs_is_replaced_while_the_others_go_on(how: str, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    makers = three(after=15, how=how, pid_file=str(programs))
    env = AsyncVector(makers, processes=3, timeout_seconds=1.0, seed=4, restart_on_error=3)
    good = SyncVector([maker(after=10**9)] * 3, seed=4)
    try:
        first = env.reset().copy()
        good.reset()
        failed = steps_until(env, [1])
        assert failed.index([1]) == 15 and all(f in ([], [1]) for f in failed)
        for _ in failed:
            good.step(ACT)
        np.testing.assert_array_equal(env._obs[::2], good._obs[::2])  # not a step was lost
        assert env.env_restarts == 1 and env._obs[1, 0] != first[1, 0]  # another episode
        text = {"exit": "exit code 7", "killed": "lack of memory", "hang": "did not answer within 1 s"}[how]
        assert text in env.first_error
        assert env.state() is not None
        first_program = int(programs.read_text().split()[0])
        assert not psutil.pid_exists(first_program) or psutil.Process(first_program).status() == psutil.STATUS_ZOMBIE
    finally:
        env.close()
        for pid in map(int, programs.read_text().split()):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_killed_from_outside() -> None:
    env = AsyncVector(three(after=10**9), processes=2, timeout_seconds=20.0, seed=4, restart_on_error=3)
    try:
        env.reset()
        for _ in range(12):
            env.step(ACT)
        os.kill(env._processes[1].process.pid, signal.SIGKILL)
        failed = steps_until(env, [1, 2])
        assert env.env_restarts == 2 and all(f in ([], [1, 2]) for f in failed)
        state, obs = env.state(), env._obs.copy()
        assert state is not None
        other = AsyncVector(three(after=10**9), processes=2, timeout_seconds=20.0, seed=9, restart_on_error=3)
        try:
            assert other.restore(state, obs)
            for _ in range(5):
                np.testing.assert_array_equal(other.step(ACT)[0], env.step(ACT)[0])
        finally:
            other.close()
    finally:
        env.close()


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_if_all_processes_fail_at_once_the_error_is_raised(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.01)
    env = AsyncVector([maker(after=1, how=how)] * 3, processes=2, timeout_seconds=20.0, seed=0, restart_on_error=1)
    env.reset()
    with pytest.raises(EnvError, match="exploded" if how == "raise" else "exit code 7"):
        for _ in range(10_000):
            env.step(ACT)
    with pytest.raises(EnvError, match="closed"):
        env.step(ACT)


def test_resetting_replaces_a_process_that_is_gone() -> None:
    """An evaluation begins like this, long after the last one."""
    env = AsyncVector(three(after=10**9), processes=2, timeout_seconds=20.0, seed=4, restart_on_error=3)
    good = SyncVector(three(after=10**9), seed=8)
    try:
        env.reset()
        os.kill(env._processes[0].process.pid, signal.SIGKILL)
        env._processes[0].process.join(5)
        env.reseed(8, 0, 0)
        good.reset()
        np.testing.assert_array_equal(env.reset()[1:], good._obs[1:])
        env.failed.clear()
        env.step(ACT)
        assert env.failed == [] and env._obs[0, 1] == 1
    finally:
        env.close()


def test_the_default_depends_on_how_environments_are_stepped() -> None:
    def limit(in_worker: bool, **settings: Any) -> int:
        config = EnvConfig(id=f"{ODD}:Fixed", **settings)
        env: Any = make_vector(config, 1, seed=0, in_worker=in_worker)[0]
        env.close()
        return int(env._limit if isinstance(env, AsyncVector) else env._restarts.limit)

    assert limit(False) == 0 and limit(True) == 5 and limit(False, vector="async") == 5
    assert limit(False, restart_on_error=2) == 2 and limit(True, vector="async", restart_on_error=0) == 0
    with pytest.raises(UserError, match=r"restart_on_error=2: CartPole-v1 has its own vector env.*env.vector=sync"):
        make_vector(EnvConfig(id="CartPole-v1", restart_on_error=2), 2, seed=0)
