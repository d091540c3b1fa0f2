"""An environment around an external program, with MultiDiscrete actions and a time limit on every step.

    paceline envs check examples/simulator/env.py:ConvectionLoop
    paceline train --config configs/convection.yaml

README.md beside this file says how to replace it with your own simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from external import Simulator, SimulatorLost
from gymnasium import spaces
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Action = NDArray[np.integer[Any]]

PROGRAM = (sys.executable, str(Path(__file__).with_name("convection.py")))
HEATER = (20.0, 28.0, 36.0)  # the flow is steady below 24.7, and turns back at random times above
PUMP = (-30.0, 0.0, 30.0)
TIME = 0.1
MIDDLE, WIDTH = np.array([0.0, 0.0, 25.0]), np.array([20.0, 25.0, 25.0])
STARTS = 3


class ConvectionLoop(gymnasium.Env[Floats, Action]):
    """Carry as much heat as possible with a flow that never turns back.

    Action: two choices at once, the heater (low, middle, high) and the pump (backwards, off, forwards). Observation:
    the state of the loop. Reward: the heat put in, up to 1 a step, while the flow goes forwards, -1 while it goes
    backwards, and a tenth less for running the pump.

    If the simulator dies or does not answer in time, the episode is truncated where it was, and the next one begins
    with a new simulator. One that does not even start is an error.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, command: Sequence[str] = PROGRAM, answer_seconds: float = 5.0, start_seconds: float = 60.0
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.MultiDiscrete([len(HEATER), len(PUMP)])
        self.simulator = Simulator(command, answer_seconds=answer_seconds, start_seconds=start_seconds)
        self._state = MIDDLE
        self._reversals = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        # All that is random is drawn here and handed over: a program with a generator of its own is given a seed.
        begin = (MIDDLE + 0.5 * WIDTH * self.np_random.uniform(-1, 1, 3)).tolist()
        reasons = []
        for _ in range(STARTS):
            try:
                self._state = np.array(self.simulator.ask({"begin": begin})["state"])
                break
            except SimulatorLost as lost:
                reasons.append(str(lost))
        else:
            raise RuntimeError(f"the simulator {self.simulator.command} failed {STARTS} times: {reasons[-1]}")
        self._reversals = 0
        return self._observe(), {}

    def step(self, action: Action) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        heater, pump = HEATER[int(action[0])], PUMP[int(action[1])]
        try:
            answer = self.simulator.ask({"advance": {"heater": heater, "pump": pump, "time": TIME}})
        except SimulatorLost as lost:
            return self._observe(), 0.0, False, True, {"simulator_lost": str(lost), "metrics": self._metrics(lost=True)}
        self._state = np.array(answer["state"])
        self._reversals += answer["reversals"]
        reward = heater / HEATER[-1] if self._state[0] > 0 else -1.0
        return self._observe(), reward - 0.1 * (pump != 0), False, False, {"metrics": self._metrics()}

    def close(self) -> None:
        self.simulator.close()

    def _observe(self) -> Floats:
        return ((self._state - MIDDLE) / WIDTH).astype(np.float32)

    def _metrics(self, *, lost: bool = False) -> dict[str, float]:
        """In the run's files as env/reversals and env/simulator_lost."""
        return {"reversals": float(self._reversals), "simulator_lost": float(lost)}


class OneChoice(gymnasium.ActionWrapper[Floats, int, Action]):
    """The combinations of all choices, numbered: for DQN, which has a value for each.

    --algo dqn --set env.wrappers='[examples/simulator/env.py:OneChoice]'
    """

    def __init__(self, env: gymnasium.Env[Floats, Action]) -> None:
        super().__init__(env)
        assert isinstance(env.action_space, spaces.MultiDiscrete)
        self._choices = tuple(env.action_space.nvec)
        self.action_space = spaces.Discrete(int(np.prod(self._choices)))

    def action(self, action: int) -> Action:
        return np.array(np.unravel_index(action, self._choices))
