"""Shared memory of the group members on one host, with a barrier."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.collective.group import CollectiveError

SPIN_SECONDS = 200e-6  # spin before sleeping: waking a member takes about 50 µs
SLICE_SECONDS = 0.1  # longest sleep between two checks of the abort word
SMALL_BYTES = 256 * 1024  # below this total every member sums all inputs itself, which saves a barrier
PAGE, LINE = 4096, 64

_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_PRIVATE = 0, 1, 128
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}  # Linux numbers its system calls by architecture
_ALL = 2**31 - 1
_WORD = 2**32

Array = NDArray[Any]


class Futex:
    """Sleep until a word of shared memory changes, and a full memory fence; with fallbacks where there is no futex."""

    def __init__(self, word: ctypes.c_uint32) -> None:
        number = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" else None
        library = ctypes.CDLL(None)
        self.ordered = platform.machine() == "x86_64"  # x86 keeps the order of stores: no fence needed around the data
        self._word, self._own = word, ctypes.c_uint32(0)
        self.wait: Callable[[int], object] = self._doze
        self.wake: Callable[[], object] = lambda: None
        self.fence: Callable[[], object] = getattr(library, "OSMemoryBarrier", lambda: time.sleep(0))
        if number is not None:
            call = library.syscall
            call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
            self._slice = (ctypes.c_long * 2)(0, int(SLICE_SECONDS * 1e9))  # struct timespec
            at, own, limit = (ctypes.addressof(each) for each in (self._word, self._own, self._slice))
            self.wait = lambda value: call(number, at, _FUTEX_WAIT, value, limit)
            self.wake = lambda: call(number, at, _FUTEX_WAKE, _ALL, None)
            # A wake is a full fence in the kernel, even on a word that nobody waits for.
            self.fence = lambda: call(number, own, _FUTEX_WAKE | _FUTEX_PRIVATE, 1, None)

    def _doze(self, value: int) -> None:
        nap, until = 10e-6, time.monotonic() + SLICE_SECONDS
        while self._word.value == value and time.monotonic() < until:
            time.sleep(nap)
            nap = min(2 * nap, 1e-3)


class SharedMemory:
    """A barrier, an input slot for each member and a result slot.

    Python has no atomic operations, so each word has one writer, with two exceptions: concurrent writers of the wake
    word write the same value, and any nonzero value in the abort word means abort.
    """

    def __init__(self, path: Path, ranks: tuple[int, ...], rank: int, slot_bytes: int, timeout: float, spin: bool):
        self.ranks, self.index, self.count = ranks, ranks.index(rank), len(ranks)
        self._timeout, self._spin, self._number, self._turn = timeout, spin, 0, 0
        self.slot_bytes = -(-slot_bytes // LINE) * LINE
        self.small_bytes = min(self.slot_bytes, max(LINE, SMALL_BYTES // self.count // LINE * LINE))
        small_at = -(-(LINE + 8 * self.count) // PAGE) * PAGE
        slots_at = small_at + 2 * self.count * self.small_bytes
        result_at = slots_at + self.count * self.slot_bytes
        size = result_at + self.slot_bytes
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise CollectiveError(f"{path} belongs to another user")
            self._allocate(file, 0, small_at)
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
            words = memoryview(self._memory)
            self._signals = words[:8].cast("I")  # wake, abort
            self._arrived = words[LINE : LINE + 8 * self.count].cast("Q")
            self._futex = Futex(ctypes.c_uint32.from_buffer(self._memory))
            try:
                self.barrier()
            finally:
                path.unlink(missing_ok=True)  # unlink at once, so that nothing is left behind if members die
            # Each member allocates its own slot, so that the memory is near its core.
            self._allocate(file, slots_at + self.index * self.slot_bytes, self.slot_bytes)
            if self.index == 0:
                self._allocate(file, small_at, slots_at - small_at)
                self._allocate(file, result_at, self.slot_bytes)
            self.barrier()
        except BaseException:
            self.abort()
            raise
        finally:
            os.close(file)
        self._small: dict[np.dtype[Any], Array] = {}
        self.inputs: dict[np.dtype[Any], Array] = {}
        self.result: dict[np.dtype[Any], Array] = {}
        for kind in (np.uint8, np.float32, np.float64):
            dtype = np.dtype(kind)
            self._small[dtype] = self._rows(dtype, small_at, 2 * self.count, self.small_bytes).reshape(
                2, self.count, -1
            )
            self.inputs[dtype] = self._rows(dtype, slots_at, self.count, self.slot_bytes)
            self.result[dtype] = self._rows(dtype, result_at, 1, self.slot_bytes)[0]

    def _rows(self, dtype: np.dtype[Any], at: int, rows: int, row_bytes: int) -> Array:
        return np.frombuffer(self._memory, dtype, rows * row_bytes // dtype.itemsize, at).reshape(rows, -1)

    def _allocate(self, file: int, at: int, size: int) -> None:
        """Reserve space. Without it the first write to a full /dev/shm would kill the process with a signal."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(file, at, size)
        except OSError as error:
            raise CollectiveError(f"/dev/shm is full: free {size:,} bytes or enlarge it ({error})") from error

    def free_half(self, dtype: np.dtype[Any]) -> Array:
        """A row for each member. The two halves alternate, so one barrier per operation is enough: a member writes to
        a half again only after the barrier of the other one, when all have read it."""
        self._turn = 1 - self._turn
        half: Array = self._small[dtype][self._turn]
        return half

    def abort(self) -> None:
        if hasattr(self, "_futex"):
            if not self._signals[1]:  # members that are released abort too, and the first one is to blame
                self._signals[1] = self.ranks[self.index] + 1
            self._futex.wake()

    def check(self) -> None:
        if self._signals[1]:
            raise CollectiveError(
                f"rank {self.ranks[self.index]}: the group was aborted by rank {self._signals[1] - 1}"
            )

    def barrier(self, extra_seconds: float = 0.0) -> None:
        """Wait until all members have called this."""
        self.check()
        self._number += 1
        number, futex = self._number, self._futex
        if not futex.ordered:
            futex.fence()  # data written before becomes visible before the arrival
        self._arrived[self.index] = number
        if not self._complete(number) and not (self._spin and self._spun(number)):
            self._sleep(number, self._timeout + extra_seconds)
        if not futex.ordered:
            futex.fence()  # data read from here on is not older than the arrivals

    def _complete(self, number: int) -> bool:
        if min(self._arrived) < number:
            return False
        if self._signals[0] != number % _WORD:
            self._signals[0] = number % _WORD
            self._futex.wake()
        return True

    def _spun(self, number: int) -> bool:
        until = time.perf_counter() + SPIN_SECONDS
        while time.perf_counter() < until:
            if self._complete(number):
                return True
            os.sched_yield()  # on a busy machine the late member may need this core
        return False

    def _sleep(self, number: int, seconds: float) -> None:
        # The fence separates our arrival from reading the others', so that the last member to arrive knows it is last.
        # Until then the wake word holds the previous number, since nobody can pass this barrier without us.
        before, until = (number - 1) % _WORD, time.monotonic() + seconds
        self._futex.fence()
        while not self._complete(number) and self._signals[0] == before:
            self.check()
            if time.monotonic() > until:
                late = [rank for rank, word in zip(self.ranks, self._arrived, strict=True) if word < number]
                names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                raise CollectiveError(f"rank {self.ranks[self.index]}: {names} did not arrive within {seconds:g} s")
            self._futex.wait(before)
