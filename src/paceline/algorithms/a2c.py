"""Advantage actor-critic: the synchronous form of A3C (Mnih et al., 2016). One gradient step on each rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.algorithms.base import MAX_LOG_RATIO, Loss
from paceline.algorithms.on_policy import OnPolicy, OnPolicySettings
from paceline.algorithms.optimizers import OPTIMIZERS, Optimizer
from paceline.algorithms.rows import LossRows
from paceline.config.values import Fraction, Positive

if TYPE_CHECKING:
    from paceline.models.outputs import Outputs


class A2C(OnPolicy):
    class Settings(OnPolicySettings):
        rollout_steps: Positive = 16
        """Steps of each environment between updates."""
        learning_rate: Annotated[float, Field(gt=0)] = 7e-4
        """Learning rate of the optimizer."""
        gae_lambda: Fraction = 1.0
        """Lambda of GAE: 0 bootstraps after one step, 1 sums rewards to the end of the rollout (n-step returns)."""
        normalize_advantage: bool = False
        """Normalise the advantages of a rollout to mean 0 and standard deviation 1."""
        optimizer: Literal["rmsprop", "adam"] = "rmsprop"
        """RMSprop as in the A3C paper, or Adam."""

    hyper: Settings
    several_policies = True
    faster_learning = "a larger a2c.rollout_steps"

    def make_optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.hyper.optimizer](self.policy.parameters, self.policy.gradient)

    def loss(self, rows: LossRows, out: Outputs) -> Loss:
        log_prob = out.log_prob(rows.action)
        policy_loss = -rows.mean(log_prob * rows.advantage)
        value_loss = rows.mean((out.value - rows.target).square())
        entropy = rows.mean(out.entropy())
        loss = policy_loss + self.hyper.value_coef * value_loss - self.hyper.entropy_coef * entropy
        log_ratio = (log_prob - rows.log_prob).clamp(max=MAX_LOG_RATIO)
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": rows.mean(log_ratio.exp() - 1 - log_ratio),
        }
