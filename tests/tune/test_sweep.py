"""`paceline tune` with real trials, on a local Ray cluster."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.config.resolve import read_file, resolve_tree, to_yaml
from paceline.run.directory import RunDirectory
from paceline.tune.sweep import run_sweep
from paceline.tune.sweep_plan import Sweep, load_sweep, make_sweep
from paceline.tune.tune_command import run_tune

Cli = Callable[..., Any]

# A step of 4 environments takes 5 ms. With `breaks` the environment raises in the middle of training.
ENV = """
import time
import gymnasium, numpy as np

class Paying(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, pay=1.0, breaks=False):
        self.pay, self.breaks, self.total = pay, breaks, 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        time.sleep(0.00125)
        self.steps += 1
        self.total += 1
        if self.breaks and self.total > 60:
            raise RuntimeError("the simulator is gone\\nsecond line")
        return np.zeros(2, np.float32), self.pay, self.steps >= 10, False, {}
"""
SMALL = [
    "--preset",
    "none",
    "--envs-per-worker",
    "4",
    "--set",
    "ppo.rollout_steps=16",
    "--set",
    "ppo.minibatch_size=64",
]
SMALL += ["--set", "ppo.epochs=1", "--parallel", "2", "--out", ".", "--name", "s"]


@pytest.fixture
def paying(here: Path) -> list[str]:
    (here / "own.py").write_text(ENV)
    return ["--env", "own.py:Paying", *SMALL]


def rows() -> dict[str, dict[str, str]]:
    try:
        with Path("s/trials.csv").open() as file:
            return {row["name"]: row for row in csv.DictReader(file)}
    except FileNotFoundError:
        return {}


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 200) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, rows()
        time.sleep(0.05)


def named(status: str) -> list[str]:
    return [name for name, row in rows().items() if row["status"] == status]


def count(status: str) -> int:
    return len(named(status))


def space_of_eight() -> None:
    pays = ", ".join("{breaks: true}" if i == 3 else f"{{pay: {i + 1}}}" for i in range(8))
    Path("space.yaml").write_text(f"env.kwargs: [{pays}]\n")


def done_runs() -> dict[str, float]:
    return {name: Path(f"s/{name}/metrics.jsonl").stat().st_mtime for name in named("done")}


def test_eight_trials_one_broken_interrupted_and_resumed(
    paying: list[str], start: Callable[..., Any], cli: Cli
) -> None:
    space_of_eight()
    process = start("tune", "--space", "space.yaml", "--total-steps", "1000", *paying)
    wait_for(lambda: count("done") >= 2 and count("failed") == 1, process)
    wait_for(lambda: any(Path(f"s/{name}/metrics.jsonl").exists() for name in named("running")), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 99 and "continue   paceline tune --resume" in out, out + err
    first = done_runs()
    stopped = {name: int(row["steps"]) for name, row in rows().items() if row["status"] == "stopped"}
    assert stopped and max(stopped.values()) > 0 and "SIGTERM: saving" in err

    done = cli("tune", "--resume", "s")
    assert done.code == 0, done.out + done.err
    table = rows()
    assert len(table) == 8 and count("done") == 7 and count("failed") == 1
    broken = table["3-seed0"]
    assert broken["error"] == "RuntimeError: the simulator is gone" and "3-seed0" in done.out
    assert "second line" in Path("s/logs/3-seed0.txt").read_text()
    assert {name: when for name, when in done_runs().items() if name in first} == first
    summaries = {name: RunDirectory(Path("s") / name).read_summary() for name in table if name != "3-seed0"}
    assert all(s["status"] == "done" and s["env_steps"] >= 1000 for s in summaries.values())
    assert all(summaries[name]["resumed"] == 1 for name in stopped if stopped[name])
    assert float(table["6-seed0"]["return"]) == 70.0
    best, _ = resolve_tree(read_file("s/best.yaml"))
    assert best.env.kwargs == {"pay": 8} and best.stop.total_steps == 1000 and best.env.envs_per_worker == 4
    assert Path("s/trials.png").stat().st_size > 10_000 and "7-seed0  done" in Path("s/trials.txt").read_text()
    assert sorted(p.name for p in Path("s").glob(".*")) == [".lock"]
    again = cli("tune", "--resume", "s")
    assert again.code == 0 and "0 to run" in again.out


@pytest.mark.faults
def test_a_killed_search_can_be_continued(paying: list[str], start: Callable[..., Any], cli: Cli) -> None:
    space_of_eight()
    budget = ["--total-steps", "1000", "--set", "checkpoint.every_iterations=2"]
    process = start("tune", "--space", "space.yaml", *budget, *paying)
    wait_for(lambda: count("done") >= 1 and count("running") >= 1, process)
    process.kill()
    process.communicate()
    first = done_runs()
    done = cli("tune", "--resume", "s")
    assert done.code == 0 and count("done") == 7 and count("failed") == 1, done.out + done.err
    assert first and {name: when for name, when in done_runs().items() if name in first} == first


def test_asha_stops_bad_trials_and_seeds_are_averaged(paying: list[str], cli: Cli) -> None:
    Path("space.yaml").write_text("env.kwargs: [{pay: 4.0}, {pay: 3.0}, {pay: 2.0}]\n")
    words = ["--search", "asha", "--interval", "200", "--seeds", "2", "--total-steps", "700"]
    done = cli("tune", "--space", "space.yaml", *words, *paying)
    assert done.code == 0, done.out + done.err
    table = rows()
    assert table["0-seed0"]["status"] == "done" and table["2-seed1"]["status"] == "stopped early", done.out
    assert 200 <= int(table["2-seed1"]["steps"]) < 700
    assert RunDirectory(Path("s/2-seed1")).read_status()["reason"] == "stopped by the search"
    assert "mean return_mean" in done.out and "best       return_mean 40: env.kwargs={'pay': 4.0}" in done.out


def test_a_population_takes_over_weights(here: Path, cli: Cli) -> None:
    """The members with the smallest learning rates get other weights and settings, and continue from there."""
    Path("space.yaml").write_text("ppo.learning_rate: {log: [1e-9, 1e-2]}\n")
    words = ["--search", "pbt", "--trials", "4", "--interval", "1500", "--total-steps", "6000", "--seed", "1"]
    done = cli("tune", "--env", "CartPole-v1", "--space", "space.yaml", *words, *SMALL)
    assert done.code == 0 and done.out.count("takes over weights") >= 1, done.out + done.err
    logs = [path.read_text() for path in Path("s").glob("*/logs/events.log")]
    assert any("weights of " in text for text in logs)
    for name, row in rows().items():
        run = RunDirectory(Path("s") / name)
        assert row["status"] == "done" and run.read_config()["ppo"]["learning_rate"] == float(row["ppo.learning_rate"])
        lines = run.read_metrics()
        assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
        assert lines[-1]["env_steps"] >= 6000
    assert json.loads(Path("s/tune.json").read_text())["search"] == "pbt"


@pytest.mark.parametrize("begun", [False, True])
def test_only_a_search_that_has_not_begun_is_removed(begun: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(sweep: Sweep, *_: Any) -> None:
        sweep.trials[0].status = "done" if begun else "pending"
        raise UserError("late")

    monkeypatch.setattr("paceline.tune.sweep._run", run)
    with pytest.raises(UserError, match="late"):
        run_sweep(new_sweep(here / "s", search="grid", trials=None))
    assert Path("s/tune.json").exists() is begun


def test_a_member_continues_with_the_settings_of_its_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search was killed after the member took over other settings, before `tune.json` had them."""
    made = new_sweep(here / "s", search="pbt", trials=4)
    config, _ = resolve_tree(made.tree(made.trials[1], {"ppo.gamma": 0.95}))
    for trial in made.trials[:2]:
        (made.folder / trial.name).mkdir(parents=True)
    RunDirectory(made.folder / made.trials[0].name).config_path.write_text("{")
    RunDirectory(made.folder / made.trials[1].name).config_path.write_text(to_yaml(config))
    before = [dict(trial.values) for trial in made.trials]
    monkeypatch.setattr("paceline.tune.sweep._run", lambda *_: "stopped before its first trial")
    assert run_sweep(made, new=False) == 99
    assert [t.values for t in load_sweep(made.folder).trials] == [before[0], {"ppo.gamma": 0.95}, *before[2:]]


