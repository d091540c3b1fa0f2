"""Environments that break Gymnasium's contract, as users write them: named in one line, or survived."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.config import EnvConfig, UserError
from paceline.envs.make import make_scalar, make_vector

ENVS = '''
import os
import sys

import gymnasium
import numpy as np
from gymnasium import spaces


class Fine(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), 1.0, self.steps == 3, False, {}


class Exits(Fine):
    def __init__(self, where="step"):
        self.where = where
        if where == "init":
            sys.exit(0)

    def reset(self, **options):
        if self.where == "reset":
            sys.exit(0)
        return super().reset(**options)

    def step(self, action):
        if self.where == "step":
            sys.exit(0)
        return super().step(action)


class Wanders(Fine):
    def __init__(self, where="init"):
        self.where = where
        self.go("init")

    def go(self, where):
        if where == self.where:
            os.makedirs("elsewhere", exist_ok=True)
            os.chdir("elsewhere")

    def reset(self, **options):
        self.go("reset")
        return super().reset(**options)

    def step(self, action):
        self.go("step")
        return super().step(action)


class FailsToClose(Fine):
    def close(self):
        raise RuntimeError("the \\x1b[31msimulator\\x1b[0m is gone")


class Colourful(Fine):
    def step(self, action):
        raise RuntimeError("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 \\x9b5m bell\\x07 end")


class Masks(Fine):
    def action_masks(self):
        return np.array([True, False])


class MasksInInfo(Fine):
    def reset(self, **options):
        return super().reset(**options)[0], {"action_mask": np.array([1, 0])}

    def step(self, action):
        return *super().step(action)[:4], {"action_mask": np.array([1, 0])}


class MasksInObservations(Fine):
    observation_space = spaces.Dict({"board": Fine.observation_space, "action_mask": spaces.MultiBinary(2)})

    def reset(self, **options):
        return {"board": super().reset(**options)[0], "action_mask": np.ones(2, np.int8)}, {}

    def step(self, action):
        observation, *rest = super().step(action)
        return {"board": observation, "action_mask": np.ones(2, np.int8)}, *rest


class Rllib(Fine):
    def __init__(self, env_config):
        self.length, self.index = env_config["length"], (env_config.worker_index, env_config.vector_index)

    def step(self, action):
        observation, _, _, *rest = super().step(action)
        return observation, 1.0, self.steps == self.length, *rest


class RllibConfig(Rllib):
    def __init__(self, config=None):
        super().__init__(config if hasattr(config, "worker_index") else None)


class OwnConfig(Fine):
    """Not of RLlib: `config` is one of several arguments."""

    def __init__(self, config="none", size=1):
        self.given = config, size


def creator(env_config):
    return Rllib(env_config)
'''
QUICK = ("--preset", "none", "--iterations", 1, "--envs-per-worker", 2, "--set", "ppo.rollout_steps=8",
         "--set", "ppo.minibatch_size=16", "--set", "ppo.epochs=1")  # fmt: skip
Cli = Callable[..., Any]


@pytest.fixture
def envs(here: Path) -> str:
    (here / "odd.py").write_text(ENVS)
    return "odd.py"


@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_an_env_that_exits_is_a_failure(envs: str, cli: Cli, where: str) -> None:
    given = ("--set", f"env.kwargs={{where: {where}}}")
    for done in (cli("train", "--env", f"{envs}:Exits", *given, *QUICK), cli("envs", "check", f"{envs}:Exits", *given)):
        assert done.code == 1
        assert "sys.exit(0) was called in" in done.err and "odd.py, line" in done.err


@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_a_relative_folder_does_not_follow_an_env_that_changes_it(here: Path, envs: str, cli: Cli, where: str) -> None:
    given = ("--env", f"{envs}:Wanders", "--set", f"env.kwargs={{where: {where}}}", *QUICK)
    done = cli("train", *given, "--out", "mine", "--name", "x", "--set", "checkpoint.every_iterations=1")
    assert done.code == 0, done.err
    assert "run        mine/x" in done.out
    os.chdir(here)
    assert json.loads((here / "mine" / "x" / "status.json").read_text())["state"] == "done"
    assert not list(here.glob("elsewhere/**/status.json"))
    assert cli("train", "--resume", "mine/x", "--iterations", 2).code == 0
    os.chdir(here)
    assert cli("evaluate", "mine/x", "--episodes", 2).code == 0
    assert Path.cwd() == here and (here / "mine" / "x" / "eval.jsonl").is_file()
    new = cli("train", *given, "--init-from", "mine/x", "--name", "y", "--out", "mine")
    assert new.code == 0, new.err
    assert "weights    from mine/x/checkpoints/" in new.out
    assert (here / "mine" / "y" / "status.json").is_file()


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_an_env_that_fails_to_close_costs_nothing_but_a_warning(envs: str, cli: Cli, vector: str) -> None:
    given = ("--env", f"{envs}:FailsToClose", "--set", f"env.vector={vector}", "--name", vector, *QUICK)
    done = cli("train", *given, "--set", "eval.every_steps=8", "--set", "eval.episodes=2")
    assert done.code == 0, done.err
    assert "paceline: warning: the env's close() failed: RuntimeError: the simulator is gone" in done.err
    assert cli("evaluate", f"runs/{vector}", "--episodes", 2).code == 0
    checked = cli("envs", "check", f"{envs}:FailsToClose")
    assert checked.code == 0 and "close() raised RuntimeError: the simulator is gone" in checked.out


def test_what_a_terminal_would_obey_stays_out(here: Path, envs: str, cli: Cli) -> None:
    done = cli("train", "--env", f"{envs}:Colourful", "--name", "x", *QUICK)
    assert done.code == 1
    checked = cli("envs", "check", f"{envs}:Colourful")
    status = json.loads((here / "runs" / "x" / "status.json").read_text())
    for text in (done.err, checked.out, status["reason"]):
        assert "RuntimeError" in text and "red" in text and "end" in text
        assert not set(text) & {"\x1b", "\x07", "\x9b"}, repr(text)


@pytest.mark.parametrize(
    ("name", "where"),
    [("Masks", "action_masks()"), ("MasksInInfo", 'info["action_mask"]'), ("MasksInObservations", 'observation["ac')],
)
def test_masks_are_told_at_the_start(envs: str, cli: Cli, name: str, where: str) -> None:
    for vector in ("sync", "async"):
        done = cli("train", "--env", f"{envs}:{name}", "--set", f"env.vector={vector}", "--name", vector, *QUICK)
        assert done.code == 0, done.err
        [line] = [line for line in done.out.splitlines() if line.startswith("spaces")]
        assert f"masked by {where}" in line
    assert f"masks: {where}" in cli("envs", "check", f"{envs}:{name}").out
    off = cli("train", "--env", f"{envs}:{name}", "--set", "env.action_mask=ignore", *QUICK)
    assert off.code == 0 and "masked" not in off.out
    assert "masked" not in cli("train", "--env", f"{envs}:Fine", *QUICK).out


@pytest.mark.parametrize("name", ["Rllib", "RllibConfig", "creator"])
def test_an_env_written_for_rllib_gets_its_arguments_in_one_dict(envs: str, name: str) -> None:
    config = EnvConfig(id=f"{envs}:{name}", kwargs={"length": 5})
    env: Any = make_scalar(config)
    assert env.length == 5 and env.index == (0, 0)
    vector: Any = make_vector(config, 3, seed=0, worker=2)[0]
    assert [one.index for one in vector.envs] == [(2, 0), (2, 1), (2, 2)]


def test_other_envs_get_theirs_as_before(envs: str) -> None:
    def given(**kwargs: Any) -> Any:
        env: Any = make_scalar(EnvConfig(id=f"{envs}:OwnConfig", kwargs=kwargs))
        return env.given

    assert given() == ("none", 1)
    assert given(size=3) == ("none", 3)
    assert given(config={"a": 1}) == ({"a": 1}, 1)


def test_a_run_on_an_env_written_for_rllib(envs: str, here: Path) -> None:
    tree = {"env": {"id": f"{envs}:Rllib", "kwargs": {"length": 5}, "envs_per_worker": 2}, "stop": {"iterations": 1}}
    run = paceline.train(tree | {"ppo": {"rollout_steps": 16, "minibatch_size": 16}}, preset="none")
    assert run.summary["length_mean"] == 5


@pytest.mark.parametrize(
    ("wrapper", "key"),
    [("NormalizeObservation", "env.normalize_observation=true"), ("NormalizeReward", "env.normalize_reward=true")],
)
def test_wrappers_whose_statistics_would_be_lost_are_refused(here: Path, wrapper: str, key: str) -> None:
    (here / "own.py").write_text(f"from gymnasium.wrappers import {wrapper}\nclass Mine({wrapper}): pass\n")
    for name in (wrapper, "own.py:Mine"):
        for vector in ("sync", "async"):
            with pytest.raises(UserError, match=key):
                make_vector(EnvConfig(wrappers=[name], vector=vector), 2, seed=0)


def test_a_wrapper_with_fixed_statistics_is_allowed(here: Path) -> None:
    (here / "own.py").write_text(
        "from gymnasium.wrappers import NormalizeObservation\n"
        "class Frozen(NormalizeObservation):\n"
        "    def __init__(self, env):\n"
        "        super().__init__(env)\n"
        "        self.update_running_mean = False\n"
    )
    env, _ = make_vector(EnvConfig(wrappers=["own.py:Frozen"]), 2, seed=0)
    assert np.isfinite(env.reset()).all()
