"""The same command on two hosts: both work, code comes along, and the network may fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, wait_until
from raycluster import QUICK_HEALTH, RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PACELINE = str(Path(sys.executable).with_name("paceline"))
SLEEPING = ["--env", "paceline/FixedCost-v0", "--set", "env.kwargs={cost_seconds: 0.002}"]
PPO = ["--preset", "none", "--envs-per-worker", "4", "--set", "ppo.rollout_steps=32", "--set", "ppo.minibatch_size=64"]
OWN_ENV = """
import gymnasium, numpy as np
from pathlib import Path
from neighbour import REWARD

class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        self.left = int((Path(__file__).parent / "length.txt").read_text())
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), REWARD, self.steps >= self.left, False, {}
"""


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[RayCluster]:
    with RayCluster(hosts, [1, 1], tmp_path, env=QUICK_HEALTH) as made:
        yield made


@pytest.fixture
def begin(cluster: RayCluster, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def run(*words: str) -> subprocess.Popen[str]:
        argv = [PACELINE, "train", *words, "--out", str(tmp_path / "runs"), "--name", "x"]
        return cluster.start_driver(argv, cwd=tmp_path, output=tmp_path / "out.txt")

    return run


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs/x/summary.json").read_text())
    return found


def iterations(folder: Path) -> int:
    path = folder / "runs/x/metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def done(process: subprocess.Popen[str], folder: Path, seconds: float = 150) -> str:
    code = process.wait(timeout=seconds)
    out = (folder / "out.txt").read_text()
    assert code == 0, out
    return out


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_both_hosts_work_and_own_code_comes_along(
    algo: str, hosts: Hosts, begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    home = tmp_path / "mine"
    home.mkdir()
    (home / "own.py").write_text(OWN_ENV)
    (home / "neighbour.py").write_text("REWARD = 2.0\n")
    (home / "length.txt").write_text("7")
    hosts.hide(1, home)
    words = ["--algo", algo, "--env", f"{home}/own.py:Own", "--preset", "none", "--iterations", "20"]
    out = done(begin(*words, "--workers", "2" if algo == "ppo" else "3"), tmp_path)  # and a learner
    made = summary(tmp_path)
    assert made["nodes"] == 2 and {host["host"] for host in made["hosts"]} == set(hosts.names), out
    assert all(host["env_steps"] > 0 and host["memory_bytes"] > 0 for host in made["hosts"])
    assert sum(host["env_steps"] for host in made["hosts"]) == made["env_steps"]
    assert made["return_mean"] == 14.0 and all(name in out for name in hosts.names)


def test_a_cut_of_ten_seconds(hosts: Hosts, tmp_path: Path) -> None:
    """With Ray's own patience: nobody is lost, and the run goes on where it stood."""
    with RayCluster(hosts, [1, 1], tmp_path) as cluster:
        words = [*SLEEPING, *PPO, "--workers", "2", "--max-time", "40s", "--out", str(tmp_path / "runs"), "--name", "x"]
        process = cluster.start_driver([PACELINE, "train", *words], cwd=str(tmp_path), output=tmp_path / "out.txt")
        wait_until(lambda: iterations(tmp_path) > 5, "five iterations", 60)
        hosts.link(1, False)
        time.sleep(10)
        hosts.link(1, True)
        before = iterations(tmp_path)
        done(process, tmp_path)
    assert iterations(tmp_path) > before + 3
    made = summary(tmp_path)
    assert made["workers_healthy"] == 2 and made["workers_lost"] == 0


# One worker on each host; a learner and a worker on the first, a worker on the other; all workers on the other.
@pytest.mark.parametrize(("algo", "cpus", "lost"), [("ppo", [1, 1], 1), ("impala", [2, 1], 1), ("impala", [1, 2], 2)])
def test_a_host_cut_off_for_ever(algo: str, cpus: list[int], lost: int, hosts: Hosts, tmp_path: Path) -> None:
    words = [*SLEEPING, "--algo", algo, "--preset", "none", "--envs-per-worker", "4", "--workers", "2"]
    words += ["--max-time", "60s", "--set", "env.step_timeout_seconds=20", "--out", str(tmp_path / "runs")]
    with RayCluster(hosts, cpus, tmp_path, env=QUICK_HEALTH) as cluster:
        process = cluster.start_driver(
            [PACELINE, "train", *words, "--name", "x"], cwd=tmp_path, output=tmp_path / "out.txt"
        )
        wait_until(lambda: iterations(tmp_path) > 5, "five iterations", 60)
        hosts.link(1, False)
        time.sleep(25)
        before = iterations(tmp_path)
        out = done(process, tmp_path)
    made = summary(tmp_path)
    assert iterations(tmp_path) > before + 3 and made["workers_lost"] >= lost and made["workers_healthy"] == 1, out


def test_a_host_that_comes_back_is_taken_back(hosts: Hosts, tmp_path: Path) -> None:
    words = [*SLEEPING, *PPO, "--workers", "2", "--max-time", "90s", "--out", str(tmp_path / "runs"), "--name", "x"]
    with RayCluster(hosts, [1, 1], tmp_path, env=QUICK_HEALTH) as cluster:
        process = cluster.start_driver([PACELINE, "train", *words], cwd=tmp_path, output=tmp_path / "out.txt")
        wait_until(lambda: iterations(tmp_path) > 5, "five iterations", 60)
        cluster.stop_node(1)
        wait_until(lambda: "1 of 2 workers at work" in (tmp_path / "out.txt").read_text(), "the loss is told", 40)
        wait_until(lambda: summary(tmp_path)["workers_healthy"] == 1, "the summary follows", 20)
        made = summary(tmp_path)
        assert made["workers_lost"] == 1 and made["workers_restarted"] == 0  # its replacement has no place yet
        gone = next(host for host in made["hosts"] if host["host"] == hosts.names[1])
        assert gone["workers"] == 0 and gone["env_steps"] > 0
        assert "an iteration has 50% of its rows" in (tmp_path / "out.txt").read_text()
        cluster.start_node(1)
        out = done(process, tmp_path)
    made = summary(tmp_path)
    assert made["workers_healthy"] == 2 and made["workers_restarted"] == 1 and made["nodes"] == 2, out
    assert "all 2 workers are at work again" in out
    assert sum(host["env_steps"] for host in made["hosts"]) == made["env_steps"]


def test_a_slow_link_is_named(hosts: Hosts, begin: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    hosts.delay(1, 20)
    words = ["--env", "CartPole-v1", *PPO, "--set", "ppo.epochs=4", "--workers", "2", "--max-time", "30s"]
    out = done(begin(*words), tmp_path)
    assert "verdict    sync-bound" in out, out


def test_other_versions_are_named(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    folder = other / "numpy-9.9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    with RayCluster(hosts, [1, 1], tmp_path, env=QUICK_HEALTH) as cluster:
        cluster.stop_node(1)
        cluster.env["PYTHONPATH"] = str(other)
        cluster.start_node(1)
        cluster.wait_alive(2)
        del cluster.env["PYTHONPATH"]
        argv = [PACELINE, "train", "--env", "CartPole-v1", "--workers", "2", "--out", str(tmp_path / "runs")]
        result = cluster.driver(argv, cwd=tmp_path, seconds=90)
    assert result.returncode == 2 and "numpy 9.9.9" in result.stderr and hosts.names[1] in result.stderr
    assert not (tmp_path / "runs").exists()
