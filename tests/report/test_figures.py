"""Without matplotlib there is no figure, and everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.report.compare import run_compare
from paceline.report.figures import draw_scaling

WriteRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_a_study_has_not_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = {"env": "E", "algo": "ppo", "engine": "ray", "scaling": "strong", "points": [{"done": 1}]}
    (tmp_path / "scaling.json").write_text(json.dumps({"series": [series]}))
    draw_scaling(tmp_path)
    assert capsys.readouterr().out == (
        "figure     not drawn: matplotlib is not installed; pip install 'paceline[report]'\n"
    )


def test_a_comparison_is_printed_and_written(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "out"
    assert run_compare([str(run)], out=str(out)) == 0
    said = capsys.readouterr().out
    assert "| ppo, ray, 1 worker | 1 |" in said and "figure     not drawn" in said
    assert said.endswith("compare.md, .json and .csv\n")
    assert {path.suffix for path in out.iterdir()} == {".md", ".json", ".csv"}
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        run_compare([str(run)], out=str(tmp_path / "file"))
    assert "| ppo, ray, 1 worker | 1 |" in capsys.readouterr().out
