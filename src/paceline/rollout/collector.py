"""Steps a vector environment with a policy for T steps, into the same batch each time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.model.heads import Head
from paceline.rollout.batch import Batch, Episode
from paceline.spaces import ActionCodec, Array, ObservationCodec

LEAST_SHARE = 0.25  # of a rollout that is halted early


class Vector(Protocol):
    """What a collector needs of a vector environment."""

    num_envs: int
    observation: ObservationCodec
    action: ActionCodec
    finished_metrics: list[dict[str, float]]

    def reset(self) -> Array: ...
    def step(self, action: Array) -> tuple[Array, Array, Array, Array]: ...
    def send(self, action: Array) -> None: ...
    def receive(self) -> tuple[Array, Array, Array, Array]: ...
    def state(self) -> dict[str, Any] | None: ...
    def restore(self, state: dict[str, Any], observation: Array) -> bool: ...


class Actor(Protocol):
    """What a collector needs of a policy."""

    @property
    def head(self) -> Head: ...

    def act(self, observation: Array, noise: NDArray[np.float32]) -> tuple[Array, Array | None, Array | None]: ...
    def judge(self, observation: Array, action: Array) -> tuple[Array, Array]: ...
    def value(self, observation: Array) -> Array: ...


class Collector:
    """Environments are reset once, at the start; episodes run on from one rollout to the next."""

    def __init__(
        self,
        envs: Sequence[Vector],
        policy: Actor,
        *,
        steps: int,
        rng: np.random.Generator,
        discount: float | None = None,
        clip_reward: bool = False,
    ) -> None:
        """`discount`: of the running return that the reward normaliser needs, if there is one. `clip_reward`: to -1…1,
        in the batch; episodes keep theirs."""
        self.envs, self.policy, self.rng = envs, policy, rng
        bounds = [0, *itertools.accumulate(env.num_envs for env in envs)]
        self._places = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        num_envs = bounds[-1]
        self._track_discounted, self._gamma = discount is not None, discount or 0.0
        self._clip_reward = clip_reward
        self.batch = self._make_batch(steps, num_envs)
        self._reward: NDArray[np.float64] = np.zeros((steps, num_envs))
        self._done: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        self._return: NDArray[np.float64] = np.zeros(num_envs)
        self._length: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._discounted: NDArray[np.float64] = np.zeros(num_envs)
        self.env_seconds = self.act_seconds = 0.0
        self._judged = False
        self.steps_taken = 0
        """Of the vector environments, ever: it grows while `collect` is at work, and another thread may look."""
        self.halted = False
        """Set by another thread: what there is by now will do, from a quarter of the rollout on."""

    def _make_batch(self, steps: int, num_envs: int) -> Batch:
        return Batch.empty(steps, num_envs, self.envs[0].observation, self.envs[0].action)

    def start(self) -> None:
        """A fresh start of all episodes."""
        for index, env in enumerate(self.envs):
            self._put(-1, index, env.reset())
        self._done[:] = False
        self._return[:] = self._length[:] = self._discounted[:] = 0

    def collect(self, version: int = 0) -> Batch:
        """T steps. What need not be done between two of them is done at the end: a simulator that takes milliseconds
        has driven everything out of the caches by then, and each call costs many times as much.
        """
        batch, clock = self.batch, time.perf_counter
        steps = len(batch.reward)
        batch.obs[0] = batch.obs[-1]
        batch.episodes, batch.env_metrics, batch.version = [], [], version
        self.halted = False
        begin = clock()
        noise = self.policy.head.noise(self.rng, batch.reward.shape)
        steps, waited = self._run(noise, math.ceil(LEAST_SHARE * steps))
        if steps < len(batch.reward):
            batch.obs[-1] = batch.obs[steps]  # where the next rollout begins
            batch = batch.head(steps)
        self._account(batch)
        self._conclude(batch)
        for env in self.envs:
            batch.env_metrics += env.finished_metrics
            env.finished_metrics = []
        self.env_seconds += waited
        self.act_seconds += clock() - begin - waited
        return batch

    def _run(self, noise: Array, least: int) -> tuple[int, float]:
        """The steps, `least` at least: how many there were, and the seconds spent on the environments."""
        batch, act, clock, (env,) = self.batch, self.policy.act, time.perf_counter, self.envs
        seconds, reward64, t = 0.0, self._reward, 0
        for t in range(len(batch.reward)):
            action, logp, value = act(batch.obs[t], noise[t])
            batch.action[t] = action
            if logp is not None and value is not None:
                batch.logp[t], batch.value[t] = logp, value
            before = clock()
            batch.obs[t + 1], reward64[t], batch.terminated[t], batch.truncated[t] = env.step(action)
            seconds += clock() - before
            self.steps_taken += 1
            if self.halted and t + 1 >= least:
                break
        self._judged = value is not None
        return t + 1, seconds

    def _conclude(self, batch: Batch) -> None:
        """What is missing of values and log-probabilities."""
        batch.value[-1] = self.policy.value(batch.obs[len(batch.reward)])
        if not self._judged:
            self._judge(batch)

    def _put(self, t: int, index: int, obs: Array) -> None:
        self.batch.obs[t, self._places[index]] = obs

    def _account(self, batch: Batch) -> None:
        """Which rows are valid, which episodes have finished, and the running discounted return."""
        steps = len(batch.reward)
        batch.reward[...] = self._reward[:steps]
        if self._clip_reward:
            np.clip(batch.reward, -1, 1, out=batch.reward)
        ended = batch.terminated | batch.truncated
        np.logical_not(self._done, out=batch.valid[0])
        np.logical_not(ended[:-1], out=batch.valid[1:])
        for t in range(steps):
            reward = self._reward[t]
            self._return += reward
            self._length += batch.valid[t]
            if self._track_discounted:
                self._discounted *= self._gamma
                self._discounted += batch.reward[t]
                batch.discounted[t] = self._discounted
            if np.count_nonzero(ended[t]):
                self._finish(ended[t])
        self._done[...] = ended[-1]

    def _judge(self, batch: Batch) -> None:
        """Log-probabilities and values of the whole rollout in one pass."""
        slots = batch.reward.size
        observation = batch.obs[:-1].reshape(slots, *batch.obs.shape[2:])
        logp, value = self.policy.judge(observation, batch.action.reshape(slots, -1))
        batch.logp[...], batch.value[:-1] = logp.reshape(batch.logp.shape), value.reshape(batch.logp.shape)

    def _finish(self, ended: NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(ended):
            self.batch.episodes.append(Episode(float(self._return[index]), int(self._length[index])))
        self._return[ended] = 0.0
        self._length[ended] = 0
        self._discounted[ended] = 0.0

    def state(self) -> dict[str, Any]:
        """Arrays and JSON: the environments where they can be saved, the running episodes, the generator."""
        return {
            "obs": self._last_observation(),
            "done": self._done.copy(),
            "return": self._return.copy(),
            "length": self._length.copy(),
            "discounted": self._discounted.copy(),
            "rng": self.rng.bit_generator.state,
            "env": self.envs[0].state() if len(self.envs) == 1 else None,
        }

    def _last_observation(self) -> Array:
        last: Array = self.batch.obs[-1].copy()
        return last

    def restore(self, state: dict[str, Any]) -> bool:
        """True: exactly where it was. False: the environments could not be brought back; all episodes start afresh."""
        self.rng.bit_generator.state = state["rng"]
        same_shape = state["obs"].shape == self.batch.obs[-1].shape
        exact = state["env"] is not None and same_shape and len(self.envs) == 1
        if not exact or not self.envs[0].restore(state["env"], state["obs"]):
            self.start()
            return False
        self.batch.obs[-1] = state["obs"]
        for own, saved in (
            (self._done, "done"),
            (self._return, "return"),
            (self._length, "length"),
            (self._discounted, "discounted"),
        ):
            own[...] = state[saved]
        return True


class ReplayCollector(Collector):
    """For what is learned from replay: values are kept only where acting has said them."""

    def _conclude(self, batch: Batch) -> None:
        if self._judged:
            super()._conclude(batch)
