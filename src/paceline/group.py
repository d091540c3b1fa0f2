"""The verbs where replicas must agree. Alone they do nothing, so an algorithm that calls them reads as if serial."""

from __future__ import annotations

from torch import Tensor


class Group:
    """One member."""

    rank = 0
    size = 1

    def mean_(self, tensor: Tensor) -> Tensor:
        """The mean over the members, in place."""
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """The first member's values, in place."""
        return tensor

    def all_ok(self, flag: bool) -> bool:
        """Whether it holds for every member."""
        return flag
