"""The gradient of A2C and A3C by hand."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.accelerated.on_policy import OnPolicyAccelerator
from paceline.algorithms.rows import Floats


class A2CAccelerator(OnPolicyAccelerator):
    def policy_gradient(self, out: Floats) -> Floats:
        n, advantage = self.weight, self.rows.advantage
        log_prob, entropy = self.head.evaluate(out, self.rows.action)
        log_ratio = log_prob - self.rows.log_prob
        self.found["policy_loss"] = -float(np.dot(log_prob, advantage)) * n
        self.found["entropy"] = float(entropy.sum()) * n
        self.found["approx_kl"] = float((np.exp(log_ratio) - 1 - log_ratio).sum()) * n
        return self.head.gradient(advantage * np.float32(-n), -self.hyper.entropy_coef * n)

    def value_gradient(self, value: Floats) -> Floats:
        error = value - self.rows.target
        self.found["value_loss"] = float(np.dot(error, error)) * self.weight
        d_value: Floats = error * np.float32(2 * self.hyper.value_coef * self.weight)
        return d_value
