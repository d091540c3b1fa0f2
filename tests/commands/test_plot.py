from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]


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
