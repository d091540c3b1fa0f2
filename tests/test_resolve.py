from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import ALGORITHMS, DEFAULT_TOTAL_STEPS, RunConfig, UserError, native_algorithms
from paceline.config.resolve import (
    keys,
    merge,
    parse_sets,
    portable,
    presets,
    put,
    read_file,
    resolve_tree,
    tidy,
    to_tree,
    to_yaml,
    validate,
)
from paceline.training.memory import fit_to_memory


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("algo", native_algorithms())
def test_every_preset_is_valid(algo: str) -> None:
    for name in presets(algo):  # a new algorithm may have none
        config, used = resolve_tree({"algo": algo, "env": name})
        assert used == f"{algo}/{name}" and config.algo == algo and config.env.id == name
        assert config.stop.has_budget
        assert resolve_tree({"algo": algo, "env": "paceline/Identity-v0"}, preset=name)[0].hyper == config.hyper


def test_presets_are_of_algorithms_that_exist() -> None:
    files = {
        path.name.removesuffix(".yaml") for path in resources.files("paceline.config").joinpath("presets").iterdir()
    }
    assert {"ppo", "a2c", "a3c", "impala", "dqn"} <= files <= set(native_algorithms())
    assert all(presets(algo) for algo in files)


def test_the_preset_fills_what_is_not_given() -> None:
    config, name = resolve_tree({"env": "CartPole-v1", "ppo": {"gamma": 0.5}})
    plain, none = resolve_tree({"env": "CartPole-v1"}, preset="none")
    assert name == "ppo/CartPole-v1" and none is None
    assert config.hyper.gamma == 0.5 and config.hyper.learning_rate != plain.hyper.learning_rate
    assert plain.hyper == RunConfig().hyper and plain.stop.total_steps == DEFAULT_TOTAL_STEPS
    assert resolve_tree({})[1] == "ppo/CartPole-v1"  # by the default env
    assert resolve_tree({"env": "paceline/Identity-v0"})[1] is None


@pytest.mark.parametrize("budget", [{"iterations": 3}, {"max_time": "5s"}, {"total_steps": 77}])
def test_the_budget_of_the_user_replaces_that_of_the_preset(budget: dict[str, Any]) -> None:
    config, _ = resolve_tree({"env": "CartPole-v1", "stop": budget})
    assert {k for k in ("total_steps", "iterations", "max_time") if getattr(config.stop, k) is not None} == set(budget)


def test_a_goal_alone_keeps_the_budget_of_the_preset() -> None:
    config, _ = resolve_tree({"env": "CartPole-v1", "stop": {"return_mean": 475}})
    assert config.stop.total_steps == presets("ppo")["CartPole-v1"]["stop"]["total_steps"]
    assert config.stop.return_mean == 475


def test_no_budget_at_all_is_the_default_one() -> None:
    given: dict[str, Any] = {"env": "paceline/Identity-v0", "stop": {"total_steps": None, "return_mean": -100}}
    assert resolve_tree(given)[0].stop.total_steps == DEFAULT_TOTAL_STEPS


@pytest.mark.parametrize("algo", native_algorithms())
def test_what_was_resolved_resolves_to_itself(algo: str, tmp_path: Path) -> None:
    given = {
        "algo": algo,
        "seed": 0,
        "env": {"id": "CartPole-v1", "kwargs": {"a": True}, "wrappers": [{"ClipReward": {"max_reward": 1.0}}]},
        "model": {"class": "net.py:Net", "kwargs": {"width": 3}},
        "stop": {"max_time": "1h30m"},
        algo: {"learning_rate": 1e-5},
    }
    config, _ = resolve_tree(given)
    path = write(tmp_path / "config.yaml", to_yaml(config))
    again, _ = resolve_tree(read_file(path))
    assert again == config and to_yaml(again) == to_yaml(config)
    assert validate(to_tree(config)) == config
    assert set(to_tree(config)) & set(native_algorithms()) == {algo}


def test_a_file(tmp_path: Path) -> None:
    assert read_file(write(tmp_path / "a.yaml", "")) == {}
    assert read_file(write(tmp_path / "a.yaml", "# all is commented out\n")) == {}
    text = "env: Acrobot-v1\nppo:\n  # gamma: 0.9\nstop:\n"
    tree = read_file(write(tmp_path / "a.yaml", text))
    assert tree == {"env": {"id": "Acrobot-v1"}}
    assert resolve_tree(tree)[0].env.id == "Acrobot-v1"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2.5e+1", -25.0),
        (".5e1", 5.0),
        ("1", 1),
        ("0.5", 0.5),
        ("e1", "e1"),
        ("1e5x", "1e5x"),
        ("", None),
        ("true", True),
        ("'1e3'", "1e3"),
    ],
)
def test_numbers_in_kwargs_are_numbers(text: str, value: Any, tmp_path: Path) -> None:
    tree = parse_sets([f"env.kwargs={{g: {text}}}"])
    assert tree == {"env": {"kwargs": {"g": value}}} and type(tree["env"]["kwargs"]["g"]) is type(value)
    assert read_file(write(tmp_path / "a.yaml", f"env: {{kwargs: {{g: {text}}}}}")) == tree


