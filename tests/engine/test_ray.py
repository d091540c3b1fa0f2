"""Runs on a Ray of our own: the same as local ones, exact after losses, and nothing left behind."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import paceline
from paceline.api import Run
from paceline.config import EngineConfig, RunConfig
from paceline.engine import choose, cluster_address
from paceline.engine.ray_cluster import Cluster
from paceline.env import catalog
from paceline.run import checkpoint

pytestmark = pytest.mark.timeout(180)

Tree = dict[str, Any]
SMALL: Tree = {
    "env": {"id": "CartPole-v1", "envs_per_worker": 8},
    "ppo": {"rollout_steps": 32, "minibatch_size": 64, "epochs": 3},
    "seed": 3,
}


def merged(*trees: Tree) -> Tree:
    result: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = {**result[key], **value} if both else value
    return result


def train(*changes: Tree, **options: Any) -> Run:
    return paceline.train(merged(SMALL, {"engine": {"threads": 1}}, *changes), preset="none", **options)


def weights(run: Run, which: str = "last") -> dict[str, Any]:
    arrays, _ = checkpoint.load(checkpoint.find(run.path, which))
    return {name: value for name, value in arrays.items() if name.startswith("engine.algorithm")}


def ray_processes() -> set[int]:
    """Everything of Ray on this machine, but for what other tests' clusters run in namespaces of their own."""
    names = ("raylet", "gcs_server", "ray::", "log_monitor", "dashboard")
    found = set()
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if any(name in (process.info["name"] or "") or f"/ray/{name}" in words for name in names):
            found.add(process.info["pid"])
    return found


@pytest.fixture(autouse=True)
def nothing_stays(here: Path) -> Iterator[None]:
    before, memory, folders = ray_processes(), set(Path("/dev/shm").glob("*paceline*")), set(Path("/tmp").glob("pl-*"))
    yield
    limit = time.monotonic() + 20
    while (left := ray_processes() - before) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left
    assert set(Path("/dev/shm").glob("*paceline*")) <= memory and set(Path("/tmp").glob("pl-*")) <= folders


# -- the same as in one process ---------------------------------------------------------------------------------------

