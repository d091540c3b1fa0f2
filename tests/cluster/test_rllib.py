"""RLlib on two hosts: a script that knows nothing of us under `paceline launch`, and `--engine rllib` on the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from sshd import start_sshd
from test_launch import PACELINE, launch, left, place
from test_training import OWN_ENV

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
__all__ = ["place"]

SCRIPT = """
import json, socket
import ray
from ray.rllib.algorithms.ppo import PPOConfig

ray.init(address="auto", log_to_driver=False, logging_level="error")
algorithm = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=2)
    .training(train_batch_size=400, minibatch_size=100, num_epochs=2)
    .build_algo()
)
result = algorithm.train()
hosts = algorithm.env_runner_group.foreach_env_runner(lambda _: socket.gethostname(), local_env_runner=False)
steps = result["env_runners"]["num_env_steps_sampled_lifetime"]
algorithm.stop()
print(json.dumps({"hosts": sorted(hosts), "steps": steps}), flush=True)
"""


def test_a_script_of_rllib_as_it_is(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    (place / "script.py").write_text(SCRIPT)
    env = start_sshd(hosts, tmp_path / "ssh") | {"HOME": str(place)}
    done = hosts.run(0, launch(place, "--", sys.executable, "script.py"), env=env, cwd=str(place), seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["hosts"] == hosts.names and facts["steps"] >= 400
    assert left(hosts) == []


def test_the_engine_takes_own_code_along(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    (place / "own.py").write_text(OWN_ENV)
    (place / "neighbour.py").write_text("REWARD = 2.0\n")
    (place / "length.txt").write_text("7")
    env = start_sshd(hosts, tmp_path / "ssh")
    words = ["--engine", "rllib", "--workers", "2", "--env", "own.py:Own", "--preset", "none", "--iterations", "2"]
    argv = launch(place, "--", PACELINE, "train", *words, "--name", "x")
    done = hosts.run(0, argv, env=env, cwd=str(place), seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((place / "runs/x/summary.json").read_text())
    assert [(host["host"], host["workers"]) for host in summary["hosts"]] == [(name, 1) for name in hosts.names]
    assert summary["nodes"] == 2 and summary["return_mean"] == 14.0
    assert left(hosts) == [] and not [p for h in (0, 1) for p in (hosts.root(h) / "tmp").glob("paceline-*")]
