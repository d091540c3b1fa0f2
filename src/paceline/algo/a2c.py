"""Advantage actor-critic: the synchronous form of A3C (Mnih et al., 2016). One gradient step on each rollout."""

from __future__ import annotations

import numpy as np

from paceline.algo.base import Floats, Metrics, OnPolicy, Rows
from paceline.algo.optimizers import OPTIMIZERS
from paceline.config import A2CConfig
from paceline.group import Group
from paceline.model.fast import Loss
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

LOSSES = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl")


class A2C(OnPolicy):
    schedule = "replicas"
    hyper: A2CConfig

    def __init__(
        self,
        policy: Policy,
        hyper: A2CConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        super().__init__(policy, hyper, rng=rng, group=group, normalize_reward=normalize_reward)
        self.optimizer = OPTIMIZERS[hyper.optimizer](policy.parameters, policy.gradient)

    def update(self, batch: Batch, remaining: float) -> Metrics:
        learning_rate = self.learning_rate(remaining)
        rows = self.rows(batch)
        losses = self.gradients(rows, sum(self.row_counts(len(rows))))
        norm = self.apply(learning_rate)
        metrics = self.finish(batch, losses, rows.fields[1], rows.fields[3])
        return metrics | {"gradient_norm": norm, "learning_rate": learning_rate, "epochs_done": 1}

    def gradients(self, rows: Rows, count: int) -> Metrics:
        """The gradient of the loss of these rows into the policy's flat gradient; returns LOSSES.

        Each row weighs `group.size / count`, `count` being that of the rows of all members.
        """
        metrics = dict.fromkeys(LOSSES, 0.0)
        if not len(rows):  # all environments reset at once; a group still waits for this member's share
            self.policy.gradient.zero_()
            return metrics
        for part in self.policy.passes(len(rows)):
            some = rows.take(part)
            self.policy.learn(some.obs, *self._losses(some, self.group.size / count, metrics), add=part.start > 0)
        policy, value, entropy = metrics["policy_loss"], metrics["value_loss"], metrics["entropy"]
        metrics["total_loss"] = policy + self.hyper.value_coef * value - self.hyper.entropy_coef * entropy
        return metrics

    def _losses(self, rows: Rows, n: float, metrics: Metrics) -> tuple[Loss, Loss]:
        """Of policy and value, as gradients with respect to the outputs; they add to `metrics`. A row weighs `n`."""
        hyper, head = self.hyper, self.policy.head
        old_logp, _, advantage, target = rows.fields

        def policy_loss(out: Floats) -> Floats:
            log_prob, entropy = head.evaluate(out, rows.action)
            log_ratio = log_prob - old_logp
            metrics["policy_loss"] -= float(np.dot(log_prob, advantage)) * n
            metrics["entropy"] += float(entropy.sum()) * n
            metrics["approx_kl"] += float((np.exp(log_ratio) - 1 - log_ratio).sum()) * n
            return head.gradient(advantage * np.float32(-n), -hyper.entropy_coef * n)

        def value_loss(value: Floats) -> Floats:
            error = value - target
            metrics["value_loss"] += float(np.dot(error, error)) * n
            d_value: Floats = error * np.float32(2 * hyper.value_coef * n)
            return d_value

        return policy_loss, value_loss
