"""What a search says and writes while Ray Tune runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.tune.plan import Sweep, load_sweep, make_sweep
from paceline.tune.scribe import Scribe


def sweep(folder: Path, **asked: Any) -> Sweep:
    options: dict[str, Any] = {"preset": None, "space": {"ppo.gamma": [0.9, 0.99]}, "trials": 5, "seeds": 1}
    options |= {"search": "random", "metric": "return_mean", "mode": "max", "interval": None}
    return make_sweep(folder, {"env": "CartPole-v1", "stop": {"total_steps": 1000}}, **(options | asked))


def test_fewer_points_than_asked_for_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Scribe(sweep(tmp_path)).begin()
    assert "there are only 2 combinations" in capsys.readouterr().out
    Scribe(sweep(tmp_path, trials=1)).begin()
    Scribe(sweep(tmp_path, search="grid", trials=None)).begin()
    assert "there are only" not in capsys.readouterr().out


def test_settings_that_were_taken_over_are_written_at_once(tmp_path: Path) -> None:
    made = sweep(tmp_path, search="pbt")
    made.save()
    Scribe(made).on_trial_result(0, [], made.trials[0].name, {"values": {"ppo.gamma": 0.95}})
    assert load_sweep(tmp_path).trials[0].values == {"ppo.gamma": 0.95}


def test_nothing_is_left_to_continue_when_all_have_ended(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    for trial in made.trials:
        trial.status, trial.score = "done", 1.0
    assert Scribe(made).finish("its time is over") == 0
    made.trials[0].status = "running"
    assert Scribe(made).finish("its time is over") == 99 and made.trials[0].status == "stopped"


def test_a_picture_that_cannot_be_drawn_is_not_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep(tmp_path)
    for trial in made.trials:
        trial.status, trial.score = "done", 1.0
        (tmp_path / trial.name).mkdir()
        (tmp_path / trial.name / "metrics.jsonl").write_text("spoilt\n{}\n")
    assert Scribe(made).finish(None) == 0
    out = capsys.readouterr().out
    assert "picture    none: " in out and "line 1 is not a JSON object" in out and "train it" in out
