"""PPO's gradient by hand."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.accelerated.on_policy import OnPolicyAccelerator
from paceline.algorithms.base import MAX_LOG_RATIO
from paceline.algorithms.rows import Floats


class PPOAccelerator(OnPolicyAccelerator):
    def policy_gradient(self, out: Floats) -> Floats:
        n, clip, advantage = self.weight, self.algorithm.annealed["clip"], self.rows.advantage
        low, high = np.float32(1 - clip), np.float32(1 + clip)
        log_prob, entropy = self.head.evaluate(out, self.rows.action)
        log_ratio = np.minimum(log_prob - self.rows.log_prob, np.float32(MAX_LOG_RATIO))
        ratio = np.exp(log_ratio)
        surrogate = ratio * advantage
        # min(ratio A, clip(ratio) A) is flat, so without gradient, where A asks for what the clip already gave.
        bounded = np.minimum(np.maximum(ratio, low), high) * advantage
        d_log_prob = surrogate * (surrogate <= bounded)
        d_log_prob *= np.float32(-n)
        if self.measure:
            self.found["policy_loss"] = float(-np.minimum(surrogate, bounded).sum() * n)
            self.found["entropy"] = float(entropy.sum() * n)
            self.found["approx_kl"] = float((ratio - 1 - log_ratio).sum() * n)
            self.found["clip_fraction"] = float(np.count_nonzero((ratio < low) | (ratio > high)) * n)
        return self.head.gradient(d_log_prob, -self.hyper.entropy_coef * n)

    def value_gradient(self, value: Floats) -> Floats:
        n, limit, rows = self.weight, self.hyper.value_clip, self.rows
        error = value - rows.target
        d_value: Floats = error * np.float32(2 * self.hyper.value_coef * n)
        if limit is None:
            self.found["value_loss"] = float(np.dot(error, error) * n)
            return d_value
        moved = value - rows.value
        clipped_error = rows.value + np.clip(moved, -limit, limit) - rows.target
        # max(error^2, clipped_error^2): where the clipped one counts, it is flat beyond the clip.
        self.found["value_loss"] = float(np.maximum(error * error, clipped_error * clipped_error).sum() * n)
        d_value[(np.abs(clipped_error) > np.abs(error)) & (np.abs(moved) > limit)] = 0
        return d_value
