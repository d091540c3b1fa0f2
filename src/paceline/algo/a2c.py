"""Advantage actor-critic: the synchronous form of A3C (Mnih et al., 2016). One gradient step on each rollout."""

from __future__ import annotations

import numpy as np

from paceline.algo.base import Floats, Metrics, OnPolicy, Rows
from paceline.algo.optimizers import OPTIMIZERS
from paceline.config import A2CConfig
from paceline.group import Group
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
        hyper, head = self.hyper, self.policy.head
        old_logp, _, advantage, target = rows.fields
        if not len(rows):  # all environments reset at once; a group still waits for this member's share
            self.policy.gradient.zero_()
            return dict.fromkeys(LOSSES, 0.0)
        n = self.group.size / count
        metrics: Metrics = {}

        def policy_loss(out: Floats) -> Floats:
            log_prob, entropy = head.evaluate(out, rows.action)
            metrics["policy_loss"] = -float(np.dot(log_prob, advantage)) * n
            metrics["entropy"] = float(entropy.sum()) * n
            log_ratio = log_prob - old_logp
            metrics["approx_kl"] = float((np.exp(log_ratio) - 1 - log_ratio).sum()) * n
            return head.gradient(advantage * np.float32(-n), -hyper.entropy_coef * n)

        def value_loss(value: Floats) -> Floats:
            error = value - target
            metrics["value_loss"] = float(np.dot(error, error)) * n
            d_value: Floats = error * np.float32(2 * hyper.value_coef * n)
            return d_value

        self.policy.learn(rows.obs, policy_loss, value_loss)
        policy, value, entropy = metrics["policy_loss"], metrics["value_loss"], metrics["entropy"]
        metrics["total_loss"] = policy + hyper.value_coef * value - hyper.entropy_coef * entropy
        return metrics
