"""From words to a job: the command that is run, its seeds, its run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.schedulers.train_command import parse_seeds, resumable, run_directory, with_seed

TRAIN = ["paceline", "train", "--env", "X"]


@pytest.mark.parametrize(
    "command",
    [
        TRAIN,
        ["python", "-m", *TRAIN],
        ["/venv/bin/paceline", *TRAIN[1:]],
        ["env", "A=b", *TRAIN],
        ["paceline", "tune", "--space", "x.yaml"],
    ],
)
def test_a_training_resumes(command: list[str], tmp_path: Path) -> None:
    words = resumable(command, "job-1")
    assert words == [*command, "--name", "job-1", "--resume", "auto"]
    assert run_directory(words, tmp_path) == str(tmp_path / "runs/job-1")


def test_what_the_user_said_stays(tmp_path: Path) -> None:
    for given in (["--name", "x"], ["--name=x"], ["--set", "name=x"]):
        assert resumable([*TRAIN, *given], "job") == [*TRAIN, *given, "--resume", "auto"]
        assert run_directory([*TRAIN, *given], tmp_path) == str(tmp_path / "runs/x")
    assert resumable([*TRAIN, "--resume", "runs/y"], "job") == [*TRAIN, "--resume", "runs/y"]
    assert run_directory([*TRAIN, "--resume", "runs/y"], tmp_path) == str(tmp_path / "runs/y")
    assert run_directory([*TRAIN, "--name", "x", "--out", "/scratch/me"], tmp_path) == "/scratch/me/x"
    (tmp_path / "c.yaml").write_text("out: elsewhere\n")
    words = [*TRAIN, "--name", "x", "--config", "c.yaml"]
    assert run_directory(words, tmp_path) == str(tmp_path / "elsewhere/x")


@pytest.mark.parametrize("command", [["python", "mine.py"], ["paceline", "evaluate", "train"], ["echo", "train"]])
def test_other_commands_are_left_alone(command: list[str], tmp_path: Path) -> None:
    assert resumable(command, "job") == command and run_directory(command, tmp_path) == ""


def test_seeds() -> None:
    assert parse_seeds("0-2,7") == [0, 1, 2, 7]
    for wrong in ("", "a", "3-1", "1,1", "-1"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(wrong)
    assert with_seed(["x"], 0) == ["x", "--seed", "0"]
    assert with_seed(["x", "--s={seed}"], 0) == ["x", "--s=0"]
    assert with_seed(["x"], None) == ["x"]
    named = resumable(with_seed([*TRAIN, "--name", "run"], 3), "job", 3)
    assert named[-4:] == ["--name", "run-3", "--resume", "auto"]
    assert resumable(with_seed([*TRAIN, "--name", "r{seed}"], 3), "job", 3)[-4:] == ["--name", "r3", "--resume", "auto"]
