"""Runs on a private Ray give the results of local ones and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from paceline import verdict
from paceline.api import Run
from paceline.code_bundle import pack
from paceline.config import EngineConfig
from paceline.config.resolve import to_tree, validate
from paceline.engines.ray.messages import WorkerSpec
from paceline.envs import catalog
from paceline.evaluate import evaluate
from paceline.run import checkpoint

pytestmark = pytest.mark.timeout(180)

TEAMS = Path(__file__).parents[2] / "team_envs.py"
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


def leftovers(mark: str, folders_before: set[Path]) -> list[str]:
    """Processes of this test, and new folders of Ray that no process uses."""
    found, commands = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
            if process.environ().get("PACELINE_TEST") == mark and process.pid != os.getpid():
                found.append(f"{process.pid} {commands[-1]}")
    new = set(Path("/tmp").glob("pl-*")) - folders_before
    return found + [str(folder) for folder in new if not any(str(folder) in command for command in commands)]


@pytest.fixture(autouse=True)
def nothing_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_TEST", str(here))
    folders = set(Path("/tmp").glob("pl-*"))
    yield
    deadline = time.monotonic() + 20
    while (left := leftovers(str(here), folders)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert not list(Path("/dev/shm").glob(f"paceline-{os.getuid()}-{os.getpid()}-*"))


# -- equal to one process ---------------------------------------------------------------------------------------------

KINDS: dict[str, Tree] = {
    "ppo": {"stop": {"iterations": 4}},
    "normalised": {
        "env": {"normalize_observation": True, "normalize_reward": True},
        "ppo": {"target_kl": 0.01},
        "stop": {"iterations": 4},
    },
    "several agents": {"env": {"id": f"{TEAMS}:Relay"}, "stop": {"iterations": 4}},
    "several policies": {
        "env": {"id": f"{TEAMS}:Signal"},
        "multi_agent": {"policies": "each"},
        "stop": {"iterations": 4},
    },
    "memory": {"model": {"memory": "lstm", "sequence_length": 10}, "stop": {"iterations": 3}},
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


SLOW_WORKER = """
import time
from pathlib import Path
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, slow_parity, folder):
        self.slow_parity, self.slow, self.folder = slow_parity, None, Path(folder)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.slow is None:  # the seed of the first episode follows from the run's seed and the worker
            self.slow = int(self.np_random.integers(2**32)) % 2 == self.slow_parity
            (self.folder / f"{self.slow_parity}-{self.slow}").touch()
        self.left = int(self.np_random.integers(1, 9))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.005 * self.slow)
        self.left -= 1
        reward, over = float(self.np_random.normal()), self.left == 0
        info = {"metrics": {"reward": reward}} if over else {}
        return np.full(2, 0.1, np.float32), reward, over, False, info
