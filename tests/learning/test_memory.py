"""Policies with memory solve what others cannot: deterministic evaluation over 100 episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config.resolve import read_file
from paceline.evaluate import evaluate

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


def score(tree: dict[str, Any], seed: int, out: Path) -> float:
    tree = tree | {"seed": seed, "out": str(out), "engine": {"threads": 1}}
    run = paceline.train(tree, quiet=True)
    [result] = evaluate(run, which="last", episodes=100, seed=10_000 + seed)
    return float(result["return_mean"])


def config(name: str) -> dict[str, Any]:
    tree = read_file(ROOT / "configs" / f"memory-{name}.yaml")
    tree["env"]["id"] = str(ROOT / tree["env"]["id"])
    return tree


@pytest.mark.parametrize(("name", "least", "seed"), [("cartpole", 475, 1), ("cartpole", 475, 2), ("pendulum", -250, 1)])
def test_control_without_velocities(name: str, least: float, seed: int, tmp_path: Path) -> None:
    assert score(config(name), seed, tmp_path) >= least


@pytest.mark.parametrize("name", ["recall", "recall-impala"])
def test_a_cue_is_recalled_after_fifty_steps(name: str, tmp_path: Path) -> None:
    assert score(config(name), 1, tmp_path) >= 0.95


@pytest.mark.parametrize("name", ["recall", "recall-impala"])
def test_without_memory_the_cue_is_guessed(name: str, tmp_path: Path) -> None:
    tree = config(name) | {"model": {}, "stop": {"total_steps": 100_000}}
    assert 0.3 <= score(tree, 1, tmp_path) <= 0.7
