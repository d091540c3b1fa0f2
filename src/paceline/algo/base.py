"""What every algorithm is to an engine, and what the actor-critic ones have in common."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.algo.optimizers import Adam, RMSprop, clip_norm_
from paceline.algo.returns import explained_variance, gae
from paceline.config import AlgorithmConfig, OnPolicyConfig
from paceline.group import Group
from paceline.model.normalizer import CLIP, RunningMoments
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch
from paceline.spaces import Array

MAX_LOG_RATIO = np.float32(20)  # the exponential of more is soon infinite
Floats = NDArray[np.float32]
Metrics = dict[str, float]
Weights = dict[str, NDArray[Any]]


class Algorithm(ABC):
    """Sees batches, a policy and a group; no environment, no engine, no file.

    In a group each member has rows of its own and all have the same weights. A row weighs `group.size / rows of all`,
    so that the mean over the members, of a gradient as of a loss, is the mean over the rows of all.
    """

    schedule: ClassVar[str]
    """How several processes share the work: `replicas` all collect and learn; others send a learner their `gradients`
    or their `rollouts`."""
    optimizer: Adam | RMSprop

    def __init__(
        self,
        policy: Policy,
        hyper: AlgorithmConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        self.policy, self.hyper, self.rng, self.group = policy, hyper, rng, group or Group()
        self.version = 0
        self.optimizer_steps = 0
        self._reward_moments = RunningMoments(1) if normalize_reward else None

    @abstractmethod
    def update(self, batch: Batch, remaining: float) -> Metrics:
        """Learn from a batch. `remaining` is the part of the budget that is left, for the schedules."""

    def absorb(self, batch: Batch, remaining: float) -> None:
        """An update whose metrics nobody asks for."""
        self.update(batch, remaining)

    def keep_in(self, folder: Path) -> None:
        """Where there is room for what does not fit in memory; before the first update."""
        return

    def interrupted(self) -> None:
        """The next rollout does not begin where the last one ended."""
        return

    def act_as(self, actor: int, actors: int) -> None:
        """This one collects for a learner: number `actor` of so many."""
        return

    def notes(self) -> list[str]:
        """What happened since the last call that a user should know."""
        return []

    # -- what other processes need ----------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Copies of all that acting and the next gradient need: parameters, normalisers, their version."""
        arrays: Weights = {"parameters": self.policy.parameters.cpu().numpy(), "version": np.asarray([self.version])}
        arrays |= {f"buffer.{name}": b.cpu().numpy() for name, b in self.policy.net.named_buffers()}
        for kind, moments in self._moments().items():
            arrays |= {f"{kind}.{name}": array for name, array in moments.state().items()}
        return {name: array.copy() for name, array in arrays.items()}

    def load_weights(self, weights: Weights) -> None:
        # Ray hands out arrays that cannot be written to, which torch would warn of.
        self.policy.parameters.copy_(torch.from_numpy(np.array(weights["parameters"])))
        for name, buffer in self.policy.net.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(weights[f"buffer.{name}"])))
        for kind, moments in self._moments().items():
            moments.load({name: weights[f"{kind}.{name}"] for name in moments.state()})
        self.policy.normalizer_changed()
        self.version = int(weights["version"][0])

    def fingerprint(self) -> int:
        """Of the parameters: replicas whose numbers differ have parted."""
        return zlib.crc32(self.policy.parameters.cpu().numpy().data)

    def _moments(self) -> dict[str, RunningMoments]:
        both = {"observation": self.policy.moments, "reward": self._reward_moments}
        return {kind: moments for kind, moments in both.items() if moments is not None}

    # -- parts of an update -----------------------------------------------------------------------------------------

    def learning_rate(self, remaining: float) -> float:
        return self.scheduled(self.hyper.learning_rate, self.hyper.learning_rate_schedule, remaining)

    def scheduled(self, start: float, schedule: str, remaining: float) -> float:
        return start * remaining if schedule == "linear" else start

    def row_counts(self, rows: int) -> list[int]:
        """The number of rows of each member, by rank."""
        return [int(count) for count in self.group.gather(float(rows))]

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradient of the whole group; returns its length before clipping."""
        self.group.mean_(self.policy.gradient)
        norm = clip_norm_(self.policy.gradient, self.hyper.max_grad_norm)
        self.optimizer.step(learning_rate)
        self.optimizer_steps += 1
        return norm

    def finish(self, batch: Batch, losses: Metrics, value: Floats, target: Floats) -> Metrics:
        """After learning: the observation normaliser sees the rollout, so that acting and learning agree on it.

        Returns the metrics of the whole group: `losses` and what `value` was worth as a forecast of `target`, `[R]`.
        """
        if self.policy.moments is not None:
            self.policy.moments.update(batch.states(batch.valid), self.group)
            self.policy.normalizer_changed()
        self.version += 1
        if self.group.size == 1:
            return losses | forecast(value, target)
        names = sorted(losses)  # as one collective: the same order everywhere
        wide, error = target.astype(np.float64), target.astype(np.float64) - value
        sums = [
            len(value),
            value.sum(dtype=np.float64),
            wide.sum(),
            np.dot(wide, wide),
            error.sum(),
            np.dot(error, error),
        ]
        vector = self.group.mean_(
            torch.tensor([*(losses[name] for name in names), *sums], dtype=torch.float64)
        ).tolist()
        metrics = dict(zip(names, vector[: len(names)], strict=True))
        count, values, *moments = vector[len(names) :]
        if not count:
            return metrics | {"explained_variance": math.nan, "value_mean": math.nan}
        first, second, error_first, error_second = (moment / count for moment in moments)
        variance, left = second - first * first, max(error_second - error_first * error_first, 0.0)
        varies = variance > 1e-12 * second  # less is what rounding leaves
        return metrics | {
            "explained_variance": 1.0 - left / variance if varies else math.nan,
            "value_mean": values / count,
        }

    def _normalize(self, advantage: Floats) -> None:
        """To mean 0 and deviation 1 over the rows of all members, in place."""
        wide = advantage.astype(np.float64)
        moments = self.group.mean_(torch.tensor([len(wide), wide.sum(), np.dot(wide, wide)], dtype=torch.float64))
        count, first, second = moments.tolist()
        if count:
            mean = first / count
            deviation = max(second / count - mean * mean, 0.0) ** 0.5
            advantage -= np.float32(mean)
            advantage /= np.float32(deviation + 1e-8)

    def _rewards(self, batch: Batch) -> Floats:
        """Those to learn from. The normaliser, if any, sees the rollout first."""
        if self._reward_moments is None:
            return batch.reward
        self._reward_moments.update(discounted_returns(batch), self.group)
        return scaled_rewards(batch, self._reward_moments)

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Arrays and JSON: all that the next update depends on."""
        return {
            "policy": self.policy.state(),
            "optimizer": self.optimizer.state(),
            "reward_moments": self._reward_moments.state() if self._reward_moments is not None else None,
            "rng": self.rng.bit_generator.state,
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
        }

    def snapshot(self) -> dict[str, Any]:
        """The same, but for what is too large to be copied at every update: `load` then leaves that as it is."""
        return self.state()

    def load(self, state: dict[str, Any]) -> None:
        self.policy.load(state["policy"])
        self.optimizer.load(state["optimizer"])
        if self._reward_moments is not None:
            self._reward_moments.load(state["reward_moments"])
        self.rng.bit_generator.state = state["rng"]
        self.version, self.optimizer_steps = state["version"], state["optimizer_steps"]