"""


def test_a_seed_gives_one_run_whichever_worker_is_first(here: Path, stable_rows: Callable[..., Any]) -> None:
    """Merged in the order of arrival, results would put other episodes into the window of the return."""
    (here / "slow.py").write_text(SLOW_WORKER)
    marks, rows = here / "marks", []
    marks.mkdir()
    for slow_parity in (0, 1):
        kwargs = {"slow_parity": slow_parity, "folder": str(marks)}
        env = {"id": "slow.py:Env", "kwargs": kwargs, "envs_per_worker": 2, "vector": "sync"}
        ppo = {"rollout_steps": 128, "minibatch_size": 256, "epochs": 1}
        engine = {"name": "ray", "workers": 2}
        run = train({"env": env, "ppo": ppo, "engine": engine, "stop": {"iterations": 6}, "seed": 3})
        rows.append(stable_rows(run.path))
    assert {mark.name for mark in marks.iterdir()} == {"0-True", "0-False", "1-True", "1-False"}
    assert rows[0] == rows[1] and rows[0][-1]["episodes"] > 200


def test_resume_across_engines_and_worker_counts(here: Path) -> None:
    two = {"engine": {"name": "ray", "workers": 2}, "stop": {"iterations": 3}, "name": "x"}
    first = train(two)
    whole = train(two, {"stop": {"iterations": 5}, "name": "whole"})
    again = paceline.train({"stop": {"iterations": 5}}, resume=first.path)
    assert json.loads((again / "resume.json").read_text())["level"] == "exact"
    mine, theirs = weights(again), weights(whole)
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    other = paceline.train({"engine": {"name": "local", "workers": 1}, "stop": {"iterations": 6}}, resume=first.path)
    assert other.summary["iterations"] == 6 and _levels(other) == ["exact", "restarted"]
    back = paceline.train({"engine": {"name": "ray", "workers": 3}, "stop": {"iterations": 7}}, resume=first.path)
    assert (back.summary["iterations"], back.summary["workers"]) == (7, 3)
    assert _levels(back) == ["exact", "restarted", "restarted"]


def _levels(run: Any) -> list[str]:
    return [entry["level"] for entry in json.loads((run / "resume.json").read_text())["history"]]


# -- with several workers ---------------------------------------------------------------------------------------------


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
        "workers    3 on a private Ray",
        "weak: 3 times",
        "grows with their square root",
        "verdict    ",
        "(127.0.0.1)",
    ):
        assert words in result.out
    if os.cpu_count() == 2:
        assert "warning    3 processes share 2 core(s)" in result.out
    assert len(run.read_eval()) == 3 and (run.logs_path / "worker-002.log").exists()


def test_more_workers_than_environments(here: Path, cli: Callable[..., Any]) -> None:
    """Each has one, and shorter rollouts keep the rows of an iteration."""
    line = "train --env CartPole-v1 --preset none --engine ray --workers 3 --iterations 2 --envs-per-worker 2 --name x"
    result = cli(*line.split(), "--set", "ppo.rollout_steps=31", "--set", "ppo.minibatch_size=16")
    assert result.code == 0, result.err
    assert "3 workers for 2 environments: each has one, and its rollouts are 21 steps long, not 31" in result.out
    assert 2 * 3 * 21 - 20 < json.loads(Path("runs/x/summary.json").read_text())["env_steps"] <= 2 * 3 * 21


@pytest.mark.parametrize(
    ("workers", "steps", "rows"), [(2, 1028, 4112), (4, 1028, 4112), (64, 65, 4160), (9000, 1, 9000)]
)
def test_rows_of_an_iteration_in_strong_scaling(workers: int, steps: int, rows: int) -> None:
    from paceline.engines.ray.synchronous import scale_up

    config = validate({"env": {"id": "CartPole-v1", "envs_per_worker": 4}, "ppo": {"rollout_steps": 1028}})
    scaled = scale_up(config, workers).hyper
    assert scaled.rollout_steps == steps and max(4, workers) * steps == rows
    assert scaled.minibatch_size == config.hyper.minibatch_size


def test_a_rollout_collected_ahead_is_collected_again_after_a_resume(here: Path) -> None:
    """A return stops the run while the workers already collect: the checkpoint has the state from before that."""
    tree = {"engine": {"name": "ray", "workers": 2}, "stop": {"metric": "env_steps>=1500", "iterations": 14}}
    first = train(tree, {"name": "x"})
    whole = train(tree, {"stop": {"metric": None, "iterations": 14}, "name": "whole"})
    assert 3 < first.summary["iterations"] < 10
    again = paceline.train({"stop": {"metric": None, "iterations": 14}}, resume=first.path)
    assert _levels(again) == ["exact"]
    mine, theirs = weights(again), weights(whole)
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def test_a_straggler_is_hurried_up(here: Path) -> None:
    slow = here / "slow.py"
    slow.write_text(
        "import os, time\nfrom paceline.envs.probe import FixedCost\n\n"
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
    assert 0.7 * slots < run.summary["env_steps"] < 0.95 * slots  # what the slow one left out was not waited for


def test_several_learners_and_replay(here: Path) -> None:
    settings = {"algo": "impala", "impala": {"rollout_steps": 8, "batch_size": 128, "replay_ratio": 0.5}, "seed": 3}
    engine = {"name": "ray", "workers": 2, "learners": 2}
    run = paceline.train({**settings, "engine": engine, "stop": {"iterations": 6}}, preset="none")
    row = run.read_metrics()[-1]
    assert row["bytes_moved"] > 0 and row["policy_lag_mean"] >= 0 and row["queued_rollouts"] >= 0
    assert run.summary["optimizer_steps"] == 9 and run.summary["actor_time_split"]["env"] > 0
    more = paceline.train({"stop": {"iterations": 8}, "engine": {"learners": 1}}, resume=run.path)
    assert more.summary["iterations"] == 8 and more.summary["optimizer_steps"] == 12


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_workers_with_memory(algo: str, here: Path) -> None:
    """Actors send the memory with their rollouts, replicas agree on minibatches of whole sequences."""
    tree: Tree = {"algo": algo, "model": {"memory": "gru", "sequence_length": 10}, "seed": 3, "stop": {"iterations": 3}}
    tree |= {"env": {"id": "CartPole-v1", "envs_per_worker": 4}, "engine": {"workers": 2, "threads": 1}}
    tree[algo] = {"rollout_steps": 24} | ({"minibatch_size": 50, "epochs": 2} if algo == "ppo" else {})
    run = paceline.train(tree, preset="none")
    assert run.summary["workers"] == 2 and run.summary["optimizer_steps"] >= 3


def test_dqn_with_actors(here: Path) -> None:
    """The rollouts go into one replay, each actor has its own epsilon. Any engine can resume with the saved replay."""
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
    assert not events.exists() or "replay" not in events.read_text()


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_actors_of_a_resumed_run_know_the_frozen_policy(here: Path, algo: str) -> None:
    """It is in the checkpoint: the run that it came from may be gone."""
    team: Tree = {"env": {"id": f"{TEAMS}:Signal"}, "stop": {"iterations": 2}, "multi_agent": {"policies": "each"}}
    tree = merged(team, {"algo": algo, algo: {"rollout_steps": 16}})
    first = paceline.train(merged(tree, {"name": "first", "env": {"envs_per_worker": 4}}))
    tree = merged(tree, {"multi_agent": {"frozen": {"speaker": "runs/first"}}, "env": {"envs_per_worker": 4}})
    second = paceline.train(merged(tree, {"name": "second", "engine": {"workers": 2, "threads": 1}}))
    assert second.summary["agent_steps"] == 2 * second.summary["env_steps"]
    shutil.rmtree(first.path)
    again = paceline.train({"stop": {"iterations": 4}, "eval": {"every_steps": 1, "episodes": 2}}, resume=second.path)
    mine, theirs = weights(second), weights(again)
    frozen = [name for name in mine if "speaker" in name]
    assert frozen and again.summary["iterations"] == 4
    for name in frozen:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


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
def test_the_verdict(settings: Tree, bound: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "OVERHEAD_SHARE", 1.0)  # starting Ray may take longer than this short run
    run = train(settings, {"engine": {"name": "ray", "workers": 2}, "stop": {"max_time": "4s"}})
    assert run.summary["verdict"].startswith(f"{bound}-bound"), run.summary["verdict"]


OWN_ALGORITHM = """
from paceline.algorithms.ppo import PPO

