"""`paceline tune` on two hosts that share no files: both run trials, and all runs end up in one folder."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from sshd import start_sshd

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PACELINE = str(Path(sys.executable).with_name("paceline"))
ENV = """
import pathlib, socket, time
import gymnasium, numpy as np
from paceline.algorithms.ppo import PPO

class MyPPO(PPO): ...

class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, pay):
        self.pay = pay
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        meeting = pathlib.Path("MEETING")  # a slow host still gets a trial: the first one waits for it
        (meeting / socket.gethostname()).touch()
        for _ in range(600):
            if len(list(meeting.iterdir())) == 2:
                break
            time.sleep(0.1)
        self.steps += 1
        return np.zeros(2, np.float32), self.pay, self.steps >= 5, False, {}
"""


def test_both_hosts_run_trials_and_nothing_is_shared(hosts: Hosts, tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    (place / "hosts").write_text("node0 cpus=1\nnode1 cpus=1\n")
    (tmp_path / "meeting").mkdir()
    (place / "own.py").write_text(ENV.replace("MEETING", str(tmp_path / "meeting")))
    (place / "space.yaml").write_text("env.kwargs: [{pay: 1.0}, {pay: 2.0}, {pay: 3.0}, {pay: 4.0}]\n")
    hosts.hide(1, place)
    env = start_sshd(hosts, tmp_path / "ssh")
    tune = [
        PACELINE,
        "tune",
        "--env",
        "own.py:Own",
        "--algo",
        "own.py:MyPPO",
        "--space",
        "space.yaml",
        "--preset",
        "none",
        "--name",
        "s",
    ]
    tune += ["--envs-per-worker", "4", "--set", "my_ppo.rollout_steps=64", "--total-steps", "2500"]
    argv = [PACELINE, "launch", "--hosts", str(place / "hosts"), "--log", str(place / "log"), "--", *tune]
    done = hosts.run(0, argv, env=env, cwd=str(place), seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = place / "runs/s"
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["location"].partition(":")[0] for row in rows} == {"node0", "node1"}, done.stdout
    assert [row["status"] for row in rows] == ["done"] * 4 and [float(row["return"]) for row in rows] == [5, 10, 15, 20]
    for row in rows:
        run = folder / row["name"]
        assert json.loads((run / "summary.json").read_text())["env_steps"] >= 2500
        settings = (run / "config.yaml").read_text()
        assert f"{place}/own.py:Own" in settings and f"{place}/own.py:MyPPO" in settings
        assert (run / "checkpoints/last/state.json").is_file()
    found = hosts.run(0, [PACELINE, "evaluate", "runs/s/3-seed0", "--episodes", "5"], cwd=str(place), seconds=60)
    assert found.returncode == 0 and "20" in found.stdout, found.stderr
    left = [path.name for host in (0, 1) for path in (hosts.root(host) / "tmp").glob("paceline-*")]
    assert left == [] and not [path.name for path in folder.glob(".*") if path.name != ".lock"]
