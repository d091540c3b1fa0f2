"""Real suites of short runs, one of which fails, and one of which is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.run.directory import RunDirectory

Cli = Callable[..., Any]
SECONDS = 60.0


def state(folder: str = "runs/mine") -> dict[str, str]:
    return {run["name"]: run["state"] for run in json.loads(Path(folder, "suite.json").read_text())["runs"]}


def wait_for(what: Callable[[], Any], suite: subprocess.Popen[str] | None = None) -> None:
    """`suite` is to be running meanwhile."""
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end
        assert suite is None or suite.poll() is None, suite.communicate()
        time.sleep(0.02)


def test_a_suite_with_a_run_that_fails(here: Path, cli: Cli) -> None:
    faulty = {"env": "paceline/Faulty-v0", "settings": {"env": {"kwargs": {"after": 10, "length": 10, "once": "was"}}}}
    games = {"cart": {"env": "CartPole-v1", "range": [0, 500]}, "broken": {**faulty, "range": [0, 20]}}
    Path("mine.yaml").write_text(json.dumps({"games": games, "total_steps": 300, "episodes": 3}))
    line = "bench suite --suite mine.yaml --algos ppo --seeds 2 --set ppo.epochs=1 --set ppo.rollout_steps=8"
    result = cli(*line.split(), "--dry-run")
    assert result.code == 0 and not Path("runs").exists()
    assert "# broken-ppo-s1: missing\npaceline train --algo ppo --env paceline/Faulty-v0 --seed 1" in result.out

    result = cli(*line.split())
    assert result.code == 1, result.err  # the others were made all the same
    assert state() == {"cart-ppo-s0": "done", "broken-ppo-s0": "failed", "cart-ppo-s1": "done", "broken-ppo-s1": "done"}
    reason = "RuntimeError: this probe env fails after 10 steps, as asked"
    assert f"[2/4] broken-ppo-s0  failed: {reason}" in result.out and "--retry" in result.out.splitlines()[-1]
    table = Path("runs/mine/suite.md").read_text()
    assert f"- `broken-ppo-s0` failed: {reason}" in table and "| broken | ppo | 1 of 2 (1 failed) | " in table
    assert f"paceline {line}\n" in table and "| cart | ppo | 2 of 2 | " in table
    tree = json.loads(Path("runs/mine/suite.json").read_text())
    run = RunDirectory(Path("runs/mine/cart-ppo-s1"))
    made, (row,) = next(one for one in tree["runs"] if one["name"] == "cart-ppo-s1"), run.read_eval()
    assert made["returns"] == {"all": row["return_mean"]} and made["scores"] == {"all": row["return_mean"] / 500}
    assert row["episodes"] == 3 and row["seed"] == 1 and row["env_steps"] == run.read_summary()["env_steps"] >= 300
    assert made["env_steps"] == row["env_steps"] and made["machine"]["cores"] and made["machine"]["date"]
    assert run.read_config()["ppo"]["epochs"] == 1 and run.read_config()["seed"] == 1
    assert "Iteration 1 reward" in Path("runs/mine/logs/cart-ppo-s1.log").read_text()

    before = {path: path.stat().st_mtime_ns for path in Path("runs/mine").glob("*/*")}
    result = cli(*line.split())
    assert result.code == 1 and "skipped without --retry" in result.out
    assert {path: path.stat().st_mtime_ns for path in Path("runs/mine").glob("*/*")} == before

    result = cli(*line.split(), "--retry")
    assert result.code == 0 and set(state().values()) == {"done"}
    assert result.out.count("already done") == 3 and RunDirectory(Path("runs/mine/broken-ppo-s0")).read_eval()
    assert "Not in these figures" not in Path("runs/mine/suite.md").read_text()

    result = cli(*line.replace("epochs=1", "epochs=2").split())
    assert result.code == 2 and "cart-ppo-s0 has ppo.epochs=1, not 2" in result.err
    Path("other.yaml").write_text("games: {a: CartPole-v1}")
    result = cli("bench", "suite", "--suite", "other.yaml", "--out", "runs/mine")
    assert result.code == 2 and "holds the suite 'mine'" in result.err


def test_an_unknown_environment_is_a_row(here: Path, cli: Cli) -> None:
    Path("mine.yaml").write_text("games: {gone: NoSuchEnv-v0}\ntotal_steps: 100\n")
    line = "bench suite --suite mine.yaml --seeds 1"
    result = cli(*line.split())
    assert result.code == 1 and "NoSuchEnv" in result.out and state() == {"gone-ppo-s0": "failed"}
    assert not Path("runs/mine/gone-ppo-s0").exists()
    result = cli(*line.split())  # remembered, although there is no run
    assert result.code == 1 and "skipped without --retry" in result.out


def test_cut_and_continued(here: Path, start: Callable[..., subprocess.Popen[str]], cli: Cli) -> None:
    slow = {
        "env": "paceline/FixedCost-v0",
        "settings": {"env": {"envs_per_worker": 1, "kwargs": {"cost_seconds": 0.004}}},
    }
    Path("mine.yaml").write_text(json.dumps({"games": {"slow": slow, "cart": "CartPole-v1"}, "episodes": 2}))
    line = "bench suite --suite mine.yaml --seeds 1 --set ppo.rollout_steps=50 --total-steps 1500"
    words = line.split()
    run = RunDirectory(Path("runs/mine/slow-ppo-s0"))

    def rows() -> int:
        return len(run.read_metrics())

    suite = start(*words)
    wait_for(lambda: rows() >= 1, suite)
    assert "in use" in cli(*words).err  # one at a time in a folder
    suite.kill()  # its run is told
    wait_for(lambda: run.read_status().get("state") == "stopped")
    first = rows()
    assert first < 29

    suite = start(*words)
    wait_for(lambda: rows() > first, suite)
    suite.send_signal(signal.SIGINT)
    out, err = suite.communicate(timeout=SECONDS)
    assert suite.returncode == 99 and err == "", err
    assert "[1/2] slow-ppo-s0  stopped: SIGINT" in out and f"continue   paceline {' '.join(words[:4])}" in out
    assert state() == {"slow-ppo-s0": "interrupted", "cart-ppo-s0": "missing"}
    assert run.read_status()["state"] == "stopped" and not run.read_eval()

    result = cli(*words, "--games", "slow")
    assert result.code == 0, result.out
    assert state() == {"slow-ppo-s0": "done", "cart-ppo-s0": "missing"}  # of the earlier call
    summary = run.read_summary()
    assert summary["resumed"] == 2 and 1500 <= summary["env_steps"] < 1600
    assert [row["iteration"] for row in run.read_metrics()] == list(range(1, rows() + 1))