class Mine(PPO):
    class Settings(PPO.Settings):
        bonus: float = 0.5
"""


def test_a_worker_installs_the_users_code_before_it_reads_the_settings(here: Path) -> None:
    import ray

    from paceline.engines.ray.ray_cluster import RayCluster

    (here / "code").mkdir()
    (here / "code/mine.py").write_text(OWN_ALGORITHM)
    tree = to_tree(
        validate({"algo": f"{here}/code/mine.py:Mine", "env": {"id": "CartPole-v1"}, "mine": {"bonus": 0.25}})
    )
    bundle = pack(tree)
    shutil.rmtree(here / "code")  # as on a machine that does not have it
    spec = WorkerSpec(tree, bundle, slot=0, envs=2, restarts=0, resumes=0, cores=1, workers=1, driver_host="")
    cluster = RayCluster(EngineConfig(), 1)
    try:
        worker = cluster.spawn(None)
        info = ray.get(worker.setup.remote(spec), timeout=60)
        assert info.problem is None and info.parameters > 0
        ray.get(worker.stop.remote(), timeout=60)
    finally:
        cluster.close()


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_address_where_nothing_is(here: Path, command: Callable[..., Any]) -> None:
    result = command("train", "--env", "CartPole-v1", "--set", "engine.address=127.0.0.1:9", "--name", "x")
    assert result.code == 2 and "engine.address=127.0.0.1:9" in result.err and "ray start --head" in result.err
    assert result.err.count("\n") == 1 and not (here / "runs").exists()


def test_an_address_where_something_else_is(here: Path, command: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = command("train", "--env", "CartPole-v1", "--set", f"engine.address={address}")
        assert result.code == 2 and address in result.err, result.err


def test_ray_is_not_installed(here: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = catalog.is_installed
    monkeypatch.setattr(catalog, "is_installed", lambda package: package != "ray" and installed(package))
    result = cli("train", "--env", "CartPole-v1", "--workers", "2")
    assert result.code == 2 and "pip install 'paceline[ray]'" in result.err and not (here / "runs").exists()


def test_a_bad_environment_is_the_users_input(here: Path, command: Callable[..., Any]) -> None:
    result = command("train", "--env", "CartPole-v9", "--workers", "2")
    assert result.code == 2 and "CartPole-v9" in result.err and result.err.count("\n") == 1
    assert not (here / "runs").exists()


WORKERS_ENVS = """
import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn

