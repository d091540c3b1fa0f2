from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.commands.main import main

DATA = Path(__file__).parents[2] / "examples/forecast"


def status(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "forecast", *words])
    return int(ended.value.code or 0)


def test_the_command_prints_and_writes_a_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(DATA / "ppo"), "--workers", "64,512", "--nodes", "1,16", "--hold-out", "8,16"]
    assert status([*words, "--out", str(tmp_path / "new")]) == 0
    shown = capsys.readouterr().out
    for text in ("steps/s, simulated", "measured", "held out", "waiting for the slowest worker", "What to change"):
        assert text in shown
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"forecast.md", "forecast.json"}
    result = json.loads((tmp_path / "new/forecast.json").read_text())
    assert result["forecast"] == "simulated"
    (series,) = result["series"]
    assert [(point["workers"], point["nodes"]) for point in series["points"]] == [
        (64, 1),
        (512, 1),
        (64, 16),
        (512, 16),
    ]
    assert status([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_actors_and_their_learner(capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(DATA / "impala"), "--workers", "16,100000"]) == 0
    shown = capsys.readouterr().out
    assert "| 16 | 1 |" in shown and "| 100,000 | 1 |" in shown
    assert "collecting" in shown  # with 16 actors
    assert "the driver 100 %" in shown and "longer rollouts" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "0"], "whole numbers from 1"),
        (["--workers", "1,x"], "such as 64,512"),
        (["--workers", "9" * 5000], "whole numbers from 1"),
        (["--workers", "2", "--nodes", "4"], "2 workers cannot use 4 nodes"),
        (["--workers", "2", "--latency", "-1"], "above zero"),
        (["--workers", "2", "--bandwidth", "0"], "above zero"),
        (["--workers", "2", "--hold-out", "3"], "no run has 3 workers"),
        (["--workers", "2", "--cores", "0"], "--cores"),
    ],
)
def test_wrong_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(DATA / "ppo"), *words]) == 2
    assert said in capsys.readouterr().err
