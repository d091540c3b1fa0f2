"""The collective operations of an algorithm. In a group of one they do nothing, so an algorithm reads as if serial."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class CollectiveError(RuntimeError):
    """The members are out of step: this group is unusable, and survivors must join a new one."""


class Group:
    """A group with a single member."""

    rank = 0
    size = 1
    generation = 0
    """Number of this group within the run. The loss of a member leads to a new group."""
    seconds = 0.0
    """Time spent in collective operations so far."""
    bytes_moved = 0
    """Bytes this member has sent so far, through shared memory and over the network."""
    waiting = False
    """True inside an operation, which may be waiting for another member. Any thread may read it."""
    _aborted = False

    def mean_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its mean over the members."""
        self._check()
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by that of rank 0."""
        self._check()
        return tensor

    def all_ok(self, flag: bool) -> bool:
        """Whether `flag` is true for every member."""
        self._check()
        return flag

    def gather(self, value: float) -> list[float]:
        """One number from each member, by rank."""
        self._check()
        return [value]

    def meet(self) -> None:
        """Wait for all members, without a limit if they share a host."""
        self._check()

    def abort(self) -> None:
        """Make pending and later operations raise `CollectiveError`. Any thread may call this."""
        self._aborted = True

    def close(self) -> None:
        """Release the group's resources. No operation may follow."""
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise CollectiveError(f"rank {self.rank}: the group (generation {self.generation}) was aborted or closed")


@dataclass(frozen=True)
class GroupSpec:
    """What a process needs to join a group. Only `rank` and `address` differ between members."""

    generation: int
    rank: int
    hosts: tuple[tuple[int, ...], ...]
    """Ranks by host, rank 0 on the first host. The first rank of each host is its leader."""
    segment: str
    """Name of the shared memory, unique to the run and the generation."""
    store: tuple[str, int] | None
    """Host and port of the driver's store (`gloo.serve_store`); None with one host."""
    address: str
    """Address of this member, as the other hosts see it."""
    capacity_bytes: int
    """Size of the largest tensor."""
    timeout_seconds: float
    """Limit of each wait."""

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts) or self.rank not in ranks or 0 not in self.hosts[0]:
            raise ValueError(
                f"rank {self.rank} of hosts {self.hosts}: ranks must be 0 to n-1, with 0 on the first host"
            )
        if len(self.hosts) > 1 and self.store is None:
            raise ValueError("a group on several hosts needs a store")
        if not re.fullmatch(r"[\w.-]+", self.segment):
            raise ValueError(f"segment {self.segment!r}: only letters, digits, '.', '_' and '-' are allowed")

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)
