"""The steps that an algorithm learns from, and the minibatches they are cut into."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from paceline.collective.group import Group
    from paceline.spaces import Array

    Floats = NDArray[np.float32]
else:
    Floats = Any  # numpy is imported when it is used


@dataclass
class Rows:
    """The valid steps of a rollout, flat: R rows. A field is read by its name, `rows.advantage`."""

    obs: Any  # [R, …] as the network takes them
    action: Any  # [R, k]
    fields: Any  # [F, R]
    names: tuple[str, ...] = ("log_prob", "value", "advantage", "target")
    """Of the fields: log-probability and value by the policy that acted, advantage, value target; and others that an
    algorithm adds."""

    def __len__(self) -> int:
        return len(self.action)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.names:
            raise AttributeError(f"Rows has no field {name!r}; it has {', '.join(self.names)}")
        return self.fields[self.names.index(name)]

    def take(self, order: Array | slice) -> Rows:
        return Rows(self.obs[order], self.action[order], self.fields[:, order], self.names)

    def add(self, **fields: Array) -> Rows:
        """With more fields, each `[R]`."""
        stacked = np.vstack([self.fields, *(np.asarray(field, np.float32) for field in fields.values())])
        return Rows(self.obs, self.action, stacked, (*self.names, *fields))

    def tensors(self, weight: float, device: Any) -> LossRows:
        """The same for a loss. `weight`: of each row in `mean`."""
        obs = self.obs if not isinstance(self.obs, np.ndarray) else torch.from_numpy(self.obs).to(device)
        action, fields = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (self.action, self.fields))
        return LossRows(obs, action, fields, self.names, weight=weight)


@dataclass
class LossRows(Rows):
    """What `loss` is given: the fields as tensors, and the weight of the rows."""

    weight: Any = 1.0  # of every row, or [R]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the minibatch, of all workers together, of one value a row."""
        mean: Tensor = values.sum() * self.weight if isinstance(self.weight, float) else (values * self.weight).sum()
        return mean


@dataclass(frozen=True)
class Minibatches:
    """The minibatches of one pass over a rollout: as few as fit, and of equal size."""

    parts: list[slice]
    """This worker's rows in each."""
    counts: list[int]
    """Rows of all workers in each."""

    @classmethod
    def of(cls, rows: list[int], rank: int, largest: int) -> Minibatches:
        """`rows`: of each worker, by rank. `largest`: of all workers together.

        Every worker cuts its own rows into the same number of parts, so all know all sizes without asking.
        """
        count = -(-sum(rows) // largest) if largest else int(sum(rows) > 0)
        cuts = [equal_parts(own, count) for own in rows]
        counts = [sum(part.stop - part.start for part in parts) for parts in zip(*cuts, strict=True)]
        # With more workers than rows in a minibatch, one may come out empty for all.
        return cls([p for p, n in zip(cuts[rank], counts, strict=True) if n], [n for n in counts if n])

    @classmethod
    def of_sequences(cls, sequence: Array, count: int, group: Group) -> Minibatches:
        """The same with whole sequences in each: nearly equal in size. `sequence [R]`: of each row of this worker, in
        ascending order. `count`: at most so many minibatches."""
        starts = np.append(np.flatnonzero(np.diff(sequence, prepend=-1)), len(sequence))
        wanted = [len(sequence) * k // count for k in range(count + 1)] if count else [0]
        bounds = [int(starts[np.abs(starts - row).argmin()]) for row in wanted]
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        rows = torch.tensor([part.stop - part.start for part in parts], dtype=torch.float64)
        counts = [round(mean * group.size) for mean in group.mean_(rows).tolist()]
        return cls([p for p, n in zip(parts, counts, strict=True) if n], [n for n in counts if n])


def equal_parts(rows: int, count: int) -> list[slice]:
    """`count` slices of equal length to within one row: no tiny last minibatch with a full step."""
    bounds = [rows * k // count for k in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
