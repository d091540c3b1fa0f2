from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

import paceline
from paceline.config import RunConfig
from paceline.config.resolve import resolve_tree
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory
from paceline.training.loop import Loop

QUICK = {"env": {"id": "CartPole-v1", "envs_per_worker": 8}, "ppo": {"rollout_steps": 32, "minibatch_size": 64}}
Content = Callable[..., dict[str, Any]]


def train(**changes: Any) -> Any:
    return paceline.train({**QUICK, "stop": {"iterations": 2}, **changes}, preset="none")


def test_five_lines(tmp_path: Path) -> None:
    """As in the documentation, by a script of its own."""
    script = """
        import gymnasium, paceline
        run = paceline.train({"env": "CartPole-v1", "stop": {"total_steps": 30_000}})
        agent = paceline.load(run)
        env = agent.make_env()
        observation, info = env.reset(seed=1)
        total, ended = 0, False
        while not ended:
            observation, reward, terminated, truncated, info = env.step(agent.act(observation))
            total, ended = total + reward, terminated or truncated
        print(total)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert float(done.stdout.splitlines()[-1]) > 60  # a random one gets about 20


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_an_infinite_argument_reaches_the_environment(vector: str, here: Path) -> None:
    (here / "own.py").write_text(
        "import math, gymnasium\n"
        "class Own(gymnasium.Env):\n"
        "    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self, most): assert most == math.inf, most\n"
        "    def reset(self, *, seed=None, options=None): return [0.0], {}\n"
        "    def step(self, action): return [0.5], 1.0, True, False, {}\n"
    )
    env = {"id": "own.py:Own", "kwargs": {"most": float("inf")}, "envs_per_worker": 2, "vector": vector}
    run = train(name="x", env=env, ppo={"rollout_steps": 8})
    again = paceline.train({"stop": {"iterations": 3}}, resume=run)
    assert paceline.load(again).make_env().step(0)[1] == 1.0


def test_a_run_is_a_path(here: Path) -> None:
    run = train(name="x")
    assert Path(run) == Path("runs/x") == run.path and os.fspath(run) == "runs/x"
    with (run / "summary.json").open() as file:
        assert json.load(file) == run.summary
    assert run.outcome.status == "done" and "2 of 2 iterations" in run.outcome.reason
    assert len(run.read_metrics()) == 2


@pytest.mark.parametrize("form", ["dict", "file", "path", "config"])
def test_what_train_takes(form: str, here: Path, content: Content) -> None:
    tree = {**QUICK, "stop": {"iterations": 2}}
    Path("a.yaml").write_text(json.dumps(tree))
    given: Any = {"dict": tree, "file": "a.yaml", "path": Path("a.yaml"), "config": RunConfig.model_validate(tree)}[
        form
    ]
    run = paceline.train(given, preset="none")
    assert content(run.path) == content(train().path)


def test_what_was_given_is_not_changed(here: Path) -> None:
    tree = {"env": {"id": "CartPole-v1", "kwargs": {}}, "stop": {"iterations": 1}}
    before = json.dumps(tree)
    paceline.train(tree)
    paceline.train(tree)
    assert json.dumps(tree) == before


def test_settings_are_validated_once(here: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By `resolve_tree` for a new run; for a resumed one as they were saved and as they were changed."""
    seen, validate = [], RunConfig.model_validate
    counting = classmethod(lambda cls, tree: seen.append(tree) or validate(tree))  # type: ignore[func-returns-value]
    monkeypatch.setattr(RunConfig, "model_validate", counting)
    tree = {**QUICK, "stop": {"iterations": 1}, "name": "x"}
    resolve_tree(tree, preset="none")
    once = len(seen)
    Path("a.yaml").write_text(json.dumps(tree))
    for start in (lambda: cli("train", "--config", "a.yaml", "--preset", "none"), lambda: train(name="y")):
        seen.clear()
        start()
        assert len(seen) == once
    seen.clear()
    paceline.train({"stop": {"iterations": 3}}, resume="runs/x")
    assert len(seen) == 2


