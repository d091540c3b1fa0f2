"""Statistics of the last optimizer steps, for algorithms that make thousands of them in an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.algorithms.rows import Floats
from paceline.lazy import np

if TYPE_CHECKING:
    from paceline.algorithms.base import Metrics


class RecentSteps:
    """Values and errors of the last `most` optimizer steps."""

    def __init__(self, most: int, rows: int, huber: float) -> None:
        self._huber = np.float32(huber)
        self._values, self._errors = np.zeros((2, most, rows), np.float32)
        self._weights, self._norms = np.ones((most, rows), np.float32), np.zeros(most)
        self._steps = 0

    def add(self, value: Floats, error: Floats, weight: Floats | None, norm: float) -> None:
        place = self._steps % len(self._values)
        self._values[place], self._errors[place], self._norms[place] = value, error, norm
        if weight is not None:
            self._weights[place] = weight
        self._steps += 1

    def means(self) -> Metrics:
        """Empty before the first step."""
        count = min(self._steps, len(self._values))
        if not count:
            return {}
        # The oldest first: a resumed run begins another ring, and sums in another order round differently.
        order = np.arange(self._steps - count, self._steps) % len(self._values)
        values, size = self._values[order], np.abs(self._errors[order])
        small = np.minimum(size, self._huber)
        loss = small * (size - np.float32(0.5) * small) * self._weights[order]
        return {
            "q_mean": float(values.mean()),
            "q_min": float(values.min()),
            "q_max": float(values.max()),
            "td_error_mean": float(size.mean()),
            "total_loss": float(loss.mean()),
            "gradient_norm": float(self._norms[order].mean()),
        }
