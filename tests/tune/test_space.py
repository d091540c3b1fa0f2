from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import UserError
from paceline.tune.plan import Sweep, Trial, load_sweep, make_sweep
from paceline.tune.space import FIXED, Range, combinations, parse_space, points, read_space

LR = "ppo.learning_rate"


def sweep(folder: Path, space: dict[str, Any], given: dict[str, Any] | None = None, **asked: Any) -> Sweep:
    options: dict[str, Any] = {"preset": None, "search": None, "trials": None, "seeds": 1, "metric": "return_mean"}
    options |= {"mode": "max", "interval": None}
    return make_sweep(folder, {"env": "CartPole-v1", **(given or {})}, space=space, **(options | asked))


def test_a_file_may_be_flat_or_nested(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("ppo:\n  learning_rate: {log: [1e-4, 1e-2]}\nppo.gamma: [0.9, 1.0]\n")
    assert read_space(tmp_path / "s.yaml") == {LR: {"log": [1e-4, 1e-2]}, "ppo.gamma": [0.9, 1.0]}
    (tmp_path / "s.yaml").write_text("")
    with pytest.raises(UserError, match="empty"):
        read_space(tmp_path / "s.yaml")
    with pytest.raises(UserError, match=r"--space .*no such file"):
        read_space(tmp_path / "none.yaml")


def test_a_grid_has_every_combination_once() -> None:
    space = parse_space({"ppo.gamma": [0.9, 0.99], "ppo.epochs": [1, 2, 3]}, "ppo")
    found = points(space, None, 0)
    assert len(found) == 6 and len({tuple(point.values()) for point in found}) == 6
    drawn = points(space, 4, 0)
    assert len({tuple(point.values()) for point in drawn}) == 4 and all(point in found for point in drawn)


def test_draws_are_in_range_and_repeat_with_the_seed() -> None:
    raw = {LR: {"log": [1e-4, 1e-2]}, "ppo.clip": {"uniform": [0.1, 0.3]}, "ppo.epochs": {"int": [1, 3]}}
    space = parse_space(raw, "ppo")
    found = points(space, 400, 7)
    assert found == points(space, 400, 7) != points(space, 400, 8)
    rates = np.array([point[LR] for point in found])
    assert rates.min() >= 1e-4 and rates.max() <= 1e-2
    assert 0.4 < (rates < 1e-3).mean() < 0.6  # half of the magnitudes
    assert {point["ppo.epochs"] for point in found} == {1, 2, 3}
    assert Range("log", 1e-4, 1e-2).clamp(0.5) == 1e-2 and Range("int", 1, 3).clamp(0.2) == 1


@pytest.mark.parametrize("kind", ["uniform", "log"])
def test_a_narrow_range_is_searched_and_not_left(kind: str) -> None:
    narrow = Range(kind, 0.999, 0.99999)
    rng = np.random.default_rng(0)
    drawn = {narrow.draw(rng) for _ in range(200)}
    assert len(drawn) > 150 and all(0.999 <= value <= 0.99999 for value in drawn)
    assert narrow.clamp(1.2) == 0.99999 and narrow.clamp(0.99912345678) == 0.9991235
    odd = Range(kind, 0.123456, 0.765432)
    assert odd.clamp(0.0) == 0.123456 and odd.clamp(1.0) == 0.765432 and odd.clamp(0.3333333) == 0.3333


def test_a_population_is_as_large_as_asked_for(tmp_path: Path) -> None:
    budget = {"stop": {"total_steps": 1000}}
    made = sweep(tmp_path, {"ppo.gamma": [0.9, 0.99]}, budget, search="pbt", trials=5)
    assert len({trial.name for trial in made.trials}) == 5
    assert sorted(trial.values["ppo.gamma"] for trial in made.trials)[1:4] == [
        0.9,
        made.trials[4].values["ppo.gamma"],
        0.99,
    ]
    assert combinations(made.domains) == 2 and combinations({LR: Range("log", 0.1, 1)}) is None


def test_a_population_takes_no_settings_that_checkpoints_are_made_for(tmp_path: Path) -> None:
    """Each is one of some algorithm, and would not fail before the first exchange."""
    values = {"optimizer": ("a2c", "adam"), "noisy_deviation": ("dqn", 0.4), "exploration": ("dqn", "noisy")}
    values |= {"replay": ("dqn", "disk"), "replay_size": ("dqn", "10k")}
    for name in FIXED:
        algo, value = values.get(name, ("dqn", True))
        given, space = {"algo": algo, "stop": {"total_steps": 1000}}, {f"{algo}.{name}": [value]}
        assert sweep(tmp_path, space, given).trials
        with pytest.raises(UserError, match=rf"{algo}\.{name}: .*pbt cannot change it"):
            sweep(tmp_path, space, given, search="pbt", trials=4)


@pytest.mark.parametrize(
    ("space", "asked", "words"),
    [
        ({"ppo.lr": [1]}, {}, "unknown key 'ppo.lr'"),
        ({LR: [1e-3, -1.0]}, {}, "learning_rate=-1.0"),
        ({LR: 1e-3}, {}, "is not a list of values"),
        ({LR: {"normal": [0, 1]}}, {}, "is not a list of values"),
        ({LR: {"log": [0, 1]}}, {"trials": 2}, "no magnitudes"),
        ({LR: {"log": [1, 0.1]}}, {"trials": 2}, "low below high"),
        ({LR: {"uniform": ["a", 1]}}, {"trials": 2}, "two numbers"),
        ({"ppo.epochs": {"int": [1.5, 3]}}, {"trials": 2}, "whole numbers"),
        ({LR: {"log": [0.1, 1]}}, {}, "--trials N"),
        ({LR: {"log": [0.1, 1]}}, {"search": "grid"}, "--trials N"),
        ({LR: [0.1, 1]}, {"search": "grid", "trials": 1}, "all combinations"),
        ({"a2c.gamma": [0.9]}, {}, "--algo a2c"),
        ({"seed": [1, 2]}, {}, "--seeds"),
        ({"stop.total_steps": [1]}, {}, "env, model and ppo"),
        ({LR: [0.1]}, {"metric": "return_mea"}, "did you mean 'return_mean'"),
        ({LR: [0.1]}, {"interval": 10}, "is for asha and pbt"),
        ({LR: [0.1]}, {"search": "asha", "interval": 10**9}, "less than the budget"),
        ({"model.hidden": [[8]]}, {"search": "pbt", "trials": 4}, "only those of ppo"),
        ({LR: [0.1]}, {"search": "pbt"}, "population"),
        ({LR: [0.1]}, {"search": "pbt", "trials": 4, "seeds": 2}, "differ by seed"),
        ({LR: [0.1]}, {"given": {"engine": {"workers": 2}}}, "one process"),
    ],
)
def test_what_is_wrong_is_said(space: dict[str, Any], asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        sweep(tmp_path, space, **asked)


def test_seeds_are_a_dimension_and_files_are_named_absolutely(tmp_path: Path) -> None:
    made = sweep(tmp_path, {LR: [0.1, 0.2]}, {"seed": 5, "env": "own.py:Own", "name": "x"}, seeds=2)
    assert [(t.name, t.point, t.seed) for t in made.trials] == [
        ("0-seed5", 0, 5), ("0-seed6", 0, 6), ("1-seed5", 1, 5), ("1-seed6", 1, 6)
    ]  # fmt: skip
    tree = made.tree(made.trials[3])
    assert tree == {"env": f"{Path.cwd()}/own.py:Own", "ppo": {"learning_rate": 0.2}, "seed": 6}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    made = sweep(tmp_path, {LR: {"log": [1e-4, 1e-2]}}, {"stop": {"total_steps": "100k"}}, search="asha", trials=3)
    made.trials[0] = Trial(**{**vars(made.trials[0]), "status": "done", "score": 3.5})
    made.save()
    assert load_sweep(tmp_path) == made and made.milestones == [10_000, 30_000, 90_000]
    (tmp_path / "tune.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        load_sweep(tmp_path)
    with pytest.raises(UserError, match=r"no tune\.json"):
        load_sweep(tmp_path / "other")