def test_errors_are_exceptions(here: Path) -> None:
    with pytest.raises(paceline.UserError, match=r"ppo\.gama.*ppo\.gamma"):
        paceline.train({"ppo": {"gama": 1}})
    with pytest.raises(paceline.UserError, match="no run at nowhere"):
        paceline.load("nowhere")
    assert not list(here.iterdir())


def test_it_says_nothing_unless_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(name="x")
    assert capsys.readouterr() == ("", "")
    paceline.train({**QUICK, "stop": {"iterations": 1}}, quiet=False)
    assert "Iteration 1 reward = " in capsys.readouterr().out


def test_in_another_thread(here: Path) -> None:
    """Where signals cannot be handled."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(train(name="x")))
    thread.start()
    thread.join(60)
    assert done and done[0].summary["iterations"] == 2


# -- loading ----------------------------------------------------------------------------------------------------------


def test_which_checkpoint(here: Path) -> None:
    run = train(
        stop={"iterations": 6}, eval={"every_steps": 400, "episodes": 5}, checkpoint={"keep": 20, "every_iterations": 1}
    )
    best = max(run.read_eval(), key=lambda row: row["return_mean"])
    steps = [row["env_steps"] for row in run.read_metrics()]
    assert paceline.load(run).counters["env_steps"] == best["env_steps"]
    assert paceline.load(run, "best").counters["env_steps"] == best["env_steps"]
    assert paceline.load(str(run.path), "last").counters["env_steps"] == steps[-1]
    assert paceline.load(run, str(steps[2])).counters == {**paceline.load(run, f"step-{steps[2]}").counters}
    assert paceline.load(run, str(steps[2])).counters["iteration"] == 3
    assert paceline.load(run.path / "checkpoints" / "last").counters["env_steps"] == steps[-1]
    assert paceline.load(run.path / "checkpoints" / f"step-{steps[1]}").counters["iteration"] == 2


def test_acting(here: Path) -> None:
    run = train()
    agent, twin = paceline.load(run), paceline.load(run)
    observation = np.array([0.1, 0.2, -0.1, 0.3], np.float32)
    assert agent.act(observation) in (0, 1) and isinstance(agent.act(observation), int)
    assert {agent.act(observation) for _ in range(20)} == {twin.act(observation)}
    sampled = [agent.act(observation, deterministic=False) for _ in range(100)]
    assert set(sampled) == {0, 1}
    assert sampled == [twin.act(observation, deterministic=False) for _ in range(100)]
    other = paceline.load(run, seed=1)
    assert sampled != [other.act(observation, deterministic=False) for _ in range(100)]


def test_loading_needs_no_environment(here: Path) -> None:
    """The file of the env may be gone: its spaces are in the checkpoint."""
    Path("mine.py").write_text(textwrap.dedent(MINE))
    run = train(env={"id": "mine.py:Grid", "envs_per_worker": 8})
    Path("mine.py").unlink()
    agent = paceline.load(run)
    seen = {"where": np.zeros(2, np.float32), "what": 1}
    action = agent.act(seen)
    assert action.shape == (2,) and agent.policy.action.space.contains(action)


def test_its_environment(here: Path) -> None:
    run = train(env={"id": "CartPole-v1", "frame_stack": 2, "max_episode_steps": 9, "envs_per_worker": 8})
    agent = paceline.load(run)
    env = agent.make_env()
    observation, _ = env.reset(seed=0)
    assert np.shape(observation) == (2, 4)
    length, ended = 0, False
    while not ended:
        observation, _, terminated, truncated, _ = env.step(agent.act(observation))
        length, ended = length + 1, terminated or truncated
    assert length <= 9
    env.close()
    film = agent.make_env(render_mode="rgb_array")
    film.reset()
    assert film.render().ndim == 3  # type: ignore[union-attr]
    film.close()


# -- starting from another's weights ----------------------------------------------------------------------------------


def policy(held: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name.startswith("engine.algorithm.policy.")}


def test_init_from(here: Path, content: Content, capsys: pytest.CaptureFixture[str]) -> None:
    source = train(stop={"iterations": 5}, name="source")
    tree = {**QUICK, "seed": 9, "stop": {"iterations": 1}}
    new = paceline.train({**tree, "name": "new"}, preset="none", init_from=source, quiet=False)
    assert policy(content(new.path, "0")) == policy(content(source.path, "last"))
    assert policy(content(new.path, "last")) != policy(content(source.path, "last"))
    assert f"weights    from {checkpoint.find(source.path)}" in capsys.readouterr().out
    assert new.summary["env_steps"] < 300 and new.summary["resumed"] == 0  # counters start anew
    fresh = paceline.train({**tree, "name": "fresh"}, preset="none")
    assert policy(content(fresh.path, "0")) != policy(content(new.path, "0"))
    # From one checkpoint of a run, for another algorithm, with the statistics of the observations.
    a2c = {"algo": "a2c", "env": QUICK["env"], "stop": {"iterations": 1}}
    part = paceline.train(a2c, preset="none", init_from=source / "checkpoints/step-0")
    assert policy(content(part.path, "0")) == policy(content(source.path, "0"))


def test_init_from_with_a_normaliser(here: Path, content: Content) -> None:
    env = {**QUICK["env"], "normalize_observation": True}
    source = train(env=env, stop={"iterations": 3})
    new = paceline.train({**QUICK, "env": env, "stop": {"iterations": 1}}, preset="none", init_from=source.path)
    arrays = policy(content(new.path, "0"))
    assert "engine.algorithm.policy.normalizer.mean" in arrays and arrays == policy(content(source.path))
    with pytest.raises(paceline.UserError, match=r"another network: normalizer"):
        paceline.train({**QUICK, "stop": {"iterations": 1}}, preset="none", init_from=source.path)


# -- what users bring -------------------------------------------------------------------------------------------------

MINE = """
    import gymnasium
    import numpy as np
    import torch
    from gymnasium import spaces

    class Grid(gymnasium.Env):
        \"\"\"Say the two signs of `where`, and once more the number in `what`.\"\"\"

        def __init__(self, length=6, scale=1.0, render_mode=None):
            self.length, self.scale = length, scale
            self.observation_space = spaces.Dict(
                {"where": spaces.Box(-1, 1, (2,), np.float32), "what": spaces.Discrete(3)}
            )
            self.action_space = spaces.MultiDiscrete([4, 3])

        def see(self):
            self.where = self.np_random.uniform(-1, 1, 2).astype(np.float32)
            self.what = int(self.np_random.integers(3))
            return {"where": self.where, "what": self.what}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.steps = 0
            return self.see(), {}

        def step(self, action):
            assert action.shape == (2,) and self.action_space.contains(action)
            sign = 2 * int(self.where[0] > 0) + int(self.where[1] > 0)
            reward = 0.5 * self.scale * ((action[0] == sign) + (action[1] == self.what))
            self.steps += 1
            return self.see(), float(reward), False, self.steps >= self.length, {"metrics": {"x": 2.0, "y": 3}}

    class Twice(gymnasium.RewardWrapper):
        def __init__(self, env, factor=2.0):
            super().__init__(env)
            self.factor = factor

        def reward(self, reward):
            return reward * self.factor

    class Net(torch.nn.Module):
        def __init__(self, shape, outputs, width=16):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(shape[0], width), torch.nn.ReLU())
            self.norm = torch.nn.BatchNorm1d(width)
            self.policy, self.value = torch.nn.Linear(width, outputs), torch.nn.Linear(width, 1)

        def forward(self, x):
            h = self.norm(self.body(x)) if len(x) > 1 else self.body(x)
            return self.policy(h), self.value(h)[:, 0]
