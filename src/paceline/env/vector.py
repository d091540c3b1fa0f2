"""N environments as one, in Gymnasium's NEXT_STEP autoreset: the step after the end of an episode ignores the action,
resets, and returns the first observation with reward 0. So `obs[t+1]` is always the true successor of `obs[t]`.

`SyncVector` steps scalar environments in this process, `NativeVector` wraps an environment's own vector implementation;
`async_vector.py` has the one with processes. Each episode of a scalar environment is seeded by itself, from
(seed, worker, env, resume number, episode): that is what lets a run that was cut in mid-episode replay it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from paceline.spaces import ActionCodec, Array, ObservationCodec

MAX_REPLAY_STEPS = 20_000  # longer episodes are restarted rather than replayed
State = dict[str, Any]  # JSON or arrays


class VectorEnv(ABC):
    """`step` returns its own buffers: copy what must outlive the next call."""

    num_envs: int
    observation: ObservationCodec
    action: ActionCodec

    def _allocate(self, num_envs: int, observation: ObservationCodec, action: ActionCodec) -> None:
        self.num_envs, self.observation, self.action = num_envs, observation, action
        self._obs: Array = np.zeros((num_envs, *observation.shape), observation.dtype)
        self._reward: NDArray[np.float64] = np.zeros(num_envs)
        self._terminated: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        self._truncated: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        self.finished_metrics: list[dict[str, float]] = []
        """What environments said of finished episodes (`info["metrics"]`); the collector empties it."""

    @abstractmethod
    def reset(self) -> Array: ...

    @abstractmethod
    def step(self, action: Array) -> tuple[Array, Array, Array, Array]:
        """`action [N, *shape]` → observation, reward, terminated, truncated."""

    def send(self, action: Array) -> None:
        """The first half of a step. Environments with threads or processes of their own set to work in them, and the
        caller goes on to `receive` when it has nothing better to do."""
        self._sent = action.copy()  # the caller's buffer may hold other actions by then

    def receive(self) -> tuple[Array, Array, Array, Array]:
        """The second half. Here all the work is done now."""
        return self.step(self._sent)

    @abstractmethod
    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        """The episodes from the next `reset` on are those of this seed."""

    def state(self) -> State | None:
        """Enough to continue exactly, or None."""
        return None

    def restore(self, state: State, observation: Array) -> bool:
        """Back to `state`, whose observation must come out as saved. False: it could not be done; call `reset`."""
        return False

    def close(self) -> None:
        return None


class SyncVector(VectorEnv):
    """Scalar environments, one after the other, in this process."""

    def __init__(
        self,
        makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        seed: int,
        worker: int = 0,
        resumes: int = 0,
        first_env: int = 0,
        squash: bool = False,
    ) -> None:
        self.envs = [make() for make in makers]
        self._entropy: tuple[int, ...] = (seed, worker, resumes)
        self._first_env = first_env
        one = self.envs[0]
        self._allocate(
            len(self.envs), ObservationCodec(one.observation_space), ActionCodec(one.action_space, squash=squash)
        )
        self._episode = [-1] * self.num_envs
        self._done = [True] * self.num_envs
        self._actions: list[list[Any]] = [[] for _ in self.envs]  # of the running episode, for `restore`
        self.on_replay: Callable[[], None] = lambda: None  # called after each step of a replay, which may take long

    def write_into(self, obs: Array, reward: Array, terminated: Array, truncated: Array, action: Array) -> Array:
        """Use these buffers from now on; returns the one the actions come in."""
        self._obs, self._reward, self._terminated, self._truncated = obs, reward, terminated, truncated
        return action

    def reset(self) -> Array:
        for index in range(self.num_envs):
            self._begin(index)
        return self._obs

    def step(self, action: Array) -> tuple[Array, Array, Array, Array]:
        encode, obs, done = self.observation.encode_one, self._obs, self._done
        for index, (env, act) in enumerate(zip(self.envs, self.action.split(action), strict=True)):
            if done[index]:
                self._begin(index)
                self._reward[index] = 0.0
                self._terminated[index] = self._truncated[index] = False
                continue
            observation, reward, terminated, truncated, info = env.step(act)
            encode(observation, obs[index])
            self._reward[index] = reward
            self._terminated[index], self._truncated[index] = terminated, truncated
            if len(self._actions[index]) <= MAX_REPLAY_STEPS:  # one too many tells that there were more
                self._actions[index].append(act)
            if terminated or truncated:
                done[index] = True
                if "metrics" in info:
                    self.finished_metrics.append({k: float(v) for k, v in info["metrics"].items()})
        return self._obs, self._reward, self._terminated, self._truncated

    def _begin(self, index: int) -> None:
        self._episode[index] += 1
        observation, _ = self.envs[index].reset(seed=self._episode_seed(index))
        self.observation.encode_one(observation, self._obs[index])
        self._done[index] = False
        self._actions[index] = []

    def _episode_seed(self, index: int) -> int:
        key = (*self._entropy, self._first_env + index, self._episode[index])
        return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        self._entropy = (seed, worker, resumes)
        self._episode = [-1] * self.num_envs

    def state(self) -> State | None:
        saved = [_own_state(env) for env in self.envs]
        own = all(state is not None for state in saved)
        if not own and max(len(actions) for actions in self._actions) > MAX_REPLAY_STEPS:
            return None
        return {
            "entropy": list(self._entropy),
            "episode": list(self._episode),
            "done": list(self._done),
            "terminated": self._terminated.copy(),
            "truncated": self._truncated.copy(),
            "own": saved if own else None,
            "actions": None if own else [np.asarray(actions) for actions in self._actions],
        }

    def restore(self, state: State, observation: Array) -> bool:
        fresh = self._entropy
        self._entropy = tuple(int(part) for part in state["entropy"])
        self._episode = [int(part) for part in state["episode"]]
        if state["own"] is not None:
            for env, saved in zip(self.envs, state["own"], strict=True):
                env.reset()
                _set_own_state(env, saved)
            self._obs[...] = observation
        else:
            try:
                for index, actions in enumerate(state["actions"]):
                    self._replay(index, actions)
            except Exception:  # an env that goes another way may refuse the next action, in any manner
                same = False
            else:
                same = np.array_equal(self._obs, observation)
            if not same:
                self.reseed(*fresh)
                return False
        self._done = [bool(flag) for flag in state["done"]]
        self._terminated[...], self._truncated[...] = state["terminated"], state["truncated"]
        return True

    def _replay(self, index: int, actions: Array) -> None:
        self._episode[index] -= 1
        self._begin(index)
        for act in actions.tolist() if actions.ndim == 1 else list(actions):
            result, *_ = self.envs[index].step(act)
            self.observation.encode_one(result, self._obs[index])
            self._actions[index].append(act)
            self.on_replay()

    def close(self) -> None:
        for env in self.envs:
            env.close()  # type: ignore[no-untyped-call]


class NativeVector(VectorEnv):
    """An environment's own vector implementation, already in NEXT_STEP."""

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv[Any, Any, Any],
        *,
        seed: int,
        worker: int = 0,
        resumes: int = 0,
        first_env: int = 0,
        squash: bool,
    ) -> None:
        self.env = env
        self._first_env = first_env
        base: Any = env.unwrapped
        base.action_space = _trusting(env.action_space)
        self.reseed(seed, worker, resumes)
        observation = ObservationCodec(env.single_observation_space)
        self._allocate(env.num_envs, observation, ActionCodec(env.single_action_space, squash=squash))

    def reset(self) -> Array:
        observation, _ = self.env.reset(seed=self._seed)
        self.observation.encode(observation, self._obs)
        return self._obs

    def step(self, action: Array) -> tuple[Array, Array, Array, Array]:
        observation, reward, terminated, truncated, info = self.env.step(self.action.decode(action))
        self.observation.encode(observation, self._obs)
        if "metrics" in info:
            values = {name: value for name, value in info["metrics"].items() if not name.startswith("_")}
            for index in np.flatnonzero(terminated | truncated):
                self.finished_metrics.append({name: float(value[index]) for name, value in values.items()})
        return self._obs, reward, terminated, truncated

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        entropy = (seed, worker, resumes, *([self._first_env] if self._first_env else []))
        self._seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)

    def state(self) -> State | None:
        base: Any = self.env.unwrapped
        if hasattr(base, "get_state") and hasattr(base, "set_state"):
            state: State = base.get_state()
            return state
        if not _is_vector_cartpole(base):
            return None
        return {
            "state": np.array(base.state),
            "steps": np.array(base.steps),
            "prev_done": np.array(base.prev_done),
            "rng": base.np_random.bit_generator.state,
        }

    def restore(self, state: State, observation: Array) -> bool:
        base: Any = self.env.unwrapped
        self.env.reset(seed=self._seed)
        if hasattr(base, "set_state"):
            base.set_state(state)
        elif _is_vector_cartpole(base):
            base.state, base.steps = np.array(state["state"]), np.array(state["steps"])
            base.prev_done = np.array(state["prev_done"])
            base.np_random.bit_generator.state = state["rng"]
        else:
            return False
        self._obs[...] = observation
        return True

    def close(self) -> None:
        self.env.close()


