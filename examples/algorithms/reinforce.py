"""REINFORCE with a learned baseline (Williams, 1992): one gradient step on each rollout.

    paceline train --algo examples/algorithms/reinforce.py:Reinforce --env CartPole-v1 --set reinforce.gamma=0.98

Settings and a loss are all that it has to define.
"""

from __future__ import annotations

from paceline.algorithms import Loss, LossRows, OnPolicy, OnPolicySettings
from paceline.models.outputs import Outputs


class Reinforce(OnPolicy):
    class Settings(OnPolicySettings):
        rollout_steps: int = 32
        """Steps of each environment between updates."""
        learning_rate: float = 3e-3
        """Learning rate of Adam."""
        gae_lambda: float = 1.0
        """Lambda of GAE: 0 bootstraps after one step, 1 sums rewards to the end of the rollout."""
        normalize_advantage: bool = True
        """Normalise the advantages of a rollout to mean 0 and standard deviation 1."""

    statistics = ("policy_loss", "value_loss", "entropy", "total_loss")

    def loss(self, rows: LossRows, out: Outputs) -> Loss:
        policy_loss = -rows.mean(out.log_prob(rows.action) * rows.advantage)
        value_loss = rows.mean((out.value - rows.target).square())
        entropy = rows.mean(out.entropy())
        loss = policy_loss + self.hyper.value_coef * value_loss - self.hyper.entropy_coef * entropy
        return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
