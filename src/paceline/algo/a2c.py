"""Advantage actor-critic: the synchronous form of A3C (Mnih et al., 2016). One gradient step on each rollout."""

from __future__ import annotations

import numpy as np

from paceline.algo.base import Algorithm, Floats, Metrics, Rows
from paceline.algo.optimizers import Adam, RMSprop, clip_norm_
from paceline.config import A2CConfig
from paceline.group import Group
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch


class A2C(Algorithm):
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
        self.hyper = hyper
        make = Adam if hyper.optimizer == "adam" else RMSprop
        self.optimizer = make(policy.parameters, policy.gradient)

    def update(self, batch: Batch, remaining: float) -> Metrics:
        hyper = self.hyper
        learning_rate = self.scheduled(hyper.learning_rate, hyper.learning_rate_schedule, remaining)
        rows = self.rows(batch)
        metrics = self.gradients(rows)
        metrics["gradient_norm"] = self.apply(learning_rate)
        metrics["learning_rate"] = learning_rate
        metrics["epochs_done"] = 1
        return self.finish(batch, rows, metrics)

    def gradients(self, rows: Rows) -> Metrics:
        """The gradient of the loss of these rows into the policy's flat gradient."""
        hyper, head = self.hyper, self.policy.head
        old_logp, _, advantage, target = rows.fields
        if not len(rows):  # all environments reset at once; a group still waits for this member's share
            self.policy.gradient.zero_()
            return dict.fromkeys(("policy_loss", "entropy", "approx_kl", "value_loss", "total_loss"), 0.0)
        n = 1.0 / len(rows)
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

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradient of the whole group; returns its length before clipping."""
        self.group.mean_(self.policy.gradient)
        norm = clip_norm_(self.policy.gradient, self.hyper.max_grad_norm)
        self.optimizer.step(learning_rate)
        self.optimizer_steps += 1
        return norm
