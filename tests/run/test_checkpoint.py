from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.config import UserError
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory, write_text

ARRAYS = {
    "weights": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "columns": np.arange(6.0).reshape(2, 3).T,
    "flags": np.array([True, False, True]),
    "pixels": np.arange(256, dtype=np.uint8),
    "rng": np.array([2**64 - 1, 0], dtype=np.uint64),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "r", "ppo", "CartPole-v1")
    write_text(run.config_path, "algo: ppo\n")
    return run


def put(run: RunDirectory, step: int, *, keep: int = 3, best: bool = False, **state: Any) -> Path:
    return checkpoint.save(run, step, {"w": np.full(100, step)}, {"step": step, **state}, keep=keep, best=best)


def names(run: RunDirectory) -> set[str]:
    return {p.name for p in run.checkpoints_path.iterdir()}


def target(run: RunDirectory, link: str) -> str:
    return str((run.checkpoints_path / link).readlink())


def test_everything_comes_back(run: RunDirectory) -> None:
    state = {
        "big": 2**127 + 1,
        "best": float("-inf"),
        "pi": 0.1 + 0.2,
        "nested": {"list": [1, None, "ü"]},
        "none": None,
    }
    path = checkpoint.save(run, 10, ARRAYS, state, keep=3)
    arrays, loaded = checkpoint.load(path)
    assert loaded == state
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].flags.writeable
    assert names(run) == {"step-10", "last"}
    assert {p.name for p in path.iterdir()} == {"arrays.safetensors", "state.json"}
    assert json.loads((path / "state.json").read_text())["format"] == 1


def test_numpy_values_in_the_state_become_plain(run: RunDirectory) -> None:
    path = checkpoint.save(run, 1, {}, {"n": np.int64(3), "f": np.float32(0.5), "list": np.arange(2)}, keep=1)
    assert checkpoint.load(path) == ({}, {"n": 3, "f": 0.5, "list": [0, 1]})


def test_a_state_that_json_cannot_hold_leaves_nothing(run: RunDirectory) -> None:
    with pytest.raises(TypeError, match="cannot be saved in a checkpoint's state"):
        put(run, 1, thing=object())
    assert names(run) == set()


def test_pruning_spares_best_and_last(run: RunDirectory) -> None:
    for step in (10, 20, 30, 40, 50):
        put(run, step, keep=2, best=step == 20)
    assert names(run) == {"step-20", "step-40", "step-50", "best", "last"}
    assert (target(run, "best"), target(run, "last")) == ("step-20", "step-50")
    assert checkpoint.available(run.path) == [20, 40, 50]
    put(run, 60, keep=2, best=True)
    assert names(run) == {"step-50", "step-60", "best", "last"}


def test_pruning_starts_with_what_a_resume_went_back_before(run: RunDirectory) -> None:
    for step in (100, 200, 300):
        put(run, step)
    put(run, 150, keep=2)
    assert checkpoint.available(run.path) == [100, 150]
    assert target(run, "last") == "step-150"


def test_saving_a_step_again_replaces_it(run: RunDirectory) -> None:
    put(run, 10, best=True, round=1)
    put(run, 20)
    put(run, 10, round=2)
    assert names(run) == {"step-10", "step-20", "best", "last"}
    assert (target(run, "best"), target(run, "last")) == ("step-10", "step-10")
    assert checkpoint.load(run.checkpoints_path / "best")[1]["round"] == 2


def test_last_is_whole_at_every_instant_of_a_replacement(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks after each change of a name in the folder, which is where a kill could fall."""
    put(run, 10, best=True, round=1)
    seen = []
    for call in ("rename", "replace"):
        real = getattr(os, call)

        def watched(source: Any, to: Any, *rest: Any, real: Any = real, **named: Any) -> None:
            real(source, to, *rest, **named)
            for link in ("last", "best"):
                seen.append(checkpoint.load(run.checkpoints_path / link)[1]["round"])

        monkeypatch.setattr(os, call, watched)
    put(run, 10, round=2)
    assert len(seen) >= 8 and set(seen) == {1, 2}
    assert names(run) == {"step-10", "best", "last"}


def test_leftovers_of_a_killed_save_are_removed(run: RunDirectory) -> None:
    put(run, 10)
    (run.checkpoints_path / ".tmp-step-20").mkdir()
    (run.checkpoints_path / ".tmp-step-20" / "arrays.safetensors").write_bytes(b"half")
    (run.checkpoints_path / ".tmp-last").symlink_to("step-20")
    assert checkpoint.available(run.path) == [10]
    put(run, 20)
    assert names(run) == {"step-10", "step-20", "last"}


LIMITED = """
import resource, signal, sys
import numpy as np
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    checkpoint.save(RunDirectory.open(sys.argv[1]), int(sys.argv[2]), {"w": np.zeros(100_000)}, {}, keep=1)
except checkpoint.CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("step", [10, 20])
def test_a_full_disk_costs_only_the_new_checkpoint(run: RunDirectory, step: int) -> None:
    """Files larger than 50 kB fail as they would on a full disk; also when the step is being replaced."""
    good = put(run, 10, best=True)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run.path), str(step)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"step-{step} was not saved: File too large; {good} is intact" in done.stdout
    assert names(run) == {"step-10", "best", "last"}
    arrays, state = checkpoint.load(run.checkpoints_path / "last")
    assert state == {"step": 10} and arrays["w"][0] == 10


