"""The presets reach published scores: deterministic evaluation over 100 episodes, on every seed named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import paceline
from paceline.evaluate import evaluate

# algorithm, env, env steps allowed, score to reach, seeds, workers
SCORES = [
    ("ppo", "CartPole-v1", 100_000, 475.0, 5, 1),
    ("ppo", "Acrobot-v1", 500_000, -90.0, 3, 1),
    ("ppo", "Pendulum-v1", 300_000, -250.0, 3, 1),
    ("ppo", "MountainCarContinuous-v0", 100_000, 85.0, 3, 1),
    ("ppo", "LunarLander-v3", 1_000_000, 200.0, 2, 1),
    ("a2c", "CartPole-v1", 500_000, 475.0, 5, 1),
    ("impala", "CartPole-v1", 300_000, 450.0, 3, 2),
    ("a3c", "CartPole-v1", 500_000, 450.0, 2, 2),
    ("dqn", "CartPole-v1", 100_000, 475.0, 3, 1),
    ("dqn", "Acrobot-v1", 150_000, -100.0, 3, 1),
    ("dqn", "MountainCar-v0", 200_000, -120.0, 2, 1),
    ("sac", "Pendulum-v1", 20_000, -160.0, 1, 1),
    ("td3", "Pendulum-v1", 20_000, -160.0, 1, 1),
]
CASES = [
    (algo, env, steps, score, seed, workers)
    for algo, env, steps, score, seeds, workers in SCORES
    for seed in range(1, seeds + 1)
]
SLACK = 1.02  # a budget ends at the first iteration at or past it

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


def test_two_workers_learn_as_fast_per_step_as_one(tmp_path: Path) -> None:
    """The env steps to 475, whose seeds differ by a factor of three: the means of eight seeds each are near."""
    logs: dict[int, list[float]] = {}
    for workers in (1, 2):
        for seed in range(1, 9):
            tree = {"env": "CartPole-v1", "seed": seed, "out": str(tmp_path), "stop": {"return_mean": 475}}
            run = paceline.train({**tree, "engine": {"workers": workers}})
            assert "return" in run.outcome.reason
            logs.setdefault(workers, []).append(math.log(run.summary["env_steps"]))
    one, two = (sum(logs[workers]) / 8 for workers in (1, 2))
    assert abs(one - two) < math.log(1.5), logs


@pytest.mark.parametrize(("algo", "env", "steps", "score", "seed", "workers"), CASES)
def test_preset_reaches_the_score(
    tmp_path: Path, algo: str, env: str, steps: int, score: float, seed: int, workers: int
) -> None:
    engine = {"threads": 1} | ({"workers": workers} if workers > 1 else {})  # two tests at a time
    run = paceline.train({"algo": algo, "env": env, "seed": seed, "out": str(tmp_path), "engine": engine})
    assert run.summary["workers"] == workers
    assert run.summary["env_steps"] <= steps * SLACK
    [result] = evaluate(run, which="last", episodes=100, seed=10_000 + seed)
    assert result["episodes"] == 100
    assert result["return_mean"] >= score
