from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.tune.space import FIXED, Range, combinations
from paceline.tune.sweep_plan import Sweep, Trial, load_sweep, make_sweep

LR = "ppo.learning_rate"


def sweep(folder: Path, space: dict[str, Any], given: dict[str, Any] | None = None, **asked: Any) -> Sweep:
    return make_sweep(folder, {"env": "CartPole-v1", **(given or {})}, space, **asked)


def test_a_population_has_the_requested_size(tmp_path: Path) -> None:
    budget = {"stop": {"total_steps": 1000}}
    made = sweep(tmp_path, {"ppo.gamma": [0.9, 0.99]}, budget, search="pbt", trials=5)
    assert len({trial.name for trial in made.trials}) == 5
    assert sorted(trial.values["ppo.gamma"] for trial in made.trials)[1:4] == [
        0.9,
        made.trials[4].values["ppo.gamma"],
        0.99,
    ]
    assert combinations(made.domains) == 2 and combinations({LR: Range("log", 0.1, 1)}) is None


def test_a_population_cannot_change_settings_that_checkpoints_depend_on(tmp_path: Path) -> None:
    """Each exists in some algorithm; without the check the first exchange would fail."""
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
        ({LR: {"log": [0, 1]}}, {"trials": 2}, "must be above 0"),
        ({LR: {"log": [1, 0.1]}}, {"trials": 2}, "low below high"),
        ({LR: {"uniform": ["a", 1]}}, {"trials": 2}, "two numbers"),
        ({"ppo.epochs": {"int": [1.5, 3]}}, {"trials": 2}, "whole numbers"),
        ({LR: {"log": [0.1, 1]}}, {}, "--trials N"),
        ({LR: {"log": [0.1, 1]}}, {"search": "grid"}, "--trials N"),
        ({LR: [0.1, 1]}, {"search": "grid", "trials": 1}, "all combinations"),
        ({"a2c.gamma": [0.9]}, {}, "--algo a2c"),
        ({"seed": [1, 2]}, {}, "--seeds"),
        ({"stop.total_steps": [1]}, {}, "model and ppo can be searched"),
        ({LR: [0.1]}, {"metric": "return_mea"}, "did you mean 'return_mean'"),
        ({LR: [0.1]}, {"interval": 10}, "is for asha and pbt"),
        ({LR: [0.1]}, {"search": "asha", "interval": 10**9}, "less than the budget"),
        ({"model.hidden": [[8]]}, {"search": "pbt", "trials": 4}, "only for those of ppo"),
        ({LR: [0.1]}, {"search": "pbt"}, "population"),
        ({LR: [0.1]}, {"search": "pbt", "trials": 4, "seeds": 2}, "differ by seed"),
        ({LR: [0.1]}, {"given": {"engine": {"workers": 2}}}, "one process"),
    ],
)
def test_bad_searches_are_refused(space: dict[str, Any], asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        sweep(tmp_path, space, **asked)


def test_each_point_has_every_seed_and_file_references_are_absolute(tmp_path: Path) -> None:
    made = sweep(tmp_path, {LR: [0.1, 0.2]}, {"seed": 5, "env": "own.py:Own", "name": "x"}, seeds=2)
    assert [(t.name, t.point, t.seed) for t in made.trials] == [
        ("0-seed5", 0, 5), ("0-seed6", 0, 6), ("1-seed5", 1, 5), ("1-seed6", 1, 6)
    ]  # fmt: skip
    tree = made.tree(made.trials[3])
    assert tree == {"env": f"{Path.cwd()}/own.py:Own", "ppo": {"learning_rate": 0.2}, "seed": 6}


def test_settings_of_a_users_own_algorithm_can_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("from paceline.algorithms.ppo import PPO\nclass MyPPO(PPO): ...\n")
    made = sweep(tmp_path / "s", {"my_ppo.gamma": [0.9, 0.99]}, {"algo": "own.py:MyPPO"})
    assert made.given["algo"] == f"{tmp_path}/own.py:MyPPO" and len(made.trials) == 2 == combinations(made.domains)
    with pytest.raises(UserError, match=r"ppo\.gamma is a setting of --algo ppo"):
        sweep(tmp_path / "s", {"ppo.gamma": [0.9]}, {"algo": "own.py:MyPPO"})


def test_a_saved_search_can_be_loaded(tmp_path: Path) -> None:
    made = sweep(tmp_path, {LR: {"log": [1e-4, 1e-2]}}, {"stop": {"total_steps": "100k"}}, search="asha", trials=3)
    made.trials[0] = Trial(**{**vars(made.trials[0]), "status": "done", "score": 3.5})
    made.save()
    assert load_sweep(tmp_path) == made and made.milestones == [10_000, 30_000, 90_000]
    (tmp_path / "tune.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        load_sweep(tmp_path)
    with pytest.raises(UserError, match=r"no tune\.json"):
        load_sweep(tmp_path / "other")
