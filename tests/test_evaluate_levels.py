from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import UserError
from paceline.envs.procgen import SCORE_RANGES
from paceline.evaluate import evaluate
from paceline.run.directory import RunDirectory
from paceline.run.metrics import EVAL_METRICS

EPISODES = 6


def train(out: Path, **env: Any) -> Path:
    env = {"id": "procgen:procgen-leaper-v0", "envs_per_worker": 4, **env}
    tree = {"env": env, "name": "x", "out": str(out), "stop": {"iterations": 1}, "ppo": {"rollout_steps": 8}}
    return paceline.train(tree).path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), kwargs={"num_levels": 2, "start_level": 30})


@pytest.fixture
def run(trained: Path, here: Path) -> Path:
    shutil.copytree(trained, here / "x", symlinks=True)
    return Path("x")


@pytest.mark.needs("procgen")
def test_both_level_sets_by_default(run: Path, cli: Callable[..., Any]) -> None:
    result = cli("evaluate", run, "--episodes", EPISODES, "--stochastic")
    assert result.code == 0 and result.err == ""
    train, test = RunDirectory(run).read_eval()
    assert (train["levels"], test["levels"]) == ("train", "test") and train["episodes"] == test["episodes"] == EPISODES
    assert {*train, *test} <= EVAL_METRICS.keys()
    low, high = SCORE_RANGES["easy"]["leaper"]
    for row in (train, test):
        assert row["return_normalized"] == pytest.approx((row["return_mean"] - low) / (high - low))
    assert test["generalization_gap"] == pytest.approx(train["return_mean"] - test["return_mean"])
    assert "generalization_gap" not in train
    gap = test["generalization_gap"]
    for text in ("train levels", "test levels", f"generalisation gap {gap:.2f}", f"{test['return_normalized']:.3f}"):
        assert text in result.out
    with (run / "eval_episodes.csv").open() as file:
        assert [line["levels"] for line in csv.DictReader(file)] == ["train"] * EPISODES + ["test"] * EPISODES


@pytest.mark.needs("procgen")
@pytest.mark.parametrize("levels", ["train", "test"])
def test_one_of_them(levels: str, run: Path) -> None:
    [row] = evaluate(run, episodes=EPISODES, levels=levels, stochastic=True)
    assert row["levels"] == levels and "generalization_gap" not in row
    both = {row["levels"]: row for row in evaluate(run, episodes=EPISODES, stochastic=True)}
    assert both[levels]["return_mean"] == row["return_mean"] and both[levels]["length_mean"] == row["length_mean"]
    lengths = {other["length_mean"] for other in both.values()}
    assert len(lengths) == 2, "two sets of levels, other episodes"


@pytest.mark.needs("procgen")
def test_random_actions_have_both_too(run: Path) -> None:
    assert [row["levels"] for row in evaluate(run, episodes=2, random=True, levels="both")] == ["train", "test"]


@pytest.mark.needs("procgen")
def test_a_film_of_either(run: Path, cli: Callable[..., Any]) -> None:
    result = cli("evaluate", run, "--video", "a.mp4", "--levels", "test", "--stochastic")
    assert result.code == 0 and Path("a.mp4").stat().st_size > 1000
    result = cli("evaluate", run, "--video", "b.mp4", "--levels", "both")
    assert result.code == 2 and "either train or test levels" in result.err and not Path("b.mp4").exists()
    result = cli("evaluate", run, "--render")
    assert result.code == 2 and "--video" in result.err


def test_levels_are_of_procgen(here: Path, cli: Callable[..., Any]) -> None:
    run = paceline.train({"env": "CartPole-v1", "name": "c", "stop": {"iterations": 1}}).path
    result = cli("evaluate", run, "--levels", "train")
    assert result.code == 2 and "CartPole-v1 has no level sets" in result.err
    assert RunDirectory(run).read_eval() == []
    assert "levels" not in evaluate(run, episodes=2)[0]


@pytest.mark.needs("procgen")
def test_exploration_mode_has_one_level(here: Path) -> None:
    run = train(here, kwargs={"distribution_mode": "exploration"})
    [row] = evaluate(run, episodes=1, stochastic=True)
    assert row["levels"] == "train" and row["return_normalized"] is None
    with pytest.raises(UserError, match="exploration mode has one level"):
        evaluate(run, episodes=1, levels="test")
