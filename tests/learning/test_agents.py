"""Several agents learn: short forms of published and own tasks, with the return of random actions beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.evaluate import evaluate

ROOT = Path(__file__).parents[2]
PPO = {"rollout_steps": 128, "minibatch_size": 1024, "learning_rate": 7e-4, "entropy_coef": 0.01}
MPE = {"envs_per_worker": 16}
# name: settings, env steps, mean return of one agent to reach, and that random actions do not reach
TASKS: dict[str, tuple[dict[str, Any], int, float, float]] = {
    "spread": ({"env": {"id": "pettingzoo.mpe:simple_spread_v3", **MPE}, "ppo": PPO}, 150_000, -18.5, -25.0),
    "meadow": ({"env": {"id": f"{ROOT}/examples/meadow.py:Meadow"}, "ppo": {"rollout_steps": 128}}, 60_000, 24.0, 8.0),
    "signal": (
        {
            "env": {"id": f"{ROOT}/tests/team_envs.py:Signal", "envs_per_worker": 16},
            "multi_agent": {"policies": "each"},
            "ppo": {"rollout_steps": 64, "learning_rate": 1e-3, "entropy_coef": 0.01},
        },
        100_000,
        6.3,
        3.5,
    ),
}
pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", TASKS)
def test_agents_learn(here: Path, name: str) -> None:
    settings, steps, score, chance = TASKS[name]
    run = paceline.train({**settings, "seed": 1, "stop": {"total_steps": steps}, "engine": {"threads": 1}})
    [result] = evaluate(run, which="last", episodes=100, seed=10_001)
    [random] = evaluate(run, which="last", episodes=100, seed=10_001, random=True)
    assert random["return_per_agent_mean"] < chance
    assert result["return_per_agent_mean"] >= score
