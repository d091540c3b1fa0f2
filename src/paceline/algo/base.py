"""What every algorithm is to an engine, and what the actor-critic ones have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.algo.optimizers import Adam, RMSprop
from paceline.algo.returns import explained_variance, gae
from paceline.config import OnPolicyConfig
from paceline.group import Group
from paceline.model.normalizer import CLIP, RunningMoments
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch
from paceline.spaces import Array

Floats = NDArray[np.float32]
Metrics = dict[str, float]


@dataclass
class Rows:
    """The valid steps of a rollout, flat: R rows."""

    obs: Array  # [R, …] as the network takes them
    action: Array  # [R, k]
    fields: Floats  # [4, R]: logp and value of the policy that acted, advantage, value target

    def __len__(self) -> int:
        return len(self.action)

    def take(self, order: Array | slice) -> Rows:
        return Rows(self.obs[order], self.action[order], self.fields[:, order])


class Algorithm(ABC):
    """Sees batches, a policy and a group; no environment, no engine, no file."""

    optimizer: Adam | RMSprop

    def __init__(
        self,
        policy: Policy,
        hyper: OnPolicyConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        self.policy, self.rng, self.group = policy, rng, group or Group()
        self._hyper = hyper
        self.version = 0
        self.optimizer_steps = 0
        self._reward_moments = RunningMoments(1) if normalize_reward else None

    @abstractmethod
    def update(self, batch: Batch, remaining: float) -> Metrics:
        """Learn from a batch. `remaining` is the part of the budget that is left, for the schedules."""

    def weights(self) -> Tensor:
        return self.policy.parameters

    def load_weights(self, flat: Tensor) -> None:
        self.policy.parameters.copy_(flat)

    def rows(self, batch: Batch) -> Rows:
        """Advantages and targets of the valid steps, the reward normaliser brought up to date."""
        hyper = self._hyper
        reward = self._scaled(batch) if self._reward_moments is not None else batch.reward
        advantage, target = gae(
            reward, batch.value, batch.terminated, batch.truncated, gamma=hyper.gamma, gae_lambda=hyper.gae_lambda
        )
        valid = batch.valid
        fields = np.stack([batch.logp[valid], batch.value[:-1][valid], advantage[valid], target[valid]])
        if hyper.normalize_advantage:
            self._normalize(fields[2])
        return Rows(self.policy.prepare(batch.obs[:-1][valid]), batch.action[valid], fields)

    def finish(self, batch: Batch, rows: Rows, metrics: Metrics) -> Metrics:
        """After learning: the observation normaliser sees the rollout, so that acting and learning agree on it."""
        if self.policy.moments is not None:
            self.policy.moments.update(batch.obs[:-1][batch.valid], self.group)
            self.policy.normalizer_changed()
        self.version += 1
        # One step of environments that all reset at once is a rollout without rows.
        metrics["explained_variance"] = explained_variance(rows.fields[1], rows.fields[3]) if len(rows) else math.nan
        metrics["value_mean"] = float(rows.fields[1].mean()) if len(rows) else math.nan
        return metrics

    def scheduled(self, start: float, schedule: str, remaining: float) -> float:
        return start * remaining if schedule == "linear" else start

    def _normalize(self, advantage: Floats) -> None:
        wide = advantage.astype(np.float64)
        moments = self.group.mean_(torch.tensor([len(wide), wide.sum(), np.dot(wide, wide)], dtype=torch.float64))
        count, first, second = moments.tolist()
        if count:
            mean = first / count
            deviation = max(second / count - mean * mean, 0.0) ** 0.5
            advantage -= np.float32(mean)
            advantage /= np.float32(deviation + 1e-8)

    def _scaled(self, batch: Batch) -> Floats:
        assert self._reward_moments is not None
        self._reward_moments.update(batch.discounted[batch.valid][:, None], self.group)
        scale = np.float32(1.0 / self._reward_moments.deviation[0])
        scaled: Floats = np.clip(batch.reward * scale, -CLIP, CLIP)
        return scaled

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

    def load(self, state: dict[str, Any]) -> None:
        self.policy.load(state["policy"])
        self.optimizer.load(state["optimizer"])
        if self._reward_moments is not None:
            self._reward_moments.load(state["reward_moments"])
        self.rng.bit_generator.state = state["rng"]
        self.version, self.optimizer_steps = state["version"], state["optimizer_steps"]