def _trusting(space: Any) -> Any:
    """The same space, which takes every action for one of its own. Ours are; to check costs a third of a step."""
    trusting = copy.copy(space)
    trusting.__class__ = type(type(space).__name__, (type(space),), {"contains": lambda self, action: True})
    return trusting


def _is_vector_cartpole(env: Any) -> bool:
    return type(env).__name__ == "CartPoleVectorEnv" and all(hasattr(env, a) for a in ("state", "steps", "prev_done"))


def _own_state(env: gymnasium.Env[Any, Any]) -> State | None:
    """The state of an env that has get_state and set_state, under no wrapper whose state we do not know."""
    layers, elapsed = env, None
    while isinstance(layers, gymnasium.Wrapper):
        if isinstance(layers, TimeLimit):
            elapsed = layers._elapsed_steps
        elif not isinstance(layers, OrderEnforcing | PassiveEnvChecker):
            return None
        layers = layers.env
    base: Any = layers
    if not (hasattr(base, "get_state") and hasattr(base, "set_state")):
        return None
    return {"elapsed": elapsed, "env": base.get_state()}


def _set_own_state(env: gymnasium.Env[Any, Any], saved: State) -> None:
    layers = env
    while isinstance(layers, gymnasium.Wrapper):
        if isinstance(layers, TimeLimit):
            layers._elapsed_steps = saved["elapsed"]
        layers = layers.env
    base: Any = layers
    base.set_state(saved["env"])
