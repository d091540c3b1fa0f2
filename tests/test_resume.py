"""A run that was cut and continued ends as one that was not: bit for bit where its environments can be brought back."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.api import Run
from paceline.config import RunConfig, UserError
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory

NOTICE = "SIGTERM: saving after this iteration; a second Ctrl-C or a later signal stops at once"
Content = Callable[..., dict[str, Any]]
Rows = Callable[[Path], list[dict[str, Any]]]
BOTH = {"normalize_observation": True, "normalize_reward": True}

# Episodes are in their middle when the rollouts end.
CARTPOLE = {"id": "CartPole-v1", "envs_per_worker": 8, **BOTH}
PENDULUM = {"id": "Pendulum-v1", "envs_per_worker": 4}
TEAMS = Path(__file__).parent / "team_envs.py"
MASKS = Path(__file__).parent / "masked_envs.py"
MASKED = {"id": f"{MASKS}:ByInfo", "envs_per_worker": 4}
CLIP = {"ClipReward": {"min_reward": -0.5}}
RUNS: dict[str, dict[str, Any]] = {
    "vector cartpole": {"env": CARTPOLE},
    "vector cartpole, a2c": {"algo": "a2c", "env": CARTPOLE},
    "scalar cartpole": {"env": {**CARTPOLE, "vector": "sync"}},
    "probe": {"env": {"id": "paceline/DelayedReward-v0", "kwargs": {"delay": 6}, **BOTH}},
    "probe, a2c": {
        "algo": "a2c",
        "env": {"id": "paceline/Identity-v0", "kwargs": {"space": "box", "length": 7}, **BOTH},
    },
    "probe of images": {
        "env": {"id": "paceline/Mixed-v0", "kwargs": {"size": 12, "length": 7}, "normalize_reward": True},
        "engine": {"threads": 1},
    },
    "probe under a limit": {
        "env": {"id": "paceline/TruncationOnly-v0", "kwargs": {"length": 40}, "max_episode_steps": 7},
    },
    "replay": {"env": {**PENDULUM, **BOTH}},
    "replay, squashed": {"env": PENDULUM, "model": {"squash": True, "shared": True}},
    "replay, a2c": {"algo": "a2c", "env": {"id": "Acrobot-v1", **BOTH}, "a2c": {"optimizer": "adam"}},
    "replay of toys": {"env": {"id": "Taxi-v3", "envs_per_worker": 4, "max_episode_steps": 50}},
    "vector cartpole, dqn": {"algo": "dqn", "env": CARTPOLE, "dqn": {"prioritized": True, "n_step": 3, "double": True}},
    "probe of images, dqn": {
        "algo": "dqn",
        "env": {"id": "paceline/ImageSide-v0", "kwargs": {"size": 12, "length": 7}},
        "dqn": {"exploration": "noisy", "dueling": True},
        "engine": {"threads": 1},
    },
    "replay, sac": {"algo": "sac", "env": {"id": "Pendulum-v1", "envs_per_worker": 2, "normalize_reward": True}},
    "replay, td3": {"algo": "td3", "env": {"id": "Pendulum-v1", "envs_per_worker": 1}, "td3": {"n_step": 3}},
    "several agents": {"env": {"id": f"{TEAMS}:Relay", "envs_per_worker": 3, "kwargs": {"steps": 7}, **BOTH}},
    "several agents, dqn": {"algo": "dqn", "env": {"id": f"{TEAMS}:Relay", "envs_per_worker": 3, **BOTH}},
    "several policies": {
        "env": {"id": f"{TEAMS}:Signal", "envs_per_worker": 3, "kwargs": {"steps": 12}, **BOTH},
        "multi_agent": {"policies": {"one": "speaker", "other": "l*"}},
    },
    "several agents, memory": {
        "env": {"id": f"{TEAMS}:Relay", "envs_per_worker": 3, "kwargs": {"steps": 7, "again": 1}},
        "model": {"memory": "lstm", "sequence_length": 5},
    },
    "vector cartpole, memory": {"env": CARTPOLE, "model": {"memory": "lstm", "sequence_length": 10}},
    "probe of images, memory": {
        "env": {"id": "paceline/Mixed-v0", "kwargs": {"size": 12, "length": 7}},
        "model": {"memory": "gru", "memory_size": 8},
        "engine": {"threads": 1},
    },
    "replay, a2c, memory": {"algo": "a2c", "env": PENDULUM, "model": {"memory": "gru"}},
    "vector cartpole, impala, memory": {
        "algo": "impala",
        "env": CARTPOLE,
        "model": {"memory": "lstm"},
        "impala": {"replay_ratio": 0.5, "batch_size": 300},
    },
    "masks": {"env": {**MASKED, **BOTH}},
    "masks, dqn": {"algo": "dqn", "env": {**MASKED, "kwargs": {"ends": "truncate"}}},
    "masks in observations, memory": {
        "algo": "impala",
        "env": {**MASKED, "id": f"{MASKS}:ByKey", "kwargs": {"nvec": [3, 2]}},
        "model": {"memory": "gru"},
    },
    "masks, several agents": {"env": {"id": f"{MASKS}:MaskedTeam", "envs_per_worker": 3}},
    "masks, several policies": {
        "env": {"id": f"{MASKS}:MaskedTeam", "envs_per_worker": 3, "kwargs": {"way": "key"}},
        "multi_agent": {"policies": "each"},
    },
    "replay under wrappers": {"env": {"id": "Acrobot-v1", "frame_stack": 3, "wrappers": [CLIP]}},
}


def settings(kind: str, iterations: int, **changes: Any) -> dict[str, Any]:
    tree = {"seed": 5, "stop": {"iterations": iterations}, **RUNS[kind], **changes}
    algo = tree.get("algo", "ppo")
    sizes: dict[str, Any] = {"rollout_steps": 33}
    if algo == "ppo":
        sizes |= {"minibatch_size": 70, "epochs": 3}
    elif algo == "dqn":  # without schedules: they follow the budget, which is shorter at first
        sizes = {"rollout_steps": 11, "rounds": 3, "gradient_steps": 5, "learning_starts": 150, "replay_size": 800}
        sizes |= {"epsilon_fraction": 0.0, "priority_beta": 1.0, "target_update_every": 7}
    elif algo in ("sac", "td3"):
        sizes = {"rounds": 33, "updates_per_step": 0.7, "learning_starts": 50, "buffer_size": 300, "batch_size": 16}
    return {**tree, algo: {**sizes, **tree.get(algo, {})}}


def train(tree: dict[str, Any], **options: Any) -> Run:
    return paceline.train(tree, preset="none", **options)


def level(run: Run | Path) -> str:
    return str(json.loads((run / "resume.json").read_text())["level"])


@pytest.mark.parametrize("kind", RUNS)
def test_cut_and_continued(kind: str, here: Path, content: Content, stable_rows: Rows) -> None:
    whole = train(settings(kind, 7, name="whole"))
    cut = train(settings(kind, 3, name="cut"))
    running = checkpoint.load(checkpoint.find(cut.path))[1]["engine"]["collectors"][0]
    lengths = checkpoint.load(checkpoint.find(cut.path))[0][running["length"]["$array"]]
    assert (lengths > 0).any(), "no episode is cut in its middle: the test would show nothing"
    again = train({"stop": {"iterations": 7}}, resume=cut.path)
    assert level(again) == "exact" and again.summary["resumed"] == 1
    assert content(whole.path) == content(again.path)
    assert stable_rows(whole.path) == stable_rows(again.path)


def test_cut_twice(here: Path, content: Content, stable_rows: Rows) -> None:
    watch = {"eval": {"every_steps": 500, "episodes": 3}}
    whole = train(settings("replay", 8, name="whole", **watch))
    train(settings("replay", 2, name="cut", **watch))
    train({"stop": {"iterations": 5}}, resume="runs/cut")
    again = train({"stop": {"iterations": 8}}, resume="runs/cut")
    assert again.summary["resumed"] == 2 and level(again) == "exact"
    assert content(whole.path) == content(again.path) and content(whole.path, "best") == content(again.path, "best")
    assert stable_rows(whole.path) == stable_rows(again.path)
    assert _evaluations(whole) == _evaluations(again) and len(_evaluations(whole)) == 2
    assert whole.summary["best_return"] == again.summary["best_return"]


def test_a_replay_on_disk(here: Path, content: Content) -> None:
    """It is in a file of the run. What was written there after the last checkpoint is not what was there before."""
    changes: dict[str, Any] = {"replay": "disk", "replay_size": 480}
    tree = settings("vector cartpole, dqn", 7)
    tree["dqn"] = {**tree["dqn"], **changes}
    whole = train({**tree, "name": "whole"})
    cut = train({**tree, "name": "cut", "stop": {"iterations": 3}, "checkpoint": {"every_iterations": 1, "keep": 9}})
    assert (cut / "replay/observations.npy").stat().st_size > 480 * 16
    shutil.copytree(cut.path, "runs/killed", symlinks=True)
    again = train({"stop": {"iterations": 7}}, resume=cut.path)
    assert level(again) == "exact" and content(whole.path) == content(again.path)
    # As if it had been killed after the third iteration, before that was saved.
    second = sorted(checkpoint.available("runs/killed"))[-2]
    late = train({"stop": {"iterations": 4}}, resume=f"runs/killed/checkpoints/step-{second}")
    assert "33 x 8 are lost" in (late / "logs/events.log").read_text() and level(late) == "partial"
    assert late.summary["iterations"] == 4


def _evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "eval_seconds"} for row in run.read_eval()]


def test_processes_of_environments(here: Path, content: Content) -> None:
    env = {**RUNS["replay"]["env"], "vector": "async", "processes": 2}
    whole = train(settings("replay", 5, name="whole"))
    train(settings("replay", 2, name="cut", env=env))
    again = train({"stop": {"iterations": 5}}, resume="runs/cut")
    assert level(again) == "exact"
    mine, theirs = content(whole.path), content(again.path)
    assert {k: v for k, v in mine.items() if k.startswith("engine.algorithm")} == {
        k: v for k, v in theirs.items() if k.startswith("engine.algorithm")
    }


@pytest.fixture
def ignored() -> Iterator[None]:
    """A signal that comes too late must not end the tests."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", ["vector cartpole", "probe", "replay", "vector cartpole, a2c"])
