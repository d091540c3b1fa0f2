from __future__ import annotations

import json
from pathlib import Path

from paceline.launch.timeline import Timeline


def test_lines_as_they_happen_and_a_table_at_the_end(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "job")
    timeline.add("node1", "here", "8 cores")
    timeline.add("node1", "ready")
    rows = [json.loads(line) for line in (tmp_path / "job/timeline.jsonl").read_text().splitlines()]
    assert [(row["host"], row["phase"], row["detail"]) for row in rows] == [
        ("node1", "here", "8 cores"),
        ("node1", "ready", ""),
    ]
    assert 0 <= rows[0]["seconds"] <= rows[1]["seconds"] < 60
    timeline.close()
    table = (tmp_path / "job/timeline.txt").read_text().splitlines()
    assert len(table) == 3 and table[1].split()[1:] == ["node1", "here", "8", "cores"]
