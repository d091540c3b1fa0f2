"""The driver or a daemon of Ray is killed: the run ends with a message, is saved if it can be, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.run import checkpoint
from paceline.run.directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
from fault_runs import ENDLESS, Start, finish, iterations, to_file, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


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
