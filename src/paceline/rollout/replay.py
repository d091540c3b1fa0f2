"""What was experienced, to be learned from again: the last rows of all rollouts, in memory or in a file mapped into it.

A ring of C rows x N environments, as they come. A slot holds an observation and the step that was taken from it; where
that led to is the observation of the slot below, so that each is stored once. The slot after the newest row, `head`,
holds only where that row led to. An episode that is broken off, because the next rollout begins elsewhere, counts as
truncated: it bootstraps from there.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.rollout.batch import Batch
from paceline.rollout.sum_tree import Indices, SumTree
from paceline.spaces import ActionCodec, Array, ObservationCodec

Floats = NDArray[np.float32]
GOES_ON, TRUNCATED, TERMINATED = 0, 1, 2
MOST_SAVED_BYTES = 64_000_000
"""Of observations in memory that a checkpoint holds; more would be written anew at each."""
SMALL = ("action", "reward", "ended", "valid")  # columns that are in memory, and in each checkpoint
OBSERVATIONS, WRITTEN = "observations.npy", "written.npy"


@dataclass
class Sample:
    """B rows to learn from. The target of one is `reward + discount x` the value of `next_obs`."""

    index: Indices  # [B] where they are
    obs: Array  # [B, …]
    action: NDArray[np.int64]  # [B]
    reward: Floats  # [B] discounted sum of up to n steps
    next_obs: Array  # [B, …] after them
    discount: Floats  # [B] of what follows; 0 where nothing does
    weight: Floats | None  # [B] of importance, the greatest is 1; None: all are


class Replay:
    def __init__(
        self,
        capacity: int,
        num_envs: int,
        observation: ObservationCodec,
        action: ActionCodec,
        *,
        prioritized: bool = False,
        on_disk: bool = False,
    ) -> None:
        """`capacity`: slots, of all environments together. On disk it needs `open` before the first row."""
        self.rows, self.num_envs = capacity // num_envs, num_envs
        if self.rows < 2:
            raise UserError(f"dqn.replay_size={capacity} is too small for {num_envs} environments: two rows of each")
        slots = (self.rows, num_envs)
        self._shape: tuple[int, ...] = (*slots, *observation.shape)
        self._dtype = observation.dtype
        self._on_disk = on_disk
        self._obs: Array | None = None
        self._file: np.memmap[Any, Any] | None = None
        self._action = np.zeros(slots, np.min_scalar_type(max(action.nvec[0] - 1, 1)))
        self._reward = np.zeros(slots, np.float32)
        self._ended = np.zeros(slots, np.uint8)
        self._valid = np.zeros(slots, np.bool_)
        self._written = 0  # rows, ever
        self._mapped_written: NDArray[np.int64] | None = None
        self._newest = 0  # rows that were written to the file, also by a run that was cut off after its last checkpoint
        self._filled = 0  # slots that may be drawn
        self.added = 0
        """Valid rows, ever."""
        self.tree = SumTree(self.rows * num_envs) if prioritized else None
        if not on_disk:
            self._use(np.zeros(self._shape, self._dtype))

    def __len__(self) -> int:
        """Valid rows of all environments that are held."""
        return self._filled

    @property
    def observation_bytes(self) -> int:
        return int(np.prod(self._shape)) * self._dtype.itemsize

    def open(self, folder: Path) -> None:
        """Observations in files of this folder, made or found there. Nothing to do in memory."""
        if not self._on_disk:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file, found = _mapped(folder / OBSERVATIONS, self._shape, self._dtype)
        self._use(np.asarray(self._file))  # a plain array: numpy's own class for files is slow to index
        self._mapped_written, _ = _mapped(folder / WRITTEN, (1,), np.dtype(np.int64))
        if not found:
            self._mapped_written[0] = 0  # whatever was written is not in this file

    def _use(self, obs: Array) -> None:
        self._obs = obs
        self._flat_obs = obs.reshape(-1, *self._shape[2:])
        self._flat_action, self._flat_reward = self._action.reshape(-1), self._reward.reshape(-1)
        self._flat_ended, self._flat_valid = self._ended.reshape(-1), self._valid.reshape(-1)

    # -- filling ----------------------------------------------------------------------------------------------------

    def add(self, batch: Batch, *, continues: bool, priority: Floats | None = None) -> None:
        """A rollout. `continues`: it begins where the last one ended. `priority [T, N]` if rows are drawn by it.

        One of a multiple of N environments is taken as several rollouts.
        """
        width = batch.reward.shape[1]
        if width == self.num_envs:
            self._add(batch, slice(None), continues, priority)
            return
        assert width % self.num_envs == 0
        for begin in range(0, width, self.num_envs):
            self._add(batch, slice(begin, begin + self.num_envs), False, priority)

    def _add(self, batch: Batch, envs: slice, continues: bool, priority: Floats | None) -> None:
        steps = len(batch.reward)
        if steps + 2 > self.rows:
            raise UserError(
                f"dqn.replay_size={self.rows * self.num_envs} is too small: with {self.num_envs} environments a "
                f"rollout of {steps} steps needs {(steps + 2) * self.num_envs}"
            )
        assert self._obs is not None
        broken = self._written > 0 and not continues
        if self._mapped_written is not None:  # before the rows: what is half written counts as gone
            self._mapped_written[0] = max(self._newest, self._written + broken + steps)
        if broken:
            last, head = (self._written - 1) % self.rows, self._written % self.rows
            ended = self._ended[last]
            np.copyto(ended, TRUNCATED, where=ended == GOES_ON)
            self._clear(head, 1)
            self._written += 1
        begin = self._written % self.rows
        self._clear(begin, steps + 1)
        ended = np.where(batch.terminated[:, envs], TERMINATED, batch.truncated[:, envs])
        self._put(self._obs, begin, batch.obs[: steps + 1, envs])
        self._put(self._action, begin, batch.action[:, envs, 0])
        self._put(self._reward, begin, batch.reward[:, envs])
        self._put(self._ended, begin, ended)
        self._put(self._valid, begin, batch.valid[:, envs])
        valid = int(np.count_nonzero(batch.valid[:, envs]))
        self._filled += valid
        self.added += valid
        if self.tree is not None:
            assert priority is not None
            slots = (begin + np.arange(steps)) % self.rows
            index = slots[:, None] * self.num_envs + np.arange(self.num_envs)
            self.tree.set(index.reshape(-1), (priority[:, envs] * batch.valid[:, envs]).reshape(-1))
        self._written += steps

    def _clear(self, begin: int, rows: int) -> None:
        """Forget what is in these slots."""
        for part in self._parts(begin, rows):
            valid = self._valid[part]
            self._filled -= int(np.count_nonzero(valid))
            valid[...] = False
            if self.tree is not None:
                self.tree.set(np.arange(part.start * self.num_envs, part.stop * self.num_envs), 0.0)

    def _put(self, column: Array, begin: int, values: Array) -> None:
        taken = 0
        for part in self._parts(begin, len(values)):
            count = part.stop - part.start
            column[part] = values[taken : taken + count]
            taken += count

    def _parts(self, begin: int, rows: int) -> list[slice]:
        """Of the ring: as one slice, or two where it begins again."""
        end = begin + rows
        if end <= self.rows:
            return [slice(begin, end)]
        return [slice(begin, self.rows), slice(0, end - self.rows)]

    # -- drawing ----------------------------------------------------------------------------------------------------

    def sample(self, rng: np.random.Generator, count: int, *, n_step: int, gamma: float, beta: float = 0.0) -> Sample:
        """`count` rows: any of them as likely, or with prioritised drawing in proportion to their priority; `beta` is
        how much of the difference the weights make up for."""
        if self.tree is None:
            return self.gather(self._draw(rng, count), n_step=n_step, gamma=gamma)
        index, weight = self._draw_by_priority(self.tree, rng, count, beta)
        return self.gather(index, n_step=n_step, gamma=gamma, weight=weight)

    def _draw(self, rng: np.random.Generator, count: int) -> Indices:
        slots = min(self._written, self.rows) * self.num_envs
        index = rng.integers(slots, size=count)
        while len(wrong := np.flatnonzero(~self._flat_valid[index])):  # resets, and the head
            index[wrong] = rng.integers(slots, size=len(wrong))
        return index

    def _draw_by_priority(
        self, tree: SumTree, rng: np.random.Generator, count: int, beta: float
    ) -> tuple[Indices, Floats]:
        total = tree.total
        index = tree.find((np.arange(count) + rng.random(count)) * (total / count))  # one from each of as many parts
        weight = (self._filled * tree[index] / total) ** -beta
        return index, (weight / weight.max()).astype(np.float32)

    def gather(self, index: Indices, *, n_step: int, gamma: float, weight: Floats | None = None) -> Sample:
        """The rows at these places. Fewer than `n_step` steps where an episode ends, or the newest row is reached."""
        reward = self._flat_reward[index]
        last, discount = index, np.full(len(index), gamma, np.float32)
        if n_step > 1:
            head, here = self._written % self.rows, index
            going = self._flat_ended[index] == GOES_ON
            for k in range(1, n_step):
                here = self._below(here)
                going &= here // self.num_envs != head
                reward += np.where(going, np.float32(gamma**k) * self._flat_reward[here], np.float32(0))
                last = np.where(going, here, last)
                np.copyto(discount, np.float32(gamma ** (k + 1)), where=going)
                going &= self._flat_ended[here] == GOES_ON
        terminated = self._flat_ended[last] == TERMINATED
        discount[terminated] = 0
        # A simulator may end in observations that are no numbers, and 0 x NaN is NaN.
        after = np.where(terminated, index, self._below(last))
        action: NDArray[np.int64] = self._flat_action[index].astype(np.int64)
        obs, next_obs = (self._flat_obs.take(rows, axis=0) for rows in (index, after))  # short rows: 5 x faster than []
        return Sample(index, obs, action, reward, next_obs, discount, weight)

    def _below(self, index: Indices) -> Indices:
        """The next row of the same environments."""
        below = index + self.num_envs
        np.subtract(below, self._valid.size, out=below, where=below >= self._valid.size)
        return below

    def reprioritize(self, index: Indices, priority: NDArray[np.floating]) -> None:
        assert self.tree is not None
        self.tree.set(index, priority)

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Arrays and JSON; None where it is too large for that. On disk the observations stay where they are, and this
        is the mark up to which they count."""
        if not self._on_disk and self.observation_bytes > MOST_SAVED_BYTES:
            return None
        held = min(self._written + 1, self.rows)  # with the head
        state: dict[str, Any] = {name: getattr(self, f"_{name}")[:held] for name in SMALL}
        state |= {"written": self._written, "added": self.added, "priority": None, "obs": None}
        if self.tree is not None:
            state["priority"] = self.tree.leaves()[: held * self.num_envs]
        if not self._on_disk:
            assert self._obs is not None
            state["obs"] = self._obs[:held]
        elif self._file is not None:
            self._file.flush()
        return state

    def load(self, state: dict[str, Any] | None) -> str | None:
        """Back to where it was saved; otherwise why it is empty, or what is missing."""
        if state is None:
            return "the replay starts empty: it was too large for a checkpoint (dqn.replay=disk keeps it)"
        shape = state["valid"].shape
        if shape[1] != self.num_envs or shape[0] > self.rows:
            return f"the replay starts empty: it was of {shape[1]} environments, these are {self.num_envs}"
        written, held = int(state["written"]), shape[0]
        newest = written if self._mapped_written is None else int(self._mapped_written[0])
        if newest < written:
            return f"the replay starts empty: {OBSERVATIONS} is not the file of this run"
        self._newest = newest
        for name in SMALL:
            getattr(self, f"_{name}")[:held] = state[name]
        if state["obs"] is not None:
            assert self._obs is not None
            self._obs[:held] = state["obs"]
        if self.tree is not None:
            leaves = np.zeros(self._valid.size)
            leaves[: held * self.num_envs] = state["priority"]
            self.tree.load(leaves)
        self._written, self.added = written, int(state["added"])
        self._filled = int(np.count_nonzero(self._valid))
        if newest > written:  # their observations are those of rows that were written after the mark
            self._clear((written + 1) % self.rows, min(newest - written, self.rows - 1))
            return f"the replay goes on with {self._filled:,} rows: {newest - written:,} x {self.num_envs} are lost"
        return None


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[np.memmap[Any, Any], bool]:
    """The file as an array, made if there is none of this shape; whether it was there."""
    if path.exists():
        try:
            found = np.lib.format.open_memmap(path, mode="r+")
            if found.shape == shape and found.dtype == dtype:
                return found, True
        except ValueError:  # it is no such file, or cut short
            pass
        path.unlink()
    size, free = math.prod(shape) * dtype.itemsize, shutil.disk_usage(path.parent).free
    problem = f"{free / 1e9:.1f} GB are free" if size > free else ""
    if not problem:
        made = np.lib.format.open_memmap(path, mode="w+", shape=shape, dtype=dtype)
        try:
            with path.open("r+b") as file:  # now: a write to mapped memory that finds no room would end the process
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            return made, False
        except OSError as error:
            path.unlink()
            problem = error.strerror or str(error)
    raise UserError(
        f"dqn.replay=disk: {path} needs {size / 1e9:.1f} GB ({problem}): lower dqn.replay_size, or choose another --out"
    )
