from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.run.directory import RunDirectory
from paceline.run.metrics import EVAL_METRICS, METRICS, MetricsWriter


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "r", "ppo", "CartPole-v1")


def row(iteration: int, **more: Any) -> dict[str, Any]:
    return {"iteration": iteration, "env_steps": 100 * iteration, "return_mean": 1.5 * iteration, **more}


def table(run: RunDirectory) -> list[dict[str, str]]:
    with run.progress_path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(run: RunDirectory) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run.tb_path))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_names_carry_units_and_what_varies_is_marked() -> None:
    volatile = {name for name, metric in METRICS.items() if metric.volatile}
    assert {name for name in METRICS if name.endswith(("_seconds", "_per_second", "_bytes", "_percent"))} <= volatile
    assert volatile.isdisjoint({"iteration", "env_steps", "return_mean", "policy_loss", "learning_rate"})
    assert {name for name, metric in EVAL_METRICS.items() if metric.volatile} == {"eval_seconds"}
    assert all(metric.description for metric in [*METRICS.values(), *EVAL_METRICS.values()])


def test_a_row_reaches_all_three_files(run: RunDirectory) -> None:
    writer = MetricsWriter(run)
    writer.write(row(1, policy_loss=np.float32(0.25), approx_kl=float("nan"), return_std=None, episodes=np.int64(3)))
    # Readable before the file is closed: a run in progress has readers.
    (read,) = run.read_metrics()
    assert read.pop("timestamp") > 1.6e9
    assert read == row(1, policy_loss=0.25, approx_kl=None, return_std=None, episodes=3)
    (cells,) = table(run)
    assert list(cells) == [name for name in METRICS if name in {*read, "timestamp"}]
    assert (cells["policy_loss"], cells["approx_kl"], cells["return_std"], cells["episodes"]) == ("0.25", "", "", "3")
    writer.close()
    drawn = scalars(run)
    assert drawn["rollout/return_mean"] == [(100, 1.5)] and drawn["train/policy_loss"] == [(100, 0.25)]
    assert not [tag for tag in drawn if "approx_kl" in tag or "env_steps" in tag or "timestamp" in tag]


def test_a_late_column_gets_its_place(run: RunDirectory) -> None:
    writer = MetricsWriter(run)
    writer.write(row(1))
    writer.write(row(2, **{"env/zeta, or so": 1.0, "env/alpha": 2.0}))
    writer.flush()
    writer.write(row(3, episodes=9))
    writer.write(row(4))
    writer.close()
    rows = table(run)
    assert list(rows[0]) == [
        "iteration", "env_steps", "episodes", "return_mean", "timestamp", "env/alpha", "env/zeta, or so",
    ]  # fmt: skip
    assert [r["iteration"] for r in rows] == ["1", "2", "3", "4"]
    assert [r["episodes"] for r in rows] == ["", "", "9", ""]
    assert [r["env/alpha"] for r in rows] == ["", "2.0", "", ""]
    assert scalars(run)["env/alpha"] == [(200, 2.0)]
    assert sorted(p.name for p in run.path.iterdir() if p.is_file()) == ["metrics.jsonl", "progress.csv"]


def test_an_unlisted_name_is_refused_before_anything_is_written(run: RunDirectory) -> None:
    writer = MetricsWriter(run)
    with pytest.raises(ValueError, match="'fps' is not in METRICS"):
        writer.write(row(1, fps=3.0))
    writer.close()
    assert run.read_metrics() == []


def test_tensorboard_gets_few_rows_but_always_the_last(run: RunDirectory) -> None:
    writer = MetricsWriter(run)
    for i in range(1, 51):
        writer.write(row(i))
    writer.flush()
    flushed = scalars(run)["rollout/return_mean"]
    assert flushed[0] == (100, 1.5) and flushed[-1] == (5000, 75.0)
    assert len(flushed) < 10
    assert len(run.read_metrics()) == 50
    writer.write(row(51))
    writer.close()
    assert scalars(run)["rollout/return_mean"][-1] == (5100, 76.5)


def test_evaluations(run: RunDirectory) -> None:
    writer = MetricsWriter(run)
    assert not run.eval_path.exists()
    writer.write_eval(row(2, episodes=20, checkpoint="step-200", return_ci_low=np.float64("nan"), length_mean=7.0))
    writer.close()
    assert run.read_eval() == [row(2, episodes=20, checkpoint="step-200", return_ci_low=None, length_mean=7.0)]
    assert scalars(run) == {"eval/return_mean": [(200, 3.0)], "eval/length_mean": [(200, 7.0)]}


