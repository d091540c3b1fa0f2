"""A curriculum solves a task that is not solved without one."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.evaluate import evaluate

EXAMPLE = Path(__file__).parents[2] / "examples" / "curriculum.py"
CURRICULUM = f"{EXAMPLE}:Curriculum"

pytestmark = [pytest.mark.learning, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("callbacks", "opened", "seed"), [([CURRICULUM], 1, 1), ([CURRICULUM], 1, 2), ([], 0, 1)])
def test_a_curriculum_opens_the_lock(callbacks: list[str], opened: float, seed: int, tmp_path: Path) -> None:
    tree = {"env": f"{EXAMPLE}:Lock", "callbacks": callbacks, "seed": seed, "out": str(tmp_path)}
    run = paceline.train({**tree, "engine": {"threads": 1}, "stop": {"total_steps": 100_000}})
    [row] = evaluate(run, which="last", episodes=10)
    assert row["return_mean"] == opened