def test_told_to_stop(kind: str, here: Path, ignored: None, content: Content, stable_rows: Rows) -> None:
    """With a schedule over the whole budget, which a shorter run would not have."""
    algo = RUNS[kind].get("algo", "ppo")
    tree = settings(kind, 40)
    tree[algo] = {**tree[algo], "learning_rate_schedule": "linear"}
    whole = train({**tree, "name": "whole"})

    def end_early(loop: Any) -> None:
        if loop.counters.iteration == 15:
            os.kill(os.getpid(), signal.SIGTERM)

    cut = train({**tree, "name": "cut"}, watch=end_early)
    assert cut.outcome.status == "stopped" and cut.outcome.exit_code == 99 and "SIGTERM" in cut.outcome.reason
    before = cut.summary
    assert 15 <= before["iterations"] < 40 and cut.read_status()["state"] == before["status"] == "stopped"
    again = train({}, resume=cut.path)
    assert again.outcome.status == "done" and level(again) == "exact"
    assert content(whole.path) == content(again.path)
    assert stable_rows(whole.path) == stable_rows(again.path)
    assert again.summary["time_split"]["start"] > before["time_split"]["start"]
    assert sum(again.summary["time_split"].values()) == pytest.approx(again.summary["wall_seconds"], rel=0.01)
    assert again.summary["wall_seconds"] > before["wall_seconds"]


