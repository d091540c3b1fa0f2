"""The verbs where replicas must agree. Alone they do nothing, so an algorithm that calls them reads as if serial."""

from __future__ import annotations

from torch import Tensor


class CollectiveError(RuntimeError):
    """The members no longer act together. The group is of no more use; a new one may be joined."""


class Group:
    """One member."""

    rank = 0
    size = 1
    generation = 0
    """Which group of the run this is: each loss of a member makes a new one."""
    seconds = 0.0
    """Time spent inside the verbs so far."""
    bytes_moved = 0
    """What this member handed to others so far, over shared memory and over the network."""
    waiting = False
    """Inside a verb, so perhaps for another member. Any thread may look."""
    _aborted = False

    def mean_(self, tensor: Tensor) -> Tensor:
        """The mean over the members, in place."""
        self._check()
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """The first member's values, in place."""
        self._check()
        return tensor

    def all_ok(self, flag: bool) -> bool:
        """Whether it holds for every member."""
        self._check()
        return flag

    def gather(self, value: float) -> list[float]:
        """One number of each member, by rank."""
        self._check()
        return [value]

    def abort(self) -> None:
        """Every verb that waits, and every later one, raises `CollectiveError`. Any thread may call it."""
        self._aborted = True

    def close(self) -> None:
        """Give back what the group holds; no verb may follow."""
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise CollectiveError(f"rank {self.rank}: the group (generation {self.generation}) was aborted or closed")
