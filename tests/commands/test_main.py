from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.commands.main import VERBS
from paceline.run.directory import RunDirectory

Cli = Callable[..., Any]


def test_help_lists_the_verbs(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0 and result.err == ""
    assert all(f"\n    {verb}" in result.out for verb in VERBS)


@pytest.mark.parametrize(
    "words, more",
    [
        (["--help"], {"pydantic", "yaml", "importlib.metadata"}),
        ([], {"pydantic", "yaml", "importlib.metadata"}),
        (["launch", "--help"], {"pydantic", "yaml"}),
        (["evaluate", "-h"], {"pydantic", "yaml"}),
        (["--version"], {"pydantic"}),
        (["plot"], set()),
        (["train", "--help"], set()),
    ],
)
def test_help_imports_nothing_heavy(words: list[str], more: set[str]) -> None:
    """This is why it answers at once."""
    script = f"""
import sys
from paceline.commands.main import main
heavy = {{"torch", "ray", "matplotlib", "tensorboard", "gymnasium", "rich", "imageio", "numpy", "psutil"}} | {more!r}
try:
    main({words})
except SystemExit as ended:
    sys.exit(f"{{heavy & set(sys.modules)}} imported" if heavy & set(sys.modules) else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_no_words_at_all(cli: Cli) -> None:
    assert cli().out == cli("--help").out


def test_version(cli: Cli) -> None:
    assert cli("--version").out.split() == ["paceline", paceline.__version__]  # type: ignore[attr-defined]


def test_doctor(here: Path, cli: Cli) -> None:
    result = cli("doctor")
    assert result.code in (0, 1) and result.out and not Path("runs").exists()


@pytest.mark.parametrize("place", ["__init__", "reset", "step"])
def test_an_environment_that_calls_exit_fails(place: str, here: Path, cli: Cli) -> None:
    bodies = {"__init__": "pass", "reset": "return np.zeros(2, np.float32), {}", "step": "pass"} | {
        place: "sys.exit(0)"
    }
    Path("ends.py").write_text(
        "import sys, gymnasium, numpy as np\nfrom gymnasium.spaces import Box, Discrete\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space, action_space = Box(0, 1, (2,), np.float32), Discrete(2)\n"
        f"    def __init__(self): {bodies['__init__']}\n"
        f"    def reset(self, *, seed=None, options=None): {bodies['reset']}\n"
        f"    def step(self, action): {bodies['step']}\n"
    )
    result = cli("train", "--env", "ends.py:Env", "--iterations", 1, "--name", "x")
    assert result.code == 1 and "sys.exit(0) was called in" in result.err and "ends.py, line" in result.err


@pytest.mark.parametrize("words", [["train", "--help"], ["--help"], ["--version"]], ids=" ".join)
def test_help_for_a_reader_that_goes_away(words: list[str], start: Callable[..., Any]) -> None:
    """`paceline train --help | head -1`, with a reader that is gone before the first line."""
    process = start(*words)
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == ""


def test_a_reader_that_goes_away(here: Path, start: Callable[..., Any]) -> None:
    """`paceline train | head -1`: the run goes on."""
    process = start("train", "--total-steps", 20_000, "--name", "x")
    assert process.stdout.readline().split() == ["run", "runs/x"]
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == ""
    assert RunDirectory(Path("runs/x")).read_summary()["status"] == "done"