def test_infinite_arguments_stay_infinite(tmp_path: Path) -> None:
    """A file, a checkpoint and a worker get them from `to_tree`."""
    config, _ = resolve_tree(parse_sets(["env.kwargs={low: -.inf, high: [.inf, 1]}"]))
    for found in (config, portable(config), validate(json.loads(json.dumps(to_tree(config))))):
        assert found.env.kwargs == {"low": -math.inf, "high": [math.inf, 1]}
    assert validate(read_file(write(tmp_path / "a.yaml", to_yaml(config)))) == config


def test_sets() -> None:
    tree = parse_sets(
        ["ppo.gamma=0.5", "model.hidden=[8, 8]", "name=a=b", "ppo.gamma=0.6"], {"seed": 3, "ppo": {"clip": 1}}
    )
    assert tree == {"seed": 3, "ppo": {"clip": 1, "gamma": 0.6}, "model": {"hidden": [8, 8]}, "name": "a=b"}
    assert parse_sets(["env=Acrobot-v1", "env.envs_per_worker=2"])["env"] == {"id": "Acrobot-v1", "envs_per_worker": 2}
    with pytest.raises(UserError, match="'seed' already has the value 3"):
        parse_sets(["seed.x=1"], {"seed": 3})


def test_sets_do_not_change_what_they_are_laid_over() -> None:
    base = {"ppo": {"clip": 0.1}}
    parse_sets(["ppo.clip=0.5"], base)
    assert base == {"ppo": {"clip": 0.1}}


def test_merging() -> None:
    low = {"a": {"x": 1, "y": 2}, "kwargs": {"p": 1}, "b": 1}
    high = {"a": {"y": 3}, "kwargs": {"q": 2}, "b": {"z": 1}}
    assert merge(low, high) == {"a": {"x": 1, "y": 3}, "kwargs": {"q": 2}, "b": {"z": 1}}
    assert low == {"a": {"x": 1, "y": 2}, "kwargs": {"p": 1}, "b": 1}


def test_kwargs_are_one_value() -> None:
    """Those of a preset or a file are for its own env, not for another."""
    tree: dict[str, Any] = {}
    put(tree, "env.kwargs", {"a": 1})
    assert merge(tree, {"env": {"kwargs": {}}})["env"]["kwargs"] == {}


def test_tidy_leaves_values_alone() -> None:
    given = {"name": None, "seed": 0, "ppo": None, "env": "x", 5: None}
    assert tidy(given) == {"name": None, "seed": 0, "env": {"id": "x"}, 5: None}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"ppo": {"gama": 1}}, "unknown key 'ppo.gama': did you mean 'ppo.gamma'?"),
        ({"gama": 1, "sed": 2}, "unknown key 'gama': .*and 1 more"),
        ({"keep": 1}, "unknown key 'keep': did you mean 'checkpoint.keep'?"),
        ({"model": {"class_": "x", "clas": 1}}, "unknown key 'model.clas': did you mean 'model.class'?"),
        ({"env": {"vector": "threads"}}, "env.vector=threads is not one of auto, sync, async"),
        ({"engine": {"device": "gpu"}}, "engine.device=gpu is not one of auto, cpu, cuda; did you mean .cuda."),
        ({"ppo": []}, "ppo=\\[\\]: expected a section of settings such as ppo.rollout_steps"),
        ({"seed": "two words"}, "seed='two words': "),
        ({"stop": {"max_time": ""}}, "stop.max_time='': expected a duration"),
    ],
)
def test_one_line_for_each_mistake(tree: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}") as error:
        validate(tree)
    assert "\n" not in str(error.value)


def test_keys_are_what_the_config_takes() -> None:
    """Each listed key can be set to its listed default."""
    for key, _, default, _ in keys():
        text = "null" if default == "none" and key != "model.memory" else default
        section = key.partition(".")[0]
        tree: dict[str, Any] = {"algo": section} if section in ALGORITHMS else {}
        if section == "sac":
            tree["engine"] = {"name": "rllib"}
        put(tree, key, yaml.safe_load(text))
        validate(tree)
    assert "model.class" in {key for key, *_ in keys()}


def test_a_minibatch_that_nobody_asked_for_shrinks_with_the_rollout() -> None:
    config, _ = resolve_tree({"env": {"id": "CartPole-v1", "envs_per_worker": 4}})
    assert (
        config.hyper.minibatch_size
        == 4 * config.hyper.rollout_steps
        < presets("ppo")["CartPole-v1"]["ppo"]["minibatch_size"]
    )
    with pytest.raises(UserError, match="minibatch_size=256 is more than a rollout holds"):
        resolve_tree({"env": {"id": "CartPole-v1", "envs_per_worker": 4}, "ppo": {"minibatch_size": 256}})


@pytest.mark.parametrize(("env", "rows"), [("Relay", 160), ("Loner", 40)])
def test_a_minibatch_for_an_own_env_must_fit_the_rows_of_its_agents(env: str, rows: int) -> None:
    own = {"env": {"id": f"{Path(__file__).parent}/team_envs.py:{env}", "envs_per_worker": 4}}

    def fit(size: int) -> int:
        given = {**own, "ppo": {"rollout_steps": 10, "minibatch_size": size}}
        config, _ = fit_to_memory(resolve_tree(given)[0], may_lower=False, given=given)
        return int(config.hyper.minibatch_size)

    assert fit(rows) == rows
    with pytest.raises(UserError, match=f"minibatch_size={rows + 1} is more than a rollout holds.* = {rows}$"):
        fit(rows + 1)
