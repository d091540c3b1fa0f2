"""The presets reach published scores: deterministic evaluation over 100 episodes, on every seed named."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.evaluate import evaluate

# algorithm, env, env steps allowed, score to reach, seeds
SCORES = [
    ("ppo", "CartPole-v1", 100_000, 475.0, 5),
    ("ppo", "Acrobot-v1", 500_000, -90.0, 3),
    ("ppo", "Pendulum-v1", 300_000, -250.0, 3),
    ("ppo", "MountainCarContinuous-v0", 100_000, 85.0, 3),
    ("ppo", "LunarLander-v3", 1_000_000, 200.0, 3),
    ("a2c", "CartPole-v1", 500_000, 475.0, 5),
]
CASES = [(algo, env, steps, score, seed) for algo, env, steps, score, seeds in SCORES for seed in range(1, seeds + 1)]
SLACK = 1.02  # a budget ends at the first iteration at or past it

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("algo", "env", "steps", "score", "seed"), CASES)
def test_preset_reaches_the_score(tmp_path: Path, algo: str, env: str, steps: int, score: float, seed: int) -> None:
    run = paceline.train({"algo": algo, "env": env, "seed": seed, "out": str(tmp_path)})
    assert run.summary["env_steps"] <= steps * SLACK
    result = evaluate(run, which="last", episodes=100, seed=10_000 + seed)
    assert result["episodes"] == 100
    assert result["return_mean"] >= score
