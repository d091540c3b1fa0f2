"""A group of several processes: shared memory between members on one host, gloo between hosts.

On one host gloo takes milliseconds per operation, more with each member; shared memory takes tens of microseconds. So
the members of a host combine their values in a file in `/dev/shm`, and one leader per host talks to the other hosts.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.collective.gloo import HostLeaders
from paceline.collective.group import CollectiveError, Group, GroupSpec
from paceline.collective.shared_memory import Array, SharedMemory

LEADER_SECONDS = 1.0  # extra time that members wait for their leader, whose error is more specific
SLOT_BYTES = 4 * 1024 * 1024  # longer tensors go in pieces: 64 members then need 260 MB, not gigabytes

_FLOAT64 = np.dtype(np.float64)


def join(spec: GroupSpec, *, cores: int) -> Group:
    """Join the group; returns once every member has joined. `cores`: shared by the members of this host."""
    if spec.size > 1:
        return ProcessGroup(spec, cores)
    group = Group()
    group.generation = spec.generation
    return group


class ProcessGroup(Group):
    """Members on one host or on several.

    Each element is summed in one place, on one host in rank order, so all members get the same bits.
    """

    def __init__(self, spec: GroupSpec, cores: int) -> None:
        self.rank, self.size, self.generation = spec.rank, spec.size, spec.generation
        self._host_count = len(spec.hosts)
        self._leaders: HostLeaders | None = None
        self._memory: SharedMemory | None = None
        self._lock = threading.Lock()
        hosted = spec.hosts[spec.host]
        shm = Path("/dev/shm")
        folder = shm if shm.is_dir() else Path(tempfile.gettempdir())
        path = folder / f"paceline-{os.getuid()}-{spec.segment}-{spec.host}"
        slot_bytes = max(8 * self.size, min(spec.capacity_bytes, SLOT_BYTES))
        seconds, spin = spec.timeout_seconds, len(hosted) <= cores
        try:
            self._memory = SharedMemory(path, tuple(sorted(hosted)), self.rank, slot_bytes, seconds, spin)
        except OSError as error:
            raise CollectiveError(f"rank {self.rank}: no shared memory at {path}: {error}") from error
        if self._host_count > 1:
            with _Operation(self) as memory:
                if self.rank == hosted[0]:
                    self._leaders = HostLeaders(spec, memory.check)
                memory.barrier(LEADER_SECONDS + 2 * seconds)  # leaders wait for the store, each other and gloo
            self.seconds = 0.0

    def mean_(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"mean_ takes float32 or float64, not {tensor.dtype}")
        with _Operation(self) as memory, np.errstate(all="ignore"):  # the algorithm looks for inf and nan
            array = tensor.numpy(force=True)  # a view, or a copy from a GPU
            flat = array.reshape(-1)  # a view, or a contiguous copy
            step = memory.slot_bytes // flat.itemsize
            for start in range(0, flat.size, step):
                self._mean(memory, flat[start : start + step])
            if tensor.data_ptr() != flat.ctypes.data:
                tensor.detach().copy_(torch.from_numpy(flat).view(tensor.shape))
            return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        with _Operation(self) as memory:
            whole = tensor.detach().cpu().contiguous()
            flat = whole.view(-1).view(torch.uint8).numpy()
            for start in range(0, flat.size, memory.slot_bytes):
                self._broadcast(memory, flat[start : start + memory.slot_bytes])
            if tensor.data_ptr() != whole.data_ptr():
                tensor.detach().copy_(whole)
            return tensor

    def all_ok(self, flag: bool) -> bool:
        return all(self.gather(float(flag)))

    def gather(self, value: float) -> list[float]:
        with _Operation(self) as memory:
            self.bytes_moved += 8
            values = memory.free_half(_FLOAT64)[:, 0]
            values[memory.index] = value
            memory.barrier()
            if self._host_count > 1:
                rows, values = values, memory.result[_FLOAT64][: self.size]
                if self._leaders is not None:
                    values[:] = 0.0
                    values[list(memory.ranks)] = rows
                self._exchange(memory, values)
            gathered: list[float] = values.tolist()
            return gathered

    def meet(self) -> None:
        with _Operation(self) as memory:
            memory.barrier(math.inf if self._host_count == 1 else 0.0)

    def abort(self) -> None:
        """Release all members of this host, and hosts that wait for this one.

        A host whose leader waits for one of its own members is not released: abort on every survivor.
        """
        self._aborted = True
        with self._lock:  # `close` removes the memory
            if self._memory is not None:
                self._memory.abort()
            if self._leaders is not None:
                self._leaders.disconnect()

    def close(self) -> None:
        self._aborted = True
        with self._lock:
            self._memory = None
            if self._leaders is not None:
                self._leaders.close()
                self._leaders = None

    def _mean(self, memory: SharedMemory, piece: Array) -> None:
        length, result = piece.size, memory.result[piece.dtype][: piece.size]
        self.bytes_moved += piece.nbytes
        if piece.nbytes <= memory.small_bytes:
            rows = memory.free_half(piece.dtype)[:, :length]
            rows[memory.index] = piece
            memory.barrier()
            if self._host_count == 1:
                _sum(rows, piece)
                piece /= self.size
                return
            if self._leaders is not None:
                _sum(rows, result)
        else:
            rows = memory.inputs[piece.dtype][:, :length]
            rows[memory.index] = piece
            start, stop = (length * part // memory.count for part in (memory.index, memory.index + 1))
            memory.barrier()
            _sum(rows[:, start:stop], result[start:stop])
            memory.barrier()
        if self._host_count > 1:
            self._exchange(memory, result)
        np.divide(result, self.size, out=piece)

    def _exchange(self, memory: SharedMemory, result: Array) -> None:
        """Sum the results of all hosts."""
        if self._leaders is not None:
            self._leaders.sum_(result)
            self.bytes_moved += 2 * result.nbytes * (self._host_count - 1) // self._host_count  # as in a ring
        memory.barrier(LEADER_SECONDS)

    def _broadcast(self, memory: SharedMemory, piece: Array) -> None:
        slot = memory.inputs[piece.dtype][0, : piece.size]  # the first slot on its host is that of rank 0
        if self.rank == 0:
            slot[:] = piece
            self.bytes_moved += piece.nbytes
        memory.barrier()
        if self._host_count > 1:
            if self._leaders is not None:
                self._leaders.broadcast_(slot)
                self.bytes_moved += piece.nbytes
            memory.barrier(LEADER_SECONDS)
        if self.rank != 0:
            piece[:] = slot
        memory.barrier()  # the slot may be written again


class _Operation:
    """Times an operation, and aborts the group if it fails: the members are then out of step."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._start = group, time.perf_counter()

    def __enter__(self) -> SharedMemory:
        self._group._check()
        memory = self._group._memory
        assert memory is not None
        self._group.waiting = True
        return memory

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._group.seconds += time.perf_counter() - self._start
        self._group.waiting = False
        if kind is not None:
            self._group.abort()


def _sum(rows: Array, out: Array) -> None:
    """Sum row by row. numpy does so by itself, except for a single column, which it sums pairwise."""
    if len(out) == 1:
        out[0] = functools.reduce(np.add, rows[:, 0])
    else:
        np.add.reduce(rows, axis=0, out=out)
