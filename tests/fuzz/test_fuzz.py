"""A thousand odd invocations of all verbs, on a hundred odd environments: one line and a known exit code for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")
FEW, ALL = 300, 1000


@pytest.mark.parametrize(
    ("first", "count"), [(0, FEW), pytest.param(FEW, ALL - FEW, marks=pytest.mark.faults)], ids=["few", "others"]
)
@pytest.mark.timeout(1800)
def test_every_ending_is_a_good_one(first: int, count: int) -> None:
    command = [sys.executable, str(FUZZ), str(count), "--first", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}\nTo see one: python tests/fuzz/fuzz.py --only N"


def test_there_are_a_hundred_odd_envs() -> None:
    script = f"import sys; sys.path.insert(0, {str(FUZZ.parent)!r}); from zoo import ODD; print(len(ODD))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert int(found.stdout) >= 100, found.stderr
