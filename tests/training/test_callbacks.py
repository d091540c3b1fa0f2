from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline

SMALL = {"ppo": {"rollout_steps": 16, "minibatch_size": 32}, "model": {"hidden": [8]}, "engine": {"threads": 1}}
OWN = """
import gymnasium, numpy as np, paceline

class Level(gymnasium.Env):
    "Reports its level as a metric; breaks once where it is 3."
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def __init__(self, broken=False):
        self.level, self.broken = 0, broken

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        if self.broken and self.level == 3 and not hasattr(Level, "has_failed"):
            Level.has_failed = True
            raise OSError("simulator")
        return np.zeros(1, np.float32), 1.0, self.at == 4, False, {"metrics": {"level": self.level}}

class Rise(paceline.Callback):
    "One level more after each iteration."
    def __init__(self, to=9):
        self.to = to

    def on_iteration(self, metrics):
        level = (self.get("env.level") or 0) + 1
        self.log("next", level)
        if level == self.to:
            raise RuntimeError("out of patience")
        self.set("env.level", level)
        self.set("ppo.learning_rate", self.get("ppo.learning_rate") / 2)
"""


class Recorder(paceline.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_start(self) -> None:
        self.seen.append("start")

    def on_episode(self, episode: Any) -> None:
        self.seen.append(("episode", episode.length, episode.total))

    def on_iteration(self, metrics: dict[str, Any]) -> None:
        self.seen.append(("iteration", metrics["iteration"]))

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        self.seen.append(("evaluation", metrics["env_steps"]))

    def on_checkpoint(self, path: Path) -> None:
        assert (path / "state.json").is_file() and path.parent.parent == self.run.resolve()
        self.seen.append(("checkpoint", path.name))

    def on_end(self, reason: str) -> None:
        self.seen.append(("end", reason))


@pytest.fixture
def own(here: Path) -> Path:
    (here / "own.py").write_text(OWN)
    return here


def train(**tree: Any) -> Any:
    callbacks = tree.pop("given", [])
    env = {"id": "own.py:Level", "envs_per_worker": 2} | tree.pop("env", {})
    stop = {"stop": {"iterations": 4}}
    return paceline.train({"env": env, **SMALL, **stop, **tree}, preset="none", callbacks=callbacks)


def levels(run: Any) -> list[float]:
    return [row["env/level"] for row in run.read_metrics()]


def test_what_it_is_told(own: Path) -> None:
    recorder = Recorder()
    run = train(given=[recorder], stop={"iterations": 2}, eval={"every_steps": 1, "episodes": 2})
    seen = [one for one in recorder.seen if one[0] != "episode"]
    assert seen[0] == "start" and seen[-1] == ("end", "2 of 2 iterations done")
    steps = [row["env_steps"] for row in run.read_metrics()]
    saved = [("checkpoint", f"step-{step}") for step in (0, *steps)]
    assert seen[1] == saved[0] and {*saved} <= {*seen}
    assert [one[1] for one in seen if one[0] == "iteration"] == [1, 2]
    assert [one[1] for one in seen if one[0] == "evaluation"] == steps
    episodes = [one for one in recorder.seen if one[0] == "episode"]
    assert len(episodes) == run.summary["episodes"] and set(episodes) == {("episode", 4, 4.0)}


def test_it_changes_settings_and_environments(own: Path) -> None:
    run = train(callbacks=["own.py:Rise"], eval={"every_steps": 1, "episodes": 1})
    rows = run.read_metrics()
    assert levels(run) == [0, 1, 2, 3] and [row["callback/next"] for row in rows] == [1, 2, 3, 4]
    assert [row["learning_rate"] for row in rows] == [3e-4, 1.5e-4, 7.5e-5, 3.75e-5]
    assert "callback/next" in (run / "progress.csv").read_text()


def test_a_resumed_run_has_the_changes(own: Path, content: Callable[..., Any], stable_rows: Any) -> None:
    whole = train(callbacks=["own.py:Rise"], name="whole")
    half = train(callbacks=["own.py:Rise"], name="half", stop={"iterations": 2})
    paceline.train({"stop": {"iterations": 4}}, resume=half)
    assert stable_rows(half.path) == stable_rows(whole.path) and content(half.path) == content(whole.path)


def test_a_resume_without_its_callback_says_so(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(given=[Recorder()], stop={"iterations": 1})
    paceline.train({"stop": {"iterations": 2}}, resume=run, quiet=False)
    assert "trained so far with Recorder, without it from now on" in capsys.readouterr().out


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_an_environment_that_is_made_again_is_as_the_others(vector: str, own: Path) -> None:
    env = {
        "kwargs": {"broken": True},
        "restart_on_error": 3,
        "vector": vector,
        "processes": 1 if vector == "async" else 0,
    }
    run = train(callbacks=["own.py:Rise"], env=env, stop={"iterations": 5})
    assert levels(run) == [0, 1, 2, 3, 4] and run.summary["env_restarts"] > 0


def test_workers_follow_as_one_process_does(own: Path) -> None:
    tree = {"callbacks": ["own.py:Rise"], "stop": {"iterations": 3}}
    two, one = train(engine={"workers": 2}, **tree), train(**tree)
    assert levels(two) == levels(one) == [0, 1, 2]
    assert [row["learning_rate"] for row in two.read_metrics()] == [3e-4, 1.5e-4, 7.5e-5]


def test_an_error_ends_the_run_once_and_saves_it(own: Path, command: Callable[..., Any]) -> None:
    Path("a.yaml").write_text(json.dumps({**SMALL, "env": "own.py:Level", "callbacks": [{"own.py:Rise": {"to": 2}}]}))
    done = command("train", "--config", "a.yaml", "--name", "x", "--iterations", 4)
    assert done.code == 1 and done.err.count("Traceback") == 1 and done.err.count("\nRuntimeError: out of") == 1
    status, rows = json.loads(Path("runs/x/status.json").read_text()), Path("runs/x/metrics.jsonl").read_text()
    assert status["state"] == "failed" and status["reason"] == "RuntimeError: out of patience"
    assert len(rows.splitlines()) == 2
    assert paceline.load("runs/x").counters["iteration"] == 2  # saved where it was
    run = paceline.train({"callbacks": [], "stop": {"iterations": 3}}, resume="runs/x")
    assert run.summary["iterations"] == 3 and levels(run) == [0, 1, 1]


def test_it_ends_the_run(own: Path) -> None:
    class Enough(paceline.Callback):
        def on_iteration(self, metrics: dict[str, Any]) -> None:
            if metrics["iteration"] == 2:
                self.stop("good enough")

    run = train(given=[Enough])  # the class will do
    assert run.outcome.status == "done" and run.outcome.reason == "good enough" and run.summary["iterations"] == 2


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("ppo.rollout_steps", 8, "it cannot change while a run trains; ppo.learning_rate, ppo.max_grad_norm,"),
        ("ppo.learning_rate", -1, "ppo.learning_rate=-1: input should be greater than 0"),
        ("env.vector", "async", "it cannot change while a run trains"),
        ("env.leve", 1, "env.leve: Level has no attribute 'leve'"),
        ("env.level", object(), "only numbers, texts and lists"),
        ("nonsense", 1, "it cannot change"),
    ],
)
def test_what_cannot_be_set(key: str, value: Any, named: str, own: Path) -> None:
    class Set(paceline.Callback):
        def on_iteration(self, metrics: dict[str, Any]) -> None:
            self.set(key, value)

    with pytest.raises(paceline.UserError) as caught:
        train(given=[Set()])
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["own.py:Level"], "expected objects of a subclass of paceline.Callback, not a Level"),
        (["own.py:Nope"], "it has no 'Nope'"),
        ([{"own.py:Rise": {"nope": 1}}], "callbacks=own.py:Rise could not be made: TypeError"),
        ([{"a": {}, "b": {}}], "expected one name per entry"),
        ("Rise", "expected module:Name or path/to/file.py:Name"),
    ],
)
def test_bad_callbacks_are_refused_at_once(given: Any, named: str, own: Path) -> None:
    with pytest.raises(paceline.UserError) as caught:
        train(callbacks=given)
    assert named in str(caught.value).replace(f"{own}/", "") and not Path("runs").exists()


def test_without_a_run_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"Recorder is not part of a run: give it to paceline.train\(callbacks="):
        Recorder().set("ppo.clip", 0.1)


def test_a_run_that_can_be_resumed_has_a_status(here: Path) -> None:
    seen: list[str] = []

    class AtCheckpoint(paceline.Callback):
        def on_checkpoint(self, path: Path) -> None:
            seen.append(json.loads((self.run / "status.json").read_text())["state"])

    paceline.train(
        {"env": "CartPole-v1", "stop": {"iterations": 1}, **SMALL}, preset="none", callbacks=[AtCheckpoint()]
    )
    assert seen == ["running", "running"]
