"""A Dict action of choices and numbers: move a hand over a block, and close the gripper there.

paceline train --env examples/grasp.py:Grasp --total-steps 100k
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS = 40
REACH = 0.15


class Grasp(gymnasium.Env[Any, Any]):
    """An episode ends when the gripper closes. It is worth 1 on the block and -0.5 elsewhere; each step costs 0.01."""

    observation_space = spaces.Dict(
        {"block": spaces.Box(-1.0, 1.0, (2,), np.float32), "hand": spaces.Box(-1.0, 1.0, (2,), np.float32)}
    )
    action_space = spaces.Dict(
        {"gripper": spaces.Discrete(2), "move": spaces.Box(-0.2, 0.2, (2,), np.float32)}  # gripper: open, close
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.hand, self.block = self.np_random.uniform(-1.0, 1.0, (2, 2)).astype(np.float32)
        return self._observe(), {}

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.hand = np.clip(self.hand + action["move"], -1.0, 1.0)
        closed = bool(action["gripper"])
        holds = closed and bool(np.linalg.norm(self.hand - self.block) < REACH)
        reward = (1.0 if holds else -0.5 if closed else 0.0) - 0.01
        return self._observe(), reward, closed, self.steps == STEPS, {"metrics": {"success": float(holds)}}

    def _observe(self) -> dict[str, Any]:
        return {"block": self.block, "hand": self.hand}
