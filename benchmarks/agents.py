"""Many agents in one environment, compared with as many environments of one agent: the same rows, the same learning.

Both sides run in this process, in turns. The agents do the work of the single environments (`Loner`), so the ratio is
what collecting from dictionaries costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from measuring import HERE
from ppo import Bench, say
from tables import Row

AGENTS, STEPS = 64, 128
SPACE = spaces.Box(-np.inf, np.inf, (8,), np.float32)


class Loner(gymnasium.Env[Any, Any]):
    """A point that is pushed to and fro."""

    observation_space, action_space = SPACE, spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.x = 0, np.zeros(8, np.float32)
        self.x[0] = self.np_random.normal()
        return self.x.copy(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.x[1] += 0.1 * (action - 1)
        self.x[0] += 0.1 * self.x[1]
        return self.x.copy(), -abs(float(self.x[0])), False, self.time == 200, {}


class Crowd:
    """As many agents, each of which is a `Loner`."""

    def __init__(self, agents: int = AGENTS) -> None:
        self.possible_agents = [f"agent_{number}" for number in range(agents)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, SPACE)
        self.action_spaces = dict.fromkeys(self.possible_agents, Loner.action_space)
        self.alone = {name: Loner() for name in self.possible_agents}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first = 0 if seed is None else seed
        return {name: env.reset(seed=first + i)[0] for i, (name, env) in enumerate(self.alone.items())}, {}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        results = [self.alone[name].step(action) for name, action in actions.items()]
        return tuple(dict(zip(actions, part, strict=True)) for part in zip(*results, strict=True))

    def close(self) -> None:
        return


def rows_per_second(name: str, envs: int, seconds: float) -> float:
    """Rows that PPO has collected and learned from, per second."""
    import paceline

    run = paceline.train(
        {
            "env": {"id": f"{HERE / 'agents.py'}:{name}", "envs_per_worker": envs, "vector": "sync"},
            "ppo": {"rollout_steps": STEPS, "minibatch_size": 2048, "epochs": 2},
            "stop": {"max_time": seconds},
            "engine": {"threads": 1},
        },
        preset="none",
    )
    steps: int = run.summary.get("agent_steps") or run.summary["env_steps"]
    return steps / float(run.summary["train_seconds"])


def rows(bench: Bench) -> list[Row]:
    """64 agents in one environment over 64 environments of one agent."""
    import os

    seconds = 2.0 if bench.quick else 10.0
    one, many = [], []
    before = Path.cwd()
    os.chdir(bench.runs_directory)
    try:
        for _ in range(bench.repeats):
            one.append(rows_per_second("Loner", AGENTS, seconds))
            many.append(rows_per_second("Crowd", 1, seconds))
            say(f"{AGENTS} environments: {one[-1]:,.0f} rows/s; {AGENTS} agents: {many[-1]:,.0f} rows/s")
    finally:
        os.chdir(before)
    name = f"{AGENTS} agents in one env"
    return [Row(name, "rows/s (peer: as many envs)", many, one, factor=0.9, better="higher", digits=0)]
