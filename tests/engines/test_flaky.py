"""Runs with simulators that fail now and then: they go on, count the failures and show the first one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.run import checkpoint

ODD = Path(__file__).parents[1] / "odd_envs.py"
Cli = Callable[..., Any]
ALGORITHMS = {
    "ppo": {"ppo.rollout_steps": 32, "ppo.minibatch_size": 64},
    "a3c": {"a3c.rollout_steps": 16},
    "impala": {"impala.rollout_steps": 16, "impala.batch_size": 128},
    "dqn": {"dqn.rollout_steps": 4, "dqn.learning_starts": 100, "dqn.n_step": 3, "dqn.prioritized": "true"},
}


def words(algo: str, *, rate: float, how: str = "raise", **sets: Any) -> list[str]:
    kwargs = f"{{rate: {rate}, how: {how}, length: 60}}"
    settings = {"env.id": f"{ODD}:Flaky", "env.kwargs": kwargs, "env.envs_per_worker": 4, **ALGORITHMS[algo], **sets}
    line = ["train", "--algo", algo, "--preset", "none", "--name", "x"]
    return line + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_run_in_one_process(algo: str, here: Path, cli: Cli) -> None:
    result = cli(*words(algo, rate=0.02, **{"env.restart_on_error": 5}), "--total-steps", 3000)
    assert result.code == 0, result.err
    run = paceline.api.RunDirectory(here / "runs/x")
    rows, summary = run.read_metrics(), run.read_summary()
    assert 20 < summary["env_restarts"] < 150 and rows[-1]["env_restarts"] == summary["env_restarts"]
    assert sum(row["env_restarts"] > 0 for row in rows) > 3
    assert rows[-1]["return_min"] == 60  # no half episode is reported
    assert result.out.count("an environment failed and was started again") == 1
    assert "RuntimeError: the simulator exploded" in result.out and "Traceback" not in result.out + result.err
    line = next(line for line in reversed(result.out.splitlines()) if line.startswith("Iteration"))
    assert line.count(f" {summary['env_restarts']} env restart(s)") == 1
    assert f"{summary['env_restarts']} environment(s) failed and were started again" in result.out
    assert (run.logs_path / "env_error.txt").read_text().count("Traceback") == 1
    assert (run.logs_path / "events.log").read_text().count("exploded") == 1


def test_evaluations_go_on_and_count(here: Path, cli: Cli) -> None:
    sets = {"env.restart_on_error": 5, "eval.every_steps": 300, "eval.episodes": 8, "stop.total_steps": 700}
    assert cli(*words("ppo", rate=0.004, **sets)).code == 0
    run = paceline.api.RunDirectory(here / "runs/x")
    assert [row["length_mean"] for row in run.read_eval()] == [60.0] * 2
    assert run.read_summary()["env_restarts"] > 1  # of 700 steps of training and 960 and more of evaluation
    result = cli("evaluate", run.path, "--episodes", 20)
    assert result.code == 0 and "environment(s) failed and were started again" in result.out, result.err


def test_by_default_an_error_in_one_process_ends_the_run(here: Path, cli: Cli) -> None:
    result = cli(*words("ppo", rate=0.02), "--total-steps", 3000)
    assert result.code == 1 and "the simulator exploded" in result.err


def test_processes_are_replaced_by_default(here: Path, cli: Cli) -> None:
    sets = {"env.vector": "async", "env.processes": 2, "env.step_timeout_seconds": 2}
    result = cli(*words("ppo", rate=0.003, how="exit", **sets), "--total-steps", 3000)
    assert result.code == 0, result.err
    run = paceline.api.RunDirectory(here / "runs/x")
    assert run.read_summary()["env_restarts"] >= 2 and "exit code 7" in result.out


def test_an_environment_that_always_fails_ends_the_run(here: Path, cli: Cli) -> None:
    result = cli(*words("ppo", rate=1.0, **{"env.restart_on_error": 2}), "--total-steps", 3000)
    assert result.code == 1 and "failed 3 times in a row" in result.err and "exploded" in result.err
    assert json.loads((here / "runs/x/status.json").read_text())["state"] == "failed"


def test_the_count_goes_on_after_a_resume(here: Path, cli: Cli) -> None:
    """Exactly, though the simulator also fails now and then while its episodes are played again."""
    settings = {"env.restart_on_error": 30}
    assert cli(*words("ppo", rate=0.02, **settings), "--iterations", 4).code == 0
    run = paceline.api.RunDirectory(here / "runs/x")
    before = run.read_summary()["env_restarts"]
    arrays, tree = checkpoint.load(checkpoint.find(run.path, "last"))
    assert before > 0 and arrays and tree["loop"]["counters"]["env_restarts"] == before
    assert cli("train", "--resume", run.path, "--iterations", 8).code == 0
    assert run.read_summary()["env_restarts"] > before
    assert '"exact"' in (run.path / "resume.json").read_text()
