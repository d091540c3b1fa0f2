from __future__ import annotations

import csv
from pathlib import Path

from paceline.config.resolve import read_file
from paceline.tune.sweep_plan import Sweep, make_sweep
from paceline.tune.table import rank_points, table, write_best, write_tables


def scored(folder: Path, scores: list[float | None], metric: str = "return_mean", mode: str = "max") -> Sweep:
    """Two points with two seeds each; a trial without a score has failed."""
    space = {"model.hidden": [[8], [16, 16]]}
    sweep = make_sweep(folder, {"env": "CartPole-v1"}, space, seeds=2, metric=metric, mode=mode)
    for trial, score in zip(sweep.trials, scores, strict=True):
        trial.score, trial.status, trial.error = score, "done" if score is not None else "failed", ""
    return sweep


def test_points_are_ranked_by_the_mean_of_their_seeds(tmp_path: Path) -> None:
    best, other = rank_points(scored(tmp_path, [1.0, 4.0, 2.0, 2.0]))
    assert (best.point, best.mean, other.mean) == (0, 2.5, 2.0)
    assert rank_points(scored(tmp_path, [1.0, 4.0, 2.0, 2.0], mode="min"))[0].point == 1
    assert rank_points(scored(tmp_path, [9.0, None, 2.0, 2.0]))[0].point == 1  # all seeds done come first
    assert rank_points(scored(tmp_path, [None, None, None, None])) == []


def test_the_csv_has_exact_values_and_the_text_is_aligned(tmp_path: Path) -> None:
    sweep = scored(tmp_path, [1234.5678, 1.23456, 2.0, None], metric="env/score")
    sweep.trials[3].error = "x" * 70
    sweep.trials[0].steps, sweep.trials[0].seconds = 12_345, 61.23456
    write_tables(sweep)
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["steps"], rows[0]["time"], rows[0]["score"]) == ("12345", "61.235", "1234.5678")
    assert rows[3]["error"] == "x" * 70 and rows[1]["model.hidden"] == "[8]"
    lines = (tmp_path / "trials.txt").read_text().splitlines()
    assert lines[0].split() == [
        *("name", "status", "location", "iteration", "time", "steps", "return", "env/score", "model.hidden", "error")
    ]
    assert "12,345" in lines[1] and "1,235" in lines[1] and lines[4].endswith("x…")
    assert len({line.find("[") for line in lines[1:5]}) == 1
    assert "mean env/score" in lines[6] and len(lines) == 9
    assert "error" not in table(scored(tmp_path, [1.0, 1.0, 1.0, 1.0]))


def test_the_best_settings_can_be_trained_with(tmp_path: Path) -> None:
    sweep = scored(tmp_path, [1.0, 1.0, 2.0, 3.0])
    write_best(sweep, rank_points(sweep)[0])
    assert read_file(tmp_path / "best.yaml") == {"env": {"id": "CartPole-v1"}, "model": {"hidden": [16, 16]}, "seed": 0}