# -- processes that end -----------------------------------------------------------------------------------------------


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}: {process.communicate()}")


def words(tree: dict[str, Any]) -> list[str]:
    """The settings as a user gives them: some in a file."""
    Path("settings.yaml").write_text(json.dumps(tree))
    return ["train", "--config", "settings.yaml", "--preset", "none"]


def test_a_terminated_process(
    here: Path, start: Callable[..., Any], cli: Callable[..., Any], content: Content, stable_rows: Rows
) -> None:
    tree = settings("vector cartpole", 80)
    whole = train({**tree, "name": "whole"})
    process = start(*words(tree), "--name", "cut")
    wait_for(process, "Iteration 20 ")
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 99 and err.split() == NOTICE.split()
    assert "stopped: SIGTERM received" in out and "continue   paceline train --resume runs/cut\n" in out
    result = cli("train", "--resume", "runs/cut")
    assert result.code == 0 and "environments exact" in result.out
    assert content(whole.path) == content(here / "runs" / "cut")
    assert stable_rows(whole.path) == stable_rows(here / "runs" / "cut")


@pytest.mark.parametrize("kind", ["vector cartpole", "replay"])
def test_a_killed_process(
    kind: str, here: Path, start: Callable[..., Any], cli: Callable[..., Any], content: Content, stable_rows: Rows
) -> None:
    tree = settings(
        kind, 60, checkpoint={"every_iterations": 2, "every_seconds": 0}, eval={"every_steps": 1500, "episodes": 2}
    )
    whole = train({**tree, "name": "whole"})
    again = ["--name", "cut", "--resume", "auto"]  # as a scheduler starts it, again and again
    for early in (4, 32):
        process = start(*words(tree), *again)
        wait_for(process, f"Iteration {random.randrange(early, early + 20)} ")
        time.sleep(random.uniform(0, 0.03))
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
        wrote, saved = _reached(here / "runs" / "cut")
        assert 0 <= wrote - saved <= 3, (wrote, saved)
    result = cli(*words(tree), *again)
    assert result.code == 0 and "environments exact" in result.out, result
    run = RunDirectory(here / "runs" / "cut")
    assert content(whole.path) == content(run.path)
    assert stable_rows(whole.path) == stable_rows(run.path)
    assert _evaluations(whole) == _evaluations(run)
    assert [int(row["iteration"]) for row in _table(run)] == list(range(1, 61))


