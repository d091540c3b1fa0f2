"""What a search prints and writes while Ray Tune runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.tune.progress import SweepProgress
from paceline.tune.sweep_plan import Sweep, load_sweep, make_sweep


def sweep(folder: Path, **asked: Any) -> Sweep:
    given = {"env": "CartPole-v1", "stop": {"total_steps": 1000}}
    return make_sweep(folder, given, {"ppo.gamma": [0.9, 0.99]}, **({"search": "random", "trials": 5} | asked))


def test_fewer_points_than_requested_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SweepProgress(sweep(tmp_path)).begin()
    assert "there are only 2 combinations" in capsys.readouterr().out
    SweepProgress(sweep(tmp_path, trials=1)).begin()
    SweepProgress(sweep(tmp_path, search="grid", trials=None)).begin()
    assert "there are only" not in capsys.readouterr().out


def test_settings_that_were_taken_over_are_written_at_once(tmp_path: Path) -> None:
    made = sweep(tmp_path, search="pbt")
    made.save()
    SweepProgress(made).on_trial_result(0, [], made.trials[0].name, {"values": {"ppo.gamma": 0.95}})
    assert load_sweep(tmp_path).trials[0].values == {"ppo.gamma": 0.95}


def test_a_stop_after_the_last_trial_is_no_interruption(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    for trial in made.trials:
        trial.status, trial.score = "done", 1.0
    assert SweepProgress(made).finish("its time is over") == 0
    made.trials[0].status = "running"
    assert SweepProgress(made).finish("its time is over") == 99 and made.trials[0].status == "stopped"


def test_a_failed_figure_does_not_fail_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep(tmp_path)
    for trial in made.trials:
        trial.status, trial.score = "done", 1.0
        (tmp_path / trial.name).mkdir()
        (tmp_path / trial.name / "metrics.jsonl").write_text("spoilt\n{}\n")
    assert SweepProgress(made).finish(None) == 0
    out = capsys.readouterr().out
    assert "picture    none: " in out and "line 1 is not a JSON object" in out and "train it" in out
