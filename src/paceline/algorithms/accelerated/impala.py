"""IMPALA's gradient by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.algorithms.base import MAX_LOG_RATIO, Metrics
from paceline.algorithms.rows import Floats

if TYPE_CHECKING:
    from paceline.algorithms.impala import IMPALA, Trajectories
    from paceline.models.heads import DistributionHead


class IMPALAAccelerator:
    def __init__(self, algorithm: IMPALA) -> None:
        self.algorithm, self.policy = algorithm, algorithm.policy
        self.head: DistributionHead = algorithm.policy.head

    @property
    def hyper(self) -> Any:
        """A callback may change them."""
        return self.algorithm.hyper

    def gradients(self, rows: Trajectories, x: Any) -> Metrics:
        """The gradient of the loss into the policy's flat gradient; returns the statistics."""
        self.rows, self.found = rows, dict.fromkeys(self.algorithm.statistics, 0.0)
        self.policy.learn_jointly(x, self.output_gradients)
        found, hyper = self.found, self.hyper
        weighted = hyper.value_coef * found["value_loss"] - hyper.entropy_coef * found["entropy"]
        found["total_loss"] = found["policy_loss"] + weighted
        return found

    def output_gradients(self, out: Floats, values: Floats) -> tuple[Floats, Floats]:
        """d loss / d outputs `[K, B]` and d loss / d values `[B]`."""
        from paceline.algorithms.impala import CLIPPED

        rows, hyper, learned, n = self.rows, self.hyper, self.rows.learned, np.float32(self.rows.weight)
        log_prob, entropy = self.head.evaluate(out[:, learned], rows.action)
        log_ratio = np.minimum(log_prob - rows.log_prob, np.float32(MAX_LOG_RATIO))
        ratio = np.exp(log_ratio)
        advantage, target = self.algorithm.vtrace(rows, values, ratio)
        policy_loss, d_log_prob = self._policy_loss(log_prob, ratio, advantage)
        error = values[learned] - target
        self.found["policy_loss"] = float(policy_loss.sum() * n)
        self.found["value_loss"] = float(np.dot(error, error) * n)
        self.found["entropy"] = float(entropy.sum() * n)
        self.found["approx_kl"] = float((ratio - 1 - log_ratio).sum() * n)
        self.found["importance_mean"] = float(ratio.sum() * n)
        self.found["clip_fraction"] = float(np.count_nonzero(ratio > CLIPPED * hyper.clip_rho) * n)
        d_out, d_value = np.zeros_like(out), np.zeros_like(values)
        d_out[:, learned] = self.head.gradient(d_log_prob * n, -hyper.entropy_coef * float(n))
        d_value[learned] = error * (2 * np.float32(hyper.value_coef) * n)
        return d_out, d_value

    def _policy_loss(self, log_prob: Floats, ratio: Floats, advantage: Floats) -> tuple[Floats, Floats]:
        """The policy's loss of each row, and its derivative with respect to the log-probability."""
        clip = self.hyper.surrogate_clip
        if clip is None:
            weighted = np.minimum(ratio, np.float32(self.hyper.clip_pg_rho)) * advantage
            return -weighted * log_prob, -weighted
        surrogate = ratio * advantage
        bounded = np.minimum(np.maximum(ratio, np.float32(1 - clip)), np.float32(1 + clip)) * advantage
        return -np.minimum(surrogate, bounded), -surrogate * (surrogate <= bounded)
