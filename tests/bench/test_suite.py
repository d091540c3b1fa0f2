from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.suite import Suite, SuiteRun, load_suite, plan_suite, read_entry, suite_names
from paceline.config import UserError
from paceline.config.resolve import resolve_tree, to_tree
from paceline.run.directory import append_line

Cli = Callable[..., Any]
TWO = {"games": {"cart": {"env": "CartPole-v1", "range": [0, 500], "total_steps": "2k"}, "acro": "Acrobot-v1"}}


def planned(tree: dict[str, Any] = TWO, **asked: Any) -> list[SuiteRun]:
    return plan_suite(Suite.model_validate(tree), Path("x"), **{"algos": ["ppo"], "seeds": 1, **asked})


def test_the_matrix() -> None:
    names = [run.name for run in planned(algos=["ppo", "a2c"], seeds=2)]
    assert names == [
        f"{game}-{algo}-s{seed}" for seed in (0, 1) for game in ("cart", "acro") for algo in ("ppo", "a2c")
    ]
    assert [run.name for run in planned(games=["acro"])] == ["acro-ppo-s0"]


def test_the_commands_of_a_run() -> None:
    tree = {**TWO, "settings": {"env": {"kwargs": {"a": [1]}}, "ppo": {"gamma": 0.9}, "a2c": {"gamma": 0.8}}}
    run = planned(tree, algos=["ppo", "a2c"], sets=["engine.threads=1", "a2c.value_coef=1"])[0]
    assert " ".join(run.train_words) == (
        'train --algo ppo --env CartPole-v1 --seed 0 --total-steps 2000 --set env.kwargs={"a": [1]} '
        "--set ppo.gamma=0.9 --set engine.threads=1 --out x --name cart-ppo-s0 --resume auto"
    )
    assert " ".join(run.evaluate_words) == "evaluate x/cart-ppo-s0 --checkpoint last --episodes 100 --seed 0"
    assert run.config.hyper.gamma == 0.9 and run.config.env.kwargs == {"a": [1]} and run.config.engine.threads == 1


def test_precedence_of_budgets_episodes_and_settings() -> None:
    tree = {**TWO, "total_steps": "3k", "episodes": 7, "settings": {"ppo": {"gamma": 0.9}}}
    assert [run.total_steps for run in planned(tree)] == [2000, 3000]
    assert [run.total_steps for run in planned(tree, total_steps=5)] == [5, 5]
    assert planned(tree)[0].episodes == 7 and planned(tree, episodes=3)[0].episodes == 3
    assert planned(tree, sets=["ppo.gamma=0.5"])[0].config.hyper.gamma == 0.5
    # Without any budget it is the preset's.
    assert planned()[1].total_steps is None and planned()[1].config.stop.total_steps == 500_000


def test_a_users_algorithm_has_a_short_name_and_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "learning.py"
    file.write_text(
        "from paceline.algorithms.ppo import PPO\n\n\nclass MyAlgo(PPO):\n"
        "    class Settings(PPO.Settings):\n        rate: float = 0.0\n"
    )
    algos, sets = ["ppo", f"{file}:MyAlgo"], ["ppo.gamma=0.9", "my_algo.rate=1", "engine.threads=1"]
    ppo, own = planned(algos=algos, games=["cart"], sets=sets)
    assert own.name == "cart-my_algo-s0" and own.sets == ("my_algo.rate=1", "engine.threads=1")
    assert own.train_words[:3] == ["train", "--algo", f"{file}:MyAlgo"] and own.config.hyper.rate == 1.0
    assert ppo.name == "cart-ppo-s0" and ppo.sets == ("ppo.gamma=0.9", "engine.threads=1")


def test_presets_by_algorithm() -> None:
    ppo, a2c = planned({**TWO, "preset": {"ppo": "Acrobot-v1"}}, algos=["ppo", "a2c"], games=["cart"])
    assert "--preset" in ppo.train_words and ppo.config.preset == "Acrobot-v1"
    assert "--preset" not in a2c.train_words and a2c.config.preset == "CartPole-v1"


