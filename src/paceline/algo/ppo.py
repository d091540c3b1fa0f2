"""Proximal policy optimisation (Schulman et al., 2017), the clipped variant.

Collect a rollout, estimate advantages by GAE, then pass over it `epochs` times in minibatches. The gradient of the loss
with respect to the network's outputs is written out by hand in `gradients`; the network takes it from there.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from paceline.algo.base import Algorithm, Floats, Metrics, Rows
from paceline.algo.optimizers import Adam, clip_norm_
from paceline.config import PPOConfig
from paceline.group import Group
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

STATISTICS = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl", "clip_fraction")
KL_MARGIN = 1.5
MAX_LOG_RATIO = np.float32(20)  # the exponential of more is soon infinite


class PPO(Algorithm):
    def __init__(
        self,
        policy: Policy,
        hyper: PPOConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        super().__init__(policy, hyper, rng=rng, group=group, normalize_reward=normalize_reward)
        self.hyper = hyper
        self.optimizer = Adam(policy.parameters, policy.gradient)

    def update(self, batch: Batch, remaining: float) -> Metrics:
        hyper = self.hyper
        learning_rate = self.scheduled(hyper.learning_rate, hyper.learning_rate_schedule, remaining)
        clip = self.scheduled(hyper.clip, hyper.clip_schedule, remaining)
        rows = self.rows(batch)
        parts = equal_parts(len(rows), hyper.minibatch_size)
        epochs, on = 0, True
        while on and epochs < hyper.epochs:
            shuffled = rows.take(self.rng.permutation(len(rows))) if len(parts) > 1 else rows
            measure = epochs == hyper.epochs - 1 or hyper.target_kl is not None
            totals, norms, measured, applied = np.zeros(len(STATISTICS)), 0.0, 0, 0  # of the last pass over the rollout
            for part in parts:
                statistics = self.gradients(shuffled.take(part), clip, measure=measure)
                totals += statistics
                measured += 1
                if hyper.target_kl is not None and not self.group.all_ok(statistics[4] <= KL_MARGIN * hyper.target_kl):
                    on = False
                    break
                norms += self.apply(learning_rate)
                applied += 1
            epochs += 1
        metrics = dict(zip(STATISTICS, (totals / max(measured, 1)).tolist(), strict=True))
        metrics |= {"gradient_norm": norms / max(applied, 1), "learning_rate": learning_rate, "clip": clip}
        metrics["epochs_done"] = epochs
        return self.finish(batch, rows, metrics)

    def gradients(self, rows: Rows, clip: float, *, measure: bool = True) -> NDArray[np.float64]:
        """The gradient of the loss of these rows into the policy's flat gradient; returns STATISTICS if asked to."""
        hyper, head = self.hyper, self.policy.head
        old_logp, old_value, advantage, target = rows.fields
        n, low, high = 1.0 / len(rows), np.float32(1 - clip), np.float32(1 + clip)
        statistics = np.zeros(len(STATISTICS))

        def policy_loss(out: Floats) -> Floats:
            log_prob, entropy = head.evaluate(out, rows.action)
            log_ratio = np.minimum(log_prob - old_logp, MAX_LOG_RATIO)
            ratio = np.exp(log_ratio)
            surrogate = ratio * advantage
            # min(ratio A, clip(ratio) A) is flat, so without gradient, where A asks for what the clip already gave.
            bounded = np.minimum(np.maximum(ratio, low), high) * advantage
            d_log_prob = surrogate * (surrogate <= bounded)
            d_log_prob *= np.float32(-n)
            if measure:
                statistics[0] = -np.minimum(surrogate, bounded).sum() * n
                statistics[2] = entropy.sum() * n
                statistics[4] = (ratio - 1 - log_ratio).sum() * n
                statistics[5] = np.count_nonzero((ratio < low) | (ratio > high)) * n
            return head.gradient(d_log_prob, -hyper.entropy_coef * n)

        def value_loss(value: Floats) -> Floats:
            error = value - target
            d_value: Floats = error * np.float32(2 * hyper.value_coef * n)
            if hyper.value_clip is None:
                statistics[1] = np.dot(error, error) * n
                return d_value
            moved = value - old_value
            clipped_error = old_value + np.clip(moved, -hyper.value_clip, hyper.value_clip) - target
            # max(error^2, clipped_error^2): where the clipped one counts, it is flat beyond the clip.
            statistics[1] = np.maximum(error * error, clipped_error * clipped_error).sum() * n
            d_value[(np.abs(clipped_error) > np.abs(error)) & (np.abs(moved) > hyper.value_clip)] = 0
            return d_value

        self.policy.learn(rows.obs, policy_loss, value_loss)
        policy, value, entropy = statistics[:3]
        statistics[3] = policy + hyper.value_coef * value - hyper.entropy_coef * entropy
        return statistics

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradient of the whole group; returns its length before clipping."""
        self.group.mean_(self.policy.gradient)
        norm = clip_norm_(self.policy.gradient, self.hyper.max_grad_norm)
        self.optimizer.step(learning_rate)
        self.optimizer_steps += 1
        return norm


def equal_parts(rows: int, largest: int) -> list[slice]:
    """As few slices as fit, all as long as the others to within one row: no tiny last minibatch with a full step."""
    count = -(-rows // largest)
    bounds = [rows * k // count for k in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
