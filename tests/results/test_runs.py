from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.config import UserError
from paceline.results.comparison import compare
from paceline.results.discovery import find_runs
from paceline.results.groups import differences, group
from paceline.results.runs import RunData, load_run, load_runs, problems_of

MakeRun = Callable[..., Path]


def test_the_figures_of_a_run(make_run: MakeRun) -> None:
    run = load_run(make_run("a", seconds=2.0, config={"seed": 7}, engine="ray", workers=4, nodes=2))
    assert (run.state, run.algo, run.env, run.engine, run.workers, run.nodes) == (
        "finished",
        "ppo",
        "CartPole-v1",
        "ray",
        4,
        2,
    )
    assert run.seed == 7 and run.env_steps == 1000 and run.train_seconds == 20.0 and run.wall_seconds == 25.0
    assert run.steps_per_second == 50.0 and run.steady_steps_per_second == 900 / 18
    assert run.curve.returns[-1] == 100.0 and run.curve.seconds[0] == 7.0
    assert run.time_split == {"start": 5.0, "env": 5.0, "learn": 15.0} and run.problems == []


def test_evaluations_and_checkpoints_are_not_in_the_steady_rate(make_run: MakeRun) -> None:
    path = make_run("a", seconds=2.0)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "time_eval_seconds": 8.0 if row["iteration"] > 5 else 0.0}) for row in rows]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = load_run(path)
    assert run.steps_per_second == 50.0 and run.steady_steps_per_second == 900 / (18 - 8)


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ({"state": "failed", "reason": "RuntimeError:\n no"}, "failed", "RuntimeError: no"),
        ({"state": "stopped", "reason": "SIGTERM received"}, "interrupted", "SIGTERM received"),
        ({"state": "running", "host": "elsewhere", "updated_at": "2020-01-01T00:00:00+00:00"}, "interrupted", "gone"),
        ({"state": "running", "host": "elsewhere"}, "interrupted", "gone"),
        ({}, "interrupted", "no status"),
    ],
)
def test_states(make_run: MakeRun, status: dict[str, str], state: str, reason: str) -> None:
    path = make_run("a")
    (path / "status.json").write_text(json.dumps(status))
    run = load_run(path)
    assert run.state == state and reason in run.reason


def test_a_run_at_work_is_running(make_run: MakeRun) -> None:
    path, now = make_run("a"), datetime.now(UTC).isoformat()
    mine = {"state": "running", "host": socket.gethostname(), "pid": os.getpid(), "updated_at": now}
    for status in (mine, {**mine, "host": "elsewhere"}):
        (path / "status.json").write_text(json.dumps(status))
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 11, "env')  # being written
        run = load_run(path)
        assert run.state == "running" and run.rows == 10 and run.problems == []
    # The number of a process that began after the last word of the run belongs to somebody else.
    (path / "status.json").write_text(json.dumps({**mine, "updated_at": "2020-01-01T00:00:00+00:00"}))
    assert load_run(path).state == "interrupted"


def test_damaged_files_are_named_and_never_guessed(make_run: MakeRun) -> None:
    torn = make_run("torn")
    text = (torn / "metrics.jsonl").read_text()
    (torn / "metrics.jsonl").write_text(text[:-30])
    run = load_run(torn)
    assert run.problems[0].startswith("metrics.jsonl: line 10, the last one, is incomplete")
    # The summary knows of 1000 steps: with a row less, the figures would be those of another run.
    assert (
        "1,000 steps and metrics.jsonl 900" in run.problems[1] and not run.usable and math.isnan(run.steps_per_second)
    )

    lines = text.splitlines()
    (torn / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]) + "\n")
    run = load_run(torn)
    assert run.problems == ["metrics.jsonl: line 4 is damaged, skipped"] and run.steps_per_second == 100.0
    (torn / "metrics.jsonl").write_text(text + text)
    assert "decreases from one row to the next" in load_run(torn).problems[0] and not load_run(torn).usable
    (torn / "metrics.jsonl").write_text(text.replace("train_seconds", "seconds"))
    assert "no valid train_seconds" in load_run(torn).problems[0] and not load_run(torn).usable

    for name in ("config.yaml", "summary.json", "provenance.json"):
        path = make_run(f"broken-{name}")
        (path / name).write_text("{[")
        assert any(name in problem and "damaged" in problem for problem in load_run(path).problems)


