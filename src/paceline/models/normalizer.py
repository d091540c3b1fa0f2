"""Running moments, exact over batches and over replicas (Chan's update)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from paceline.collective.group import Group
from paceline.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


EPSILON = 1e-8
CLIP = 10.0


class RunningMoments:
    """Mean and variance of all rows seen; before the first, mean 0 and variance 1.

    These initial values have no weight: even a ten-thousandth of a row would make the variance of a far mean many times
    too large.
    """

    def __init__(self, size: int) -> None:
        self.mean: NDArray[np.float64] = np.zeros(size)
        self.var: NDArray[np.float64] = np.ones(size)
        self.count = 0.0

    def update(self, rows: NDArray[np.float32], group: Group) -> None:
        """Take in `rows [R, size]` of every member of the group."""
        sums = torch.from_numpy(self.sums(rows))
        group.mean_(sums)
        self.merge(sums.numpy() * group.size)

    @staticmethod
    def sums(rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """What `merge` needs of `rows [R, size]`: their number, sum and sum of squares. Sums of several parts add
        up."""
        wide = rows.astype(np.float64)
        return np.concatenate(([len(wide)], wide.sum(0), (wide * wide).sum(0)))

    def merge(self, sums: NDArray[np.float64]) -> None:
        """Take in rows, given their `sums`."""
        count, first, second = float(sums[0]), *np.split(sums[1:], 2)
        if count == 0:
            return
        mean = first / count
        var = np.maximum(second / count - mean * mean, 0.0)
        total = self.count + count
        delta = mean - self.mean
        spread = self.var * self.count + var * count + delta * delta * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, spread / total, total

    def with_sums(self, sums: NDArray[np.float64]) -> RunningMoments:
        """A copy that has seen these rows too."""
        seen = copy.copy(self)  # `merge` makes new arrays
        seen.merge(sums)
        return seen

    @property
    def deviation(self) -> NDArray[np.float64]:
        deviation: NDArray[np.float64] = np.sqrt(self.var + EPSILON)
        return deviation

    def state(self) -> dict[str, NDArray[np.float64]]:
        return {"mean": self.mean, "var": self.var, "count": np.asarray([self.count])}

    def load(self, state: dict[str, NDArray[np.float64]]) -> None:
        self.mean, self.var = np.array(state["mean"]), np.array(state["var"])
        self.count = float(state["count"][0])
