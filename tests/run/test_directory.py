from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from paceline.config import UserError
from paceline.run.directory import RunDirectory, replacing, write_json, write_text


def make_run(folder: Path, name: str) -> RunDirectory:
    run = RunDirectory.create(folder, name, "ppo", "CartPole-v1")
    write_text(run.config_path, "algo: ppo\n")
    return run


def test_create_makes_the_named_folder(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a" / "b", "mine", "ppo", "CartPole-v1")
    assert run.path == tmp_path / "a" / "b" / "mine"
    assert (
        run.checkpoints_path.is_dir() and run.tb_path.is_dir() and run.logs_path.is_dir() and run.videos_path.is_dir()
    )


@pytest.mark.parametrize(
    ("env_id", "tidy"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("ALE/Pong-v5", "ALE-Pong-v5"),
        ("some/folder/my_env.py:My Env", "my-env.py-My-Env"),
        ("pkg.module:Env-v0", "pkg.module-Env-v0"),
    ],
)
def test_create_invents_a_name(tmp_path: Path, env_id: str, tidy: str) -> None:
    names = {RunDirectory.create(tmp_path, None, "a2c", env_id).path.name for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch(rf"a2c_{re.escape(tidy)}_\d{{8}}-\d{{6}}_[0-9a-f]{{4}}", name) for name in names)


def test_create_refuses_a_run_that_exists(tmp_path: Path) -> None:
    run = make_run(tmp_path, "taken")
    with pytest.raises(UserError, match=r"taken exists.*another --name.*--resume .*taken"):
        RunDirectory.create(tmp_path, "taken", "ppo", "CartPole-v1")
    assert run.read_config() == {"algo": "ppo"}


def test_create_refuses_a_folder_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    with pytest.raises(UserError, match="is not a run: choose another --name"):
        RunDirectory.create(tmp_path, "thesis", "ppo", "CartPole-v1")
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]


def test_create_accepts_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunDirectory.create(tmp_path, "empty", "ppo", "CartPole-v1").checkpoints_path.is_dir()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../up", "new\nline"])
def test_create_refuses_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not a folder name"):
        RunDirectory.create(tmp_path / "runs", name, "ppo", "CartPole-v1")
    assert list(tmp_path.iterdir()) == []


def test_create_says_that_out_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match=r"cannot make the run directory .*--out"):
        RunDirectory.create(tmp_path / "out", "x", "ppo", "CartPole-v1")
    with pytest.raises(UserError, match="a file is in the way"):
        RunDirectory.create(tmp_path, "out", "ppo", "CartPole-v1")
    assert (tmp_path / "out").read_text() == "mine"


def test_create_leaves_nothing_half_made(tmp_path: Path) -> None:
    """The parents can be made, the run cannot: its name is too long for the file system."""
    with pytest.raises(UserError, match="File name too long"):
        RunDirectory.create(tmp_path / "a" / "b", "n" * 300, "ppo", "CartPole-v1")
    assert list(tmp_path.iterdir()) == []


def test_create_in_an_unwritable_place() -> None:
    with pytest.raises(UserError, match="cannot make the run directory /proc/runs/x"):
        RunDirectory.create("/proc/runs", "x", "ppo", "CartPole-v1")


def test_open_names_the_nearest_runs(tmp_path: Path) -> None:
    make_run(tmp_path, "cartpole-seed1")
    make_run(tmp_path, "walker")
    assert RunDirectory.open(str(tmp_path / "walker")).path == tmp_path / "walker"
    with pytest.raises(UserError, match=r"no run at .*cartpole-seed2; did you mean .*cartpole-seed1\?"):
        RunDirectory.open(tmp_path / "cartpole-seed2")


def test_open_names_the_most_recent_runs(tmp_path: Path) -> None:
    for age, name in enumerate(["newest", "second", "third", "oldest"]):
        stamp = time.time() - 100 * age
        os.utime(make_run(tmp_path, name).config_path, (stamp, stamp))
    with pytest.raises(UserError) as error:
        RunDirectory.open(tmp_path / "qqq")
    assert re.findall(r"newest|second|third|oldest", str(error.value)) == ["newest", "second", "third"]


