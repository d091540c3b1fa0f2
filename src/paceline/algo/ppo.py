"""Proximal policy optimisation (Schulman et al., 2017), the clipped variant.

Collect a rollout, estimate advantages by GAE, then pass over it `epochs` times in minibatches. The gradient of the loss
with respect to the network's outputs is written out by hand in `step`; the network takes it from there.
"""

from __future__ import annotations

import itertools

import numpy as np

from paceline.algo.base import Algorithm, Metrics, Rows
from paceline.algo.optimizers import Adam, clip_norm_
from paceline.config import PPOConfig
from paceline.group import Group
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

STATISTICS = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl", "clip_fraction")
KL_MARGIN = 1.5


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
        totals, norms, steps, epochs = np.zeros(len(STATISTICS)), 0.0, 0, 0
        on = True
        while on and epochs < hyper.epochs:
            shuffled = rows.take(self.rng.permutation(len(rows))) if len(parts) > 1 else rows
            for part in parts:
                statistics = self.gradients(shuffled.take(part), clip)
                totals += statistics
                steps += 1
                if hyper.target_kl is not None and not self.group.all_ok(statistics[4] <= KL_MARGIN * hyper.target_kl):
                    on = False
                    break
                norms += self.apply(learning_rate)
            epochs += 1
        metrics = dict(zip(STATISTICS, (totals / max(steps, 1)).tolist(), strict=True))
        metrics |= {"gradient_norm": norms / max(steps, 1), "learning_rate": learning_rate, "clip": clip}
        metrics["epochs_done"] = epochs
        return self.finish(batch, rows, metrics)

    def gradients(self, rows: Rows, clip: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The gradient of the loss of these rows into the policy's flat gradient; returns STATISTICS."""
        hyper, head = self.hyper, self.policy.head
        old_logp, old_value, advantage, target = rows.fields
        n = np.float32(1.0 / len(rows))
        out, value = self.policy.forward(rows.obs)
        log_prob, entropy = head.evaluate(out, rows.action)

        log_ratio = log_prob - old_logp
        ratio = np.exp(log_ratio)
        # min(ratio A, clip(ratio) A) is flat, so without gradient, where A asks for what the clip already gave.
        flat = np.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)
        surrogate = ratio * advantage
        d_log_prob = np.where(flat, np.float32(0), surrogate)
        d_log_prob *= -n
        bounded = np.clip(ratio, 1 - clip, 1 + clip) * advantage
        policy_loss = -float(np.minimum(surrogate, bounded).sum()) * n

        error = value - target
        if hyper.value_clip is not None:
            moved = value - old_value
            clipped_error = old_value + np.clip(moved, -hyper.value_clip, hyper.value_clip) - target
            # max(error^2, clipped_error^2): where the clipped one counts, it is flat beyond the clip.
            beyond = (np.abs(clipped_error) > np.abs(error)) & (np.abs(moved) > hyper.value_clip)
            value_loss = float(np.maximum(error * error, clipped_error * clipped_error).sum()) * n
            d_value = np.where(beyond, np.float32(0), error)
            d_value *= 2 * np.float32(hyper.value_coef) * n
        else:
            value_loss = float(np.dot(error, error)) * n
            d_value = error * (2 * np.float32(hyper.value_coef) * n)

        self.policy.backward(head.gradient(d_log_prob, -hyper.entropy_coef * float(n)), d_value)
        mean_entropy = float(entropy.sum()) * n
        approx_kl = float((ratio - 1 - log_ratio).sum()) * n
        clip_fraction = float(np.count_nonzero(np.abs(ratio - 1) > clip)) * n
        total = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * mean_entropy
        return np.array([policy_loss, value_loss, mean_entropy, total, approx_kl, clip_fraction])

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
