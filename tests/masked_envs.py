"""Environments with action masks, given in each of the three ways. All of them refuse an invalid action."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

LENGTH = 7


class Masked(gymnasium.Env[Any, Any]):
    """Random masks, and a reward that is the sum of the choices. The mask of a terminal state allows nothing.

    `way`: info, method, key or tuple (in info, one array a choice); `fault`: what is wrong with the mask at step 3;
    `ends`: terminate or truncate."""

    def __init__(
        self, way: str = "info", nvec: Any = (5,), fault: str = "", ends: str = "terminate", start: int = 0
    ) -> None:
        self.way, self.fault, self.ends, self.nvec, self.start = way, fault, ends, tuple(nvec), start
        one = len(self.nvec) == 1
        self.action_space = spaces.Discrete(self.nvec[0], start=start) if one else spaces.MultiDiscrete(self.nvec)
        self.observation_space: Any = spaces.Box(-1.0, 1.0, (3,), np.float32)
        if way == "key":
            mask = spaces.MultiBinary(sum(self.nvec))
            self.observation_space = spaces.Dict({"action_mask": mask, "observation": self.observation_space})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._state()

    def step(self, action: Any) -> Any:
        picked = np.ravel(action) - self.start
        assert all(part[k] for part, k in zip(self._parts(), picked, strict=True)), f"{action} is invalid"
        self.steps += 1
        observation, info = self._state()
        over = self.steps == LENGTH
        return (
            observation,
            float(picked.sum()),
            over and self.ends == "terminate",
            over and self.ends != "terminate",
            info,
        )

    def _state(self) -> Any:
        self.mask = [(self.np_random.random(n) < 0.3).astype(np.int8) for n in self.nvec]
        for part in self.mask:
            part[self.np_random.integers(len(part))] = 1
            if self.steps == LENGTH and self.ends == "terminate":
                part[:] = 0
        given = self._given()
        observation: Any = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        if self.way == "key":
            observation = {"action_mask": given, "observation": observation}
        return observation, {"action_mask": given} if self.way in ("info", "tuple") and given is not None else {}

    def action_masks(self) -> Any:
        return self._given()

    def _parts(self) -> list[Any]:
        return self.mask

    def _given(self) -> Any:
        flat: Any = tuple(self.mask) if self.way == "tuple" else np.concatenate(self.mask)
        if self.steps == 3 and self.fault:
            flat = {
                "none": np.zeros(sum(self.nvec)),
                "shape": np.ones(3),
                "missing": None,
                "text": "no",
                "numbers": np.full(sum(self.nvec), 2),
            }[self.fault]
        return flat


class ByInfo(Masked):
    action_masks: Any = None


class ByMethod(Masked):
    def __init__(self, **options: Any) -> None:
        super().__init__(way="method", **options)


class ByKey(ByInfo):
    def __init__(self, **options: Any) -> None:
        super().__init__(way="key", **options)


class ByTuple(ByInfo):
    def __init__(self, **options: Any) -> None:
        super().__init__(way="tuple", **options)


class Late(ByInfo):
    """The first reset has no mask."""

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {}


class Fails(ByInfo):
    """The first and the third instance raise an error at their fourth step."""

    made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        Fails.made += 1
        self.fails = Fails.made in (1, 3)

    def step(self, action: Any) -> Any:
        if self.fails and self.steps == 3:
            raise RuntimeError("the simulator crashed")
        return super().step(action)


class Continuous(ByInfo):
    def __init__(self, way: str = "info") -> None:
        super().__init__(way=way)
        self.action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, info = self._state()
        return observation, 0.0, self.steps == LENGTH, False, info


class Picture(ByInfo):
    """An image beside the mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)

    def _state(self) -> Any:
        _, info = super()._state()
        return self.np_random.integers(0, 256, (12, 12, 1)).astype(np.uint8), info


WAYS = {"info": ByInfo, "method": ByMethod, "key": ByKey, "tuple": ByTuple}


class VectorMasked(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """N of `Masked` as one vector environment, with masks as one array in `info`."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 3, nvec: Any = (5,), fault: str = "", way: str = "info") -> None:
        self.num_envs, self.way = num_envs, way
        self.envs = [ByInfo(nvec=nvec, fault=fault) for _ in range(num_envs)]
        self.single_action_space, self.single_observation_space = (
            self.envs[0].action_space,
            self.envs[0].observation_space,
        )
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        if way != "method":
            self.action_masks: Any = None
        else:
            self.action_masks = lambda: self.last

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        states = [env.reset(seed=None if seed is None else seed + i) for i, env in enumerate(self.envs)]
        self.done = np.zeros(self.num_envs, bool)
        return np.stack([observation for observation, _ in states]), self._info([info for _, info in states])

    def step(self, actions: Any) -> Any:
        results = []
        for env, action, done in zip(self.envs, actions, self.done, strict=True):
            results.append(
                (env.reset()[0], 0.0, False, False, {"action_mask": env.mask[0]}) if done else env.step(action)
            )
        observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
        self.done = np.array(terminated) | np.array(truncated)
        return (
            np.stack(observations),
            np.array(rewards),
            np.array(terminated),
            np.array(truncated),
            self._info(list(infos)),
        )

    def _info(self, infos: list[Any]) -> dict[str, Any]:
        has = np.array(["action_mask" in info for info in infos])
        size = sum(self.envs[0].nvec)
        masks = [info.get("action_mask", np.zeros(size)) for info in infos]
        self.last = np.stack(masks) if len({len(mask) for mask in masks}) == 1 else np.array(masks, object)
        return {} if self.way == "method" else {"action_mask": self.last, "_action_mask": has}


class MaskedTeam:
    """Two agents whose masks are in their infos, or with `way="key"` in their observations. An invalid action is an
    error. `b` dies after three steps."""

    def __init__(self, way: str = "info") -> None:
        self.way, self.possible_agents = way, ["a", "b"]
        seen: Any = spaces.Box(0, 1, (3,), np.float32)
        if way == "key":
            seen = spaces.Dict({"x": seen, "action_mask": spaces.Box(0, 1, (4,), np.int8)})
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(4))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng, self.time, self.masks = np.random.default_rng(seed), 0, {}
        return self._see(self.possible_agents)

    def _see(self, names: Any) -> Any:
        self.masks = {name: np.eye(4, dtype=np.int8)[self.rng.integers(4)] for name in names}
        x = {name: self.rng.random(3, np.float32) for name in names}
        if self.way == "key":
            return {name: {"x": x[name], "action_mask": self.masks[name]} for name in names}, {}
        return x, {name: {"action_mask": self.masks[name]} for name in names}

    def step(self, actions: Any) -> Any:
        assert all(self.masks[name][action] for name, action in actions.items()), "an invalid action"
        self.time += 1
        seen, infos = self._see(list(actions))
        dead = {name: name == "b" and self.time == 3 for name in actions}
        return seen, dict.fromkeys(actions, 1.0), dead, dict.fromkeys(actions, self.time == 6), infos

    def close(self) -> None:
        return