"""


def test_an_environment_in_a_file(
    here: Path, command: Callable[..., Any], cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to the shell; then evaluated from another folder, and learned from."""
    Path("mine.py").write_text(textwrap.dedent(MINE))
    sets = ["--set", "env.kwargs={length: 5}", "--set", "ppo.learning_rate=3e-3", "--set", "eval.every_steps=4000"]
    result = command("train", "--env", "mine.py:Grid", "--name", "x", "--total-steps", 12_000, "--quiet", *sets)
    assert result.code == 0 and result.err == "", result
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    result = cli("evaluate", "../runs/x", "--episodes", 70)
    assert result.code == 0 and "70 episodes" in result.out, result
    row = json.loads((here / "runs/x/eval.jsonl").read_text().splitlines()[-1])
    assert row["length_mean"] == 5 and row["return_mean"] > 2  # 1.46 by chance, 5 at best
    rows = [json.loads(line) for line in (here / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert all(row["env/x"] == 2 and row["env/y"] == 3 for row in rows)


def test_a_network_in_a_file(here: Path, content: Content) -> None:
    Path("mine.py").write_text(textwrap.dedent(MINE))
    model = {"class": "mine.py:Net", "kwargs": {"width": 7}}
    run = train(model=model, name="x")
    assert run.read_config()["model"]["class"] == f"{here}/mine.py:Net"
    held = content(run.path)
    assert held["engine.algorithm.policy.net.body.0.weight"][1] == (7, 4)
    assert held == content(train(model=model).path)
    assert policy(held) != policy(content(run.path, "0"))
    assert paceline.load(run).act(np.zeros(4, np.float32)) in (0, 1)
    again = paceline.train({"stop": {"iterations": 4}}, resume=run.path)
    assert content(again.path) == content(train(model=model, stop={"iterations": 4}).path)


def test_wrappers(here: Path) -> None:
    Path("mine.py").write_text(textwrap.dedent(MINE))
    env = {"id": "paceline/KnownReturn-v0", "envs_per_worker": 8}
    assert train(env=env).summary["return_mean"] == 10
    clipped = {**env, "wrappers": [{"ClipReward": {"min_reward": -1, "max_reward": 0.25}}]}
    assert train(env=clipped).summary["return_mean"] == 2.5
    doubled = {**env, "wrappers": ["mine.py:Twice"]}
    assert train(env=doubled).summary["return_mean"] == 20
    both = {**env, "wrappers": [*clipped["wrappers"], {"mine.py:Twice": {"factor": 8}}]}  # type: ignore[misc]
    run = train(env=both)
    assert run.summary["return_mean"] == 20  # in order: clipped, then multiplied
    assert run.read_config()["env"]["wrappers"][1] == {f"{here}/mine.py:Twice": {"factor": 8}}
    swapped = {**env, "wrappers": both["wrappers"][::-1]}
    assert train(env=swapped).summary["return_mean"] == 2.5


def test_a_wrapper_takes_the_place_of_the_own_vector_env(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"id": "CartPole-v1", "wrappers": [{"TimeAwareObservation": {}}]}
    paceline.train({"env": env, "stop": {"iterations": 1}}, preset="none", quiet=False)
    out = capsys.readouterr().out
    assert "in this process (its own vector env takes no wrappers)" in out and "observation (5,)" in out


CLASSES = """
    if __name__ == "__main__":
        import paceline

        env = {"id": Grid, "wrappers": [Twice], "envs_per_worker": 2}
        paceline.train({"env": env, "model": {"class": Net}, "stop": {"iterations": 1}, "name": "all"}, preset="none")
        paceline.train({"env": Grid, "stop": {"iterations": 1}, "name": "env"}, preset="none")
        try:
            paceline.train({"env": Grid()})
        except paceline.UserError as error:
            print(error)
"""


def test_classes_as_settings(here: Path, cli: Callable[..., Any]) -> None:
    """A script gives its own classes; other processes find them in the run."""
    Path("mine.py").write_text(textwrap.dedent(MINE) + textwrap.dedent(CLASSES))
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "env=Grid is one environment, but a run makes several" in done.stdout
    tree = RunDirectory(Path("runs/all")).read_config()
    assert tree["env"]["id"] == f"{here}/mine.py:Grid" and tree["env"]["wrappers"] == [f"{here}/mine.py:Twice"]
    assert tree["model"]["class"] == f"{here}/mine.py:Net"
    for name in ("all", "env"):
        assert cli("evaluate", f"runs/{name}", "--episodes", 1).code == 0


def test_frame_stack(here: Path) -> None:
    run = train(env={"id": "CartPole-v1", "frame_stack": 3, "envs_per_worker": 8})
    assert paceline.load(run).policy.observation.shape == (12,)
    run = train(
        env={"id": "paceline/ImageSide-v0", "kwargs": {"size": 12}, "frame_stack": 2, "envs_per_worker": 8},
        engine={"threads": 1},
    )
    assert paceline.load(run).policy.observation.shape == (6, 12, 12)


def test_kwargs_and_limits(here: Path) -> None:
    assert train(env={"id": "paceline/KnownReturn-v0", "kwargs": {"length": 3}}).summary["length_mean"] == 3
    for vector in ("auto", "sync"):
        env = {"id": "CartPole-v1", "vector": vector, "max_episode_steps": 6, "envs_per_worker": 8}
        assert train(env=env).summary["length_mean"] == 6
    env = {"id": "CartPole-v1", "kwargs": {"sutton_barto_reward": True}, "envs_per_worker": 8}
    assert train(env=env).summary["return_mean"] < 0


@pytest.mark.parametrize("env", [{"id": "Acrobot-v1", "max_episode_steps": 30}, {"id": "mine.py:Grid"}])
def test_processes(env: dict[str, Any], here: Path, content: Content) -> None:
    """In processes of their own, with the results of one process."""
    Path("mine.py").write_text(textwrap.dedent(MINE))
    env = {**env, "envs_per_worker": 5}
    sync = train(env={**env, "vector": "sync"}, ppo={"rollout_steps": 32, "minibatch_size": 60})
    several = train(env={**env, "vector": "async", "processes": 2}, ppo={"rollout_steps": 32, "minibatch_size": 60})
    assert policy(content(sync.path)) == policy(content(several.path))
    assert sync.summary["return_mean"] == several.summary["return_mean"]
    assert not [child for child in psutil.Process().children() if "multiprocessing.spawn" in " ".join(child.cmdline())]


def test_a_registered_module(here: Path) -> None:
    Path("my_package_of_envs.py").write_text(
        textwrap.dedent(MINE) + "gymnasium.register('mine/Grid-v3', lambda **kw: Grid(**kw), max_episode_steps=4)\n"
    )
    run = train(env={"id": "my_package_of_envs:mine/Grid-v3"})
    assert run.summary["length_mean"] == 4
    assert "mine/Grid-v3" in gymnasium.registry
    run = train(env={"id": "my_package_of_envs:Grid", "kwargs": {"length": 3}})
    assert run.summary["length_mean"] == 3


def test_a_watcher_sees_each_iteration_and_may_end_the_run(here: Path) -> None:
    seen = []

    def watch(loop: Loop) -> str | None:
        seen.append(loop.row["iteration"])
        return "enough" if len(seen) == 2 else None

    config = {"env": "CartPole-v1", "name": "w", "stop": {"iterations": 4}}
    run = paceline.train(config, watch=watch)
    assert seen == [1, 2] and (run.outcome.status, run.outcome.reason) == ("stopped", "enough")
    seen += [0]  # so that it says nothing any more
    assert paceline.train(config, resume="auto", watch=watch).outcome.status == "done" and seen[3:] == [3]