def new_sweep(folder: Path, **asked: Any) -> Sweep:
    given = {"env": "CartPole-v1", "stop": {"total_steps": 1000}}
    return make_sweep(folder, given, {"ppo.gamma": [0.9, 0.99]}, **asked)


def test_retry_needs_resume(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("space.yaml").write_text("ppo.gamma: [0.9, 0.99]\n")
    monkeypatch.setattr("paceline.tune.sweep._run", lambda *_: "stopped before its first trial")
    options: dict[str, Any] = {"preset": None, "parallel": None, "gpus": 0.0, "stop_after": None, "retry": True}
    given, asked = {"env": "CartPole-v1", "out": ".", "name": "s"}, {"space": "space.yaml"}
    with pytest.raises(UserError, match="--retry"):
        run_tune(given, asked=asked, resume=None, **options)
    assert run_tune(given, asked=asked, resume="auto", **options) == 99


def test_bad_input_writes_nothing(here: Path, cli: Cli) -> None:
    Path("bad.yaml").write_text("ppo.lr: [1, 2]\n")
    Path("good.yaml").write_text("ppo.gamma: [0.9, 0.99]\n")
    good = ["--space", "good.yaml"]
    for words in (
        ["--space", "bad.yaml"],
        [],
        [*good, "--env", "None-v0"],
        [*good, "--gpus", "nan"],
        ["--resume", "x"],
    ):
        done = cli("tune", *words)
        assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert not Path("runs").exists()