def test_suites_that_come_with_it() -> None:
    assert {"atari-small", "classic", "procgen-easy"} <= set(suite_names())
    for name in suite_names():
        shown, suite = load_suite(name)
        assert shown == name and suite.about
        if suite.procgen is None:
            assert all(game.range and game.range[0] < game.range[1] for game in suite.games.values())
    classic = load_suite("classic")[1]
    assert len(plan_suite(classic, Path("x"), algos=["ppo", "a2c", "a3c", "impala"], seeds=3)) == 4 * 4 * 3


def test_procgen_takes_games_and_ranges_from_the_environment() -> None:
    from paceline.envs.procgen import SCORE_RANGES

    for mode in ("easy", "hard"):
        made = planned({"procgen": mode, "settings": {"env": {"kwargs": {"num_levels": 7}}}})
        assert {run.game: run.range for run in made} == SCORE_RANGES[mode] and len(made) == 16
        assert {run.levels for run in made} == {("train", "test")}
        assert made[0].env == "procgen:procgen-bigfish-v0"
        assert made[0].config.env.kwargs == {"distribution_mode": mode, "num_levels": 7}
    for item in ("env.kwargs.distribution_mode=easy", "env.kwargs={num_levels: 3}"):
        with pytest.raises(UserError, match="score ranges of this suite are those of hard mode"):
            planned({"procgen": "hard"}, sets=[item])
    # Also where they are listed one by one.
    assert planned({"games": {"run": "coinrun"}})[0].levels == ("train", "test")
    assert planned()[0].levels == ("all",)


def test_procgen_easy_is_the_papers() -> None:
    coinrun = plan_suite(load_suite("procgen-easy")[1], Path("x"), algos=["ppo"], seeds=1, games=["coinrun"])[0]
    assert coinrun.config.stop.total_steps == 25_000_000 and coinrun.stochastic
    assert coinrun.config.env.kwargs == {"distribution_mode": "easy", "num_levels": 200, "start_level": 0}
    assert coinrun.config.preset == "procgen-paper"
    impala = plan_suite(load_suite("procgen-easy")[1], Path("x"), algos=["impala"], seeds=1, games=["coinrun"])[0]
    assert impala.config.model == coinrun.config.model and impala.config.model.cnn == "impala"


def test_a_run_of_other_settings_is_noticed() -> None:
    run = planned(sets=["ppo.gamma=0.9"])[0]
    saved = to_tree(resolve_tree(run.given)[0])
    assert run.difference(saved) is None
    assert run.difference({**saved, "stop": {"total_steps": 1}, "out": "elsewhere"}) is None
    assert run.difference({**saved, "ppo": {**saved["ppo"], "gamma": 0.8}}) == "ppo.gamma=0.8, not 0.9"
    # A setting that was not asked for may be anything, unless it came with another preset.
    assert run.difference({**saved, "ppo": {**saved["ppo"], "clip": 0.1}}) is None
    assert run.difference({**saved, "preset": "none"}) == "preset=none, not CartPole-v1"