def damaged(path: Path, name: str, **values: object) -> Path:
    tree = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(tree | values))
    return path


def test_values_that_are_no_numbers_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    row = (path := make_run("nan")) / "metrics.jsonl"
    row.write_text(row.read_text().replace('"env_steps": 500', '"env_steps": NaN'))
    run = load_run(path)
    assert not run.usable and run.env_steps == 0 and "no valid env_steps" in run.problems[0]
    run = load_run(damaged(make_run("resumed"), "summary.json", resumed="often", hosts=["a", {"cores": "x"}]))
    assert run.resumed == 0 and run.usable and "resumed is 'often', not a number" in run.problems[0]
    assert run.summary["hosts"] == [{}] and "cores is 'x'" in run.problems[1]
    # Its speed would be that of another number of workers.
    run = load_run(damaged(make_run("workers"), "summary.json", workers="two"))
    assert run.workers == 1 and not run.usable and any("is unknown; no figures" in text for text in run.problems)
    run = load_run(damaged(make_run("status"), "status.json", resumes={}, pid=math.inf))
    assert run.usable and "resumes is '{}'" in run.problems[0]
    path = make_run("config")
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("seed: 0", "seed: first").replace("  workers: 0", "  workers: [1]"))
    run = load_run(path)
    assert (run.seed, len(run.problems)) == (0, 2) and run.usable
    run = load_run(damaged(make_run("origin"), "provenance.json", paceline=[1], cores="x"))
    assert run.version == "[1]" and "cores is 'x'" in run.problems[0]
    path = make_run("eval")
    (path / "eval.jsonl").write_text('{"env_steps": "x", "return_mean": 1}\n{"return_mean": 1}\n')
    run = load_run(path)
    assert len(run.evaluations) == 1 and "eval.jsonl: 1 rows skipped" in run.problems[0]
    assert len(problems_of(load_runs([tmp_path]))) >= 8 and compare(group(load_runs([tmp_path]), ["algo"])).results


