"""Runs survive workers that are killed, stopped, broken or stuck, count steps exactly and leave nothing behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.run import checkpoint
from paceline.run.directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
import audited

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
AUDITED = Path(audited.__file__)
ODD = Path(__file__).parents[2] / "odd_envs.py"
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


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short TMPDIR, where Ray makes its folder."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def family_of(process: subprocess.Popen[str]) -> list[int]:
    return [p.pid for p in psutil.Process(process.pid).children(recursive=True)]


def nothing_left(family: list[int], place: Path) -> None:
    """The processes of Ray and its folder, which holds the token, must go."""
    wait_for(lambda: not [pid for pid in family if psutil.pid_exists(pid)])  # Ray's helpers check their parent rarely
    wait_for(lambda: not [*place.glob("pl-*")])


def kill_and_check(process: subprocess.Popen[str], place: Path) -> None:
    family = family_of(process)
    assert [*place.glob("pl-*")]
    process.kill()
    process.wait(timeout=10)
    nothing_left(family, place)


def command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def find(process: subprocess.Popen[str], word: str) -> list[int]:
    """Processes of the run with this word in their command line."""
    try:
        return [pid for pid in family_of(process) if word in command_of(pid)]
    except psutil.NoSuchProcess:
        return []


def test_the_driver_is_killed(here: Path, start: Start, place: Path) -> None:
    process = start(*ENDLESS.split(), **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 3)
    assert len(family_of(process)) > 4
    kill_and_check(process, place)
    again = start("train", "--resume", "runs/x", "--engine", "local", "--workers", "1", "--iterations", "200")
    assert again.wait(timeout=120) == 0


def test_the_driver_is_killed_while_ray_starts(here: Path, start: Start, place: Path) -> None:
    process = start(*ENDLESS.split(), **to_file(here))
    wait_for(lambda: find(process, "raylet/raylet"))
    kill_and_check(process, place)


def test_the_next_run_removes_what_a_killed_guard_left(here: Path, start: Start, place: Path) -> None:
    process = start(*ENDLESS.split(), **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 1)
    family, [guard] = family_of(process), find(process, "ray_folder.py")
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait(timeout=10)
    time.sleep(3)
    [folder] = place.glob("pl-*")  # nobody is left to remove it
    again = start(*f"{ENDLESS} --iterations 1".replace("--name x", "--name y").split(), **to_file(here))
    wait_for(lambda: not folder.exists())
    wait_for(lambda: not [pid for pid in family if psutil.pid_exists(pid)], seconds=5)
    assert finish(again, 60)[0] == 0


@pytest.mark.parametrize("sign, pause", [("ray_folder.py", 0.0), ("raylet/raylet", 0.0), ("raylet/raylet", 1.5),
                                         ("ray::", 0.0)])  # fmt: skip
def test_a_signal_while_ray_starts(sign: str, pause: float, here: Path, start: Start, place: Path) -> None:
    """A scheduler's two signals end it with one line and the signal's code; neither Ray nor its token stay."""
    process = start(*ENDLESS.split(), **to_file(here))
    wait_for(lambda: find(process, sign))
    time.sleep(pause)
    family = family_of(process)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM, Path("out.txt").read_text()
    assert Path("out.txt").read_text() == "paceline: SIGTERM before training began; nothing was written\n"
    nothing_left(family, place)
    assert not Path("runs").exists()


def test_ray_leaves_our_handler_of_sigterm_in_place(here: Path, place: Path) -> None:
    """Its own in C++ prints a stack trace, in the moments between Ray's start and ours."""
    script = """
import os, signal
from paceline.config import EngineConfig
from paceline.engines.ray.ray_cluster import RayCluster
signal.signal(signal.SIGTERM, lambda number, frame: print("ours"))
cluster = RayCluster(EngineConfig(), 1)
os.kill(os.getpid(), signal.SIGTERM)
cluster.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ours\n", "")


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_dead_raylet_ends_the_run_with_a_message(algo: str, here: Path, start: Start, place: Path) -> None:
    process = start(*f"{ENDLESS} --algo {algo}".split(), **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 3)
    family, [raylet] = family_of(process), find(process, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    out, status = Path("out.txt").read_text(), json.loads(Path("runs/x/status.json").read_text())
    assert out.splitlines()[-1].startswith(f"paceline: failed: Ray's raylet (process {raylet}) died"), out[-2000:]
    assert "state-dump" not in out and "Traceback" not in out, out[-2000:]
    assert status["state"] == "failed" and "Ray's raylet" in status["reason"]
    nothing_left(family, place)
    again = start("train", "--resume", "runs/x", "--engine", "local", "--workers", "1", "--iterations", "1")
    assert again.wait(timeout=120) == 0


def test_a_run_whose_gcs_died_is_saved(here: Path, start: Start, place: Path) -> None:
    process = start(*ENDLESS.split(), **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 3)
    family, [gcs] = family_of(process), find(process, "gcs_server")
    os.kill(gcs, signal.SIGKILL)
    assert process.wait(timeout=120) == 99
    out, run = Path("out.txt").read_text(), RunDirectory(here / "runs/x")
    assert f"stopped: Ray's GCS (process {gcs}) died" in out and "Traceback" not in out, out[-2000:]
    assert run.read_status()["state"] == "stopped"
    assert checkpoint.available(run.path)[-1] == run.read_metrics()[-1]["env_steps"]
    nothing_left(family, place)


def test_a_signal_saves_and_stops(here: Path, start: Start) -> None:
    words = ENDLESS.split()
    process = start(*words, **to_file(here))
    wait_for(lambda: iterations(here / "runs/x") > 3)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process, 90)
    assert code == 99 and "paceline train --resume" in out, out
