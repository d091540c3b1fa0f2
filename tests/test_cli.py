from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli import TRAIN_FLAGS
from paceline.config import PPOConfig
from paceline.resolve import keys, presets, read_file, resolve_tree, validate
from paceline.run.directory import RunDirectory

Cli = Callable[..., Any]


def saved(name: str = "x") -> dict[str, Any]:
    return RunDirectory(Path("runs") / name).read_config()


def test_help(command: Callable[..., Any]) -> None:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        result = command("--help")
        seconds.append(time.perf_counter() - began)
    assert result.code == 0 and result.err == ""
    assert all(f"\n    {verb} " in result.out for verb in ("train", "evaluate", "envs", "plot", "doctor"))
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize("words", [["--help"], [], ["--version"], ["train", "--help"], ["evaluate", "-h"], ["plot"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    script = f"""
import sys
from paceline.cli import main
try:
    main({words})
except SystemExit as ended:
    heavy = {{"torch", "ray", "matplotlib", "tensorboard", "gymnasium", "rich", "imageio", "numpy"}} & set(sys.modules)
    sys.exit(f"{{heavy}} imported" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_bad_settings_are_refused_before_torch_is_imported() -> None:
    script = (
        "import sys; from paceline.cli import main\ntry: main(['train', '--set', 'ppo.gama=1'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30).returncode == 0


def test_no_words_at_all(cli: Cli) -> None:
    assert cli().out == cli("--help").out


def test_version(cli: Cli) -> None:
    assert cli("--version").out.split() == ["paceline", paceline.__version__]  # type: ignore[attr-defined]


def test_help_of_train_lists_every_key(cli: Cli) -> None:
    for words in (["train", "--help"], ["train", "--env", "CartPole-v1", "-h"]):
        result = cli(*words)
        assert result.code == 0
        for key, _, default, meaning in keys():
            assert f"  {key}  [{default}]  " in result.out and meaning in result.out
        assert all(f"  {flag} " in result.out for flag in TRAIN_FLAGS)
        others = ("--config", "--set", "--preset", "--resume", "--init-from", "--quiet")
        assert all(f"  {flag}" in result.out for flag in others)


@pytest.mark.parametrize("verb", ["evaluate", "envs", "plot", "doctor"])
def test_help_of_the_other_verbs(verb: str, cli: Cli) -> None:
    result = cli(verb, "--help")
    assert result.code == 0 and result.out.startswith(f"usage: paceline {verb}")


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
    assert tree["ppo"]["learning_rate"] == preset["ppo"]["learning_rate"] != PPOConfig().learning_rate  # preset
    assert tree["ppo"]["clip"] == 0.2  # default
    assert tree["stop"]["total_steps"] is None  # the budget of the user replaces that of the preset
    assert "preset     ppo/CartPole-v1 (--preset none turns it off)" in result.out
    assert tree["preset"] == "CartPole-v1"
    assert resolve_tree(read_file("runs/x/config.yaml"))[0] == validate(tree)


def test_without_a_preset(here: Path, cli: Cli) -> None:
    result = cli("train", "--preset", "none", "--iterations", 1, "--name", "x")
    assert "preset     none" in result.out and saved()["ppo"] == PPOConfig().model_dump()
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
    assert given.keys() == TRAIN_FLAGS.keys()
    assert cli("train", *(word for pair in given.items() for word in pair)).code == 0
    tree = saved()
    expected = {**given, "--total-steps": 500, "--max-time": 60, "--stop-return": -3.5}
    for flag, (key, _) in TRAIN_FLAGS.items():
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        assert str(value).removesuffix(".0") == str(expected[flag]).removesuffix(".0"), flag


def test_envs(cli: Cli) -> None:
    result = cli("envs")
    assert result.code == 0 and "CartPole-v1" in result.out and "paceline/KnownReturn-v0" in result.out


def test_envs_check(here: Path, cli: Cli) -> None:
    result = cli("envs", "check", "paceline/Identity-v0", "--set", "env.kwargs={n: 3}")
    assert result.code == 0 and "steps/s" in result.out and "Discrete(3)" in result.out
    assert result.out.rstrip().endswith("ready to train on")
    Path("bad.py").write_text(
        "import gymnasium, numpy as np\nfrom gymnasium.spaces import Box, Discrete\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space, action_space = Box(0, 1, (2,), np.float32), Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return np.full(2, 7, np.float32), {}\n"
        "    def step(self, action): return np.zeros(2, np.float32), float('nan'), True, False, {}\n"
    )
    result = cli("envs", "check", "bad.py:Env")
    assert result.code == 1 and "outside the bounds" in result.out and "nan" in result.out
    assert not Path("runs").exists()


def test_doctor(here: Path, cli: Cli) -> None:
    result = cli("doctor")
    assert result.code in (0, 1) and result.out and not Path("runs").exists()


def test_plot(here: Path, cli: Cli) -> None:
    import imageio.v3 as imageio

    for name in ("x", "y"):
        assert (
            cli("train", "--total-steps", 3000, "--name", name, "--quiet", "--set", "eval.every_steps=1000").code == 0
        )
    assert cli("evaluate", "runs/x", "--random", "--episodes", 2).code == 0
    result = cli("plot", "runs/x", "runs/y", "--smooth", 2, "-o", "deep/er/curves.png")
    assert result.code == 0 and result.out.strip() == "deep/er/curves.png" and result.err == ""
    picture = imageio.imread("deep/er/curves.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 800 and picture.std() > 1
    assert cli("plot", "runs/x", "-o", "curves.svg").code == 0 and "<svg" in Path("curves.svg").read_text()


def test_a_random_baseline_is_not_drawn_as_an_evaluation(here: Path, cli: Cli) -> None:
    from paceline.report.plots import _load

    assert cli("train", "--iterations", 2, "--name", "x", "--quiet", "--set", "eval.every_steps=1500").code == 0
    for words in (["--random"], ["--stochastic"], ["--checkpoint", "0"]):
        assert cli("evaluate", "runs/x", "--episodes", 2, *words).code == 0
    drawn = _load(Path("runs/x"), "x").evaluations
    assert [row.get("kind") for row in drawn] == ["deterministic", None] and drawn[0]["env_steps"] == 0


def test_a_reader_that_goes_away(here: Path, start: Callable[..., Any]) -> None:
    """`paceline train | head -1`: the run goes on."""
    process = start("train", "--total-steps", 20_000, "--name", "x")
    assert process.stdout.readline().split() == ["run", "runs/x"]
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == ""
    assert RunDirectory(Path("runs/x")).read_summary()["status"] == "done"
