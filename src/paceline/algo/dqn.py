"""Deep Q-learning (Mnih et al., 2015) from replay, with its usual improvements, each by itself: double, dueling,
n-step, prioritised drawing, noisy networks.

A rollout goes into the replay; then some optimizer steps follow, each with rows drawn from there. The target of a row
is the discounted sum of its next rewards and, where the episode goes on, what the target network says the state after
them is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.algo.base import Algorithm, Floats, Metrics, Weights, discounted_returns
from paceline.algo.optimizers import Adam
from paceline.algo.returns import n_step
from paceline.config import DQNConfig
from paceline.group import Group
from paceline.model.ahead import Ahead
from paceline.model.policy import Policy
from paceline.model.q import AHEAD_ROWS, QPolicy
from paceline.rollout.batch import Batch
from paceline.rollout.replay import Replay, Sample

LEAST_PRIORITY = 1e-6  # an error of 0 can be drawn again
CHUNK_BYTES = 4_000_000  # of observations that are drawn at once, for several optimizer steps
MOST_RECENT = 256  # optimizer steps that metrics are made of
After = Callable[[slice], Floats]
"""Rows of a sample → what the target network says of the states after them, `[K, B]`."""


class DQN(Algorithm):
    schedule = "rollouts"
    hyper: DQNConfig
    policy: QPolicy
    optimizer: Adam

    def __init__(
        self,
        policy: Policy,
        hyper: DQNConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        assert isinstance(policy, QPolicy)
        super().__init__(policy, hyper, rng=rng, group=group, normalize_reward=normalize_reward)
        self.optimizer = Adam(policy.parameters, policy.gradient, eps=1e-8)
        self.replay: Replay | None = None  # from the first rollout on, which says how wide it is
        self._folder: Path | None = None
        self._continues = False  # the next rollout begins where the last one ended
        self._exponent = 1.0  # of epsilon
        self.target_updates = self.steps_sampled = self.steps_trained = 0
        self._told = ""
        self._recent = Recent(min(hyper.rounds * hyper.gradient_steps, MOST_RECENT), hyper.batch_size, hyper.huber)
        self._gradient = np.zeros((policy.action.nvec[0], hyper.batch_size), np.float32)
        self._target = np.zeros(hyper.batch_size, np.float32)
        self._rows, self._share = np.arange(hyper.batch_size), np.float32(1 / hyper.batch_size)
        if hyper.exploration == "epsilon" and hyper.learning_starts:
            policy.head.epsilon = 1.0
        self._resample()

    def keep_in(self, folder: Path) -> None:
        self._folder = folder

    def interrupted(self) -> None:
        self._continues = False

    def act_as(self, actor: int, actors: int) -> None:
        """As in Ape-X each has an epsilon of its own: the first that of the schedule, the last next to none."""
        self._exponent = 1 + self.hyper.epsilon_power * actor / max(1, actors - 1)

    def notes(self) -> list[str]:
        told, self._told = [self._told] if self._told else [], ""
        return told

    # -- an update --------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, remaining: float) -> Metrics:
        self.absorb(batch, remaining)
        replay, hyper = self.replay, self.hyper
        assert replay is not None
        metrics = {
            "learning_rate": self.learning_rate(remaining),
            "epsilon": self.policy.head.epsilon,
            "target_updates": self.target_updates,
            "steps_sampled": self.steps_sampled,
            "steps_trained": self.steps_trained,
            "replay_rows": len(replay),
        }
        return metrics | self._recent.means() | ({"priority_beta": self._beta(remaining)} if hyper.prioritized else {})

    def absorb(self, batch: Batch, remaining: float) -> None:
        replay = self._take(batch)
        ready = len(replay) > 0 and replay.added >= self.hyper.learning_starts
        if ready:
            self._learn(replay, self.learning_rate(remaining), self._beta(remaining))
        self._explore(remaining, ready)
        self.version += 1

    def _beta(self, remaining: float) -> float:
        return self.hyper.priority_beta + (1 - self.hyper.priority_beta) * (1 - remaining)

    def _take(self, batch: Batch) -> Replay:
        """The rollout into the replay; the normalisers see it first."""
        if self.replay is None:
            self.replay = self._make_replay(batch.reward.shape[1])
        if self._reward_moments is not None:
            self._reward_moments.update(discounted_returns(batch), self.group)
        if self.policy.moments is not None:
            self.policy.moments.update(batch.states(batch.valid), self.group)
            self.policy.normalizer_changed()
        priority = self._first_priorities(batch) if self.hyper.prioritized else None
        self.replay.add(batch, continues=self._continues, priority=priority)
        self._continues = True
        self.steps_sampled += batch.env_steps
        return self.replay

    def _make_replay(self, num_envs: int) -> Replay:
        hyper, policy = self.hyper, self.policy
        replay = Replay(
            hyper.replay_size,
            num_envs,
            policy.observation,
            policy.action,
            prioritized=hyper.prioritized,
            on_disk=hyper.replay == "disk",
        )
        if hyper.replay == "disk":
            assert self._folder is not None
            replay.open(self._folder)
        return replay

    def _first_priorities(self, batch: Batch) -> Floats:
        """By what those who acted thought the actions (`logp`) and the states (`value`) to be worth."""
        target = n_step(
            batch.reward * self._reward_scale(),
            batch.value,
            batch.terminated,
            batch.truncated,
            gamma=self.hyper.gamma,
            n=self.hyper.n_step,
        )
        return self._priority(target - batch.logp)

    def _priority(self, error: Floats) -> Floats:
        priority: Floats = (np.abs(np.nan_to_num(error)) + np.float32(LEAST_PRIORITY)) ** self.hyper.priority_alpha
        return priority

    def _reward_scale(self) -> np.float32:
        return np.float32(1.0 if self._reward_moments is None else 1.0 / self._reward_moments.deviation[0])

    def _learn(self, replay: Replay, learning_rate: float, beta: float) -> None:
        hyper, left = self.hyper, self.hyper.gradient_steps
        while left:
            steps = min(left, self._at_once())
            sample = replay.sample(
                self.rng, steps * hyper.batch_size, n_step=hyper.n_step, gamma=hyper.gamma, beta=beta
            )
            error = self._learn_from(sample, steps, learning_rate)
            if hyper.prioritized:
                replay.reprioritize(sample.index, self._priority(error))
            left -= steps

    def _at_once(self) -> int:
        """Optimizer steps whose rows can be drawn together: nothing that the draw or their targets depend on changes
        between them."""
        hyper, observation = self.hyper, self.policy.observation
        if hyper.prioritized or self.policy.online.is_noisy:
            return 1
        row_bytes = 2 * math.prod(observation.shape) * observation.dtype.itemsize
        until_target = hyper.target_update_every - self.optimizer_steps % hyper.target_update_every
        return max(1, min(until_target, CHUNK_BYTES // (row_bytes * hyper.batch_size)))

    def _learn_from(self, sample: Sample, steps: int, learning_rate: float) -> Floats:
        """Optimizer steps with a part of the rows each. Returns the error of every row, from before its step."""
        policy, hyper, size = self.policy, self.hyper, self.hyper.batch_size
        if policy.online.is_noisy:
            policy.target.resample(self.rng)
        sample.obs, sample.next_obs = policy.prepare(sample.obs), policy.prepare(sample.next_obs)
        sample.reward *= self._reward_scale()
        rows = len(sample.reward)
        error, later = np.empty(rows, np.float32), np.empty((policy.action.nvec[0], rows), np.float32)
        piece = max(1, AHEAD_ROWS // size) * size  # of whole steps

        def look(number: int) -> None:
            part = slice(number * piece, (number + 1) * piece)
            later[:, part] = policy.target.values(sample.next_obs[part])

        with Ahead(look, math.ceil(rows / piece), policy.helper) as ahead:

            def after(part: slice) -> Floats:
                ahead.need(part.start // piece)
                return later[:, part]

            for begin in range(0, rows, size):
                self._step(sample, slice(begin, begin + size), after, error, learning_rate)
        if self.optimizer_steps % hyper.target_update_every == 0:
            policy.target.parameters.lerp_(policy.parameters, hyper.target_tau)
            self.target_updates += 1
        self._resample()  # for acting, and with the weights of the last step
        self.steps_trained += steps * size
        return error

    def _step(self, sample: Sample, part: slice, after: After, error: Floats, learning_rate: float) -> None:
        """One optimizer step."""
        online, action = self.policy.online, sample.action[part]
        weight = None if sample.weight is None else sample.weight[part]
        best: NDArray[np.int64] | None = None

        def loss(q: Floats) -> Floats:
            """The gradient of the mean Huber loss, `[K, B]`: only of the actions that were taken."""
            later = after(part)
            worth = later.max(axis=0) if best is None else later[best, self._rows]
            np.multiply(sample.discount[part], worth, out=self._target)
            np.add(self._target, sample.reward[part], out=self._target)
            bound, values, differs = np.float32(self.hyper.huber), self._recent.values, error[part]
            values[...] = q[action, self._rows]
            np.subtract(values, self._target, out=differs)
            d = np.clip(differs, -bound, bound)
            d *= self._share if weight is None else weight * self._share
            self._gradient[...] = 0
            self._gradient[action, self._rows] = d
            return self._gradient

        if online.is_noisy:
            online.resample(self.rng)
        if self.hyper.double:
            best = online.values(sample.next_obs[part]).argmax(axis=0)
        online.learn(sample.obs[part], loss)
        self._recent.add(error[part], weight, self.apply(learning_rate))

    # -- exploring --------------------------------------------------------------------------------------------------

    def _explore(self, remaining: float, ready: bool) -> None:
        hyper = self.hyper
        if hyper.exploration == "epsilon":
            done = min(1.0, (1 - remaining) / hyper.epsilon_fraction) if hyper.epsilon_fraction else 1.0
            epsilon = hyper.epsilon_start + (hyper.epsilon_end - hyper.epsilon_start) * done
            self.policy.head.epsilon = epsilon if ready or self.optimizer_steps else 1.0

    def _resample(self) -> None:
        if self.policy.online.is_noisy:
            self.policy.online.resample(self.rng)

    # -- what other processes need, saving --------------------------------------------------------------------------

    def weights(self) -> Weights:
        return super().weights() | {"epsilon": np.asarray([self.policy.head.epsilon])}

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.policy.head.epsilon = float(weights["epsilon"][0]) ** self._exponent
        self._resample()

    def state(self) -> dict[str, Any]:
        return self.snapshot() | {
            "replay": None if self.replay is None else self.replay.state(),
            "replay_envs": 0 if self.replay is None else self.replay.num_envs,
        }

    def snapshot(self) -> dict[str, Any]:
        return super().state() | {
            "target": self.policy.target.parameters.numpy(),
            "noise": self.policy.online.noise.numpy(),
            "continues": self._continues,
            "counts": [self.target_updates, self.steps_sampled, self.steps_trained],
        }

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.policy.target.parameters.copy_(_tensor(state["target"]))
        self.policy.online.noise.copy_(_tensor(state["noise"]))
        self.policy.online.refresh()
        self.target_updates, self.steps_sampled, self.steps_trained = state["counts"]
        if "replay_envs" not in state:
            if self.replay is None and self.steps_sampled:
                self._told = "the replay starts empty: it was lost with the learner that had it"
        elif state["replay_envs"]:
            self.replay = self._make_replay(state["replay_envs"])
            self._told = self.replay.load(state["replay"]) or ""
        self._continues = state["continues"] and bool(self.replay)  # in an empty one nothing went before


class Recent:
    """What the last optimizer steps saw, `most` of them."""

    def __init__(self, most: int, rows: int, huber: float) -> None:
        self._huber = np.float32(huber)
        self._values, self._errors = np.zeros((2, most, rows), np.float32)
        self._weights, self._norms = np.ones((most, rows), np.float32), np.zeros(most)
        self._steps = 0

    @property
    def values(self) -> Floats:
        """Of the next step's rows, to be written: what the actions that were taken are worth."""
        row: Floats = self._values[self._steps % len(self._values)]
        return row

    def add(self, error: Floats, weight: Floats | None, norm: float) -> None:
        place = self._steps % len(self._values)
        self._errors[place], self._norms[place] = error, norm
        if weight is not None:
            self._weights[place] = weight
        self._steps += 1

    def means(self) -> Metrics:
        """Empty before the first step."""
        count = min(self._steps, len(self._values))
        if not count:
            return {}
        # The oldest first: a run that goes on begins another ring, and sums in another order are rounded otherwise.
        order = np.arange(self._steps - count, self._steps) % len(self._values)
        values, size = self._values[order], np.abs(self._errors[order])
        small = np.minimum(size, self._huber)
        loss = small * (size - np.float32(0.5) * small) * self._weights[order]
        return {
            "q_mean": float(values.mean()),
            "q_min": float(values.min()),
            "q_max": float(values.max()),
            "td_error_mean": float(size.mean()),
            "total_loss": float(loss.mean()),
            "gradient_norm": float(self._norms[order].mean()),
        }


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array))