def _reached(run: Path) -> tuple[int, int]:
    wrote = RunDirectory(run).read_metrics()[-1]["iteration"]
    return wrote, checkpoint.load(checkpoint.find(run, "last"))[1]["loop"]["counters"]["iteration"]


def _table(run: RunDirectory) -> list[dict[str, str]]:
    with run.progress_path.open() as file:
        return list(csv.DictReader(file))


def test_killed_before_its_first_checkpoint(here: Path, cli: Callable[..., Any]) -> None:
    """`--resume auto` starts it anew; a user who asks for that run is told."""
    run = train({"env": "CartPole-v1", "stop": {"iterations": 1}, "name": "x"})
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "progress.csv", "summary.json", "status.json"):
        (run / name).unlink()
    assert cli("train", "--resume", run.path).code == 2
    assert cli("train", "--name", "x").code == 2
    result = cli("train", "--name", "x", "--resume", "auto", "--iterations", 2, "--quiet")
    assert result.code == 0 and [row["iteration"] for row in run.read_metrics()] == [1, 2]
    assert run.summary["resumed"] == 0


# -- environments that cannot be brought back -------------------------------------------------------------------------

OPAQUE = """
    import gymnasium
    import numpy as np

    class Env(gymnasium.Env):
        \"\"\"What is seen depends on all steps since the env was made: an episode cannot be replayed.\"\"\"

        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, strict=False):
            self.strict, self.age, self.ended = strict, 0, True

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.ended = False
            return self.see(), {}

        def see(self):
            return np.array([np.sin(self.age), self.np_random.uniform(-1, 1)], np.float32)

        def step(self, action):
            if self.strict and self.ended:
                raise RuntimeError("this episode is over")
            self.age += 1
            self.ended = self.age % 23 == 0
            return self.see(), float(action), self.ended, False, {}
"""


