"""Deep Q-learning (Mnih et al., 2015) from replay, with its usual improvements, each by itself: double, dueling,
n-step, prioritised drawing, noisy networks.

A rollout goes into the replay; then some optimizer steps follow, each with rows drawn from there. The target of a row
is the discounted sum of its next rewards and, where the episode goes on, what the target network says the state after
them is worth.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import deque
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
from paceline.model.fast import Twin, Work
from paceline.model.policy import Policy
from paceline.model.q import QPolicy
from paceline.rollout.batch import Batch
from paceline.rollout.replay import Replay, Sample

LEAST_PRIORITY = 1e-6  # an error of 0 can be drawn again
CHUNK_BYTES = 4_000_000  # of observations that are drawn at once, for several optimizer steps
PIECE = 512  # rows of one pass of the target network over them


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
        self._recent = Recent(hyper.rounds * hyper.gradient_steps)
        self._gradient = np.zeros((policy.action.nvec[0], hyper.batch_size), np.float32)
        self._rows = np.arange(hyper.batch_size)
        self._twin: Twin | None = None
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
        hyper, learning_rate = self.hyper, self.learning_rate(remaining)
        replay = self._take(batch)
        beta = hyper.priority_beta + (1 - hyper.priority_beta) * (1 - remaining)
        ready = len(replay) >= max(hyper.learning_starts, 1)
        if ready:
            self._learn(replay, learning_rate, beta)
        self._explore(remaining, ready)
        self.version += 1
        metrics = {
            "learning_rate": learning_rate,
            "epsilon": self.policy.head.epsilon,
            "target_updates": self.target_updates,
            "steps_sampled": self.steps_sampled,
            "steps_trained": self.steps_trained,
            "replay_rows": len(replay),
        }
        return metrics | self._recent.means() | ({"priority_beta": beta} if hyper.prioritized else {})

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
        policy, hyper = self.policy, self.hyper
        if policy.online.is_noisy:
            policy.target.resample(self.rng)
        sample.obs, sample.next_obs = policy.prepare(sample.obs), policy.prepare(sample.next_obs)
        sample.reward *= self._reward_scale()
        rows = len(sample.reward)
        later = np.empty((len(self._gradient), rows), np.float32)
        values, error = np.empty(rows, np.float32), np.empty(rows, np.float32)
        norm = 0.0

        def look(piece: slice) -> None:
            later[:, piece] = policy.target.values(sample.next_obs[piece])

        def step(piece: slice) -> None:
            nonlocal norm
            for begin in range(piece.start, piece.stop, hyper.batch_size):
                part = slice(begin, begin + hyper.batch_size)
                norm += self._step(sample, part, later, values, error, learning_rate)

        # In pieces: what the target network says of the next one is computed while this one is learned from.
        length = max(1, PIECE // hyper.batch_size) * hyper.batch_size
        pieces = [slice(begin, min(begin + length, rows)) for begin in range(0, rows, length)]
        look(pieces[0])
        for piece, following in itertools.pairwise(pieces):
            self._both(functools.partial(step, piece), functools.partial(look, following))
        step(pieces[-1])
        if self.optimizer_steps % hyper.target_update_every == 0:
            policy.target.parameters.lerp_(policy.parameters, hyper.target_tau)
            self.target_updates += 1
        self._resample()  # for acting, and with the weights of the last step
        self.steps_trained += rows
        self._recent.add(steps, values, error, self._huber(error, sample.weight), norm / steps)
        return error

    def _step(
        self, sample: Sample, part: slice, later: Floats, values: Floats, error: Floats, learning_rate: float
    ) -> float:
        """One optimizer step; `later [K, B]` is what the target network says of the states after. Returns the length
        of the gradient."""
        online = self.policy.online
        if online.is_noisy:
            online.resample(self.rng)
        if self.hyper.double:
            best = online.values(sample.next_obs[part]).argmax(axis=0)
            after = later[:, part][best, self._rows]
        else:
            after = later[:, part].max(axis=0)
        target = sample.reward[part] + sample.discount[part] * after
        weight = None if sample.weight is None else sample.weight[part]
        self._current = sample.action[part], target, weight, values[part], error[part]
        online.learn(sample.obs[part], self._loss)
        return self.apply(learning_rate)

    def _both(self, here: Work, there: Work) -> None:
        """At once, where there is a second core. They have nothing in common."""
        if self.policy.threads < 2:
            here()
            there()
            return
        if self._twin is None:
            self._twin = Twin()
        self._twin.both(here, there)

    def _loss(self, q: Floats) -> Floats:
        """The gradient of the mean Huber loss, `[K, B]`: only of the actions that were taken. Writes the values and
        the errors of its rows."""
        action, target, weight, values, error = self._current
        values[...] = q[action, self._rows]
        np.subtract(values, target, out=error)
        bound = np.float32(self.hyper.huber)
        d = np.clip(error, -bound, bound)
        d *= np.float32(1.0 / len(d)) if weight is None else weight * np.float32(1.0 / len(d))
        self._gradient[...] = 0
        self._gradient[action, self._rows] = d
        return self._gradient

    def _huber(self, error: Floats, weight: Floats | None) -> float:
        bound = np.float32(self.hyper.huber)
        size = np.abs(error)
        small = np.minimum(size, bound)
        loss = small * (size - np.float32(0.5) * small)
        return float(np.mean(loss if weight is None else loss * weight))

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
    """Means over the last optimizer steps, `most` of them about."""

    NAMES = ("q_mean", "td_error_mean", "total_loss", "gradient_norm")

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: deque[tuple[int, float, float, float, float, float, float]] = deque()
        self._steps = 0

    def add(self, steps: int, values: Floats, error: Floats, loss: float, norm: float) -> None:
        mean, size = float(values.mean()), float(np.abs(error).mean())
        self._rows.append((steps, float(values.min()), float(values.max()), mean, size, loss, norm))
        self._steps += steps
        while len(self._rows) > 1 and self._steps - self._rows[0][0] >= self._most:
            self._steps -= self._rows.popleft()[0]

    def means(self) -> Metrics:
        """Empty before the first step."""
        if not self._rows:
            return {}
        steps, low, high, *others = zip(*self._rows, strict=True)
        means = [sum(map(operator.mul, steps, column)) / self._steps for column in others]
        return {"q_min": min(low), "q_max": max(high), **dict(zip(self.NAMES, means, strict=True))}


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array))