def test_open_says_what_a_path_is_instead(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "one")
    (run.checkpoints_path / "step-5").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a run directory"):
        RunDirectory.open(tmp_path / "file")
    with pytest.raises(UserError, match=r"is a folder of runs.*runs/one"):
        RunDirectory.open(tmp_path / "runs")
    with pytest.raises(UserError, match=r"is a checkpoint, not a run: the run is .*runs/one$"):
        RunDirectory.open(run.checkpoints_path / "step-5")
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        RunDirectory.open(run.logs_path)


def test_write_json_holds_what_numpy_makes(tmp_path: Path) -> None:
    write_json(
        tmp_path / "x.json",
        {
            "nan": float("nan"),
            "inf": np.float32("inf"),
            "f": np.float32(0.5),
            "a": np.arange(3),
            "b": np.bool_(True),
            7: (1,),
        },
    )
    strict = json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert strict == {"nan": None, "inf": None, "f": 0.5, "a": [0, 1, 2], "b": True, "7": [1]}


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        write_json(path, {"new": object()})
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_status_and_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    assert run.read_summary() == {} and run.read_status() == {}
    run.write_status(state="running", iteration=3)
    status = run.read_status()
    assert (status["state"], status["pid"], status["iteration"]) == ("running", os.getpid(), 3)
    assert status["host"] and "T" in status["updated_at"]
    with pytest.raises(ValueError, match="running, done, stopped, failed"):
        run.write_status(state="finished")
    run.write_summary({"return_mean": float("nan"), "env_steps": np.int64(4)})
    assert run.read_summary() == {"return_mean": None, "env_steps": 4}
    run.summary_path.write_text('{"return')
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        run.read_summary()


def test_read_config_says_what_is_wrong(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    run.config_path.write_text("a: [1\n")
    with pytest.raises(UserError, match=r"config\.yaml is damaged") as error:
        run.read_config()
    assert "\n" not in str(error.value)


def test_rows_survive_a_torn_last_line_only(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    assert run.read_metrics() == [] and run.read_eval() == []
    run.metrics_path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iterat')
    assert run.read_metrics() == [{"iteration": 1}, {"iteration": 2}]
    run.metrics_path.write_bytes(b'{"iteration": 1}\n\0\0\0\n')  # what a power cut leaves
    assert run.read_metrics() == [{"iteration": 1}]
    run.metrics_path.write_text('{"iteration": 1}\n{"iterat\n{"iteration": 3}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        run.read_metrics()


HOLDER = """
import sys
from paceline.run.directory import RunDirectory
run = RunDirectory.open(sys.argv[1])
run.lock()
print("locked", flush=True)
sys.stdin.readline()
"""


def start_holder(run: RunDirectory) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    return holder


def test_the_lock_of_another_process_is_respected_and_ends_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    holder = start_holder(run)
    try:
        with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on "):
            run.lock()
    finally:
        holder.kill()
        holder.communicate(timeout=10)
    assert run.lock()
    run.unlock()


def test_unlock_lets_the_next_one_in(tmp_path: Path) -> None:
    run, again = make_run(tmp_path, "r"), RunDirectory.open(tmp_path / "r")
    assert run.lock() and run.lock()
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        again.lock()
    run.unlock()
    run.unlock()
    assert again.lock()
    again.unlock()


def _linger(seconds: float) -> None:
    time.sleep(seconds)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Environment processes may outlive a killed run for a moment: they must not stand in the way of its resume."""
    run, again = make_run(tmp_path, "r"), RunDirectory.open(tmp_path / "r")
    run.lock()
    child = get_context("fork").Process(target=_linger, args=(20,))
    child.start()
    try:
        time.sleep(0.1)
        with pytest.raises(UserError):  # the child's copy being closed has not released ours
            again.lock()
        assert run._lock is not None
        os.close(run._lock)  # what the death of this process would do
        assert again.lock()
    finally:
        child.kill()
        child.join(10)
        again.unlock()
