"""Sum tree: samples indices with probabilities proportional to their weights. Nodes have 64 children.

Wide nodes suit numpy: a quarter of a million leaves need three levels, with a few calls per level for any number of
samples. A sum is always recomputed from its children, so that rounding errors do not accumulate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FAN = 64
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class SumTree:
    def __init__(self, size: int) -> None:
        self.size = size
        self._levels: list[Floats] = []  # [nodes, FAN], leaves first; the last has one node
        nodes = size
        while True:
            nodes = -(-nodes // FAN)
            self._levels.append(np.zeros((nodes, FAN)))
            if nodes == 1:
                break
        self._leaves = self._levels[0].reshape(-1)

    @property
    def total(self) -> float:
        return float(self._levels[-1].sum())

    def __getitem__(self, index: Indices) -> Floats:
        weights: Floats = self._leaves[index]
        return weights

    def set(self, index: Indices, weight: NDArray[np.floating] | float) -> None:
        """Set weights >= 0; an index of weight 0 is never sampled. For a repeated index the last weight counts."""
        self._leaves[index] = weight
        for children, parents in zip(self._levels, self._levels[1:], strict=False):
            index = index // FAN
            parents.reshape(-1)[index] = children[index].sum(axis=1)

    def leaves(self) -> Floats:
        return self._leaves[: self.size]

    def load(self, leaves: NDArray[np.floating]) -> None:
        self._leaves[: self.size] = leaves
        for children, parents in zip(self._levels, self._levels[1:], strict=False):
            parents.reshape(-1)[: len(children)] = children.sum(axis=1)

    def find(self, mass: Floats) -> Indices:
        """For each number in [0, total), the leaf whose interval of the cumulative sum contains it."""
        index = np.zeros(len(mass), np.int64)
        for level in reversed(self._levels):
            sums = np.cumsum(level[index], axis=1)
            # Rounding may put a number beyond the node's last child with a positive weight.
            mass = np.minimum(mass, np.nextafter(sums[:, -1], 0.0))
            child = (sums > mass[:, None]).argmax(axis=1)
            before = np.where(child > 0, np.take_along_axis(sums, np.maximum(child - 1, 0)[:, None], 1)[:, 0], 0.0)
            mass = mass - before
            index = index * FAN + child
        return index
