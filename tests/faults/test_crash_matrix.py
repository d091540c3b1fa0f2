"""A sample of the crash matrix (`make test-crashes` runs all of it)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from broken_run import Cell
from crash_matrix import attempt, cells

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
SAMPLE = [
    "local/ppo/plain/SIGTERM/start",
    "local/dqn/plain/SIGTERM burst/save",
    "local/a3c/plain/kill driver/save",
    "local/impala/plain/stop and continue/iteration",
    "local/ppo/memory/kill driver/save",
    "local/ppo/policies/kill driver/iteration",
    "local/dqn/masks/SIGTERM/save",
    "ray/impala/agents/kill worker/iteration",
    "ray/ppo/plain/SIGTERM burst/start",
    "ray/dqn/plain/SIGTERM/evaluation",
    "ray/a2c/plain/kill raylet/save",
]
AS_ROOT = ["local/ppo/plain/disk full/save"]


@pytest.mark.parametrize("name", [*SAMPLE, *(AS_ROOT if os.getuid() == 0 else [])])
def test_a_broken_run_ends_well_and_continues(name: str) -> None:
    cell = Cell(*name.split("/"))
    assert cell in cells()
    outcome = attempt(cell, seed=1)
    assert outcome.problems == [], outcome