@pytest.mark.parametrize("strict", [False, True])
def test_restarted(strict: bool, here: Path, cli: Callable[..., Any], content: Content) -> None:
    Path("opaque.py").write_text(textwrap.dedent(OPAQUE))
    env = {"id": "opaque.py:Env", "kwargs": {"strict": strict}, "envs_per_worker": 4, **BOTH}
    watch = {"eval": {"every_steps": 200, "episodes": 2}}
    run = train(settings("probe", 4, env=env, name="a", **watch))
    at_cut = content(run.path)
    old = here / "old"
    shutil.copytree(run / "checkpoints", old, symlinks=True)
    rows = run.read_metrics()

    # As if the run had gone on for some iterations after its last checkpoint.
    train({"stop": {"iterations": 7}}, resume=run.path)
    assert len(run.read_metrics()) == 7 and run.read_eval()[-1]["iteration"] > 4
    shutil.rmtree(run / "checkpoints")
    old.rename(run / "checkpoints")
    shutil.copytree(run.path, "runs/b", symlinks=True)

    result = cli("train", "--resume", "runs/a", "--iterations", 4)
    assert result.code == 0 and "environments restarted" in result.out and level(run) == "restarted"
    now = content(run.path)
    for name, value in at_cut.items():
        if name.startswith("engine.algorithm"):
            assert now[name] == value, name
    assert now["engine"]["algorithm"] == at_cut["engine"]["algorithm"] and now["loop"] == at_cut["loop"]
    assert now["engine"]["collectors"][0]["rng"] == at_cut["engine"]["collectors"][0]["rng"]
    assert now["engine.collectors.0.length"] != at_cut["engine.collectors.0.length"]  # unfinished episodes were dropped
    assert set(now["engine.collectors.0.length"][2]) == {0}
    assert [row["env_steps"] for row in run.read_metrics()] == [row["env_steps"] for row in rows]
    assert len(_table(run)) == 4 and all(row["iteration"] <= 4 for row in run.read_eval())

    # From the same cut the same way: a and b are one resume apart, so take b twice.
    shutil.copytree("runs/b", "runs/c", symlinks=True)
    b, c = (train({"stop": {"iterations": 8}}, resume=f"runs/{name}") for name in "bc")
    assert content(b.path) == content(c.path) and b.summary["iterations"] == 8
    steps = [row["env_steps"] for row in b.read_metrics()]
    assert steps[:4] == [row["env_steps"] for row in rows] and steps == sorted(steps)
    assert steps[4] - steps[3] <= 4 * 33 and b.summary["episodes"] >= rows[-1]["episodes"]
    assert [row["iteration"] for row in b.read_metrics()] == list(range(1, 9))


def test_restarted_environments_have_a_stream_of_their_own(here: Path) -> None:
    """Not the one of the first start again: the agent would see the same beginnings twice."""
    Path("opaque.py").write_text(textwrap.dedent(OPAQUE))
    env = {"id": "opaque.py:Env", "envs_per_worker": 4}
    run = train(settings("probe", 1, env=env, name="a"))
    first = checkpoint.load(checkpoint.find(run.path, "0"))[0]["engine.collectors.0.obs"]
    train({}, resume=run.path)
    second = checkpoint.load(checkpoint.find(run.path))[0]["engine.collectors.0.obs"]
    assert (first[:, 1] != second[:, 1]).all()


# -- what may be said when continuing ---------------------------------------------------------------------------------