@dataclass
class Rows:
    """The valid steps of a rollout, flat: R rows."""

    obs: Any  # [R, …] as the network takes them
    action: Array  # [R, k]
    fields: Floats  # [4, R]: logp and value of the policy that acted, advantage, value target

    def __len__(self) -> int:
        return len(self.action)

    def take(self, order: Array | slice) -> Rows:
        return Rows(self.obs[order], self.action[order], self.fields[:, order])


class OnPolicy(Algorithm):
    """Learns from the policy's own rollouts, with advantages by GAE from the values at collection."""

    hyper: OnPolicyConfig

    def rows(self, batch: Batch) -> Rows:
        """Advantages and targets of the valid steps, the reward normaliser brought up to date."""
        return self._estimate(batch, self._rewards(batch))

    def _estimate(self, batch: Batch, reward: Floats) -> Rows:
        hyper = self.hyper
        advantage, target = gae(
            reward, batch.value, batch.terminated, batch.truncated, gamma=hyper.gamma, gae_lambda=hyper.gae_lambda
        )
        valid = batch.valid
        fields = np.stack([batch.logp[valid], batch.value[:-1][valid], advantage[valid], target[valid]])
        if hyper.normalize_advantage:
            self._normalize(fields[2])
        return Rows(self.policy.prepare(batch.states(valid)), batch.action[valid], fields)


def discounted_returns(batch: Batch) -> Floats:
    """What the reward normaliser sees, `[R, 1]`."""
    returns: Floats = batch.discounted[batch.valid][:, None]
    return returns


def scaled_rewards(batch: Batch, moments: RunningMoments) -> Floats:
    scaled: Floats = np.clip(batch.reward * np.float32(1.0 / moments.deviation[0]), -CLIP, CLIP)
    return scaled


def forecast(value: Floats, target: Floats) -> Metrics:
    """How well the values of one process foresaw their targets."""
    if not len(value):  # one step of environments that all reset at once is a rollout without rows
        return {"explained_variance": math.nan, "value_mean": math.nan}
    return {"explained_variance": explained_variance(value, target), "value_mean": float(value.mean())}
