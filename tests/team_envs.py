"""Environments of several agents for tests: whose rewards and observations say what happened."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SPACE = spaces.Box(-np.inf, np.inf, (4,), np.float32)


class Relay:
    """Own class. `a` is there from the start and cut at the end, `b` dies at `dies`, `c` comes at `comes`, and `d`
    never. After `again` steps a dead `b` comes back. An observation is [number, time, life, a draw]."""

    def __init__(
        self, dies: int = 3, comes: int = 2, steps: int = 6, again: int = 0, fails: int = 0, continuous: bool = False
    ) -> None:
        self.possible_agents = ["a", "b", "c", "d"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, SPACE)
        space: Any = spaces.Box(0.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(5)
        self.action_spaces = dict.fromkeys(self.possible_agents, space)
        self.dies, self.comes, self.steps, self.again, self.fails = dies, comes, steps, again, fails
        self.total = 0

    def _see(self, name: str) -> Any:
        number = self.possible_agents.index(name)
        return np.array([number, self.time, self.life[name], self.rng.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed)
        self.time, self.life, self.here = 0, {"a": 1, "b": 1, "c": 0, "d": 0}, ["a", "b"]
        return {name: self._see(name) for name in self.here}, {}

    def step(self, actions: Any) -> Any:
        assert sorted(actions) == sorted(self.here), (sorted(actions), self.here)
        self.time += 1
        self.total += 1
        if self.fails and self.total % self.fails == 0:
            raise RuntimeError("out of order")
        acted, last = list(self.here), self.time == self.steps
        dead = {name: name == "b" and self.time == self.dies for name in acted}
        cut = {name: last and not dead[name] for name in acted}
        rewards = {
            name: 10.0 * self.possible_agents.index(name) + self.time + float(np.ravel(actions[name])[0])
            for name in acted
        }
        seen = {name: self._see(name) for name in acted}
        self.here = [] if last else [name for name in acted if not dead[name]]
        newcomers = ["c"] if self.time == self.comes else []
        newcomers += ["b"] if self.again and self.time == self.dies + self.again else []
        for name in newcomers if not last else []:
            self.life[name] += 1
            self.here.append(name)
            seen[name] = self._see(name)
        return seen, rewards, dead, cut, {}

    def close(self) -> None:
        return


class NanAtTheEnd(Relay):
    """The last observation of a dead agent is no number."""

    def step(self, actions: Any) -> Any:
        seen, rewards, dead, cut, infos = super().step(actions)
        for name in seen:
            if dead.get(name):
                seen[name][:] = np.nan
        return seen, rewards, dead, cut, infos


class InGymnasium(gymnasium.Env[Any, Any]):
    """mobile-env's form: Dict spaces by agent with integer keys, one flag for all, nothing seen at the end."""

    def __init__(self, names: Any = (0, 1), steps: int = 4) -> None:
        self.observation_space = spaces.Dict(dict.fromkeys(names, SPACE))
        self.action_space = spaces.Dict({name: spaces.Discrete(3) for name in names})
        self.names, self.steps = list(names), steps

    def _see(self) -> Any:
        return {n: np.array([i, self.time, 0, self.np_random.random()], np.float32) for i, n in enumerate(self.names)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        over = self.time == self.steps
        info = {"metrics": {"load": 3.0}} if over else {}
        return {} if over else self._see(), dict.fromkeys(self.names, 1.0), False, over, info


class MultiAgentEnv(gymnasium.Env[Any, Any]):
    """As RLlib's class of that name."""


class InRllib(MultiAgentEnv):
    """RLlib's form: `env_config`, flags with `__all__`."""

    def __init__(self, env_config: Any) -> None:
        self.possible_agents = ["x", "y"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, SPACE)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(3))
        self.steps = env_config.get("steps", 3)
        self.turns, self.wait = env_config.get("turns", False), env_config.get("wait", False)

    def _see(self) -> Any:
        who = [self.possible_agents[self.time % 2]] if self.turns else self.possible_agents
        who = [] if self.wait and self.time == 1 else who
        return {name: np.array([0, self.time, 0, 0], np.float32) for name in who}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        over = self.time == self.steps
        return self._see(), dict.fromkeys(action, 1.0), {"__all__": over}, {"__all__": False}, {}


class Unequal(Relay):
    """`b` sees less than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spaces = self.observation_spaces | {"b": spaces.Box(-1, 1, (2,), np.float32)}


class Crowd:
    """Many agents that walk to 0: for speed, next to `Loner`."""

    def __init__(self, agents: int = 64, steps: int = 100) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, SPACE)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(3))
        self.steps, self.alone = steps, {name: Loner(steps) for name in self.possible_agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {
            n: env.reset(seed=None if seed is None else seed + i)[0] for i, (n, env) in enumerate(self.alone.items())
        }, {}

    def step(self, actions: Any) -> Any:
        results = {name: self.alone[name].step(action) for name, action in actions.items()}
        parts = zip(*results.values(), strict=True)
        return tuple(dict(zip(results, part, strict=True)) for part in parts)

    def close(self) -> None:
        return


class Loner(gymnasium.Env[Any, Any]):
    """One agent of `Crowd`."""

    observation_space, action_space = SPACE, spaces.Discrete(3)

    def __init__(self, steps: int = 100) -> None:
        self.steps = steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.x = 0, np.array([self.np_random.normal(), 0.0, 0.0, 0.0], np.float32)
        return self.x, {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.x = self.x + np.float32(0.1) * (action - 1)
        return self.x, -abs(float(self.x[0])), False, self.time == self.steps, {}


class Signal:
    """Two roles that must agree: `speaker` sees a colour and says a word, `listener` hears it one step later and names
    the colour. Both are paid if it is right. Their spaces differ."""

    def __init__(self, colours: int = 3, steps: int = 8) -> None:
        self.possible_agents = ["speaker", "listener"]
        self.colours, self.steps = colours, steps
        self.observation_spaces = {
            "speaker": spaces.Box(0, 1, (colours,), np.float32),
            "listener": spaces.Box(0, 1, (colours + 1,), np.float32),
        }
        self.action_spaces = {"speaker": spaces.Discrete(colours), "listener": spaces.Box(-1.0, 1.0, (1,), np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.word, self.said = 0, 0, 0
        self.colour = int(self.rng.integers(self.colours))
        self.meant = self.colour
        return self._see(), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        named = int(np.clip((actions["listener"][0] + 1) / 2 * self.colours, 0, self.colours - 1))
        right = float(self.time > 1 and named == self.meant)
        self.word, self.meant = int(actions["speaker"]), self.colour
        self.colour = int(self.rng.integers(self.colours))
        over = self.time == self.steps
        flags = dict.fromkeys(self.possible_agents, over)
        return self._see(), dict.fromkeys(self.possible_agents, right), dict.fromkeys(flags, False), flags, {}

    def close(self) -> None:
        return

    def _see(self) -> Any:
        colour, heard = np.zeros(self.colours, np.float32), np.zeros(self.colours + 1, np.float32)
        colour[self.colour] = 1.0
        heard[self.word if self.time else self.colours] = 1.0
        return {"speaker": colour, "listener": heard}
