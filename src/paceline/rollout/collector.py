"""Collectors: a policy steps vector environments for T steps and fills a `Batch`, the same one each time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.envs.vector import VectorEnv
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.teams import Teams
from paceline.spaces import Array

if TYPE_CHECKING:
    from paceline.models.acting import ActingPolicy
    from paceline.models.recurrent_policy import RecurrentPolicy

MIN_SHARE = 0.25  # of a rollout that stops early


class Collector:
    """One vector environment. It is reset once, at the start; episodes continue from one rollout to the next."""

    def __init__(
        self,
        envs: Sequence[VectorEnv],
        policy: ActingPolicy,
        *,
        steps: int,
        rng: np.random.Generator,
        discount: float | None = None,
        clip_reward: bool = False,
    ) -> None:
        """`discount`: for the running return that the reward normaliser needs; None without one. `clip_reward`: clip
        the rewards in the batch to [-1, 1]; returns of episodes are not clipped."""
        self.envs, self.policy, self.rng = envs, policy, rng
        self._columns = _slices([env.rows for env in envs])  # of each vector in the batch
        self._own_envs = _slices([env.num_envs for env in envs])
        num_envs = self._columns[-1].stop
        agents = len(envs[0].agents)
        self._teams = Teams(steps, self._own_envs[-1].stop, agents, envs[0].team) if agents else None
        self._track_discounted, self._gamma = discount is not None, discount or 0.0
        self._clip_reward = clip_reward
        self.batch = self._make_batch(steps, num_envs)
        self._reward: NDArray[np.float64] = np.zeros((steps, num_envs))
        self._done: NDArray[np.bool_] = np.zeros(num_envs, np.bool_)
        self._return: NDArray[np.float64] = np.zeros(num_envs)
        self._length: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._discounted: NDArray[np.float64] = np.zeros(num_envs)
        self._failures: list[tuple[int, int]] = []  # step and environment, in this rollout
        self.env_seconds = self.act_seconds = 0.0
        self._has_values = False  # whether acting has filled `value` and `logp`
        self.steps_taken = 0
        """Steps of the vector environments since the start. Other threads may read it during `collect`."""
        self.stop_early = False
        """Set by another thread: end this rollout as soon as a quarter of it is collected."""

    def _make_batch(self, steps: int, num_envs: int) -> Batch:
        return Batch.empty(steps, num_envs, self.envs[0].observation, self.envs[0].action)

    def start(self) -> None:
        """Start new episodes in all environments."""
        for index, env in enumerate(self.envs):
            self._store(-1, index, env.reset())
            env.failed.clear()
        self._done[:] = False
        self._return[:] = self._length[:] = self._discounted[:] = 0
        if self._teams is not None:
            self._teams.start()

    def collect(self, version: int = 0) -> Batch:
        """Collect T steps. All work that can wait is done after the last step: a simulator that takes milliseconds
        evicts everything from the CPU caches, and each call between its steps would cost many times as much.
        """
        batch, clock = self.batch, time.perf_counter
        steps = len(batch.reward)
        batch.obs[0] = batch.obs[-1]
        batch.episodes, batch.env_metrics, batch.version = [], [], version
        batch.env_restarts, batch.env_error = 0, ""
        self._failures.clear()
        self.stop_early = False
        begin = clock()
        noise = self.policy.head.noise(self.rng, batch.reward.shape)
        steps, env_seconds = self._run(noise, math.ceil(MIN_SHARE * steps))
        if steps < len(batch.reward):
            batch.obs[-1] = batch.obs[steps]  # where the next rollout begins
            batch = batch.head(steps)
        self._track_episodes(batch)
        self._fill_values(batch)
        for env in self.envs:
            batch.env_metrics += [metrics for _, metrics in env.finished_metrics]
            env.finished_metrics = []
            if env.env_restarts:
                batch.env_restarts += env.env_restarts
                batch.env_error = env.first_error
                env.env_restarts = 0
        self.env_seconds += env_seconds
        self.act_seconds += clock() - begin - env_seconds
        return batch

    def _run(self, noise: Array, min_steps: int) -> tuple[int, float]:
        """Step the environments. Returns the number of steps and the seconds spent in the environments."""
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
            if self._teams is not None:
                self._note_agents(t, 0)
            if env.failed:
                self._note_failures(t, 0)
            self.steps_taken += 1
            if self.stop_early and t + 1 >= min_steps:
                break
        self._has_values = value is not None
        return t + 1, seconds

    def _fill_values(self, batch: Batch) -> None:
        """Compute the values and log-probabilities that acting has not, in one pass over the whole rollout."""
        batch.value[-1] = self.policy.value(batch.obs[len(batch.reward)])
        if not self._has_values:
            slots = batch.reward.size
            observation = batch.obs[:-1].reshape(slots, *batch.obs.shape[2:])
            logp, value = self.policy.evaluate_actions(observation, batch.action.reshape(slots, -1))
            batch.logp[...], batch.value[:-1] = logp.reshape(batch.logp.shape), value.reshape(batch.logp.shape)

    def _note_failures(self, t: int, index: int) -> None:
        env, first = self.envs[index], self._columns[index].start
        each = max(1, len(env.agents))
        self._failures += [(t, first + row) for i in env.failed for row in range(i * each, (i + 1) * each)]
        env.failed.clear()

    def _note_agents(self, t: int, index: int) -> None:
        """Who took part in step t of one vector of environments with several agents."""
        env, teams, own = self.envs[index], self._teams, self._own_envs[index]
        assert teams is not None
        self.batch.valid[t, self._columns[index]] = env.valid
        teams.stepped[t, own], teams.over[t, own] = env.stepped, env.over

    def _store(self, t: int, index: int, obs: Array) -> None:
        self.batch.obs[t, self._columns[index]] = obs

    def _track_episodes(self, batch: Batch) -> None:
        """Fill `valid`, `episodes` and the running discounted return."""
        steps = len(batch.reward)
        batch.reward[...] = self._reward[:steps]
        if self._clip_reward:
            np.clip(batch.reward, -1, 1, out=batch.reward)
        if self._teams is not None:
            self._track_teams(batch, self._teams)
            return
        ended = batch.terminated | batch.truncated
        cut = self._cut_failed(batch, ended) if self._failures else None
        np.logical_not(self._done, out=batch.valid[0])
        np.logical_not(ended[:-1], out=batch.valid[1:])
        for t in range(steps):
            self._return += self._reward[t]
            self._length += batch.valid[t]
            if self._track_discounted:
                self._discounted *= self._gamma
                self._discounted += batch.reward[t]
                batch.discounted[t] = self._discounted
            if np.count_nonzero(ended[t]):
                for index in np.flatnonzero(ended[t] if cut is None else ended[t] & ~cut[t]):
                    self.batch.episodes.append(Episode(float(self._return[index]), int(self._length[index]), t))
                self._return[ended[t]] = 0.0
                self._length[ended[t]] = 0
                self._discounted[ended[t]] = 0.0
        self._done[...] = ended[-1]

    def _track_teams(self, batch: Batch, teams: Teams) -> None:
        teams.track(batch, self._reward, self._failures)
        if not self._track_discounted:
            return
        for t, row in self._failures:
            if not t:
                self._discounted[row] = 0.0
        for t, reward in enumerate(batch.reward):
            self._discounted *= self._gamma
            self._discounted += reward
            batch.discounted[t] = self._discounted
            self._discounted[batch.terminated[t] | batch.truncated[t]] = 0.0

    def _cut_failed(self, batch: Batch, ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Truncate each episode whose environment failed at its last good step. Returns where, `[T, N]`.

        A step that failed has no outcome, so its row must not be learned from. The step before it has one, and its true
        successor is the observation that the failed step began with. This makes the failed step a row that only resets,
        as after every truncation: all estimators bootstrap from that observation and stop their traces there.
        """
        cut = np.zeros_like(ended)
        for t, index in self._failures:
            if t and not ended[t - 1, index]:
                batch.truncated[t - 1, index] = ended[t - 1, index] = cut[t - 1, index] = True
            elif not t:  # the previous rollout has bootstrapped from this observation already
                self._done[index] = True
                self._return[index] = self._length[index] = self._discounted[index] = 0
        return cut

    def state(self) -> dict[str, Any]:
        """Arrays and JSON: the environments where they can be saved, the running episodes, the generator."""
        return {
            "obs": self._last_observation(),
            **{name: array.copy() for name, array in self._running().items()},
            "rng": self.rng.bit_generator.state,
            "env": self.envs[0].state() if len(self.envs) == 1 else None,
        }

    def _running(self) -> dict[str, Array]:
        """The state of the running episodes, by name in a checkpoint."""
        if self._teams is not None:
            return self._teams.running() | {"discounted": self._discounted}
        return {"done": self._done, "return": self._return, "length": self._length, "discounted": self._discounted}

    def _last_observation(self) -> Array:
        last: Array = self.batch.obs[-1].copy()
        return last

    def restore(self, state: dict[str, Any]) -> bool:
        """True: continues exactly. False: the environments could not be restored and all episodes start again."""
        self.rng.bit_generator.state = state["rng"]
        same_shape = state["obs"].shape == self.batch.obs[-1].shape
        exact = state["env"] is not None and same_shape and len(self.envs) == 1
        if not exact or not self.envs[0].restore(state["env"], state["obs"]):
            self.start()
            return False
        self.batch.obs[-1] = state["obs"]
        for name, array in self._running().items():
            array[...] = state[name]
        return True