def test_resume_cuts_what_came_after_the_checkpoint(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.run import metrics

    monkeypatch.setattr(metrics._Events, "INTERVAL_SECONDS", 0.0)  # every row is drawn
    writer = MetricsWriter(run)
    for i in range(1, 6):
        writer.write(row(i, timestamp=float(i)))
        writer.write_eval(row(i))
    writer.write(row(6, timestamp=6.0, **{"env/late": 1.0}))
    writer.close()
    for path in (run.metrics_path, run.eval_path, run.progress_path):
        with path.open("a") as file:
            file.write('{"iteration": 7, "env_')  # killed while writing

    writer = MetricsWriter(run, resume_iteration=3)
    assert [r["iteration"] for r in run.read_metrics()] == [1, 2, 3]
    assert [r["iteration"] for r in run.read_eval()] == [1, 2, 3]
    assert [r["iteration"] for r in table(run)] == ["1", "2", "3"]
    assert "env/late" not in table(run)[0]
    for i in (4, 5):
        writer.write(row(i, timestamp=float(i)) | {"return_mean": -1.0})
    writer.close()
    assert [r["return_mean"] for r in run.read_metrics()] == [1.5, 3.0, 4.5, -1.0, -1.0]
    assert [r["return_mean"] for r in table(run)] == ["1.5", "3.0", "4.5", "-1.0", "-1.0"]
    drawn = scalars(run)
    assert drawn["rollout/return_mean"] == [(100, 1.5), (200, 3.0), (300, 4.5), (400, -1.0), (500, -1.0)]
    assert [step for step, _ in drawn["eval/return_mean"]] == [100, 200, 300]
    assert not drawn.get("env/late")


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    runs = [RunDirectory.create(tmp_path, name, "ppo", "CartPole-v1") for name in ("straight", "resumed")]
    rows = [row(i, timestamp=i / 3, policy_loss=0.1 * i / 7) for i in range(1, 9)]
    for run, stops in zip(runs, ([8], [6, 8]), strict=True):
        done = 0
        for stop in stops:
            writer = MetricsWriter(run, resume_iteration=done - 2 if done else None)
            for r in rows[max(0, done - 2) : stop]:
                writer.write(r)
            writer.close()
            done = stop
    straight, resumed = runs
    assert straight.metrics_path.read_bytes() == resumed.metrics_path.read_bytes()
    assert straight.progress_path.read_bytes() == resumed.progress_path.read_bytes()


def test_resume_before_the_first_row(run: RunDirectory) -> None:
    writer = MetricsWriter(run)
    writer.write(row(1))
    writer.close()
    writer = MetricsWriter(run, resume_iteration=0)
    assert run.read_metrics() == [] and table(run) == []
    writer.write(row(1) | {"return_mean": 9.0})
    writer.close()
    assert [r["return_mean"] for r in table(run)] == ["9.0"]
    assert scalars(run)["rollout/return_mean"] == [(100, 9.0)]


LIMITED = """
import resource, signal, sys
from paceline.run.directory import RunDirectory
from paceline.run.metrics import MetricsWriter
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDirectory(Path(sys.argv[1]))
writer = MetricsWriter(run)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    for i in range(1000):
        writer.write({"iteration": i, "env_steps": i, "return_mean": i / 3})
except OSError as error:
    print(error.strerror)
"""


def test_a_full_disk_leaves_whole_lines(run: RunDirectory) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run.path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "File too large\n"
    text = run.metrics_path.read_text()
    assert text.endswith("\n") and 1000 < len(text) <= 2000
    assert [json.loads(line)["iteration"] for line in text.splitlines()] == list(range(text.count("\n")))


def test_a_row_is_cheap(run: RunDirectory) -> None:
    """Iterations may take 10 ms; CPU time, the best of five, with room for a slow machine."""
    writer = MetricsWriter(run)
    full = row(1) | {name: 1 / (3 + i) for i, name in enumerate(METRICS) if name not in ("iteration", "env_steps")}
    writer.write(full)

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    costs = []
    for _ in range(5):
        start = cpu()
        for _ in range(200):
            writer.write(full)
        costs.append((cpu() - start) / 200)
    writer.close()
    assert min(costs) < 300e-6


def test_a_long_run_keeps_every_second_row_then_every_fourth(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.results.json_lines import GrowingFile
    from paceline.run import metrics

    monkeypatch.setattr(metrics, "MAX_ROWS", 10)
    reader, seen = GrowingFile(run.metrics_path), list[int]()

    def follow() -> None:
        rows, replaced = reader.read()
        if replaced:
            seen.clear()
        seen.extend(row["iteration"] for row in rows)

    writer = MetricsWriter(run)
    for i in range(1, 36):
        writer.write(row(i, policy_loss=1.0))
        follow()
        assert len(run.read_metrics()) <= 10 and seen == [r["iteration"] for r in run.read_metrics()]
    assert seen == [4, 8, 12, 16, 20, 24, 28, 32]
    writer.close()
    last = [*seen, 35]  # the last row is never missing
    assert [r["iteration"] for r in run.read_metrics()] == [int(r["iteration"]) for r in table(run)] == last

    writer = MetricsWriter(run, resume_iteration=33)
    for i in range(34, 45):
        writer.write(row(i))
    writer.close()
    assert [r["iteration"] for r in run.read_metrics()] == [8, 16, 24, 32, 40, 44]
    assert scalars(run)["rollout/return_mean"][-1] == (4400, 66.0)


def test_how_many_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.run import metrics

    most = metrics.MAX_ROWS
    counts = [1, most, most + 1, 2 * most, 2 * most + 1, 4 * most, 100 * most]
    assert [metrics.stride(count) for count in counts] == [1, 1, 2, 2, 4, 4, 128]
