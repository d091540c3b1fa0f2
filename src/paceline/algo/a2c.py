"""Advantage actor-critic: the synchronous form of A3C (Mnih et al., 2016). One gradient step on each rollout."""

from __future__ import annotations

import numpy as np

from paceline.algo.base import Algorithm, Metrics, Rows
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
        n = np.float32(1.0 / len(rows))
        out, value = self.policy.forward(rows.obs)
        log_prob, entropy = head.evaluate(out, rows.action)
        error = value - target
        d_value = error * (2 * np.float32(hyper.value_coef) * n)
        self.policy.backward(head.gradient(-n * advantage, -hyper.entropy_coef * float(n)), d_value)
        policy_loss = -float(np.dot(log_prob, advantage)) * float(n)
        value_loss = float(np.dot(error, error)) * float(n)
        mean_entropy = float(entropy.sum()) * float(n)
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": mean_entropy,
            "total_loss": policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * mean_entropy,
            "approx_kl": float(np.dot(log_prob - old_logp, log_prob - old_logp)) * 0.5 * float(n),
        }

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradient of the whole group; returns its length before clipping."""
        self.group.mean_(self.policy.gradient)
        norm = clip_norm_(self.policy.gradient, self.hyper.max_grad_norm)
        self.optimizer.step(learning_rate)
        self.optimizer_steps += 1
        return norm
