from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.algorithms.ppo import PPO
from paceline.config.keys import keys
from paceline.config.resolve import presets, read_file, resolve_tree, validate
from paceline.config.train_flags import FLAGS
from paceline.run.directory import RunDirectory

Cli = Callable[..., Any]


def saved(name: str = "x") -> dict[str, Any]:
    return RunDirectory(Path("runs") / name).read_config()


def test_bad_settings_are_refused_before_torch_is_imported() -> None:
    script = (
        "import sys; from paceline.commands.main import main\ntry: main(['train', '--set', 'ppo.gama=1'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30).returncode == 0


def test_help_of_train_lists_every_key(cli: Cli) -> None:
    for words in (["train", "--help"], ["train", "--env", "CartPole-v1", "-h"]):
        result = cli(*words)
        assert result.code == 0
        for key, _, default, meaning in keys():
            assert f"  {key}  [{default}]  " in result.out and meaning in result.out
        assert all(f"  {flag} " in result.out for flag in FLAGS.values())
        others = ("--config", "--set", "--preset", "--resume", "--init-from", "--quiet")
        assert all(f"  {flag}" in result.out for flag in others)


def test_help_of_train_lists_the_settings_of_your_own_algorithm(here: Path, cli: Cli) -> None:
    Path("own.py").write_text(
        "from paceline.algorithms.ppo import PPO\n"
        "class SoftPPO(PPO):\n"
        "    class Settings(PPO.Settings):\n"
        "        softness: float = 0.125\n"
        "        'How soft it is.'\n"
    )
    for words in (["--algo", "own.py:SoftPPO", "--help"], ["-h", "--algo=own.py:SoftPPO"]):
        result = cli("train", *words)
        assert result.code == 0 and "  soft_ppo.softness  [0.125]  float\n      How soft it is." in result.out
    result = cli("train", "--algo", "nothing", "--help")
    assert result.code == 2 and result.out == "" and "algo=nothing is not one of ppo" in result.err


def test_precedence(here: Path, cli: Cli) -> None:
    """flag > --set > file > preset > default; each of five keys is decided by another of them."""
    Path("a.yaml").write_text("seed: 1\nppo: {gamma: 0.91, gae_lambda: 0.92}\nstop: {iterations: 3}\nname: file\n")
    sets = ["--set", "seed=2", "--set", "ppo.gamma=0.93", "--set", "stop.iterations=2"]
    result = cli("train", "--config", "a.yaml", *sets, "--seed", 3, "--iterations", 1, "--name", "x")
    assert result.code == 0
    tree = saved()
    assert tree["seed"] == 3 and tree["stop"]["iterations"] == 1  # flag
    assert tree["ppo"]["gamma"] == 0.93  # --set
    assert tree["ppo"]["gae_lambda"] == 0.92  # file
    preset = presets("ppo")["CartPole-v1"]
    assert tree["ppo"]["learning_rate"] == preset["ppo"]["learning_rate"] != PPO.Settings().learning_rate  # preset
    assert tree["ppo"]["clip"] == 0.2  # default
    assert tree["stop"]["total_steps"] is None  # the budget of the user replaces that of the preset
    assert "preset     ppo/CartPole-v1 (--preset none turns it off)" in result.out
    assert tree["preset"] == "CartPole-v1"
    assert resolve_tree(read_file("runs/x/config.yaml"))[0] == validate(tree)


def test_without_a_preset(here: Path, cli: Cli) -> None:
    result = cli("train", "--preset", "none", "--iterations", 1, "--name", "x")
    assert "preset     none" in result.out and saved()["ppo"] == PPO.Settings().model_dump()
    result = cli("train", "--env", "paceline/Identity-v0", "--iterations", 1, "--name", "y")
    assert "preset     none" in result.out
    result = cli("train", "--env", "Acrobot-v1", "--preset", "CartPole-v1", "--iterations", 1, "--name", "z")
    assert "preset     ppo/CartPole-v1" in result.out
    assert saved("z")["ppo"]["learning_rate"] == presets("ppo")["CartPole-v1"]["ppo"]["learning_rate"]


def test_zeros_are_honoured(here: Path, cli: Cli) -> None:
    Path("a.yaml").write_text("seed: 7\nstop: {return_mean: 5, confirm_episodes: 3}\nppo: {gamma: 0.5}\n")
    sets = ["ppo.gamma=0", "ppo.gae_lambda=0", "ppo.max_grad_norm=0", "ppo.value_coef=0", "stop.confirm_episodes=0"]
    sets += [
        "checkpoint.every_seconds=0",
        "checkpoint.every_iterations=0",
        "eval.every_steps=0",
        "stop.return_window=1",
    ]
    words = [word for item in sets for word in ("--set", item)]
    line = "train --config a.yaml --seed 0 --threads 0 --stop-return 0 --iterations 3 --name x"
    result = cli(*line.split(), *words)
    assert result.code == 0
    tree = saved()
    assert tree["seed"] == 0 and tree["engine"]["threads"] == 0 and tree["stop"]["return_mean"] == 0
    assert [tree["ppo"][key] for key in ("gamma", "gae_lambda", "max_grad_norm", "value_coef")] == [0, 0, 0, 0]
    assert tree["stop"]["confirm_episodes"] == 0 and tree["checkpoint"]["every_seconds"] == 0
    run = RunDirectory(Path("runs/x"))
    assert run.read_summary()["seed"] == 0 and run.read_summary()["iterations"] == 1 and not run.read_eval()


def test_every_flag_sets_its_key(here: Path, cli: Cli) -> None:
    given = {
        "--algo": "a2c",
        "--env": "paceline/KnownReturn-v0",
        "--total-steps": "0.5k",
        "--iterations": "2",
        "--max-time": "1m",
        "--stop-return": "-3.5",
        "--workers": "1",
        "--envs-per-worker": "3",
        "--engine": "local",
        "--device": "cpu",
        "--threads": "1",
        "--seed": "11",
        "--out": "runs",
        "--name": "x",
    }
    assert set(given) == set(FLAGS.values())
    assert cli("train", *(word for pair in given.items() for word in pair)).code == 0
    tree = saved()
    expected = {**given, "--total-steps": 500, "--max-time": 60, "--stop-return": -3.5}
    for key, flag in FLAGS.items():
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        assert str(value).removesuffix(".0") == str(expected[flag]).removesuffix(".0"), flag


def test_a_run_that_must_reach_its_goal(here: Path, cli: Cli) -> None:
    words = ("train", "--iterations", 2, "--set", "stop.must_reach=true", "--set", "stop.confirm_episodes=0", "--quiet")
    assert cli(*words, "--stop-return", 499, "--name", "hard").code == 1
    assert RunDirectory(Path("runs/hard")).read_status()["reason"].endswith("the goal was not reached")
    assert cli(*words, "--stop-return", 5, "--name", "easy").code == 0
    refused = cli(*words, "--name", "none")
    assert refused.code == 2 and "needs a goal" in refused.err and not Path("runs/none").exists()