def test_the_same_command_again(here: Path, cli: Callable[..., Any]) -> None:
    """`--resume auto` is added to a command that says everything."""
    line = "train --env CartPole-v1 --algo ppo --seed 0 --envs-per-worker 8 --name x --out runs --resume auto --quiet"
    sets = ["ppo.rollout_steps=3.2e1", "ppo.minibatch_size=64", "model.hidden=[8, 8]", "env.normalize_reward=true"]
    full = [*line.split(), *(word for item in sets for word in ("--set", item)), "--iterations"]
    assert cli(*full, 2).code == 0
    assert cli(*full, 4).code == 0
    run = RunDirectory(Path("runs/x"))
    assert run.read_summary()["resumed"] == 1 and len(run.read_metrics()) == 4
    assert run.read_config()["stop"]["iterations"] == 4
    assert cli(*full, 4, "--init-from", "runs/x").code == 0  # it was for the start


def test_a_file_of_the_user_from_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("opaque.py").write_text(textwrap.dedent(OPAQUE))
    tree = settings("probe", 1, env={"id": "opaque.py:Env"}, name="x", out=str(here / "runs"))
    train(tree)
    train({**tree, "stop": {"iterations": 2}}, resume="auto")
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    run = train({"stop": {"iterations": 3}}, resume=here / "runs" / "x")
    assert run.summary["iterations"] == 3
    with pytest.raises(UserError, match=r"env\.id=.*sub/opaque\.py:Env differs"):
        train({**tree, "stop": {"iterations": 4}}, resume="auto")


def test_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    for iterations in (1, 2):
        tree = {"out": "~/runs", "name": "x", "env": "CartPole-v1", "stop": {"iterations": iterations}}
        train(tree, resume="auto")
    assert RunDirectory(here / "runs" / "x").read_summary()["resumed"] == 1


def test_a_config_object(here: Path) -> None:
    config = RunConfig.model_validate({"name": "x", "stop": {"iterations": 1}})
    paceline.train(config)
    more = RunConfig.model_validate({"name": "x", "stop": {"iterations": 2}})
    assert paceline.train(more, resume="auto").summary["iterations"] == 2
    with pytest.raises(UserError, match="seed=3 differs"):
        paceline.train(RunConfig.model_validate({"seed": 3}), resume="runs/x")


def test_a_failed_attempt_lets_go_of_the_run(here: Path) -> None:
    run = train({"env": "CartPole-v1", "stop": {"iterations": 1}, "name": "x"})
    state = checkpoint.find(run.path) / "state.json"
    good = state.read_bytes()
    state.write_bytes(good[:100])
    for _ in range(2):
        with pytest.raises(UserError, match=r"state\.json is cut short"):
            train({}, resume=run.path)
    state.write_bytes(good)
    assert train({"stop": {"iterations": 2}}, resume=run.path).summary["iterations"] == 2


def test_a_finished_run_has_nothing_to_do(here: Path, content: Content, stable_rows: Rows) -> None:
    run = train(settings("vector cartpole", 3, name="x"))
    before, rows = content(run.path), stable_rows(run.path)
    again = train({}, resume=run.path)
    assert again.outcome.exit_code == 0 and content(run.path) == before and stable_rows(run.path) == rows


def test_a_moved_run(here: Path, content: Content) -> None:
    whole = train(settings("vector cartpole", 4, name="whole"))
    train(settings("vector cartpole", 2, name="cut"))
    Path("archive").mkdir()
    Path("runs/cut").rename("archive/moved")
    again = train({"stop": {"iterations": 4}}, resume="archive/moved")
    assert again.path == Path("archive/moved") and content(whole.path) == content(again.path)
    assert not Path("runs/cut").exists()


def test_from_an_earlier_checkpoint(here: Path, content: Content) -> None:
    """The rows after it are cut, and the way from there is the same."""
    config = {"env": "CartPole-v1", "stop": {"iterations": 6}, "checkpoint": {"every_iterations": 2}, "out": "runs"}
    run = paceline.train({**config, "name": "whole"})
    before = content(run.path)
    earlier = sorted(run.checkpoints_path.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))[-2]
    again = paceline.train({}, resume=earlier)
    assert again.summary["resumed"] == 1 and len(again.read_metrics()) == 6
    assert content(again.path) == before