def test_a_folder_that_is_not_ours_hides_no_other(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, closed, real = make_run("a"), tmp_path / "closed", Path.is_file
    closed.mkdir()

    def is_file(path: Path) -> bool:  # root, who runs the tests in a container, may look everywhere
        if path.parent == closed:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert find_runs([tmp_path]) == [made]
    with pytest.raises(UserError, match="closed: no run in it"):
        find_runs([closed])


def test_a_run_counts_once_by_any_path(make_run: MakeRun, tmp_path: Path) -> None:
    made = make_run("runs/a")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/b").symlink_to(made)
    assert find_runs([tmp_path / "runs", tmp_path / "link"]) == [made]
    assert len(load_runs([tmp_path])) == 1


def test_another_version_is_said(make_run: MakeRun) -> None:
    run = load_run(make_run("old", version="0.0.1"))
    assert run.problems[0].startswith("written by paceline 0.0.1, read by ") and run.usable


def test_where_runs_are_found(make_run: MakeRun, tmp_path: Path) -> None:
    made = [make_run("one/a"), make_run("two/deep/a"), make_run("two/b")]
    assert find_runs([tmp_path]) == [made[0], made[2], made[1]]
    assert [run.name for run in load_runs([tmp_path])] == ["one/a", "b", "deep/a"]
    assert find_runs([made[0], tmp_path / "one"]) == [made[0]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: no run in it \(a run is a folder with config.yaml\)"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(UserError, match="there is no run at"):
        find_runs([tmp_path / "one/c"])


def test_what_a_study_planned_is_there_too(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("study/a", config={"seed": 0})
    killed = make_run("study/b", config={"seed": 1}, state="running")
    entry = {"algo": "ppo", "env": "CartPole-v1", "engine": "local", "workers": 1}
    runs = [
        {**entry, "name": "a", "state": "done"},
        {**entry, "name": "b", "state": "failed", "reason": "killed by SIGKILL"},
        {**entry, "name": "c", "seed": 2, "state": "failed", "reason": "NoSuchEnv"},
        {**entry, "name": "d", "seed": 3, "state": "missing"},
    ]
    (killed.parent / "scaling.json").write_text(json.dumps({"scaling": "x", "runs": runs}))
    found = load_runs([tmp_path])
    assert {run.name: (run.state, run.reason) for run in found[1:]} == {
        "b": ("failed", "killed by SIGKILL"),
        "c": ("failed", "NoSuchEnv"),
        "d": ("missing", "not run yet"),
    }
    (together,) = group(found)  # they are of one kind
    assert together.count("failed") == 2 and [run.name for run in together.used] == ["a"]
    assert problems_of(found) == ["b: failed: killed by SIGKILL", "c: failed: NoSuchEnv", "d: missing: not run yet"]


def test_groups_are_of_one_kind(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(f"a{seed}", config={"seed": seed, "eval": {"every_steps": 10 * seed}})
        make_run(f"fast{seed}", config={"seed": seed, "ppo": {"learning_rate": 0.01}})
        make_run(f"two{seed}", config={"seed": seed}, engine="ray", workers=2)
    groups = group(load_runs([tmp_path]))
    assert [(one.label, [run.name for run in one.runs]) for one in groups] == [
        ("local, 1 worker, learning_rate=0.002", ["a0", "a1"]),
        ("local, 1 worker, learning_rate=0.01", ["fast0", "fast1"]),
        ("ray, 2 workers", ["two0", "two1"]),
    ]
    assert [one.label for one in group(load_runs([tmp_path]), ["workers"])] == ["1 worker", "2 workers"]
    assert group(load_runs([tmp_path]), ["ppo.learning_rate"])[1].key == {"ppo.learning_rate": 0.01}
    with pytest.raises(UserError, match=r"--by ppo\.rate: no run has it; allowed: env, algo"):
        group(load_runs([tmp_path]), ["ppo.rate"])
    told = differences([one.runs[0] for one in groups])
    assert list(told) == ["engine", "workers", "ppo.learning_rate"] and told["workers"] == [1, 1, 2]


def test_labels_say_what_it_takes(make_run: MakeRun, tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for algo in ("ppo", "a2c"):
            make_run(f"{algo}{rate}", config={"algo": algo, algo: {"learning_rate": rate}})
    make_run("odd", config={"ppo": {"learning_rate": 0.1}, "model": {"class": "/far/net.py:Net"}})
    make_run("env", config={"env": {"id": "/far/env.py:Env"}}, state="failed")
    assert {one.label for one in group(load_runs([tmp_path]))} == {
        "ppo, learning_rate=0.1",
        "ppo, learning_rate=0.2",
        "ppo, learning_rate=0.1, model.class=net.py:Net",
        "a2c, learning_rate=0.1",
        "a2c, learning_rate=0.2",
        "env.py:Env, ppo",
    }


def test_a_users_algorithm_is_shown_by_its_short_name() -> None:
    runs = [
        RunData(
            Path(f"run{rate}"),
            f"run{rate}",
            "finished",
            "",
            config={"algo": "/home/a/my_algo.py:MyAlgo", "env": {"id": "E"}, "model": {}, "my_algo": {"rate": rate}},
            metrics={"env_steps": np.ones(1)},
        )
        for rate in (1, 2)
    ]
    assert [one.label for one in group(runs)] == ["rate=1", "rate=2"]
    assert [one.label for one in group(runs[:1])] == ["my_algo, ?, 1 worker"]
    assert [one.label for one in group(runs, ["algo"])] == ["my_algo"]
    assert differences(runs) == {"my_algo.rate": [1, 2]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"return_mean": True}, ""),
        ({"wall_seconds": 1e6, "train_seconds": 1e6}, "did the clock jump?); no figures"),
        ({"env_steps": float("nan")}, "rows have no valid env_steps"),
    ],
)
def test_rows_that_would_give_wrong_figures(make_run: MakeRun, row: dict[str, Any], said: str) -> None:
    path = make_run("run")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(one | row) + "\n" for one in rows))
    run = load_run(path)
    assert said in " ".join(run.problems) and (run.usable == (not said))
    assert not run.usable or run.curve.returns[0] != 1.0


def test_a_pipe_is_not_waited_for(make_run: MakeRun) -> None:
    path = make_run("run")
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    assert "metrics.jsonl cannot be read: not a regular file" in load_run(path).problems


def test_a_process_that_nobody_waited_for_is_gone(make_run: MakeRun) -> None:
    path = make_run("run", state="running")
    process = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    now = {"pid": process.pid, "host": socket.gethostname(), "updated_at": "2999-01-01T00:00:00+00:00"}
    (path / "status.json").write_text(json.dumps({"state": "running", **now}))
    assert load_run(path).state == "interrupted"
    process.wait()
