from __future__ import annotations

from typing import Any

import pytest

from paceline.config.resolve import validate
from paceline.training.pauses import pause_expected
from paceline.training.stopping import Counters, Stopping


@pytest.mark.parametrize(
    ("tree", "iteration", "expected"),
    [
        ({"stop": {"iterations": 10}}, 0, False),
        ({"stop": {"iterations": 10}}, 8, False),
        ({"stop": {"iterations": 10}}, 9, True),
        ({"stop": {"total_steps": 1000}}, 8, False),
        ({"stop": {"total_steps": 1000}}, 9, True),
        ({"stop": {"max_time": "10s"}}, 9, True),
        ({"eval": {"every_steps": 500}}, 3, False),
        ({"eval": {"every_steps": 500}}, 4, True),
        ({"checkpoint": {"every_iterations": 5, "every_seconds": 0}}, 3, False),
        ({"checkpoint": {"every_iterations": 5, "every_seconds": 0}}, 4, True),
        ({"checkpoint": {"every_iterations": 0, "every_seconds": 8}}, 6, False),
        ({"checkpoint": {"every_iterations": 0, "every_seconds": 8}}, 7, True),
    ],
)
def test_a_pause_after_the_next_iteration(tree: dict[str, Any], iteration: int, expected: bool) -> None:
    """Each iteration had 100 steps and took a second; nothing has been saved yet."""
    config = validate({"env": {"id": "CartPole-v1"}, "checkpoint": {"every_seconds": 0}} | tree)
    counters, seconds = Counters(iteration, 100 * iteration), float(iteration)
    assert pause_expected(config, counters, Stopping(config.stop), seconds, seconds) is expected
