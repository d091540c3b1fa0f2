import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import UserError
from paceline.report import plots
from paceline.report.figure_style import short_number
from paceline.report.plots import moving_average, plot_runs
from paceline.results.json_lines import read_rows


def make_run(folder: Path, rows: int = 40, evaluations: int = 4, env: str = "CartPole-v1", **extra: Any) -> Path:
    rng = np.random.default_rng(rows)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"algo: ppo\nenv:\n  id: {env}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(rows):
            row = {
                "iteration": i + 1,
                "env_steps": 1024 * (i + 1),
                "return_mean": None if i == 0 else 20.0 + 10.0 * i + rng.normal(),
                "policy_loss": float(rng.normal() * 0.01),
                "value_loss": 200.0 * math.exp(-i / 5),
                "entropy": 0.69 - 0.01 * i,
                "approx_kl": 0.01,
                "explained_variance": 1 - math.exp(-i / 9),
                "iteration_steps_per_second": 15000.0 + float(rng.normal() * 500),
                **extra,
            }
            file.write(json.dumps(row) + "\n")
    with (folder / "eval.jsonl").open("w") as file:
        for i in range(evaluations):
            mean = 100.0 * i
            row = {"env_steps": 10240 * (i + 1), "return_mean": mean}
            file.write(json.dumps({**row, "return_ci_low": mean - 9, "return_ci_high": mean + 9}) + "\n")
    return folder


def drawn(runs: list[Path], smooth: int = 1) -> Any:
    """The figure itself, to look at its lines."""
    labels = plots._labels(runs)
    return plots._draw([plots._load(run, label) for run, label in zip(runs, labels, strict=True)], smooth)


def lines_with(axis: Any, label: str) -> list[Any]:
    return [line for line in axis.lines if str(line.get_label()).startswith(label)]


def test_a_png_of_sensible_size(tmp_path: Path) -> None:
    output = plot_runs([make_run(tmp_path / "runs/a")], tmp_path / "figures/a.png", smooth=5)
    data = output.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert 1200 <= width <= 4000 and 700 <= height <= 3000
    assert 20_000 < len(data) < 2_000_000


