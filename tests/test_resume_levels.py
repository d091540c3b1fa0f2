"""What a resume says about itself: the level of every part, kept for every resume; and which checkpoint it took."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import UserError
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory

CARTPOLE = {"id": "CartPole-v1", "envs_per_worker": 8}
SIZES = {"rollout_steps": 16, "minibatch_size": 64, "epochs": 1}
DISK: dict[str, Any] = {
    "algo": "dqn",
    "env": CARTPOLE,
    "dqn": {"replay": "disk", "replay_size": 400, "rollout_steps": 4, "rounds": 4, "learning_starts": 200},
    "checkpoint": {"every_iterations": 1, "keep": 99},
    "seed": 3,
}


def history(run: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((run / "resume.json").read_text())["history"]
    return entries


def test_a_replay_that_was_overwritten(here: Path, cli: Callable[..., Any]) -> None:
    """A ring that has wrapped since the checkpoint has none of its rows left: it learns when it has enough again."""
    run = paceline.train({**DISK, "stop": {"iterations": 12}, "name": "x"}, preset="none")
    steps = checkpoint.available(run.path)
    early = steps[4]  # some rows are held, more than the ring holds were written after it
    before = checkpoint.load(checkpoint.find(run.path, str(early)))[1]["engine"]["algorithm"]["optimizer_steps"]
    assert before > 0
    result = cli("train", "--resume", f"runs/x/checkpoints/step-{early}", "--iterations", 5)
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("resumed")]
    assert "environments exact; replay empty" in line and "are lost" in line
    (entry,) = history(run.path)
    assert entry["level"] == "partial" and entry["parts"]["replay"].startswith("empty")
    assert entry["parts"]["environments"] == entry["parts"]["weights"] == entry["parts"]["optimizer"] == "exact"
    assert entry["checkpoint"] == f"step-{early}" and entry["env_steps"] == early
    row = run.read_metrics()[-1]
    assert row["replay_rows"] < 200 and row["optimizer_steps"] == before
    cli("train", "--resume", run.path, "--iterations", 8)
    row = run.read_metrics()[-1]
    assert row["replay_rows"] > 200 and row["optimizer_steps"] > before


def test_every_resume_is_kept(here: Path) -> None:
    large = {**DISK, "dqn": {**DISK["dqn"], "replay_size": 4000}}
    run = paceline.train({**large, "stop": {"iterations": 2}, "name": "x"}, preset="none")
    for iterations in (3, 4):
        paceline.train({"stop": {"iterations": iterations}}, resume=run.path)
    early = checkpoint.available(run.path)[1]
    paceline.train({"stop": {"iterations": 3}}, resume=run / f"checkpoints/step-{early}")
    assert [(entry["resume"], entry["level"]) for entry in history(run)] == [(1, "exact"), (2, "exact"), (1, "exact")]
    assert [entry["parts"]["replay"] for entry in history(run)] == ["exact"] * 3  # the ring had room for all of it


def test_a_replay_that_is_not_saved(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.rollout.replay.MAX_SAVED_BYTES", 1000)
    tree = {**DISK, "dqn": {**DISK["dqn"], "replay": "ram"}}
    run = paceline.train({**tree, "stop": {"iterations": 4}, "name": "x"}, preset="none")
    paceline.train({"stop": {"iterations": 5}}, resume=run.path)
    (entry,) = history(run)
    assert entry["level"] == "partial" and entry["parts"]["replay"].startswith("empty: it was too large")


# -- checkpoints that do not load -------------------------------------------------------------------------------------


def saved(**changes: Any) -> RunDirectory:
    tree = {
        "env": CARTPOLE,
        "ppo": SIZES,
        "name": "x",
        "stop": {"iterations": 4},
        "checkpoint": {"every_iterations": 1},
    }
    return paceline.train({**tree, **changes}, preset="none")


def damage(run: RunDirectory, kind: str) -> str:
    """Returns the step of the newest checkpoint that is good."""
    last = checkpoint.find(run.path, "last")
    if kind == "a flipped byte":
        content = bytearray((last / "arrays.safetensors").read_bytes())
        content[-5] ^= 1
        (last / "arrays.safetensors").write_bytes(content)
    elif kind == "an empty folder":
        for file in last.iterdir():
            file.unlink()
    else:
        (run.checkpoints_path / "last").unlink()
        return last.name
    return f"step-{checkpoint.available(run.path)[-2]}"


@pytest.mark.parametrize("kind", ["a flipped byte", "an empty folder", "no link"])
def test_auto_falls_back_to_the_newest_good_checkpoint(kind: str, here: Path, cli: Callable[..., Any]) -> None:
    run = saved()
    good = damage(run, kind)
    result = cli("train", "--resume", run.path)
    assert result.code == 2 and good in result.err and "loads: use that one" in result.err
    result = cli("train", "--name", "x", "--resume", "auto", "--iterations", 6, "--quiet")
    assert result.code == 0, result.err
    assert "warning" in result.err and f"continuing from {Path.cwd()}/runs/x/checkpoints/{good}" in result.err
    assert f"continuing from {Path.cwd()}/runs/x/checkpoints/{good}" in (run.path / "logs/events.log").read_text()
    assert [row["iteration"] for row in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
    assert history(run.path)[-1]["checkpoint"] == good
    assert cli("train", "--resume", run.path, "--iterations", 7).code == 0  # `last` is good again


def test_the_newest_is_of_the_last_resume(here: Path, cli: Callable[..., Any]) -> None:
    """Not the one with the most steps, if the run went back to before it."""
    run = saved(stop={"iterations": 6}, checkpoint={"every_iterations": 1, "keep": 9})
    steps = checkpoint.available(run.path)
    paceline.train({"stop": {"iterations": 3}}, resume=run.path / f"checkpoints/step-{steps[1]}")
    good = f"step-{steps[2]}"
    assert checkpoint.find(run.path, "last").name == f"step-{steps[3]}"
    damage(run, "a flipped byte")
    result = cli("train", "--name", "x", "--resume", "auto", "--quiet")
    assert result.code == 0 and f"continuing from {Path.cwd()}/runs/x/checkpoints/{good}" in result.err


def test_no_good_checkpoint_is_left(here: Path, cli: Callable[..., Any]) -> None:
    run = saved()
    for path in run.checkpoints_path.glob("step-*"):
        shutil.rmtree(path)
        path.mkdir()
    result = cli("train", "--name", "x", "--resume", "auto")
    assert result.code == 2 and "no checkpoint that loads" in result.err and "--name" in result.err
    with pytest.raises(UserError, match=r"state\.json is missing; no other checkpoint of this run loads"):
        paceline.train({}, resume=run.path)


def test_a_run_whose_first_checkpoint_is_damaged_starts_again(here: Path, cli: Callable[..., Any]) -> None:
    run = saved(stop={"iterations": 1})
    for path in run.checkpoints_path.glob("step-[1-9]*"):
        shutil.rmtree(path)
    arrays = run.checkpoints_path / "step-0/arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])
    result = cli("train", "--env", "CartPole-v1", "--name", "x", "--resume", "auto", "--iterations", 2, "--quiet")
    assert result.code == 0 and "starts again" in result.err and len(list(Path("runs").glob("x-damaged-*"))) == 1
    assert [row["iteration"] for row in run.read_metrics()] == [1, 2]