class OldStep(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {"action_mask": np.ones(2)}

    def step(self, action):
        return np.zeros(3, np.float32), 0.0, True, {}

class Masked(OldStep):
    mask = np.array([0, 1])

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {"action_mask": self.mask}

    def step(self, action):
        assert action == 1
        return np.zeros(3, np.float32), 0.0, False, self.np_random.random() < 0.2, {"action_mask": self.mask}

class Norm(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.torso = nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], 8), nn.Tanh())
        self.policy, self.critic = nn.Linear(8, outputs), nn.Linear(8, 1)

    def forward(self, x):
        h = self.torso(x)
        return self.policy(h), self.critic(h)[:, 0]
"""


def test_an_env_that_breaks_its_contract_in_a_worker_is_the_users_input(
    here: Path, command: Callable[..., Any]
) -> None:
    (here / "envs.py").write_text(WORKERS_ENVS)
    result = command("train", "--env", "envs.py:OldStep", "--workers", 2, "--iterations", 1, "--name", "x")
    assert result.code == 2 and "old gym API" in result.err and "Traceback" not in result.err, result
    assert not (here / "runs").exists()


def test_workers_share_the_statistics_of_batch_norm_and_use_masks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "envs.py").write_text(WORKERS_ENVS)
    for algo in ("ppo", "dqn"):
        tree = {"algo": algo, "env": {"id": "envs.py:Masked"}, "stop": {"iterations": 2}}
        tree |= {"dqn": {"learning_starts": 50, "rounds": 50}} if algo == "dqn" else {}
        masked = paceline.train(tree | {"engine": {"workers": 2, "threads": 1}}, preset="none", quiet=False)
        assert capsys.readouterr().out.count('masked by info["action_mask"]') == 1
        [row] = evaluate(masked, episodes=3)
        assert row["episodes"] == 3
    net = {"class": "envs.py:Norm"}
    one = train({"model": net, "stop": {"iterations": 2}, "engine": {"workers": 2}})
    saved = weights(one)
    (mean,) = [array for name, array in saved.items() if name.endswith("running_mean")]
    assert np.abs(mean).sum() > 0
    again = train({"model": net, "stop": {"iterations": 2}, "engine": {"workers": 2}, "name": "again"})
    same = weights(again)
    assert all(np.array_equal(array, same[name]) for name, array in saved.items())


def test_more_workers_than_the_machine_can_hold(here: Path, cli: Callable[..., Any]) -> None:
    result = cli("train", "--env", "CartPole-v1", "--workers", "99999")
    assert result.code == 2 and "engine.workers=99999: each takes 130 MB at least" in result.err
    assert not Path("runs").exists()


def test_only_the_user_can_read_the_token() -> None:
    from paceline.engines.ray.ray_cluster import RayCluster

    cluster = RayCluster(EngineConfig(), 1)
    try:
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        # Ray makes its own folder readable for everybody, so the one around it must not be.
        assert stat.S_IMODE(token.parents[1].stat().st_mode) == 0o700
    finally:
        cluster.close()
