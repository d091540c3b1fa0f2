"""RLlib under paceline's loop: files, resume, evaluation, and the copy of its policy."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline
from paceline.api import Run
from paceline.commands.main import main
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.engines import RLLIB_PACKAGES, make_engine
from paceline.envs import catalog
from paceline.evaluate import evaluate
from paceline.run.directory import RunDirectory
from paceline.training.clock import Clock

missing = [name for name in RLLIB_PACKAGES if not catalog.is_installed(name)]
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")]

Tree = dict[str, Any]
SMALL: Tree = {
    "env": {"id": "CartPole-v1", "envs_per_worker": 4},
    "model": {"hidden": [16, 16]},
    "ppo": {"rollout_steps": 64, "minibatch_size": 64, "epochs": 2},
    "seed": 3,
}
ENGINE = {"name": "rllib", "workers": 1, "threads": 1}

ODD_ENV = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Odd(gymnasium.Env):
    observation_space = spaces.Dict({"where": spaces.Box(-1, 1, (2,), np.float64), "what": spaces.Discrete(3, start=5)})
    action_space = spaces.Box(np.float32([[-1, 0]]), np.float32([[3, 2]]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        ended = self.steps == 10
        return self.observation_space.sample(), 1.0, ended, False, {"metrics": {"seven": 7}} if ended else {}
"""


