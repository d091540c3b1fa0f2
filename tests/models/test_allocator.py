from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from paceline.models.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.empty(50_000_000, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
faults()
print(kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_a_large_array_comes_from_the_memory_of_the_last_one() -> None:
    """Otherwise each page of each array is a fault: five times 50 MB."""
    answers = {}
    for way in ("keep", "leave"):
        run = subprocess.run(
            [sys.executable, "-c", FAULTS, way], capture_output=True, text=True, timeout=60, check=True
        )
        answers[way] = run.stdout.split()
    assert answers["keep"][0] == "True" and int(answers["keep"][1]) < 20
    assert int(answers["leave"][1]) > 100  # huge pages are 125
