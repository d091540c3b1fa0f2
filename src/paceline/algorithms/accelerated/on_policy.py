"""What the accelerators of losses over independent rows have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from paceline.algorithms.rows import Floats, Rows

if TYPE_CHECKING:
    from paceline.algorithms.on_policy import OnPolicy
    from paceline.models.heads import DistributionHead


class OnPolicyAccelerator(ABC):
    """`policy_gradient` and `value_gradient` may run in two threads at once: each writes statistics of its own."""

    def __init__(self, algorithm: OnPolicy) -> None:
        self.algorithm, self.policy = algorithm, algorithm.policy
        self.head: DistributionHead = algorithm.policy.head

    @property
    def hyper(self) -> Any:
        """A callback may change them."""
        return self.algorithm.hyper

    def gradients(self, rows: Rows, weight: float, *, measure: bool = True) -> dict[str, float]:
        """The gradient of the loss into the policy's flat gradient; returns the statistics."""
        self.weight, self.measure = weight, measure
        totals = dict.fromkeys(self.algorithm.statistics, 0.0)
        parts = self.policy.passes(len(rows))
        for part in parts:
            self.rows = rows.take(part) if len(parts) > 1 else rows
            self.found = dict.fromkeys(self.algorithm.statistics, 0.0)
            self.policy.learn(self.rows.obs, self.policy_gradient, self.value_gradient, add=part.start > 0)
            for name, value in self.found.items():
                totals[name] += value
        weighted = self.hyper.value_coef * totals["value_loss"] - self.hyper.entropy_coef * totals["entropy"]
        totals["total_loss"] = totals["policy_loss"] + weighted
        return totals

    @abstractmethod
    def policy_gradient(self, out: Floats) -> Floats:
        """d loss / d outputs `[K, B]`."""

    @abstractmethod
    def value_gradient(self, value: Floats) -> Floats:
        """d loss / d values `[B]`."""