FAR = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Far(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def _observe(self):
        return self.np_random.normal([1000, -3], [50, 1]).astype(np.float32)

    def __init__(self, env_config):
        assert env_config.worker_index in (0, 1) and env_config.vector_index in (0, 1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), 100.0, self.steps == 5, False, {}
"""


# The side that is lit is the right one.
PIXELS = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Pixels(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (9, 10, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def _show(self):
        self.side = int(self.np_random.integers(2))
        image = np.zeros((9, 10, 1), np.uint8)
        image[:, 5 * self.side : 5 * self.side + 5] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action):
        right = action == self.side
        self.steps += 1
        ended = self.steps == 5
        return self._show(), float(right), False, ended, {"metrics": {"seven": 7}} if ended else {}
"""
FIELDS = """
    custom_metrics date done episode_len_mean episode_reward_max episode_reward_mean episode_reward_min
    episodes_this_iter episodes_total experiment_id experiment_tag hostname info.last_target_update_ts
    info.learner.default_policy.cur_lr info.learner.default_policy.max_q info.learner.default_policy.mean_q
    info.learner.default_policy.mean_td_error info.learner.default_policy.min_q info.learner.default_policy.model
    info.num_steps_sampled info.num_steps_trained info.num_target_updates iterations_since_restore node_ip
    num_healthy_workers off_policy_estimator perf.cpu_util_percent perf.ram_util_percent pid policy_reward_max
    policy_reward_mean policy_reward_min sampler_perf.mean_env_wait_ms sampler_perf.mean_inference_ms
    sampler_perf.mean_processing_ms time_since_restore time_this_iter_s time_total_s timers.learn_throughput
    timers.learn_time_ms timers.update_time_ms timestamp timesteps_since_restore timesteps_total training_iteration
    trial_id
"""
"""The fields of a result of RLlib's DQN at the time of `tune.run`."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO in which an env runner was killed, and which was stopped by Ctrl-C."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL | {"checkpoint": {"every_seconds": 0}}))
    words = ["--config", str(folder / "small.yaml"), "--preset", "none", "--engine", "rllib", "--workers", "2"]
    words += ["--set", "engine.rllib={use_kl_loss: false}", "--max-time", "90s", "--out", str(folder), "--name", "run"]
    with (folder / "out.txt").open("w") as out:
        argv = [sys.executable, "-m", "paceline", "train", *words]
        process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)
    rows = folder / "run/metrics.jsonl"
    children: list[psutil.Process] = []

    def wait_for(true: Callable[[dict[str, Any]], bool]) -> None:
        end = time.monotonic() + 60
        while not (rows.exists() and any(true(json.loads(line)) for line in rows.read_text().splitlines(True)[:-1])):
            assert process.poll() is None and time.monotonic() < end, (folder / "out.txt").read_text()
            time.sleep(0.05)

    try:
        wait_for(lambda row: row["workers_healthy"] == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        home = Path(next(m[0] for child in children if (m := re.search(r"/tmp/pl-\w+", " ".join(child.cmdline())))))
        next(child for child in children if "EnvRunner" in " ".join(child.cmdline())).kill()
        wait_for(lambda row: row["workers_restarted"] == 1 and row["workers_healthy"] == 2)
        children += psutil.Process(process.pid).children(recursive=True)
        assert home.exists()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=40) == 99
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not home.exists()
    finally:
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
    return folder / "run"


@pytest.fixture(scope="module")
def by_dqn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On images, with the only env runner in this process."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "pixels.py").write_text(PIXELS)
    dqn = {"learning_starts": 200, "epsilon_fraction": 0.5, "target_update_every": 20, "gamma": 0.0, "rounds": 16}
    settings = {
        "algo": "dqn",
        "env": {"id": f"{folder}/pixels.py:Pixels", "envs_per_worker": 4},
        "model": {"hidden": [32], "activation": "relu"},
        "dqn": dqn,
        "stop": {"total_steps": 2000},
        "engine": {"name": "rllib", "threads": 1},
        "out": str(folder),
        "name": "run",
    }
    return paceline.train(settings, preset="none")


def test_dqn_learns_from_images(by_dqn: Run) -> None:
    rows = by_dqn.read_metrics()
    assert rows[-1]["q_max"] <= 1.5 and rows[-1]["target_updates"] > 1 and rows[-1]["env/seven"] == 7
    assert rows[-1]["steps_sampled"] == rows[-1]["env_steps"] and rows[-1]["epsilon"] == pytest.approx(0.05)
    (result,) = evaluate(by_dqn.path, episodes=10)  # by our copy of it
    assert result["return_mean"] == 5.0


def test_a_run_of_ppo(stopped: Path) -> None:
    run = RunDirectory(stopped)
    rows = run.read_metrics()
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[1]["env_steps"] >= 512 and rows[-1]["episodes"] > 5 and 9 < rows[-1]["return_mean"] < 200
    # A step of CartPole is worth 1: no part of an episode is lost where RLlib cuts it.
    assert rows[-1]["length_mean"] == rows[-1]["return_mean"]
    assert {"total_loss", "policy_loss", "value_loss", "entropy", "gradient_norm"} <= rows[-1].keys()
    assert "approx_kl" not in rows[-1]  # it is not computed
    assert rows[-1]["time_learn_seconds"] > 0 and rows[-1]["time_act_seconds"] > 0
    assert len(list(csv.DictReader((stopped / "progress.csv").open()))) == len(rows)
    summary = run.read_summary()
    assert (summary["engine"], summary["workers"], summary["status"]) == ("rllib", 2, "stopped")
    own = [json.loads(line) for line in (stopped / "logs" / "rllib.jsonl").open()]
    assert (
        own[-1]["training_iteration"] >= len(rows) == len(own) and own[-1]["timesteps_total"] == rows[-1]["env_steps"]
    )
    assert own[-1]["episode_reward_mean"] == pytest.approx(own[-1]["env_runners"]["episode_return_mean"])
    assert (stopped / "checkpoints/last").resolve().name == f"step-{rows[-1]['env_steps']}"
    assert "1 env runner(s) lost and replaced" in (stopped.parent / "out.txt").read_text()
    with pytest.raises(UserError, match="only RLlib reads RLlib's checkpoints"):
        paceline.train({"engine": {"name": "local", "workers": 0}}, resume=stopped)
    (result,) = evaluate(stopped, episodes=5)
    assert result["episodes"] == 5 and result["return_mean"] >= 8
    with pytest.raises(SystemExit, match="0"):
        main(["plot", str(stopped), "-o", str(stopped.parent / "curves.png")])


def test_a_run_of_ppo_goes_on(stopped: Path) -> None:
    before, summary = paceline.load(stopped).policy.state(), RunDirectory(stopped).read_summary()
    last = summary["iterations"]
    taken: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))  # the learner is in this process
    more = paceline.train({"stop": {"iterations": last + 1, "max_time": None}}, resume=stopped)
    hook.remove()
    rows = more.read_metrics()
    assert rows[-1]["iteration"] == last + 1
    assert rows[-1]["env_steps"] - rows[-2]["env_steps"] < 400  # it continued counting
    assert more.summary["resumed"] == 1
    assert more.summary["optimizer_steps"] == summary["optimizer_steps"] + len(taken)
    after = paceline.load(more).policy.state()
    moved = max(float(np.abs(after[name] - before[name]).max()) for name in after)
    assert 0 < moved < 0.05  # one iteration away from where it was, and not from the start again


def test_the_copy_is_the_policy(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD_ENV)
    env = {"id": f"{tmp_path}/odd.py:Odd", "envs_per_worker": 2}
    tree = SMALL | {"env": env, "engine": ENGINE, "model": {"hidden": [16, 8], "activation": "relu"}}
    engine: Any = make_engine(validate(tree))
    try:
        other = engine.policy.state()
        other = {name: value + 0.01 for name, value in other.items()}
        engine.load_policy(other)
        engine._copy_policy()
        assert all(np.allclose(value, other[name]) for name, value in engine.policy.state().items())
        engine.start()
        done = engine.iterate(1.0, Clock(time.perf_counter()))
        assert done.env_steps >= 128 and len(done.episodes) >= 10
        assert all((e.total, e.length) == (10.0, 10) for e in done.episodes)
        assert done.env_metrics == [{"seven": 7.0}] * len(done.episodes)
        engine._copy_policy()
        assert engine.policy.observation.shape == (5,)
        rows = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
        module = engine._algorithm.get_module("default_policy")
        with torch.no_grad():
            theirs = module.forward_inference({"obs": torch.from_numpy(rows)})["action_dist_inputs"].numpy()
        log_std = engine.policy.state()["log_std"]
        assert np.allclose(engine.policy.greedy(rows), theirs[:, :2], atol=1e-5)
        assert np.allclose(np.broadcast_to(log_std, (6, 2)), theirs[:, 2:], atol=1e-6)
        assert [e.length for e in engine.evaluate(3, stochastic=False, number=0)] == [10, 10, 10]
        learner = engine._algorithm.learner_group._learner
        coefficient = float(learner.curr_kl_coeffs_per_module["default_policy"])
        assert coefficient != 0.2  # after one iteration
        state = engine.state()
        learner.curr_kl_coeffs_per_module["default_policy"].fill_(9.0)
        engine.start(state)
        assert float(learner.curr_kl_coeffs_per_module["default_policy"]) == coefficient
        assert engine._algorithm.env_runner_group.local_env_runner.num_env_steps_sampled_lifetime == done.env_steps
    finally:
        engine.close()


def test_normalisers_are_shared_saved_and_used_by_the_copy(tmp_path: Path) -> None:
    (tmp_path / "far.py").write_text(FAR)
    env = {
        "id": f"{tmp_path}/far.py:Far",
        "envs_per_worker": 2,
        "normalize_observation": True,
        "normalize_reward": True,
    }
    engine: Any = make_engine(validate(SMALL | {"env": env, "engine": ENGINE}))
    clock = Clock(time.perf_counter())

    def scaling() -> Any:
        """What the environments of the env runner apply."""
        group = engine._algorithm.env_runner_group
        parts = group.foreach_env_runner(lambda runner: runner.env.unwrapped.call("_mean"), local_env_runner=False)
        return np.stack([mean for part in parts for mean in part])

    try:
        engine.start()
        done = engine.iterate(1.0, clock)
        assert {(e.total, e.length) for e in done.episodes} == {(500.0, 5)}  # not those that RLlib learns from
        moments, rewards = engine.policy.moments, engine._statistics.rewards
        assert moments.count >= done.env_steps and rewards.count == done.env_steps
        np.testing.assert_allclose(moments.mean, [1000.0, -3.0], rtol=0.1)
        np.testing.assert_allclose(moments.deviation, [50.0, 1.0], rtol=0.3)
        applied = engine.policy.scaling()[0]
        engine.iterate(1.0, clock)
        np.testing.assert_array_equal(scaling(), np.stack([applied] * 2))
        state = engine.state()
        saved = state["algorithm"]["policy"]
        np.testing.assert_array_equal(saved["normalizer.mean"], engine.policy.moments.mean)
        assert saved["normalizer.count"][0] > done.env_steps
        kept = [np.array(saved["normalizer.mean"]), np.array(rewards.var)]
        for moments in (engine.policy.moments, rewards):
            moments.merge(np.full(1 + 2 * moments.mean.size, 1e9))
        engine.start({**state, "algorithm": {"policy": {**saved, "normalizer.mean": kept[0]}},
                      "rllib": {**state["rllib"], "reward_moments": {"mean": rewards.mean, "var": kept[1],
                                                                    "count": np.ones(1)}}})  # fmt: skip
        np.testing.assert_array_equal(engine.policy.moments.mean, kept[0])
        np.testing.assert_array_equal(engine._statistics.rewards.var, kept[1])
        assert [(e.total, e.length) for e in engine.evaluate(2, stochastic=False, number=0)] == [(500.0, 5)] * 2
    finally:
        engine.close()


def test_the_old_names_are_where_the_page_says(stopped: Path, by_dqn: Run) -> None:
    names = {name for run in (stopped, by_dqn.path) for name in next(csv.reader((run / "progress.csv").open()))}
    rows = [json.loads((run / "logs" / "rllib.jsonl").read_text().splitlines()[-1]) for run in (stopped, by_dqn.path)]
    page = (Path(__file__).parents[3] / "docs/rllib.md").read_text()
    table = page.partition("<!-- checked: ")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    listed: set[str] = set()
    for line in table:
        then, here, theirs = (cell.strip() for cell in line.split("|")[1:4])
        listed.update(re.findall("`([^`]+)`", then))
        assert here, line
        file, found = re.search("`([a-z]+[.](?:json|yaml))`: `([a-z]+)`", here), re.findall("`([^`]+)`", here)
        if file:
            assert file[2] in yaml.safe_load((stopped / file[1]).read_text()), line
        else:
            known = names | {'info["metrics"]', "--name"}
            assert {"env/seven" if name == "env/NAME" else name for name in found} <= known, line
            assert found or here.startswith("not available: "), line
        for path in re.findall("`([^`]+)`", theirs):
            assert any(holds(row, path) for row in rows), line
    assert listed == set(FIELDS.split())


def holds(row: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(row, dict) or part not in row:
            return False
        row = row[part]
    return True
