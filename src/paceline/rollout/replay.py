"""Replay buffer: the newest rows of all rollouts, in memory or in a memory-mapped file.

A ring of C rows x N environments. A slot holds an observation and the step taken from it; its next observation is the
one in the slot of the next row, so that each is stored once. The row after the newest one, `head`, holds only the next
observations of the newest row. If a rollout does not continue the one before it, running episodes count as truncated
and bootstrap from their last observation.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
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
Scaling = Callable[[Floats], Floats]
RUNNING, TRUNCATED, TERMINATED = 0, 1, 2
MAX_SAVED_BYTES = 100_000_000
"""Observations in memory are saved up to this size: every checkpoint writes all that there are so far."""
SMALL = ("action", "reward", "ended", "valid")  # columns that are always in memory and in every checkpoint
OBSERVATIONS, WRITTEN = "observations.npy", "written.npy"


@dataclass
class Sample:
    """B rows to learn from. The target of a row is `reward + discount * value(next_obs)`."""

    index: Indices  # [B] slots in the buffer
    obs: Array  # [B, …]
    action: NDArray[Any]  # [B] indices, or [B, A] continuous
    reward: Floats  # [B] discounted sum over up to n steps
    next_obs: Array  # [B, …] after these steps
    discount: Floats  # [B] gamma**n; 0 after termination
    weight: Floats | None  # [B] importance weights, at most 1; None: all 1


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
        setting: str = "dqn.replay_size",
    ) -> None:
        """`capacity`: slots of all environments together. With `on_disk`, call `open` before the first row. `setting`:
        what holds the capacity, for errors."""
        self._setting, self._where = setting, setting.partition(".")[0] + ".replay"
        self.rows, self.num_envs = capacity // num_envs, num_envs
        if self.rows < 2:
            raise UserError(f"{setting}={capacity} is too small for {num_envs} environments: give at least 2 rows each")
        slots = (self.rows, num_envs)
        self._shape: tuple[int, ...] = (*slots, *observation.shape)
        self._dtype = observation.dtype
        self._on_disk = on_disk
        self._obs: Array | None = None
        self._file: np.memmap[Any, Any] | None = None
        if action.is_continuous:
            self._action = np.zeros((*slots, action.dim), np.float32)
        else:
            self._action = np.zeros(slots, np.min_scalar_type(max(action.nvec[0] - 1, 1)))
        self._reward = np.zeros(slots, np.float32)
        self._ended = np.zeros(slots, np.uint8)
        self._valid = np.zeros(slots, np.bool_)
        self._written = 0  # rows since the start
        self._mapped_written: NDArray[np.int64] | None = None
        self._newest = 0  # rows written to the file, including those after the last checkpoint of an interrupted run
        self._filled = 0  # valid rows held
        self.added = 0
        """Valid rows since the start, without those lost at a resume."""
        self.tree = SumTree(self.rows * num_envs) if prioritized else None
        if not on_disk:
            self._use(np.zeros(self._shape, self._dtype))

    def __len__(self) -> int:
        """Valid rows held."""
        return self._filled

    @property
    def observation_bytes(self) -> int:
        return int(np.prod(self._shape)) * self._dtype.itemsize

    def open(self, folder: Path) -> None:
        """Keep observations in files of this folder, which are created if missing. No effect without `on_disk`."""
        if not self._on_disk:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file, found = _mapped(folder / OBSERVATIONS, self._shape, self._dtype, self._setting)
        self._use(np.asarray(self._file))  # a plain array: np.memmap is slow to index
        self._mapped_written, _ = _mapped(folder / WRITTEN, (1,), np.dtype(np.int64), self._setting)
        if not found:
            self._mapped_written[0] = 0  # the file is new

    def _use(self, obs: Array) -> None:
        self._obs = obs
        self._flat_obs = obs.reshape(-1, *self._shape[2:])
        self._flat_action, self._flat_reward = (
            self._action.reshape(-1, *self._action.shape[2:]),
            self._reward.reshape(-1),
        )
        self._flat_ended, self._flat_valid = self._ended.reshape(-1), self._valid.reshape(-1)

    # -- filling ----------------------------------------------------------------------------------------------------

    def add(self, batch: Batch, *, continues: bool, priority: Floats | None = None) -> None:
        """Add a rollout. `continues`: it begins where the last one ended. `priority [T, N]`: for prioritised sampling.

        A rollout of a multiple of N environments is added as several rollouts.
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
                f"{self._setting}={self.rows * self.num_envs} is too small: a rollout of {steps} steps in "
                f"{self.num_envs} environments needs {(steps + 2) * self.num_envs}"
            )
        assert self._obs is not None
        broken = self._written > 0 and not continues
        if self._mapped_written is not None:  # before the rows: half-written ones count as lost
            self._mapped_written[0] = max(self._newest, self._written + broken + steps)
        if broken:
            last, head = (self._written - 1) % self.rows, self._written % self.rows
            ended = self._ended[last]
            np.copyto(ended, TRUNCATED, where=ended == RUNNING)
            self._clear(head, 1)
            self._written += 1
        elif self._written:  # a row that only resets follows the end of an episode, or an environment that failed
            ended = self._ended[(self._written - 1) % self.rows]
            np.copyto(ended, TRUNCATED, where=(ended == RUNNING) & ~batch.valid[0, envs])
        begin = self._written % self.rows
        self._clear(begin, steps + 1)
        ended = np.where(batch.terminated[:, envs], TERMINATED, batch.truncated[:, envs])
        self._put(self._obs, begin, batch.obs[: steps + 1, envs])
        action = batch.action[:, envs]
        self._put(self._action, begin, action if self._action.ndim == 3 else action[..., 0])
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
        """Invalidate these rows."""
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
        """Rows of the ring as one slice, or as two where it wraps around."""
        end = begin + rows
        if end <= self.rows:
            return [slice(begin, end)]
        return [slice(begin, self.rows), slice(0, end - self.rows)]

    # -- sampling ---------------------------------------------------------------------------------------------------

    def sample(
        self,
        rng: np.random.Generator,
        count: int,
        *,
        n_step: int,
        gamma: float,
        beta: float = 0.0,
        scaled: Scaling | None = None,
    ) -> Sample:
        """Sample `count` rows, uniformly or in proportion to their priority. `beta`: how much of the bias importance
        weights correct, 1 for all of it. `scaled`: what is learned from instead of the rewards."""
        if self.tree is None:
            return self.gather(self._draw(rng, count), n_step=n_step, gamma=gamma, scaled=scaled)
        index, weight = self._draw_by_priority(self.tree, rng, count, beta)
        return self.gather(index, n_step=n_step, gamma=gamma, weight=weight, scaled=scaled)

    def _draw(self, rng: np.random.Generator, count: int) -> Indices:
        slots = min(self._written, self.rows) * self.num_envs
        index = rng.integers(slots, size=count)
        while len(wrong := np.flatnonzero(~self._flat_valid[index])):  # reset rows and the head
            index[wrong] = rng.integers(slots, size=len(wrong))
        return index

    def _draw_by_priority(
        self, tree: SumTree, rng: np.random.Generator, count: int, beta: float
    ) -> tuple[Indices, Floats]:
        total = tree.total
        index = tree.find((np.arange(count) + rng.random(count)) * (total / count))  # one sample per stratum
        weight = (self._filled * tree[index] / total) ** -beta
        return index, (weight / weight.max()).astype(np.float32)

    def gather(
        self,
        index: Indices,
        *,
        n_step: int,
        gamma: float,
        weight: Floats | None = None,
        scaled: Scaling | None = None,
    ) -> Sample:
        """The rows in these slots. They span fewer than `n_step` steps where an episode or the data ends."""

        def rewards(slots: Indices) -> Floats:
            return self._flat_reward[slots] if scaled is None else scaled(self._flat_reward[slots])

        reward = rewards(index)
        last, discount = index, np.full(len(index), gamma, np.float32)
        if n_step > 1:
            head, here = self._written % self.rows, index
            going = self._flat_ended[index] == RUNNING
            for k in range(1, n_step):
                here = self._next_row(here)
                going &= here // self.num_envs != head
                reward += np.where(going, np.float32(gamma**k) * rewards(here), np.float32(0))
                last = np.where(going, here, last)
                np.copyto(discount, np.float32(gamma ** (k + 1)), where=going)
                going &= self._flat_ended[here] == RUNNING
        terminated = self._flat_ended[last] == TERMINATED
        discount[terminated] = 0
        # The last observation of a simulator may contain NaN, and 0 * NaN is NaN.
        after = np.where(terminated, index, self._next_row(last))
        action = self._flat_action.take(index, axis=0)
        if action.ndim == 1:
            action = action.astype(np.int64)
        obs, next_obs = (
            self._flat_obs.take(rows, axis=0) for rows in (index, after)
        )  # for short rows 5 times as fast as []
        return Sample(index, obs, action, reward, next_obs, discount, weight)

    def _next_row(self, index: Indices) -> Indices:
        """The slots of the same environments in the next row."""
        following = index + self.num_envs
        np.subtract(following, self._valid.size, out=following, where=following >= self._valid.size)
        return following

    def reprioritize(self, index: Indices, priority: NDArray[np.floating]) -> None:
        assert self.tree is not None
        self.tree.set(index, priority)

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Arrays and JSON, or None if the observations are too large. With `on_disk` they stay in their file, and the
        state records up to which row it is valid."""
        held = min(self._written + 1, self.rows)  # including the head
        if not self._on_disk and held * self.observation_bytes > MAX_SAVED_BYTES * self.rows:
            return None
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
        """Restore a saved state. Returns why the buffer is empty or what is missing, None if it is complete.

        Lost rows do not count as `added`: learning waits for new ones where too few are left."""
        if state is None:
            return f"empty: it was too large for a checkpoint ({self._where}=disk would keep it)"
        shape = state["valid"].shape
        if shape[1] != self.num_envs or shape[0] > self.rows:
            return f"empty: it was of {shape[1]} environments, now there are {self.num_envs}"
        written, saved = int(state["written"]), shape[0]
        newest = written if self._mapped_written is None else int(self._mapped_written[0])
        if newest < written:
            return f"empty: {OBSERVATIONS} is not the file of this run"
        self._newest = newest
        for name in SMALL:
            getattr(self, f"_{name}")[:saved] = state[name]
        if state["obs"] is not None:
            assert self._obs is not None
            self._obs[:saved] = state["obs"]
        if self.tree is not None:
            leaves = np.zeros(self._valid.size)
            leaves[: saved * self.num_envs] = state["priority"]
            self.tree.load(leaves)
        self._written, self.added = written, int(state["added"])
        self._filled = int(np.count_nonzero(self._valid))
        held, lost = self._filled, newest - written
        self._clear((written + 1) % self.rows, min(lost, self.rows - 1))  # written after the checkpoint, over old ones
        if self._filled < held:
            self.added = self._filled
            left = f"partial: {self._filled:,} rows are left" if self._filled else "empty"
            return f"{left}, {lost:,} x {self.num_envs} are lost: they were overwritten after the checkpoint"
        return None


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], setting: str) -> tuple[np.memmap[Any, Any], bool]:
    """The file as an array, and whether it existed. A missing file, or one of another shape, is created."""
    if path.exists():
        try:
            found = np.lib.format.open_memmap(path, mode="r+")
            if found.shape == shape and found.dtype == dtype:
                return found, True
        except ValueError:  # not such a file, or truncated
            pass
        path.unlink()
    size, free = math.prod(shape) * dtype.itemsize, shutil.disk_usage(path.parent).free
    problem = f"{free / 1e9:.1f} GB are free" if size > free else ""
    if not problem:
        made = np.lib.format.open_memmap(path, mode="w+", shape=shape, dtype=dtype)
        try:
            with path.open("r+b") as file:  # now: writing to mapped memory on a full disk kills the process
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            return made, False
        except OSError as error:
            path.unlink()
            problem = error.strerror or str(error)
    key = setting.partition(".")[0] + ".replay=disk"
    raise UserError(f"{key}: {path} needs {size / 1e9:.1f} GB ({problem}): lower {setting} or choose another --out")
