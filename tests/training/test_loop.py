"""Complete runs: the files they leave, when they stop, and that the same seed gives the same run."""

from __future__ import annotations

import csv
import json
import math
import re
import resource
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.api import Run
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory
from paceline.run.metrics import METRICS
from paceline.training.signals import BURST_SECONDS
from paceline.training.stopping import DEADLINE_SECONDS

SMALL = {"env": {"id": "CartPole-v1", "envs_per_worker": 8}, "ppo": {"rollout_steps": 32, "minibatch_size": 64}}
FILES = "config.yaml provenance.json status.json metrics.jsonl progress.csv summary.json checkpoints tb logs videos"
SUMMARY = (
    "status algo env engine workers nodes seed env_steps iterations episodes wall_seconds train_seconds "
    "steps_per_second time_split return_mean return_std length_mean best_return optimizer_steps peak_memory_bytes "
    "cpu_percent resumed"
)
Rows = Callable[[Path], list[dict[str, Any]]]


def small(**changes: Any) -> dict[str, Any]:
    """Settings for a run of less than a second."""
    return {**SMALL, "seed": 1, **changes}


def train(**changes: Any) -> Run:
    return paceline.train(small(**changes), preset="none")


# -- determinism ------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "a2c": {"algo": "a2c", "ppo": None},
    "normalised": {"env": {**SMALL["env"], "normalize_observation": True, "normalize_reward": True}},
    "continuous": {"env": {"id": "Pendulum-v1"}, "model": {"shared": True}},
    "scalar": {"env": {**SMALL["env"], "vector": "sync"}},
    "image": {"env": {"id": "paceline/ImageSide-v0", "kwargs": {"size": 12}}, "engine": {"threads": 1}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_run(
    kind: str, here: Path, stable_rows: Rows, content: Callable[..., dict[str, Any]]
) -> None:
    settings = {"stop": {"iterations": 4}, "eval": {"every_steps": 256, "episodes": 3}, "checkpoint": {"keep": 9}}
    settings |= KINDS[kind]
    first = train(name="first", engine={"name": "local", **settings.get("engine", {})}, **_without(settings, "engine"))
    again = train(name="again", **settings)
    other = train(name="other", **{**settings, "seed": 2})
    assert stable_rows(first.path) == stable_rows(again.path)
    assert content(first.path) == content(again.path) and content(first.path, "0") == content(again.path, "0")
    assert stable_rows(first.path) != stable_rows(other.path)
    assert content(first.path, "0") != content(other.path, "0")
    unlike = {"eval_seconds"}
    assert [_without(row, *unlike) for row in first.read_eval()] == [
        _without(row, *unlike) for row in again.read_eval()
    ]


def _without(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


def test_another_process_gives_the_same_run(
    here: Path, command: Callable[..., Any], stable_rows: Rows, content: Callable[..., dict[str, Any]]
) -> None:
    line = "--preset none --seed 1 --iterations 3 --envs-per-worker 8 --quiet --name other --engine local"
    sets = [word for key in ("rollout_steps=32", "minibatch_size=64") for word in ("--set", f"ppo.{key}")]
    assert command("train", *line.split(), *sets).code == 0
    own = train(stop={"iterations": 3}, name="own")
    assert stable_rows(own.path) == stable_rows(here / "runs" / "other")
    assert content(own.path) == content(here / "runs" / "other")


def test_evaluation_does_not_disturb_the_training(here: Path, content: Callable[..., dict[str, Any]]) -> None:
    plain = train(stop={"iterations": 4})
    watched = train(stop={"iterations": 4}, eval={"every_steps": 1, "episodes": 2, "stochastic": True})
    assert len(watched.read_eval()) == 4
    assert content(plain.path)["engine.algorithm.policy.net.policy.0.weight"]
    mine, theirs = content(plain.path), content(watched.path)
    assert _without(mine, "loop") == _without(theirs, "loop")


# -- what a run leaves ------------------------------------------------------------------------------------------------


def test_the_files_of_a_run(here: Path) -> None:
    run = train(stop={"total_steps": 1500}, name="x")
    assert run.path == Path("runs/x")
    names = {p.name for p in run.path.iterdir()}
    assert names >= set(FILES.split())
    summary = json.loads((run / "summary.json").read_text())
    assert set(SUMMARY.split()) <= summary.keys() and summary == run.summary
    rows = run.read_metrics()
    last = rows[-1]
    assert summary["status"] == run.read_status()["state"] == "done" and run.outcome.exit_code == 0
    assert (summary["algo"], summary["env"], summary["engine"]) == ("ppo", "CartPole-v1", "local")
    assert (summary["workers"], summary["nodes"], summary["seed"], summary["resumed"]) == (1, 1, 1, 0)
    assert summary["env_steps"] == last["env_steps"] and summary["iterations"] == last["iteration"] == len(rows)
    assert summary["episodes"] == last["episodes"] and summary["optimizer_steps"] == last["optimizer_steps"]
    assert summary["return_mean"] == last["return_mean"] and summary["length_mean"] == last["length_mean"]
    assert last["env_steps"] >= 1500 and rows[-2]["env_steps"] < 1500
    assert summary["peak_memory_bytes"] > 50e6 and summary["cpu_percent"] > 0 and summary["best_return"] is None
    rate = summary["env_steps"] / summary["train_seconds"]
    assert summary["steps_per_second"] == pytest.approx(rate)
    assert not [p for p in run.path.rglob("*") if ".tmp" in p.name]


def test_rows(here: Path) -> None:
    run = train(stop={"iterations": 6})
    rows = run.read_metrics()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) <= set(METRICS) for row in rows)
    steps = [row["env_steps"] for row in rows]
    assert all(0 < b - a <= 256 for a, b in zip([0, *steps], steps, strict=False))
    # Every slot of a rollout is a step, except the one after each episode, which only resets.
    assert 6 * 256 - rows[-1]["episodes"] <= steps[-1] <= 6 * 256 - rows[-1]["episodes"] + 8
    assert [row["optimizer_steps"] for row in rows] == [40 * n for n in range(1, 7)]  # 10 epochs of 4 minibatches
    for row in rows:
        assert row["return_min"] <= row["return_mean"] <= row["return_max"]
        assert row["return_mean"] == row["length_mean"]  # CartPole pays 1 a step
        assert math.isfinite(row["total_loss"]) and row["learning_rate"] == 3e-4
    with (run / "progress.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["return_mean"]) for line in table] == [row["return_mean"] for row in rows]


@pytest.mark.parametrize("kind", ["ppo", "a2c", "scalar"])
def test_the_time_adds_up(kind: str, here: Path) -> None:
    run = train(stop={"iterations": 30}, eval={"every_steps": 1000}, checkpoint={"every_iterations": 10}, **KINDS[kind])
    summary = run.summary
    split = summary["time_split"]
    assert sum(split.values()) == pytest.approx(summary["wall_seconds"])
    assert all(split[part] > 0 for part in ("start", "env", "act", "learn", "eval", "save")), split
    assert all(seconds >= 0 for seconds in split.values())
    assert summary["train_seconds"] == pytest.approx(summary["wall_seconds"] - split["start"])
    for row in run.read_metrics():
        times = [value for name, value in row.items() if name.startswith("time_")]
        assert sum(times) == pytest.approx(row["wall_seconds"])


def test_linear_schedules_end_near_zero(here: Path) -> None:
    ppo = {**SMALL["ppo"], "learning_rate_schedule": "linear", "clip_schedule": "linear"}
    rows = train(stop={"iterations": 5}, ppo=ppo).read_metrics()
    assert [row["learning_rate"] for row in rows] == pytest.approx([3e-4 * (1 - k / 5) for k in range(5)])
    assert [row["clip"] for row in rows] == pytest.approx([0.2 * (1 - k / 5) for k in range(5)])


# -- when it stops ----------------------------------------------------------------------------------------------------


def test_iterations_and_steps_whichever_comes_first(here: Path) -> None:
    run = train(stop={"iterations": 3, "total_steps": 10_000})
    assert run.summary["iterations"] == 3 and "3 of 3 iterations" in run.outcome.reason
    run = train(stop={"iterations": 300, "total_steps": 600})
    assert run.summary["iterations"] == 3 and "of 600 steps" in run.outcome.reason


def test_time(here: Path) -> None:
    run = train(stop={"max_time": "0.3s"})
    *before, _ = [row["train_seconds"] for row in run.read_metrics()]
    assert run.summary["train_seconds"] >= 0.3 and "0.3 s are over" in run.outcome.reason
    assert all(seconds < 0.3 for seconds in before), "it goes on after its time"
    assert run.outcome.status == "done" and run.outcome.exit_code == 0


def test_a_return_that_is_confirmed(here: Path) -> None:
    stop = {"return_mean": 60, "total_steps": 60_000, "return_window": 10, "confirm_episodes": 7}
    run = paceline.train({"env": "CartPole-v1", "seed": 3, "stop": stop})
    assert run.summary["env_steps"] < 60_000, "not learned"
    (*_, confirmation) = run.read_eval()
    assert confirmation["episodes"] == 7 and confirmation["return_mean"] >= 60
    assert confirmation["env_steps"] == run.summary["env_steps"]
    assert "7 evaluation episodes" in run.outcome.reason
    # It is also the best evaluation so far.
    assert checkpoint.find(run.path, "best") == checkpoint.find(run.path, "last")


SAMPLER = """
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(50)

    def reset(self, *, seed=None, options=None):
        self.seen = []
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.seen.append(action)
        ended = len(self.seen) == 4
        paid = 10.0 if ended and len(set(self.seen)) > 1 else 0.0
        return np.ones(1, np.float32), paid, ended, False, {}
"""


def test_a_return_that_is_not_confirmed(here: Path) -> None:
    """Sampled actions earn 10 per episode, the most likely action earns 0."""
    Path("sampler.py").write_text(SAMPLER)
    stop = {"return_mean": 5, "iterations": 12, "confirm_episodes": 3}
    run = train(env={"id": "sampler.py:Env"}, stop=stop)
    assert run.summary["iterations"] == 12 and run.summary["return_mean"] > 9
    evaluated = [row["iteration"] for row in run.read_eval()]
    assert all(row["return_mean"] == 0 for row in run.read_eval())
    assert evaluated[0] == 1 and 3 <= len(evaluated) <= 12
    run = train(env={"id": "sampler.py:Env"}, stop={**stop, "confirm_episodes": 0})
    assert run.summary["iterations"] == 1 and not run.read_eval()


def test_best_compares_evaluations_of_one_kind(here: Path) -> None:
    """Sampled actions earn 10 per episode in this environment, the most likely one earns 0."""
    Path("sampler.py").write_text(SAMPLER)
    stop = {"return_mean": 99, "iterations": 4, "return_window": 2, "confirm_episodes": 3}
    evaluate = {"every_steps": 1, "episodes": 3, "stochastic": True}
    run = train(env={"id": "sampler.py:Env"}, stop=stop, eval=evaluate, name="x")
    assert {row["return_mean"] for row in run.read_eval()} == {10.0} and run.summary["best_return"] == 10
    # Resumed with the other kind, the best of the first kind is no measure.
    again = paceline.train({"eval": {"stochastic": False}, "stop": {"iterations": 6}}, resume=run.path)
    assert again.read_eval()[-1]["return_mean"] == again.summary["best_return"] == 0
    assert checkpoint.find(run.path, "best").name == f"step-{run.read_metrics()[4]['env_steps']}"


def test_a_confirmation_is_of_the_same_kind(here: Path) -> None:
    Path("sampler.py").write_text(SAMPLER)
    stop = {"return_mean": 5, "iterations": 4, "confirm_episodes": 3}
    run = train(env={"id": "sampler.py:Env"}, stop=stop, eval={"stochastic": True})
    assert run.summary["iterations"] == 1 and run.summary["best_return"] == 10


def test_rows_say_how_many_episodes_the_return_is_from(here: Path, cli: Callable[..., Any]) -> None:
    out = cli("train", "--preset", "none", "--iterations", 30, "--name", "x", "--set", "ppo.rollout_steps=16").out
    rows = RunDirectory(Path("runs/x")).read_metrics()
    assert all(row.get("return_episodes", 0) == min(100, row["episodes"]) for row in rows)
    lines = [line for line in out.splitlines() if line.startswith("Iteration")]
    assert all(
        (f"({n} episode" in line) == (0 < n < 100) for line, n in zip(lines, (r["episodes"] for r in rows), strict=True)
    )
    assert rows[-1]["return_episodes"] == 100


def test_a_return_of_zero_is_a_goal(here: Path) -> None:
    run = train(stop={"return_mean": 0, "return_window": 5, "iterations": 9, "confirm_episodes": 2})
    assert run.summary["iterations"] == 1 and "return" in run.outcome.reason


@pytest.mark.parametrize(
    ("rule", "iterations"),
    [("env/utility>0.05", 1), ("env/utility<0.05", 5), ("optimizer_steps>=120", 3), ("env/nothing>=0", 5)],
)
def test_a_metric(rule: str, iterations: int, here: Path) -> None:
    env = {"id": "paceline/KnownReturn-v0"}
    run = train(env=env, stop={"metric": rule, "iterations": 5})
    assert run.summary["iterations"] == iterations
    assert (rule in run.outcome.reason) == (iterations < 5)
    assert all(row["env/utility"] == pytest.approx(0.1) and row["return_mean"] == 10 for row in run.read_metrics())
    assert "env/utility" in (run / "progress.csv").read_text().splitlines()[0]


# -- evaluating and keeping -------------------------------------------------------------------------------------------


def test_periodic_evaluation(here: Path) -> None:
    run = train(stop={"total_steps": 4000}, eval={"every_steps": 700, "episodes": 5}, checkpoint={"keep": 2})
    boundaries = [row["env_steps"] for row in run.read_metrics()]
    due = [next(b for b in boundaries if b >= 700 * n) for n in range(1, 1 + boundaries[-1] // 700)]
    rows = run.read_eval()
    assert [row["env_steps"] for row in rows] == due
    assert all(row["episodes"] == 5 for row in rows)
    best = max(rows, key=lambda row: row["return_mean"])  # the first of equals, as in the run
    assert run.summary["best_return"] == best["return_mean"]
    assert checkpoint.find(run.path, "best").name == f"step-{best['env_steps']}"
    assert checkpoint.find(run.path, "last").name == f"step-{boundaries[-1]}"
    assert checkpoint.find(run.path).name == f"step-{best['env_steps']}"
    steps = checkpoint.available(run.path)
    assert len(steps) <= 3 and {best["env_steps"], boundaries[-1]} <= set(steps)


def test_keeping_the_newest(here: Path) -> None:
    run = train(stop={"iterations": 9}, checkpoint={"every_iterations": 2, "keep": 3})
    boundaries = [row["env_steps"] for row in run.read_metrics()]
    assert checkpoint.available(run.path) == [boundaries[5], boundaries[7], boundaries[8]]
    assert checkpoint.find(run.path).name == f"step-{boundaries[-1]}"
    assert sorted(p.name for p in (run / "checkpoints").iterdir() if p.is_symlink()) == ["last"]


def test_saving_by_time(here: Path) -> None:
    run = train(stop={"iterations": 10}, checkpoint={"every_seconds": 1e-6, "keep": 100})
    assert len(checkpoint.available(run.path)) == 11
    run = train(stop={"iterations": 10}, checkpoint={"every_seconds": 0, "keep": 100})
    assert len(checkpoint.available(run.path)) == 2  # the start and the end


# -- when it fails ----------------------------------------------------------------------------------------------------

BROKEN = """
    import gymnasium
    import numpy as np

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, fault="", at=100):
            self.fault, self.at, self.count = fault, at, 0

        def reset(self, *, seed=None, options=None):
            if self.fault == "reset":
                raise ValueError("no episode\\nto be had")
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.count += 1
            bad = float("nan") if self.count > self.at else 0.0
            if self.fault == "step" and bad != 0.0:
                raise ValueError("the simulator fell over")
            observation = np.full(2, bad if self.fault == "observation" else 0.0, np.float32)
            return observation, bad if self.fault == "reward" else 0.0, self.count % 10 == 0, False, {}
"""


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
@pytest.mark.parametrize("fault", ["observation", "reward"])
def test_numbers_that_are_not(fault: str, algo: str, here: Path, cli: Callable[..., Any]) -> None:
    Path("broken.py").write_text(textwrap.dedent(BROKEN))
    sets = ["--set", f"env.kwargs={{fault: {fault}}}", "--set", f"{algo}.rollout_steps=40"]
    result = cli("train", "--algo", algo, "--env", "broken.py:Env", "--name", "x", *sets)
    _failed_clearly(result, "nan", "iteration 3", "lower the learning rate", "normalize_observation", "envs check")
    status = json.loads(Path("runs/x/status.json").read_text())
    assert status["state"] == "failed" and "nan" in status["reason"]
    assert len(Path("runs/x/metrics.jsonl").read_text().splitlines()) == 2
    paceline.load("runs/x")  # the last good checkpoint


def test_a_learning_rate_that_is_much_too_high(here: Path, cli: Callable[..., Any]) -> None:
    sets = ["model.activation=relu", "ppo.learning_rate=1e30", "ppo.max_grad_norm=0"]
    result = cli("train", "--name", "x", "--quiet", *(word for item in sets for word in ("--set", item)))
    _failed_clearly(result, "lower the learning rate")
    assert RunDirectory(Path("runs/x")).read_status()["state"] == "failed"


def _failed_clearly(result: Any, *words: str) -> None:
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert result.code == 1 and len(lines) == 1 and lines[0].startswith("paceline: failed: "), result
    assert all(word in lines[0] for word in words), lines[0]


def test_an_env_that_fails(here: Path, cli: Callable[..., Any]) -> None:
    Path("broken.py").write_text(textwrap.dedent(BROKEN))
    words = ["train", "--env", "broken.py:Env", "--name", "x", "--set"]
    result = cli(*words, "env.kwargs={fault: step}")
    assert result.code == 1 and result.err.rstrip().endswith("paceline: failed: ValueError: the simulator fell over")
    assert "broken.py" in result.err  # whose fault it was
    assert RunDirectory(Path("runs/x")).read_status()["state"] == "failed"
    shutil.rmtree("runs")
    result = cli(*words, "env.kwargs={fault: reset}")
    assert result.code == 1 and "broken.py" in result.err and "no episode" in result.err
    assert not Path("runs").exists()  # nothing was done yet


HUNGRY = """
import gymnasium, numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    taken = 0
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        Env.taken += 1
        if Env.taken > 3000:
            np.empty(2**58, np.uint8)
        return np.zeros(2, np.float32), 1.0, Env.taken % 10 == 0, False, {}
"""


def test_memory_runs_out(here: Path, cli: Callable[..., Any]) -> None:
    Path("hungry.py").write_text(HUNGRY)
    words = ["--preset", "none", "--set", "checkpoint.every_iterations=1", "--name", "x"]
    result = cli("train", "--env", "hungry.py:Env", *words)
    _failed_clearly(
        result, "out of memory", "env.envs_per_worker", "ppo.minibatch_size", "--init-from runs/x", "--resume"
    )
    assert checkpoint.load(checkpoint.find(Path("runs/x"), "last"))


def test_a_full_disk(here: Path, command: Callable[..., Any]) -> None:
    """Simulates a full disk by a limit on file sizes, which the metrics exceed."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    sets = ["model.hidden=[8]", "ppo.rollout_steps=8", "ppo.minibatch_size=64", "checkpoint.every_iterations=5"]
    words = [word for item in sets for word in ("--set", item)]
    result = command("train", "--preset", "none", "--name", "x", "--max-time", "60", *words, preexec_fn=limit)
    _failed_clearly(result, "File too large", "metrics.jsonl", "--resume")
    run = RunDirectory(Path("runs/x"))
    assert run.read_status()["state"] == "failed"
    iteration = paceline.load(run.path).counters["iteration"]
    assert iteration % 5 == 0 and 0 <= run.read_metrics()[-1]["iteration"] - iteration <= 5
    resumed = paceline.train({"stop": {"iterations": iteration + 6}}, resume=run.path)
    assert [row["iteration"] for row in resumed.read_metrics()] == list(range(1, iteration + 7))


def test_a_disk_too_small_for_a_checkpoint(here: Path, command: Callable[..., Any]) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    result = command("train", "--name", "x", "--iterations", 2, "--quiet", preexec_fn=limit)
    _failed_clearly(result, "step-0 was not saved", "File too large", "no earlier one")
    assert not list(Path("runs/x/checkpoints").iterdir())


def test_the_folder_is_removed_meanwhile(here: Path, start: Callable[..., Any]) -> None:
    process = start("train", "--preset", "none", "--name", "x", "--max-time", "60")
    _wait_for(process, "Iteration 2 ")
    Path("runs/x").rename("elsewhere")
    shutil.rmtree("elsewhere")
    _, err = process.communicate(timeout=30)
    lines = err.strip().splitlines()
    assert process.returncode == 1 and len(lines) == 1, err
    assert "No such file or directory" in lines[0] and "runs/x" in lines[0]
    assert not Path("runs/x").exists()


# -- when it is told to stop ------------------------------------------------------------------------------------------


def test_the_end_of_the_allocation(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DEADLINE", f"{time.time() + DEADLINE_SECONDS + 0.7:.3f}")
    run = train(stop={"max_time": "60s"})
    assert run.outcome.status == "stopped" and run.outcome.exit_code == 99
    assert "the allocation ends in" in run.outcome.reason
    assert paceline.load(run.path).counters["iteration"] == run.read_metrics()[-1]["iteration"] >= 1
    done = train(stop={"iterations": 1}, name="enough")  # a run that reaches its budget is done, even past the deadline
    assert done.outcome.exit_code == 0


def test_a_bad_deadline_writes_nothing(here: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DEADLINE", "noon")
    result = cli("train", "--env", "CartPole-v1", "--iterations", "1")
    assert result.code == 2 and "PACELINE_DEADLINE=noon" in result.err and not Path("runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2], ids=["INT", "USR1", "USR2"])
def test_signals(number: signal.Signals, here: Path, start: Callable[..., Any]) -> None:
    process = start("train", "--env", "paceline/FixedCost-v0", "--preset", "none", "--name", "x", "--max-time", "60")
    _wait_for(process, "Iteration 1 ")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 99
    assert err.strip() == f"{number.name}: saving after this iteration; a second Ctrl-C or a later signal stops at once"
    assert f"{number.name} received" in out and "paceline train --resume runs/x" in out
    assert out.splitlines()[-1].split() == ["run", "runs/x"]
    run = RunDirectory(Path("runs/x"))
    assert run.read_status()["state"] == run.read_summary()["status"] == "stopped"
    assert paceline.load(run.path).counters["iteration"] == run.read_metrics()[-1]["iteration"]


def test_a_signal_when_nobody_reads(here: Path, start: Callable[..., Any]) -> None:
    """Ctrl-C also ends the `tee` of `paceline train 2>&1 | tee log`. The run is saved anyway."""
    process = start("train", "--env", "paceline/FixedCost-v0", "--preset", "none", "--name", "x", "--max-time", "60")
    _wait_for(process, "Iteration 1 ")
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 99
    run = RunDirectory(Path("runs/x"))
    assert run.read_status()["state"] == "stopped"
    assert paceline.load(run.path).counters["iteration"] == run.read_metrics()[-1]["iteration"]


def _in_an_iteration(start: Callable[..., Any], cost_seconds: float) -> Any:
    """A run in its first iteration, of 1,024 steps."""
    cost = f"env.kwargs={{cost_seconds: {cost_seconds}}}"
    process = start("train", "--env", "paceline/FixedCost-v0", "--preset", "none", "--name", "x", "--set", cost)
    _wait_for(process, "preset")
    while not Path("runs/x/checkpoints/last").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    return process


@pytest.mark.parametrize("numbers", ["TERM TERM TERM", "USR1 TERM TERM", "INT TERM"])
def test_a_burst_of_signals_is_one_request(numbers: str, here: Path, start: Callable[..., Any]) -> None:
    """Schedulers, job scripts and `timeout` pass on the same signal within milliseconds."""
    process = _in_an_iteration(start, 0.002)
    for name in numbers.split():
        process.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 99 and err.count("saving after this iteration") == 1, err
    run = RunDirectory(Path("runs/x"))
    assert run.read_status()["state"] == "stopped" and f"SIG{numbers.split()[0]} received" in out
    assert paceline.load(run.path).counters["iteration"] == run.read_metrics()[-1]["iteration"] >= 1


@pytest.mark.parametrize("name, pause", [("INT", 0.1), ("TERM", BURST_SECONDS + 0.3)])
def test_a_second_ctrl_c_and_a_later_signal_end_it_at_once(
    name: str, pause: float, here: Path, start: Callable[..., Any]
) -> None:
    process = _in_an_iteration(start, 0.05)  # an iteration of a minute
    process.send_signal(signal.Signals[f"SIG{name}"])
    time.sleep(pause)
    assert process.poll() is None  # it finishes the iteration
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.wait(timeout=30) == 99
    status = RunDirectory(Path("runs/x")).read_status()
    assert status["state"] == "stopped" and "ended at once" in status["reason"]
    paceline.load("runs/x")


def _wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without {text!r}: {process.communicate()}")


# -- what it says -----------------------------------------------------------------------------------------------------


def test_what_it_says(here: Path, cli: Callable[..., Any]) -> None:
    result = cli("train", "--total-steps", "3000", "--name", "x", "--set", "eval.every_steps=2000")
    lines = result.out.splitlines()
    assert result.code == 0 and result.err == ""
    assert lines[0].split() == lines[-1].split() == ["run", "runs/x"]
    assert any(re.match(r"preset +ppo/CartPole-v1 ", line) for line in lines)
    iterations = [line for line in lines if line.startswith("Iteration ")]
    assert [line.split()[:4] for line in iterations] == [
        ["Iteration", str(n), "reward", "="] for n in range(1, len(iterations) + 1)
    ]
    assert all(" / 3,000 | " in line for line in iterations)
    assert any(line.startswith("Evaluation at 2,") for line in lines)
    assert any(line.startswith("done: 3,") and "of 3,000 steps done" in line for line in lines)
    assert any(re.fullmatch(r"used +\d\.\d GB of memory at most, \d\.\d cores on average", line) for line in lines)
    quiet = cli("train", "--total-steps", "500", "--name", "y", "--quiet")
    assert [line.split() for line in quiet.out.splitlines()] == [["run", "runs/y"]] * 2 and quiet.err == ""


def test_what_it_says_can_be_pasted_into_a_shell(here: Path, cli: Callable[..., Any]) -> None:
    result = cli("train", "--iterations", 1, "--out", "my runs", "--name", "x")
    assert "evaluate   paceline evaluate 'my runs/x'\n" in result.out


def test_a_run_named_by_itself(here: Path, cli: Callable[..., Any]) -> None:
    out = cli("train", "--iterations", 1, "--quiet", "--out", "deep/er").out.split()
    assert out[1] == out[3] and re.fullmatch(r"deep/er/ppo_CartPole-v1_\d{8}-\d{6}_\w{4}", out[1])
    assert (Path(out[1]) / "summary.json").is_file() and list(Path("deep/er").iterdir()) == [Path(out[1])]
