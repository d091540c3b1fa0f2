"""Two hosts for a test, which see its `tmp_path`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, shared=[tmp_path]) as pair:
        yield pair
