"""An environment is what one has in hand: a class, a function, a spec, an id; in a module, a script or a cell."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import paceline
from paceline.code_bundle import pack
from paceline.config import objects
from paceline.config.resolve import resolve_tree, to_tree

SMALL = {"ppo": {"rollout_steps": 16}, "model": {"hidden": [8]}, "stop": {"iterations": 1}}
SCRIPT = """
import sys
import gymnasium, numpy as np, paceline
import helper

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, goal=4):
        self.goal = goal
    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.at += 1
        return np.zeros(1, np.float32), helper.REWARD, self.at == self.goal, False, {}

print("running")
small = {"ppo": {"rollout_steps": 16}, "model": {"hidden": [8]}, "stop": {"iterations": 1}}
"""
ELSEWHERE = """
import pickle, sys
from pathlib import Path
from paceline.code_bundle import install, relocate, uninstall
from paceline.config.resolve import validate
from paceline.envs.make import make_env
bundle, tree = pickle.loads(Path(sys.argv[1]).read_bytes())
install(bundle)
env = make_env(validate(relocate(tree, bundle)).env)
env.reset()
print(env.step(0)[1])
uninstall(bundle)
"""


class Walk(gymnasium.Env[Any, Any]):
    """Ends after `goal` steps, each worth 1."""

    def __init__(self, goal: int = 4) -> None:
        self.goal = goal
        self.observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return np.zeros(1, np.float32), 1.0, self.at == self.goal, False, {}


@pytest.fixture(autouse=True)
def no_objects() -> Iterator[None]:
    registry = dict(gymnasium.registry)
    yield
    objects._given.clear()
    objects._pickled.clear()
    gymnasium.registry.clear()
    gymnasium.registry.update(registry)


def train(env: Any, **tree: Any) -> Any:
    return paceline.train({"env": env, **SMALL, **tree})


def in_another_process(run: Any) -> Any:
    """The steps of an episode that another process plays, with what the run keeps."""
    code = (
        "import sys; from paceline.evaluate import evaluate; print(evaluate(sys.argv[1], episodes=1)[0]['length_mean'])"
    )
    words = [sys.executable, "-c", code, str(Path(run).resolve())]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=60)
    return float(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1]


def test_a_class_in_a_function_a_lambda_and_a_partial(here: Path) -> None:
    class Inner(Walk):
        def __init__(self) -> None:
            super().__init__(goal=5)

    goal = 6
    runs = [train(Inner), train(lambda: Walk(goal)), train(functools.partial(Walk, goal=7))]
    assert [run.summary["length_mean"] for run in runs] == [5, 6, 7]
    assert [paceline.load(run).make_env().unwrapped.goal for run in runs] == [5, 6, 7]  # each run has its own
    again = paceline.train({"env": Inner, "stop": {"iterations": 2}}, resume=runs[0])
    assert again.summary["length_mean"] == 5


def in_a_cell(reward: float = 1.0) -> Any:
    """A class as a notebook has it."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT.replace("import helper", f"class helper: REWARD = {reward}").replace('print("running")', ""), cell)
    return cell["Walk"]


def test_what_a_cell_defines_again_is_new(here: Path) -> None:
    """Both are `__main__:Walk`: a run keeps the one that it was trained with."""
    runs = [train(in_a_cell(reward)) for reward in (3.0, 9.0)]
    for run, reward in zip(runs, (3.0, 9.0), strict=True):
        env = paceline.load(run).make_env()
        env.reset()
        assert env.step(0)[1] == reward


def test_specs_and_ids(here: Path) -> None:
    gymnasium.register("OnlyHere-v0", entry_point=in_a_cell(), max_episode_steps=3)
    run = train("OnlyHere-v0")
    assert run.summary["env"] == "OnlyHere-v0" and run.summary["length_mean"] == 3
    assert in_another_process(run) == 3  # which has not registered it

    made = gymnasium.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=7, sutton_barto_reward=True).spec
    config, preset = resolve_tree({"env": made})
    assert (config.env.id, config.env.max_episode_steps, preset) == ("CartPole-v1", 7, "ppo/CartPole-v1")
    assert config.env.kwargs == {"sutton_barto_reward": True}
    assert config.env == resolve_tree({"env": to_tree(config)["env"]})[0].env  # plain settings

    wrapped = gymnasium.wrappers.TimeAwareObservation(gymnasium.make("CartPole-v1"))
    run = train(wrapped.spec)
    assert paceline.load(run).make_env().observation_space.shape == (5,)
    assert in_another_process(run) > 5


def test_a_made_environment_is_refused(here: Path) -> None:
    with pytest.raises(paceline.UserError, match=r"env=Walk is one environment.*its class or a function") as caught:
        train(Walk())
    assert "spec" not in str(caught.value)
    with pytest.raises(paceline.UserError, match=r"its spec \(env.spec\)"):
        train({"id": gymnasium.make("CartPole-v1")})
    with pytest.raises(paceline.UserError, match=r"env=3"):
        train(3)


def test_what_cannot_be_pickled_trains_here_and_says_so_elsewhere(here: Path) -> None:
    walk, lock = in_a_cell(), threading.Lock()

    def make() -> Any:
        with lock:
            return walk()

    run = train(make)
    assert run.summary["length_mean"] == 4
    assert "cannot leave its process: env=make" in in_another_process(run)
    with pytest.raises(paceline.UserError, match=r"cannot leave its process.*lock"):
        pack(to_tree(resolve_tree({"env": make})[0]))  # to workers


def test_a_script_without_a_guard(here: Path, command: Callable[..., Any]) -> None:
    """Its environment travels by value, with 2 workers and in processes; nobody runs the script again."""
    (here / "helper.py").write_text("REWARD = 2.0\n")
    (here / "script.py").write_text(
        SCRIPT + "paceline.train({'env': Walk, 'name': 'ray', 'engine': {'workers': 2}, **small})\n"
        "env = {'id': lambda: Walk(5), 'vector': 'async', 'processes': 2, 'envs_per_worker': 2}\n"
        "paceline.train({'env': env, 'name': 'async', **small})\n"
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("running") == 1 and "running" not in done.stderr
    for name, total in {"ray": 8.0, "async": 10.0}.items():
        assert json.loads(Path("runs", name, "summary.json").read_text())["return_mean"] == total
    resumed = command(
        "train", "--resume", here / "runs/ray", "--iterations", 2, "--engine", "local", "--workers", 1, cwd="/"
    )
    assert resumed.code == 0, resumed.err
    (here / "helper.py").unlink()
    assert "No module named 'helper'" in in_another_process(here / "runs/ray")


def test_another_machine_gets_its_modules_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "helper.py").write_text("REWARD = 3.0\n")
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(SCRIPT).replace('print("running")', ""), cell)
    tree = to_tree(resolve_tree({"env": cell["Walk"]})[0])
    (here / "sent").write_bytes(pickle.dumps((pack(tree), tree)))
    (here / "helper.py").unlink()
    words = [sys.executable, "-c", ELSEWHERE, str(here / "sent")]
    done = subprocess.run(words, cwd="/", env={**os.environ, "TMPDIR": str(here)}, capture_output=True, text=True)
    assert done.stdout == "3.0\n", done.stderr
    del sys.modules["helper"]


def test_a_file_that_trains_when_it_is_imported_is_refused(here: Path) -> None:
    (here / "script.py").write_text(SCRIPT.replace("import helper\n", "") + "paceline.train({'env': Walk, **small})\n")
    with pytest.raises(paceline.UserError, match=r"train\(\) in .*script.py.*under if __name__ == '__main__'"):
        train("script.py:Walk")
    assert not Path("runs").exists()