def test_the_first_checkpoint_failing_says_that_there_is_none(run: RunDirectory) -> None:
    run.checkpoints_path.rmdir()
    run.checkpoints_path.write_text("a file in the way")
    with pytest.raises(checkpoint.CheckpointError, match="there is no earlier one"):
        put(run, 1)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def other_format(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))


def change_a_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 20', '"step": 21'))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("arrays.safetensors", cut_in_half, r"arrays\.safetensors has \d+ bytes instead of \d+"),
        ("arrays.safetensors", flip_a_bit, r"arrays\.safetensors is damaged: its checksum"),
        ("arrays.safetensors", Path.unlink, r"arrays\.safetensors is missing"),
        ("state.json", cut_in_half, r"state\.json is cut short or damaged"),
        ("state.json", change_a_number, r"state\.json is damaged: its checksum"),
        ("state.json", other_format, "format 2, but this version of paceline reads format 1"),
        ("state.json", Path.unlink, r"state\.json is missing"),
    ],
)
def test_damage_is_noticed_and_another_checkpoint_named(run: RunDirectory, file: str, damage: Any, reason: str) -> None:
    put(run, 10)
    damage(put(run, 20) / file)
    with pytest.raises(UserError, match=reason + r".*checkpoints/step-10 loads") as error:
        checkpoint.load(run.checkpoints_path / "last")
    assert "\n" not in str(error.value)
    cut_in_half(run.checkpoints_path / "step-10" / "state.json")
    with pytest.raises(UserError, match="no other checkpoint of this run loads"):
        checkpoint.load(run.checkpoints_path / "last")


def test_load_of_nothing(run: RunDirectory) -> None:
    put(run, 10)
    with pytest.raises(UserError, match=r"step-99 cannot be loaded: it does not exist; .*step-10 loads"):
        checkpoint.load(run.checkpoints_path / "step-99")


def test_find(run: RunDirectory) -> None:
    folder = run.checkpoints_path
    with pytest.raises(UserError, match="has no checkpoint yet"):
        checkpoint.find(run.path)
    put(run, 10)
    put(run, 20)
    assert checkpoint.find(run.path) == folder / "step-20"
    put(run, 30, best=True)
    put(run, 40)
    assert checkpoint.find(run.path) == checkpoint.find(str(run.path), "best") == folder / "step-30"
    assert checkpoint.find(run.path, "last") == checkpoint.find(folder, "last") == folder / "step-40"
    assert checkpoint.find(run.path, "20") == checkpoint.find(run.path, "step-20") == folder / "step-20"
    assert checkpoint.find(folder / "step-20") == folder / "step-20"
    with pytest.raises(UserError, match=r"no checkpoint '25': there are best, last, 20, 30, 40"):
        checkpoint.find(run.path, "25")
    with pytest.raises(UserError, match=r"no checkpoint 'step-25': there are best, last"):
        checkpoint.find(folder / "step-25")
    with pytest.raises(UserError, match="is already a checkpoint"):
        checkpoint.find(folder / "step-20", "best")
    with pytest.raises(UserError, match="there is no run at"):
        checkpoint.find(run.path.parent / "other")


def test_find_without_best_says_what_exists(run: RunDirectory) -> None:
    put(run, 10)
    with pytest.raises(UserError, match="has no checkpoint 'best': there are last, 10"):
        checkpoint.find(run.path, "best")


def test_a_run_may_be_moved(run: RunDirectory, tmp_path: Path) -> None:
    put(run, 10, best=True)
    run.path.rename(tmp_path / "moved")
    assert checkpoint.load(checkpoint.find(tmp_path / "moved"))[1] == {"step": 10}


def test_the_checkpoints_of_the_best_evaluations_stay(tmp_path: Path) -> None:
    settings = {"eval": {"every_steps": 1, "episodes": 2}, "checkpoint": {"keep": 1, "keep_best": 3}}
    run = paceline.train({"env": "CartPole-v1", "out": str(tmp_path), "stop": {"iterations": 8}, **settings})
    returns = {row["env_steps"]: row["return_mean"] for row in RunDirectory(run.path).read_eval()}
    best = sorted(returns, key=lambda step: -returns[step])[:3]
    assert len(returns) == 8 and checkpoint.best_steps(RunDirectory(run.path), 3) == best
    assert set(checkpoint.available(run.path)) == {*best, max(returns)}
    assert checkpoint.find(run.path, "best").name == f"step-{best[0]}"
    assert checkpoint.best_steps(RunDirectory(run.path), 1) == []
