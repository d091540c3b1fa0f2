"""RLlib under our loop: its numbers in our files, resumed, evaluated, and the copy of its policy the same policy."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline
from paceline.config import UserError
from paceline.engine import RLLIB_PACKAGES, make_engine
from paceline.engine.clock import Clock
from paceline.env import catalog
from paceline.evaluate import evaluate
from paceline.resolve import validate

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


def test_a_run_of_ppo(tmp_path: Path) -> None:
    settings = SMALL | {"engine": ENGINE | {"rllib": {"use_kl_loss": False}}, "out": str(tmp_path), "name": "run"}
    taken: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))  # the learner is in this process
    run = paceline.train(settings | {"stop": {"iterations": 2}}, preset="none")
    hook.remove()
    rows = run.read_metrics()
    assert [row["iteration"] for row in rows] == [1, 2]
    assert rows[-1]["env_steps"] >= 512 and rows[-1]["episodes"] > 5 and 9 < rows[-1]["return_mean"] < 60
    # A step of CartPole is worth 1: no part of an episode is lost where RLlib cuts it.
    assert rows[-1]["length_mean"] == rows[-1]["return_mean"]
    assert {"total_loss", "policy_loss", "value_loss", "entropy", "gradient_norm"} <= rows[-1].keys()
    assert rows[-1]["time_learn_seconds"] > 0 and rows[-1]["time_act_seconds"] > 0
    assert len(list(csv.DictReader((run / "progress.csv").open()))) == 2
    summary = run.summary
    assert (summary["engine"], summary["workers"], summary["status"]) == ("rllib", 1, "done")
    assert summary["optimizer_steps"] == len(taken)
    own = [json.loads(line) for line in (run / "logs" / "rllib.jsonl").open()]
    assert own[-1]["training_iteration"] == 2 and own[-1]["timesteps_total"] == rows[-1]["env_steps"]
    assert own[-1]["episode_reward_mean"] == pytest.approx(own[-1]["env_runners"]["episode_return_mean"])

    with pytest.raises(UserError, match="RLlib's checkpoints are read by RLlib alone"):
        paceline.train({"engine": {"name": "local", "workers": 0}}, resume=run.path)
    (result,) = evaluate(run.path, episodes=5)
    assert result["episodes"] == 5 and result["return_mean"] >= 8
    before = paceline.load(run).policy.state()

    more = paceline.train({"stop": {"iterations": 3}}, resume=run.path)
    rows = more.read_metrics()
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert rows[2]["env_steps"] - rows[1]["env_steps"] < 400  # it went on counting, and did not count anew
    assert more.summary["resumed"] == 1 and more.summary["optimizer_steps"] > summary["optimizer_steps"]
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
        assert np.allclose(engine.policy.best(rows), theirs[:, :2], atol=1e-5)
        assert np.allclose(np.broadcast_to(log_std, (6, 2)), theirs[:, 2:], atol=1e-6)
        assert [e.length for e in engine.evaluate(3, stochastic=False, number=0)] == [10, 10, 10]
    finally:
        engine.close()


def test_images_are_refused_before_ray_starts() -> None:
    with pytest.raises(UserError, match="takes vectors, and the env shows images"):
        make_engine(validate({"env": {"id": "ALE/Pong-v5"}, "engine": ENGINE}))
