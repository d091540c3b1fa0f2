from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.results.json_lines import read_rows


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n{"a": 3, "b"')
    assert read_rows(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_rows(path)
    assert read_rows(tmp_path / "none.jsonl") == []
