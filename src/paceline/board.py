"""The shared memory of the members of a group on one host, and the barrier in it."""

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

from paceline.group import CollectiveError

SPIN_SECONDS = 200e-6  # a sleeping member takes some 50 µs to wake
SLICE_SECONDS = 0.1  # the longest sleep between two looks at the abort word
SMALL_BYTES = 256 * 1024  # up to this much of all members together, each adds up everything itself: one barrier less
PAGE, LINE = 4096, 64

_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_PRIVATE = 0, 1, 128
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}  # Linux numbers its system calls by architecture
_ALL = 2**31 - 1
_WORD = 2**32

Array = NDArray[Any]


class Futex:
    """Sleep until a word of shared memory changes; and a full memory fence. Both also where there is no futex."""

    def __init__(self, word: ctypes.c_uint32) -> None:
        number = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" else None
        library = ctypes.CDLL(None)
        self.ordered = platform.machine() == "x86_64"  # there stores are seen in order: no fence around the data
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
            # To wake is a full fence in the kernel, also on a word where nobody waits.
            self.fence = lambda: call(number, own, _FUTEX_WAKE | _FUTEX_PRIVATE, 1, None)

    def _doze(self, value: int) -> None:
        nap, until = 10e-6, time.monotonic() + SLICE_SECONDS
        while self._word.value == value and time.monotonic() < until:
            time.sleep(nap)
            nap = min(2 * nap, 1e-3)


class Board:
    """The shared memory of the members on one host: a barrier, a slot for each, and one for the result.

    Python has no atomic operations, so each word has one writer, but two: the wake word, where all writers of a moment
    write the same, and the abort word, where any value but 0 does.
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
                raise CollectiveError(f"{path} is of another user")
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
                path.unlink(missing_ok=True)  # all are in, or never will be: nothing stays behind, whoever dies
            # Only now is memory taken, each member's by itself: it lies near its core.
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
        """Without it a full /dev/shm would end the process with a signal, at the first write."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(file, at, size)
        except OSError as error:
            raise CollectiveError(f"{size:,} more bytes of /dev/shm are needed; free or enlarge it: {error}") from error

    def free_half(self, dtype: np.dtype[Any]) -> Array:
        """A row for each member. One barrier is enough: the halves take turns, and a member writes to this one again
        only after the barrier of the other, when all have read it."""
        self._turn = 1 - self._turn
        half: Array = self._small[dtype][self._turn]
        return half

    def abort(self) -> None:
        if hasattr(self, "_futex"):
            self._signals[1] = self.ranks[self.index] + 1
            self._futex.wake()

    def check(self) -> None:
        if self._signals[1]:
            raise CollectiveError(
                f"rank {self.ranks[self.index]}: the group was given up by rank {self._signals[1] - 1}"
            )

    def barrier(self, extra_seconds: float = 0.0) -> None:
        """Return when all members have come here."""
        self.check()
        self._number += 1
        number, futex = self._number, self._futex
        if not futex.ordered:
            futex.fence()  # what was written before is seen before the arrival
        self._arrived[self.index] = number
        if not self._complete(number) and not (self._spin and self._spun(number)):
            self._sleep(number, self._timeout + extra_seconds)
        if not futex.ordered:
            futex.fence()  # and what is read from here on is not older than it

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
            os.sched_yield()  # the one we wait for may be on our core, when others use the machine too
        return False

    def _sleep(self, number: int, seconds: float) -> None:
        # The fence is between our arrival and the look at the others', so the last one to arrive sees that it is the
        # last. The wake word still holds the number before until then, since nobody gets further without us.
        before, until = (number - 1) % _WORD, time.monotonic() + seconds
        self._futex.fence()
        while not self._complete(number) and self._signals[0] == before:
            self.check()
            if time.monotonic() > until:
                late = [rank for rank, word in zip(self.ranks, self._arrived, strict=True) if word < number]
                names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                raise CollectiveError(f"rank {self.ranks[self.index]}: {names} did not arrive within {seconds:g} s")
            self._futex.wait(before)
