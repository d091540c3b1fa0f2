"""benchmarks/structure.py finds repeated code and repeated names."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/structure.py"
BODY = "".join(f"    step_{k}()\n" for k in range(7))


@pytest.fixture
def structure() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="structure")


def test_a_block_is_found_once_with_all_its_places(structure: dict[str, Any]) -> None:
    texts = [f"def one():\n{BODY}", f"import os\n\n\ndef two():\n    # why\n{BODY.replace('    ', '  ')}  more()\n"]
    assert structure["duplicated_blocks"](texts) == [(7, [(0, 2), (1, 6)])]


def test_short_blocks_and_imports_do_not_count(structure: dict[str, Any]) -> None:
    same = "".join(f"import module_{k}\n" for k in range(9)) + "".join(f"step_{k}()\n" for k in range(5))
    assert structure["duplicated_blocks"]([same, same]) == []


def test_names_that_occur_twice(structure: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a/base.py", "b/base.py", "b/other.py"):
        (tmp_path / "paceline" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "paceline" / name).write_text("class Pool:\n    class Settings: ...\n")
    source = structure["Source"].read(tmp_path)
    assert source.modules_that_share_a_name() == ["base ×2"]
    assert source.classes_that_share_a_name() == ["Pool ×3"]
    assert source.lines_by_package() == {"a": 2, "b": 4}
