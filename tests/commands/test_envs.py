from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]


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