def test_svg_and_pdf(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    assert b"<svg" in plot_runs([run], tmp_path / "a.SVG").read_bytes()
    assert plot_runs([run], tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_the_curves_are_those_of_the_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    returns = drawn([run]).axes[0]
    [training] = lines_with(returns, "training")
    rows = read_rows(run / "metrics.jsonl")
    assert training.get_xdata().tolist() == [row["env_steps"] for row in rows]
    assert training.get_ydata()[1:].tolist() == [row["return_mean"] for row in rows[1:]]
    assert math.isnan(training.get_ydata()[0])  # no episode had ended yet
    assert any(
        line.get_ydata()[:4].tolist() == [0, 100, 200, 300] for line in returns.lines if len(line.get_xdata()) == 4
    )
    assert len(returns.collections) == 1  # the band of the evaluation
    assert lines_with(returns, "solved, 475")


def test_without_evaluation_or_threshold(tmp_path: Path) -> None:
    returns = drawn([make_run(tmp_path / "a", evaluations=0, env="my_env.py:Maze")]).axes[0]
    assert not returns.collections
    assert not lines_with(returns, "solved") and not lines_with(returns, "evaluation")
    assert not lines_with(drawn([make_run(tmp_path / "b", env="NoSuchEnv-v7")]).axes[0], "solved")


def test_smoothing_is_drawn_over_the_raw_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    raw, smoothed = drawn([run], smooth=5).axes[1].lines
    assert smoothed.get_ydata()[10] == pytest.approx(np.mean(raw.get_ydata()[8:13]))
    assert raw.get_linewidth() < smoothed.get_linewidth()


def test_several_runs_share_a_legend_by_name(tmp_path: Path) -> None:
    figure = drawn([make_run(tmp_path / "x/a"), make_run(tmp_path / "x/b", 30), make_run(tmp_path / "y/b", 20)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "x/b", "y/b"]
    assert len({line.get_color() for line in figure.axes[1].lines}) == 3


def test_more_runs_than_colours_stay_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{i}", rows=3, evaluations=0) for i in range(9)]
    looks = {
        (line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)) for line in drawn(runs).axes[1].lines
    }
    assert len(looks) == 9


def test_a_metric_that_was_not_logged_is_said_to_be(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", policy_loss=None, approx_kl=None)
    axes = drawn([run]).axes
    assert [text.get_text() for text in axes[1].texts] == ["not logged"]
    assert len(axes) == 6  # no second axis without KL
    plot_runs([run], tmp_path / "a.png")


def test_a_run_of_one_row_is_visible(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", rows=1, evaluations=0)
    assert drawn([run], smooth=10).axes[1].lines[-1].get_marker() == "o"


@pytest.mark.parametrize(
    ("values", "rows", "expected"),
    [
        ([1, 5, 3, 7], 1, [1, 5, 3, 7]),
        ([1, 5, 3, 7, 2], 3, [1, 3, 5, 4, 2]),
        ([0, 10, 0, 10, 0], 2, [0, 5, 5, 5, 0]),  # ¼, ½, ¼
        ([0, 1, 2, 3, 4, 5, 6], 5, [0, 1, 2, 3, 4, 5, 6]),  # a straight line is not bent at its ends
        ([0, 1, 2, 3, 4, 5, 6], 4, [0, 1, 2, 3, 4, 5, 6]),
        ([1, 2, 9], 99, [1, 4, 9]),
        ([4], 3, [4]),
        ([], 3, []),
    ],
)
def test_moving_average_by_hand(values: list[float], rows: int, expected: list[float]) -> None:
    assert moving_average(values, rows).tolist() == pytest.approx(expected)


def test_moving_average_leaves_out_what_is_unknown() -> None:
    nan, inf = math.nan, math.inf
    average = moving_average([nan, nan, 2.0, 4.0, inf, 6.0], 3)
    assert average[2:].tolist() == [3.0, 3.0, 5.0, 6.0]
    assert average[1] == 2.0 and math.isnan(average[0])


def test_errors_are_one_helpful_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/good")
    empty = tmp_path / "runs/empty"
    empty.mkdir()
    for runs, output, smooth, words in (
        ([run], "a.jpeg", 1, [".jpeg", ".png"]),
        ([run], "a", 1, [".png"]),
        ([run], "a.png", 0, ["--smooth 0"]),
        ([], "a.png", 1, ["no run"]),
        ([tmp_path / "runs/god"], "a.png", 1, ["runs/god", "no such run", "good"]),
        ([run, empty], "a.png", 1, ["empty", "no run in it"]),
        ([tmp_path / "nowhere/x"], "a.png", 1, ["no run with metrics"]),
        ([run], "runs/good/config.yaml/a.png", 1, ["cannot be written"]),
    ):
        with pytest.raises(UserError) as caught:
            plot_runs(runs, tmp_path / output, smooth)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("a.*"))


def test_a_damaged_config_costs_only_the_title(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "config.yaml").write_text("{ not yaml")
    assert drawn([run]).get_suptitle().startswith("a")
    assert drawn([make_run(tmp_path / "b")]).get_suptitle().startswith("PPO on CartPole-v1")


def test_numbers_on_the_axis_are_short() -> None:
    assert [short_number(x) for x in (0, 500, 1000, 250_000, 1_500_000, 2e9)] == [
        "0",
        "500",
        "1k",
        "250k",
        "1.5M",
        "2G",
    ]


def test_no_torch_no_pyplot(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", rows=3)
    program = (
        "import sys; from pathlib import Path; from paceline.report.plots import plot_runs\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"plot_runs([Path({str(run)!r})], Path({str(tmp_path / 'a.svg')!r}))\n"
        "print({'torch', 'ray', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(plots.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_folders_of_runs(tmp_path: Path) -> None:
    for name in ("runs/a", "runs/deep/b"):
        make_run(tmp_path / name)
    make_run(tmp_path / "runs/empty", rows=0)
    found = plots._runs_at(tmp_path / "runs")
    assert [run.name for run in found] == ["a", "b"]
    output = plot_runs([tmp_path / "runs"], tmp_path / "all.svg")
    assert all(f"<!-- {name} -->" in output.read_text() for name in ("a", "b"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="no run in it"):
        plot_runs([tmp_path / "nothing"], tmp_path / "all.svg")