def test_the_users_files_are_the_same_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = planned({"games": {"mine": "mine.py:Env"}}, sets=["model.class=net.py:Net"])[0]
    saved = to_tree(run.config)
    saved["env"]["id"], saved["model"]["class"] = f"{tmp_path}/mine.py:Env", f"{tmp_path}/net.py:Net"
    assert run.difference(saved) is None
    saved["env"]["id"] = "/other/mine.py:Env"
    assert (run.difference(saved) or "").startswith("env.id=/other/mine.py:Env")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"games": ["carts"]}, ["--games", "carts", "cart, acro", "did you mean 'cart'"]),
        ({"games": []}, ["--games", "cart, acro"]),
        ({"algos": ["ppo", "trpo"]}, ["--algos", "trpo", "impala"]),
        ({"seeds": 0}, ["--seeds 0", "at least 1"]),
        ({"episodes": 0}, ["--episodes 0", "at least 1"]),
        ({"sets": ["ppo.gama=1"]}, ["ppo.gama", "did you mean"]),
        ({"sets": ["a2c.gamma=1"]}, ["a2c.gamma=1", "ppo"]),
        ({"sets": ["seed=4"]}, ["seed=4", "--seeds"]),
        ({"sets": ["stop.total_steps=4"]}, ["--total-steps"]),
        ({"sets": ["env=Pendulum-v1"]}, ["--games"]),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        planned(**asked)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("games: {a: {env: X, rang: [1, 2]}}", ["games.a.rang"]),
        ("game: {a: X}", ["game", "allowed: about, games"]),
        ("games: {a: {env: X, range: [2, 1]}}", ["games.a", "least"]),
        ("games: {a/b: X}", ["a/b", "letters"]),
        ("about: nothing", ["games or procgen"]),
        ("games: {a: X}\nprocgen: easy", ["games or procgen"]),
        ("games: {a: X}\npreset: {pp: b}", ["preset", "ppo"]),
        ("games: [", ["line 1", "not YAML"]),
        ("- a", ["a mapping"]),
    ],
)
def test_files_that_are_refused(text: str, words: list[str], here: Path, cli: Cli) -> None:
    Path("mine.yaml").write_text(text)
    result = cli("bench", "suite", "--suite", "mine.yaml")
    assert result.code == 2 and all(word in result.err for word in ["--suite mine.yaml", *words]), result.err
    assert result.err.count("\n") == 1 and sorted(path.name for path in here.iterdir()) == ["mine.yaml"]


def test_suites_that_do_not_exist(here: Path, cli: Cli) -> None:
    result = cli("bench", "suite", "--suite", "procgen")
    assert result.code == 2 and "procgen-easy" in result.err and ".yaml" in result.err
    result = cli("bench", "suite", "--suite", "gone.yaml")
    assert result.code == 2 and "gone.yaml" in result.err and "no such file" in result.err
    result = cli("bench", "suite", "--suite", "classic", "--total-steps", "many")
    assert result.code == 2 and "--total-steps many" in result.err
    assert not list(here.iterdir())


def test_a_run_is_read_by_its_own_evaluation_alone(tmp_path: Path) -> None:
    tree = {"games": {"cart": {"env": "CartPole-v1", "range": [0, 500]}}, "episodes": 3}
    (run,) = plan_suite(Suite.model_validate(tree), tmp_path, algos=["ppo"], seeds=1, total_steps=100)
    assert read_entry(run, None)["state"] == "missing"
    assert read_entry(run, {"state": "failed", "reason": "x"})["reason"] == "x"
    run.path.mkdir()
    (run.path / "config.yaml").write_text("stop: {total_steps: 100}\n")
    assert read_entry(run, None)["state"] == "interrupted"
    (run.path / "status.json").write_text('{"state": "failed", "reason": "RuntimeError: y"}')
    assert read_entry(run, None)["reason"] == "RuntimeError: y"
    (run.path / "status.json").write_text('{"state": "done"}')
    summary = {"status": "done", "env_steps": 128, "steps_per_second": 10.0, "wall_seconds": 1.0}
    (run.path / "summary.json").write_text(json.dumps(summary))
    row = {"kind": "deterministic", "episodes": 3, "seed": 0, "env_steps": 128, "return_mean": 50.0}
    for other in ({"kind": "random"}, {"episodes": 4}, {"seed": 1}, {"env_steps": 64}, {"kind": None}):
        append_line(run.path / "eval.jsonl", {**row, **other})
    found = read_entry(run, None)
    assert found["state"] == "interrupted" and found["trained"]  # only its evaluation is missing
    append_line(run.path / "eval.jsonl", row)
    done = read_entry(run, {"state": "failed", "reason": "x"})
    assert done["state"] == "done" and done["returns"] == {"all": 50.0} and done["scores"] == {"all": 0.1}
    (longer,) = plan_suite(Suite.model_validate(tree), tmp_path, algos=["ppo"], seeds=1, total_steps=200)
    assert read_entry(longer, None)["state"] == "interrupted" and not read_entry(longer, None)["trained"]
