"""The example around an external program: what happens when that dies, hangs, or cannot be started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

import paceline
from paceline.config import EnvConfig
from paceline.config.plugins import load_attribute
from paceline.config.resolve import read_file
from paceline.envs import check
from paceline.envs.make import make_scalar

ROOT = Path(__file__).parents[2]
ID = f"{ROOT}/examples/simulator/env.py:ConvectionLoop"
FORWARDS = np.array([1, 2])
Env = gymnasium.Env[Any, Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Env]]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = []

    def one(**kwargs: Any) -> Env:
        made.append(make_scalar(EnvConfig(id=ID, kwargs=kwargs)))
        return made[-1]

    yield one
    for env in made:
        env.close()  # type: ignore[no-untyped-call]


def simulator_of(env: Env) -> Any:
    return env.unwrapped.simulator  # type: ignore[attr-defined]


def test_it_keeps_the_contract(make: Callable[..., Env], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SPEED_SECONDS", 0.05)
    report = check.check_env(make, "ConvectionLoop")
    assert not report.problems and all("no time limit is registered" in w for w in report.warnings), report.text()


def test_choices_are_numbered_for_dqn(make: Callable[..., Env]) -> None:
    one_choice = load_attribute(ID.replace("ConvectionLoop", "OneChoice"), "env.wrappers")
    env = one_choice(make())
    assert env.action_space.n == 9
    assert [env.action(k).tolist() for k in (0, 5, 8)] == [[0, 0], [1, 2], [2, 2]]


def test_the_seed_decides(make: Callable[..., Env]) -> None:
    def walk(seed: int) -> list[float]:
        env = make()
        observation, _ = env.reset(seed=seed)
        seen = [*observation]
        for k in range(20):
            seen += [*env.step(np.array([k % 3, k // 2 % 3]))[0]]
        return [*seen, *env.reset()[0]]

    assert walk(3) == walk(3) != walk(4)


@pytest.mark.parametrize(("sign", "said"), [(signal.SIGKILL, "by signal 9"), (signal.SIGSTOP, "no answer in 2 s")])
def test_a_lost_simulator_ends_the_episode_and_is_replaced(
    sign: signal.Signals, said: str, make: Callable[..., Env]
) -> None:
    env = make(answer_seconds=2)
    env.reset(seed=1)
    before, *_ = env.step(FORWARDS)
    first = simulator_of(env).pid
    os.kill(first, sign)
    observation, reward, terminated, truncated, info = env.step(FORWARDS)
    assert (reward, terminated, truncated) == (0.0, False, True) and (observation == before).all()
    assert said in info["simulator_lost"] and info["metrics"]["simulator_lost"] == 1.0
    assert not psutil.pid_exists(first)
    env.reset()
    assert env.step(FORWARDS)[4]["metrics"]["simulator_lost"] == 0.0 and simulator_of(env).pid != first


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no licence')", "exit code 1; it last said: no licence"),
        ("import time; time.sleep(60)", "no answer in 0.2 s"),
        ("input(); print('{oops')", "which is not JSON"),
        ("", "exit code 0"),
    ],
)
def test_a_program_that_does_not_do_is_an_error(program: str, said: str, make: Callable[..., Env]) -> None:
    env = make(
        command=[sys.executable, "-c", program], answer_seconds=0.1, start_seconds=0.1 if "sleep" in program else 20
    )
    with pytest.raises(RuntimeError, match="failed 3 times") as error:
        env.reset(seed=0)
    assert said in str(error.value)
    with pytest.raises(RuntimeError, match="cannot be started: No such file"):
        make(command=["/no/such/program"]).reset()


def test_a_long_request_that_nobody_reads_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    make_simulator = load_attribute(f"{ROOT}/examples/simulator/external.py:Simulator", "example")
    simulator = make_simulator(["sleep", "30"], answer_seconds=0.3, start_seconds=0)
    with pytest.raises(Exception, match="read no request in"):
        simulator.ask({"text": "a" * 200_000})
    assert simulator.pid is None


def test_nothing_is_left_running(make: Callable[..., Env], tmp_path: Path) -> None:
    """Of the program, nor of what it has started, even if it does not go when its input ends."""
    mark = tmp_path / "child"
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '60']); open({str(mark)!r}, 'w').write(str(child.pid))\n"
        "for line in sys.stdin: print('{\"state\": [0, 0, 0]}', flush=True)\n"
        "time.sleep(60 * (len(sys.argv) > 1))\n"
    )
    for stubborn in ([], ["stubborn"]):
        env = make(command=[sys.executable, "-c", program, *stubborn])
        env.reset(seed=0)
        pids = [simulator_of(env).pid, int(mark.read_text())]
        assert all(psutil.pid_exists(pid) for pid in pids)
        env.close()  # type: ignore[no-untyped-call]
        _wait_for_the_end(pids)


def test_it_goes_with_a_process_that_is_killed() -> None:
    program = (
        "import os, signal, env\n"
        "loop = env.ConvectionLoop()\n"
        "loop.reset(seed=0)\n"
        "print(loop.simulator.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT / "examples/simulator", capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    _wait_for_the_end([int(done.stdout)])


def _wait_for_the_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # an orphan waits for init to collect it
    except psutil.NoSuchProcess:
        return False


def test_it_trains_and_leaves_no_program_behind(here: Path) -> None:
    here.joinpath("examples").symlink_to(ROOT / "examples")
    tree = read_file(ROOT / "configs/convection.yaml")
    tree |= {"stop": {"iterations": 2}, "name": "loop", "ppo": {"rollout_steps": 32, "minibatch_size": 64}}
    tree["env"]["max_episode_steps"] = 20
    run = paceline.train(tree, quiet=True)
    assert run.summary["env_steps"] > 300 and "env/simulator_lost" in run.read_metrics()[-1]
    assert not [p for p in psutil.Process().children(recursive=True) if "convection.py" in " ".join(p.cmdline())]
