"""What the dashboard reads, and what it does not read twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.report.dashboard import PageState
from paceline.results import json_lines, live_runs
from paceline.results.live_runs import LiveCurve, LiveRun, RunWatcher

WriteRun = Callable[..., Path]


def add(path: Path, *steps: int, end: str = "\n") -> None:
    with path.open("a") as file:
        for step in steps:
            file.write(json.dumps({"env_steps": step, "return_mean": float(step), "wall_seconds": 1.0}) + end)


def steps(run: LiveRun) -> list[float | None]:
    return [point[0] for point in run.curve.points]


def live(path: Path, write_run: WriteRun) -> LiveRun:
    write_run(path, state="running", rows=0)
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "updated_at": "2999-01-01T00:00:00+00:00"}))
    return LiveRun(path, path.name, show_curves=True)


def test_only_what_was_added_is_read(tmp_path: Path, write_run: WriteRun) -> None:
    run = live(tmp_path / "run", write_run)
    rows = run.path / "metrics.jsonl"
    add(rows, 1, 2)
    run.refresh(1.0)
    assert (steps(run), run.state) == ([1, 2], "running")
    version = run.version
    run.refresh(2.0)
    assert run.version == version
    add(rows, 3, end="")  # being written
    run.refresh(3.0)
    assert steps(run) == [1, 2]
    with rows.open("a") as file:
        file.write("\n")
    run.refresh(4.0)
    assert steps(run) == [1, 2, 3]
    assert run.curve.epoch == 0
    assert run.version > version
    assert run.row()["return_mean"] == 3.0


def test_rows_that_a_resume_cut_are_gone(tmp_path: Path, write_run: WriteRun) -> None:
    run = live(tmp_path / "run", write_run)
    rows = run.path / "metrics.jsonl"
    add(rows, 1, 2, 3)
    run.refresh(1.0)
    rewritten = rows.with_suffix(".new")
    add(rewritten, 1, 7, 8, 9)
    rewritten.replace(rows)
    run.refresh(2.0)
    assert steps(run) == [1, 7, 8, 9]
    assert run.curve.epoch == 1


def test_a_curve_stays_small() -> None:
    curve = LiveCurve()
    for step in range(10 * live_runs.CURVE_POINTS):
        curve.add([float(step)])
    assert live_runs.CURVE_POINTS / 2 <= len(curve.points) <= live_runs.CURVE_POINTS
    values = [point[0] for point in curve.points]
    assert values[0] == 0.0 and values[-1] is not None and values[-1] > 9.8 * live_runs.CURVE_POINTS
    gaps = {b - a for a, b in pairwise(values) if a is not None and b is not None}
    assert len(gaps) == 1


def test_the_first_look_reads_the_ends_of_files(tmp_path: Path, write_run: WriteRun) -> None:
    run = LiveRun(write_run(tmp_path / "run"), "run")
    run.refresh(1.0)
    assert (run.row()["env_steps"], run.row()["env"], run.row()["seed"]) == (20_000, "CartPole-v1", 0)
    assert run.curve.points == [] and run.config == {}  # of a run that is over the summary says it
    run.show_curves = True
    assert run.is_behind
    run.refresh(1.1)  # at once, however settled it is
    assert len(steps(run)) == 20 and not run.is_behind
    run.drop_curves()
    assert run.curve.points == [] and run.is_behind


def test_a_large_file_is_read_bit_by_bit(tmp_path: Path, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = live(tmp_path / "run", write_run)
    add(run.path / "metrics.jsonl", *range(1, 31))
    monkeypatch.setattr(json_lines, "CHUNK_BYTES", 600)
    calls = 0
    while run.is_behind:
        calls += 1
        run.refresh(float(calls))
        assert run.row()["env_steps"] == 30  # the last row is known from the first look on
    assert calls > 1 and steps(run) == list(range(1, 31))


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path, write_run: WriteRun) -> None:
    run = live(tmp_path / "run", write_run)
    (run.path / "metrics.jsonl").unlink()
    os.mkfifo(run.path / "metrics.jsonl")
    run.refresh(1.0)
    assert run.curve.points == []


def test_a_poll_tells_of_some_runs_before_all_are_read(tmp_path: Path, write_run: WriteRun) -> None:
    for name in "abc":
        write_run(tmp_path / name)
    watcher, sent = RunWatcher(tmp_path), PageState(["a"], "")
    watcher.shown = frozenset("a")
    assert not watcher.poll(0.0)
    changes = sent.changes(watcher.runs)
    assert changes is not None and (len(changes["runs"]), changes["unread"]) == (1, 2)
    while not watcher.poll(0.0):
        pass
    changes = sent.changes(watcher.runs)
    assert changes is not None and (len(changes["runs"]), changes["unread"]) == (2, 0)


def test_runs_come_and_go(tmp_path: Path, write_run: WriteRun) -> None:
    watcher = RunWatcher(tmp_path)
    watcher.poll()
    assert watcher.runs == {}
    write_run(tmp_path / "a")
    write_run(tmp_path / "sweep" / "b", state="failed", reason="no memory")
    watcher._scanned -= live_runs.SCAN_SECONDS
    watcher.poll()
    assert {name: run.state for name, run in watcher.runs.items()} == {"a": "finished", "sweep/b": "failed"}
    assert watcher.runs["sweep/b"].row()["reason"] == "no memory"
    assert watcher.runs["a"].row()["split"]["learn"] == 12.0


def test_logs_are_plain_files_of_the_run(tmp_path: Path, write_run: WriteRun) -> None:
    run = LiveRun(write_run(tmp_path / "run"), "run")
    (tmp_path / "secret.log").write_text("secret")
    logs = run.path / "logs"
    (logs / "worker-000.log").write_text("x" * json_lines.TAIL_BYTES + "end\n")
    (logs / "link.log").symlink_to(tmp_path / "secret.log")
    os.mkfifo(logs / "pipe.log")
    assert run.logs() == ["worker-000.log"]
    assert run.read_log("link.log", None) is None
    assert run.read_log("../../secret.log", None) is None
    found = run.read_log("worker-000.log", None)
    assert found is not None and len(found[0]) == json_lines.TAIL_BYTES and found[0].endswith("end\n")
    with (logs / "worker-000.log").open("a") as file:
        file.write("more\n")
    assert run.read_log("worker-000.log", found[1]) == ("more\n", found[1] + 5)


def test_a_linked_folder_of_logs_is_not_followed(tmp_path: Path, write_run: WriteRun) -> None:
    run = LiveRun(write_run(tmp_path / "run"), "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.log").write_text("secret")
    (run.path / "logs").rmdir()
    (run.path / "logs").symlink_to(tmp_path / "elsewhere")
    assert run.logs() == [] and run.details()["logs"] == []
    assert run.read_log("secret.log", None) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"env_steps": NaN, "return_mean": "high", "wall_seconds": 1e999, "iteration": NaN}'),
        ("metrics.jsonl", f'{{"env_steps": 1{"0" * 400}, "wall_seconds": 1}}'),
        ("summary.json", '{"workers": "two", "env_steps": "many", "verdict": NaN, "hosts": NaN, "resumed": "x"}'),
        ("status.json", '{"state": ["done"], "env_steps": "many", "pid": NaN, "updated_at": 5}'),
        ("config.yaml", "{algo: [1], env: text, engine: 3, stop: {total_steps: many}}"),
        ("config.yaml", "{seed: 2026-01-02}"),
    ],
)
def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path, write_run: WriteRun, file: str, text: str) -> None:
    write_run(tmp_path / "good")
    # A summary takes the place of the settings: without one they are read.
    bad = write_run(tmp_path / "bad", rows=0 if file in ("metrics.jsonl", "config.yaml") else 20)
    (bad / file).write_text(text + "\n")
    watcher = RunWatcher(tmp_path)
    watcher.poll()
    changes = PageState(["good", "bad"], "bad").changes(watcher.runs)
    json.dumps(changes, allow_nan=False)
    assert changes is not None and {row["name"]: row["env_steps"] for row in changes["runs"]}["good"] == 20_000
    assert {row["name"] for row in changes["runs"]} == {"good", "bad"} and changes["focus"]["name"] == "bad"
    bad_row = watcher.runs["bad"].row()
    assert file != "metrics.jsonl" or (bad_row["env_steps"], bad_row["progress"]) in ((0, 0.0), (0, None))
    if file == "config.yaml" and "seed" in text:
        assert bad_row["reason"].startswith("its files are damaged: ")
    write_run(tmp_path / "spare")
    (bad / file).unlink()
    (tmp_path / "spare" / file).rename(bad / file)
    watcher.runs["bad"]._refreshed = 0.0
    watcher.poll()
    assert not watcher.runs["bad"].row()["reason"].startswith("its files")
