"""Settings of the C allocator for large arrays that are allocated again and again."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_KEPT = 2**30


def keep_freed_memory() -> bool:
    """Keep freed memory for the next array. Returns whether the C library supports it (glibc does).

    By default glibc maps every large array anew and gives it back when it is freed. The activations of a minibatch of
    images are hundreds of megabytes, and a page fault for each 4 KiB of them, at each step, is a fifth of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