KINDS: dict[str, Tree] = {
    "ppo": {"stop": {"iterations": 4}},
    "normalised": {
        "env": {"normalize_observation": True, "normalize_reward": True},
        "ppo": {"target_kl": 0.01},
        "stop": {"iterations": 4},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_gives_the_weights_of_the_local_engine(kind: str, here: Path) -> None:
    local = train(KINDS[kind], {"name": "local", "engine": {"name": "local"}})
    remote = train(KINDS[kind], {"name": "ray", "engine": {"name": "ray", "workers": 1}})
    mine, theirs = weights(local), weights(remote)
    assert mine.keys() == theirs.keys() and mine
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    assert local.summary["env_steps"] == remote.summary["env_steps"]
    assert (remote.summary["engine"], remote.summary["workers"], remote.summary["nodes"]) == ("ray", 1, 1)


def test_resume_across_engines_and_worker_counts(here: Path) -> None:
    two = {"engine": {"name": "ray", "workers": 2}, "stop": {"iterations": 3}, "name": "x"}
    first = train(two)
    whole = train(two, {"stop": {"iterations": 5}, "name": "whole"})
    again = paceline.train({"stop": {"iterations": 5}}, resume=first.path)
    assert (again / "resume.json").read_text().count("exact") == 1
    mine, theirs = weights(again), weights(whole)
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    other = paceline.train({"engine": {"name": "local", "workers": 1}, "stop": {"iterations": 6}}, resume=first.path)
    assert other.summary["iterations"] == 6 and (other / "resume.json").read_text().count("restarted") == 1
    back = paceline.train({"engine": {"name": "ray", "workers": 3}, "stop": {"iterations": 7}}, resume=first.path)
    assert (back.summary["iterations"], back.summary["workers"]) == (7, 3)


# -- what it does with workers ----------------------------------------------------------------------------------------


def test_weak_scaling_and_what_is_written(here: Path, cli: Callable[..., Any]) -> None:
    line = "train --env CartPole-v1 --preset none --engine ray --workers 3 --iterations 3 --envs-per-worker 4 --name x"
    sets = "ppo.rollout_steps=32 ppo.minibatch_size=64 engine.scaling=weak engine.learning_rate_scaling=sqrt"
    result = cli(
        *line.split(), *(word for item in sets.split() for word in ("--set", item)), "--set", "eval.every_steps=1"
    )
    assert result.code == 0, result.err
    run = paceline.api.RunDirectory(Path("runs/x"))
    summary, row = run.read_summary(), run.read_metrics()[-1]
    assert summary["env_steps"] > 3 * 3 * 4 * 32 * 0.8 and summary["workers"] == 3
    assert row["learning_rate"] == pytest.approx(3e-4 * 3**0.5)
    assert row["workers_healthy"] == 3 and row["workers_lost"] == 0 and row["bytes_moved"] > 0
    assert (
        set(summary["worker_time_split"]) == {"0", "1", "2"}
        and summary["hosts"][0]["env_steps"] == summary["env_steps"]
    )
    split = summary["time_split"]
    assert sum(split.values()) == pytest.approx(summary["wall_seconds"], rel=0.02) and split["sync"] > 0
    for words in (
        "workers    3 on a Ray of our own",
        "weak: 3 times",
        "grows with their root",
        "verdict    ",
        "(127.0.0.1)",
    ):
        assert words in result.out
    if os.cpu_count() == 2:
        assert "warning    3 processes share 2 core(s)" in result.out
    assert len(run.read_eval()) == 3 and (run.logs_path / "worker-002.log").exists()


def test_a_straggler_is_hurried_up(here: Path) -> None:
    slow = here / "slow.py"
    slow.write_text(
        "import os, time\nfrom paceline.env.probe import FixedCost\n\n"
        "class Uneven(FixedCost):\n"
        "    def __init__(self):\n        super().__init__(0.0)\n"
        "        try:\n            os.close(os.open('taken', os.O_CREAT | os.O_EXCL))\n            self.slow = 0.05\n"
        "        except FileExistsError:\n            self.slow = 0.0\n"
        "    def step(self, action):\n        time.sleep(self.slow)\n        return super().step(action)\n"
    )
    env = {"id": f"{slow}:Uneven", "envs_per_worker": 3, "vector": "sync"}
    settings = {"env": env, "ppo": {"rollout_steps": 40, "minibatch_size": 60}, "stop": {"iterations": 4}}
    run = train(settings, {"engine": {"name": "ray", "workers": 3, "straggler_share": 0.6}})
    slots = 3 * 40 * 4
    assert 0.7 * slots < run.summary["env_steps"] < 0.95 * slots
    split = run.summary["time_split"]
    assert run.summary["train_seconds"] - split["save"] < 4 * 40 * 0.05 * 0.9


def test_several_learners_and_replay(here: Path) -> None:
    settings = {"algo": "impala", "impala": {"rollout_steps": 8, "batch_size": 128, "replay_ratio": 0.5}, "seed": 3}
    engine = {"name": "ray", "workers": 2, "learners": 2}
    run = paceline.train({**settings, "engine": engine, "stop": {"iterations": 6}}, preset="none")
    row = run.read_metrics()[-1]
    assert row["bytes_moved"] > 0 and row["policy_lag_mean"] >= 0 and row["queued_rollouts"] >= 0
    assert run.summary["optimizer_steps"] == 9 and run.summary["actor_time_split"]["env"] > 0
    more = paceline.train({"stop": {"iterations": 8}, "engine": {"learners": 1}}, resume=run.path)
    assert more.summary["iterations"] == 8 and more.summary["optimizer_steps"] == 12


def test_dqn_with_actors(here: Path) -> None:
    """Their rollouts go into one replay; each explores by an epsilon of its own. It is saved, and any engine goes on
    with it."""
    hyper = {"rollout_steps": 4, "rounds": 2, "gradient_steps": 2, "learning_starts": 200, "prioritized": True}
    engine = {"name": "ray", "workers": 2}
    tree = {"algo": "dqn", "dqn": {**hyper, "n_step": 3, "epsilon_fraction": 0.0, "epsilon_end": 0.4}, "seed": 3}
    run = paceline.train({**tree, "engine": engine, "stop": {"iterations": 30}}, preset="none")
    row = run.read_metrics()[-1]
    assert row["steps_sampled"] == row["replay_rows"] == run.summary["env_steps"] > 1500
    assert row["steps_trained"] == run.summary["optimizer_steps"] * 64 and row["q_max"] >= row["q_mean"] >= row["q_min"]
    assert run.summary["actor_time_split"]["env"] > 0 and row["policy_lag_mean"] >= 0
    changes = {"engine": {"name": "local", "workers": 1}, "stop": {"iterations": 31}}
    more = paceline.train(changes, resume=run.path)
    assert more.read_metrics()[-1]["replay_rows"] > row["replay_rows"]
    events = more / "logs/events.log"
    assert not events.exists() or "starts empty" not in events.read_text()


def test_init_from(here: Path) -> None:
    first = train({"engine": {"name": "local"}, "stop": {"iterations": 1}, "name": "first"})
    engine = {"name": "ray", "workers": 2}
    second = train({"engine": engine, "stop": {"iterations": 1}, "name": "second"}, init_from=first.path)
    for name, value in weights(second, "0").items():
        if ".policy." in name:
            np.testing.assert_array_equal(value, weights(first)[name], err_msg=name)


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (
            {"env": {"id": "paceline/FixedCost-v0", "kwargs": {"cost_seconds": 0.02}, "envs_per_worker": 2}},
            "env-waiting",
        ),
        ({"model": {"hidden": [512, 512]}, "ppo": {"epochs": 20, "minibatch_size": 256}}, "learner"),
    ],
)
def test_the_verdict(settings: Tree, bound: str, here: Path) -> None:
    run = train(settings, {"engine": {"name": "ray", "workers": 2}, "stop": {"max_time": "14s"}})
    assert run.summary["verdict"].startswith(f"{bound}-bound"), run.summary["verdict"]


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_address_where_nothing_is(here: Path, command: Callable[..., Any]) -> None:
    began = time.monotonic()
    result = command("train", "--env", "CartPole-v1", "--set", "engine.address=127.0.0.1:9", "--name", "x")
    assert result.code == 2 and "engine.address=127.0.0.1:9" in result.err and "ray start --head" in result.err
    assert result.err.count("\n") == 1 and time.monotonic() - began < 30 and not (here / "runs").exists()