class MemoryCollector(Collector):
    """For a policy with memory, which is zero at the start of each episode and goes on from rollout to rollout.

    The row that only resets an environment shows the last observation of its episode, so it still has the memory of
    that episode: its value is what a truncated episode bootstraps from. After that row the memory is zero.
    """

    policy: RecurrentPolicy

    def __init__(self, envs: Sequence[VectorEnv], policy: RecurrentPolicy, **options: Any) -> None:
        """`options`: see `Collector`."""
        super().__init__(envs, policy, **options)
        slots, length = self.batch.reward.shape, policy.sequence_length
        self._memory = np.zeros((slots[1], policy.memory_width), np.float32)
        self.batch.memory = np.zeros((math.ceil(slots[0] / length), *self._memory.shape), np.float32)

    def start(self) -> None:
        super().start()
        self._memory[...] = 0

    def _run(self, noise: Array, min_steps: int) -> tuple[int, float]:
        batch, act, clock, (env,) = self.batch, self.policy.act, time.perf_counter, self.envs
        memory, length, resets = self._memory, self.policy.sequence_length, self._done.copy()
        seconds, reward64, t = 0.0, self._reward, 0
        for t in range(len(batch.reward)):
            if t % length == 0:
                batch.memory[t // length] = memory
            batch.action[t], batch.logp[t], batch.value[t] = act(batch.obs[t], noise[t], memory)
            before = clock()
            batch.obs[t + 1], reward64[t], batch.terminated[t], batch.truncated[t] = env.step(batch.action[t])
            seconds += clock() - before
            if env.valid is not None:
                memory[~env.valid] = 0  # agents that are not there, or that this step has reset
                self._note_agents(t, 0)
            else:
                memory[resets] = 0
                np.logical_or(batch.terminated[t], batch.truncated[t], out=resets)
                memory[env.failed] = 0  # they have been reset in this step
            if env.failed:
                self._note_failures(t, 0)
            self.steps_taken += 1
            if self.stop_early and t + 1 >= min_steps:
                break
        return t + 1, seconds

    def _fill_values(self, batch: Batch) -> None:
        batch.value[-1] = self.policy.value(batch.obs[len(batch.reward)], self._memory)

    def _running(self) -> dict[str, Array]:
        return super()._running() | {"memory": self._memory}


class ReplayCollector(Collector):
    """For learning from replay, which needs values only if acting has computed them."""

    def _fill_values(self, batch: Batch) -> None:
        if self._has_values:
            super()._fill_values(batch)


class InterleavedCollector(Collector):
    """Several vector environments: the policy acts for one while the others step in their own threads or processes."""

    def _run(self, noise: Array, min_steps: int) -> tuple[int, float]:
        self._seconds, t = 0.0, 0
        for t in range(len(self.batch.reward)):
            for index, (env, columns) in enumerate(zip(self.envs, self._columns, strict=True)):
                if t:
                    self._receive(t - 1, index)
                action = self._act(t, columns, noise[t, columns])
                before = time.perf_counter()
                env.send(action)
                self._seconds += time.perf_counter() - before
            self.steps_taken += 1
            if self.stop_early and t + 1 >= min_steps:
                break
        for index in range(len(self.envs)):
            self._receive(t, index)
        return t + 1, self._seconds

    def _act(self, t: int, columns: slice, noise: Array) -> Array:
        """Choose the actions of step t for one vector and store them."""
        batch = self.batch
        action, logp, value = self.policy.act(batch.obs[t, columns], noise)
        batch.action[t, columns] = action
        self._has_values = logp is not None and value is not None
        if self._has_values:
            batch.logp[t, columns], batch.value[t, columns] = logp, value
        return action

    def _receive(self, t: int, index: int) -> None:
        """Store the results of step t of one vector."""
        batch, columns, before = self.batch, self._columns[index], time.perf_counter()
        result = self.envs[index].receive()
        obs, self._reward[t, columns], batch.terminated[t, columns], batch.truncated[t, columns] = result
        self._seconds += time.perf_counter() - before
        if self._teams is not None:
            self._note_agents(t, index)
        if self.envs[index].failed:
            self._note_failures(t, index)
        self._store(t + 1, index, obs)


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    return [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]