def test_an_address_where_something_else_is(here: Path, command: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = command("train", "--env", "CartPole-v1", "--set", f"engine.address={address}")
        assert result.code == 2 and address in result.err and time.monotonic() - began < 30, result.err


def test_ray_is_not_installed(here: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = catalog.is_installed
    monkeypatch.setattr(catalog, "is_installed", lambda package: package != "ray" and installed(package))
    result = cli("train", "--env", "CartPole-v1", "--workers", "2")
    assert result.code == 2 and "pip install 'paceline[ray]'" in result.err and not (here / "runs").exists()


def test_a_cluster_named_local_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    config = RunConfig()
    assert cluster_address(config.engine) is None and choose(config) == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address(config.engine) == "10.0.0.1:6379" and choose(config) == "ray"


def test_a_bad_environment_is_the_users_input(here: Path, command: Callable[..., Any]) -> None:
    result = command("train", "--env", "CartPole-v9", "--workers", "2")
    assert result.code == 2 and "CartPole-v9" in result.err and result.err.count("\n") == 1
    assert not (here / "runs").exists()


def test_more_workers_than_environments_to_share(here: Path, cli: Callable[..., Any]) -> None:
    result = cli("train", "--env", "CartPole-v1", "--workers", "9", "--envs-per-worker", "8", "--preset", "none")
    assert result.code == 2 and "engine.scaling=weak" in result.err


def test_nobody_else_can_exchange_the_token() -> None:
    cluster = Cluster(EngineConfig(), 1)
    try:
        folder = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # Ray opens the one it is given to everybody
    finally:
        cluster.close()
