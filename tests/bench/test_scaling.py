from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.bench import scaling_tables
from paceline.bench.scaling import Matrix, ScalingBenchmark, load_matrix, plan_scaling
from paceline.config import UserError
from paceline.results.runs import RunData
from paceline.results.scaling_figures import scaling_result, seconds_to_return

Cli = Callable[..., Any]
MACHINE = {"date": "2026-01-02", "commit": "", "cpu": "CPU", "cores": 2, "device": "cpu", "versions": {"torch": "2"}}


def planned(sets: tuple[str, ...] = (), **asked: Any) -> list[Any]:
    matrix = Matrix.model_validate(
        {"iterations": 3, "seeds": 1, **{k: v for k, v in asked.items() if k in Matrix.model_fields}}
    )
    more = {key: value for key, value in asked.items() if key not in Matrix.model_fields}
    return plan_scaling(matrix, out=Path("x"), sets=sets, **more)


def entry(workers: int, seed: int, rate: float | None, engine: str = "ray", **changes: Any) -> dict[str, Any]:
    """A run of 1000 steps at this rate, or one that failed."""
    one: dict[str, Any] = {"name": f"{engine}-w{workers}-s{seed}", "env": "E", "algo": "ppo", "engine": engine}
    one |= {"scaling": "strong", "nodes": None, "workers": workers, "seed": seed, "command": "paceline train …"}
    if rate is None:
        return {**one, "state": "failed", "reason": "no memory", **changes}
    seconds = 1000 / rate
    one |= {"state": "done", "reason": None, "env_steps": 1000, "train_seconds": seconds, "wall_seconds": seconds + 5}
    one |= {"steps_per_second": rate, "steady_steps_per_second": rate, "return_mean": 100.0 + seed, "threshold": 90.0}
    one |= {"seconds_to_return": seconds / 2 if seed else None, "machine": MACHINE, "problems": []}
    one |= {"time_split": {"start": 5.0, "env": 0.25 * seconds, "learn": 0.75 * seconds}}
    return one | {"verdict": "learner-bound: 75 % of the time", **changes}


def test_the_matrix_and_its_commands() -> None:
    points = planned(workers=[2, 1], engines=["ray", "rllib"], seeds=2)
    assert [point.name for point in points[:4]] == [
        f"CartPole-v1-ppo-{e}-w{w}-s0" for e in ("ray", "rllib") for w in (1, 2)
    ]
    assert len(points) == 8 and " ".join(points[1].words) == (
        "train --algo ppo --env CartPole-v1 --seed 0 --engine ray --workers 2 --iterations 3 --out x "
        "--name CartPole-v1-ppo-ray-w2-s0 --resume auto"
    )
    weak = planned(workers=[4], scaling=["weak"], iterations=None, total_steps=100, algos=["ppo", "impala"])
    assert [point.config.stop.total_steps for point in weak] == [400, 400]
    assert [point.config.engine.scaling for point in weak] == ["weak", "strong"]  # IMPALA's actors share nothing
    nodes = planned(nodes=[1, 2], workers=[1, 2], rehearse=True)
    assert [point.name[-8:] for point in nodes] == ["n1-w1-s0", "n1-w2-s0", "n2-w2-s0"]
    assert nodes[2].words[:5] == ["launch", "--rehearse", "2", "--log", "x/launch/CartPole-v1-ppo-auto-n2-w2-s0"]


def test_a_file_and_the_flags_over_it(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("workers: [1, 2, 4]\niterations: 5\nsettings: {ppo: {epochs: 2}}\nengines: [ray]\n")
    matrix = load_matrix(str(file), {"total_steps": "2k", "workers": ["1"]})
    assert matrix.budget == {"stop.total_steps": 2000} and matrix.workers == [1] and matrix.engines == ["ray"]
    (point, *_) = plan_scaling(matrix, out=Path("x"))
    assert point.config.hyper.epochs == 2
    grid = planned(config=str(Path(__file__).parents[2] / "configs/grid5000.yaml"), iterations=None, workers=[1])
    assert grid[0].config.stop.iterations == 10 and grid[0].config.hyper.epochs == 30


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"iterations": None}, ["budget", "--iterations"]),
        ({"sets": ("engine.workers=3",)}, ["use --workers instead"]),
        ({"algos": ["pp"]}, ["--algos 'pp'", "did you mean 'ppo'"]),
        ({"hosts": "f"}, ["--hosts needs --nodes"]),
        ({"algos": ["a2c"], "engines": ["rllib"]}, ["a2c is not available on --engine rllib"]),
        ({"envs": ["a:X-v0", "b/a:X-v0"]}, ["--envs a:X-v0,b/a:X-v0", "would be called a-X-v0-ppo"]),
        ({"nodes": [4], "workers": [1, 2]}, ["no run is left", "1 on 4, 2 on 4"]),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        planned(**asked)
    assert all(word in str(error.value) for word in words), error.value


def test_a_run_of_another_size_is_not_taken_for_this_one() -> None:
    from paceline.config.resolve import to_tree

    (one, two) = planned(workers=[1, 2], engines=["ray"])
    saved = to_tree(two.config)
    assert two.difference(saved) is None and one.difference(saved) == "engine.workers=2, not 1"
    assert "stop.iterations=3, not 5" in str(planned(workers=[2], engines=["ray"], iterations=5)[0].difference(saved))


def benchmark(folder: Path, *sets: str, **asked: Any) -> ScalingBenchmark:
    return ScalingBenchmark(folder, "scaling", "", planned(sets, **asked), [], None)


def test_runs_of_other_settings_are_no_speed_up(tmp_path: Path) -> None:
    first = benchmark(tmp_path, "ppo.epochs=30", workers=[1])
    (entry_,) = first.entries.values()
    entry_ |= {key: value for key, value in entry(1, 0, 100.0).items() if key not in entry_} | {"state": "done"}
    first.write()
    with pytest.raises(UserError, match=r"CartPole-v1-ppo-auto-w1-s0 with ppo\.epochs=30, not 1 as .*w2-s0"):
        benchmark(tmp_path, "ppo.epochs=1", workers=[2])
    with pytest.raises(UserError, match=r"stop\.iterations=3, not 5"):
        benchmark(tmp_path, "ppo.epochs=30", workers=[2], iterations=5)
    with pytest.raises(UserError, match=r"ppo\.epochs=30, not 1"):  # the same job by another engine is compared, too
        benchmark(tmp_path, "ppo.epochs=1", workers=[1], engines=["rllib"])
    more = benchmark(tmp_path, "ppo.epochs=30", workers=[2, 4], engines=["auto", "rllib"], seeds=2)
    assert len(more.entries) == 9
    benchmark(tmp_path, "ppo.epochs=1", workers=[2], scaling=["weak"])  # another series


def test_weak_scaling_is_one_series(tmp_path: Path) -> None:
    small, large = planned(workers=[1, 4], scaling=["weak"], iterations=None, total_steps=100)
    assert large.config.stop.total_steps == 400 and small.settings == large.settings


def test_figures_by_hand() -> None:
    rates = {1: (100, 110), 2: (180, 200), 4: (300, 320)}
    runs = [entry(workers, seed, rate) for workers, pair in rates.items() for seed, rate in enumerate(pair)]
    runs += [entry(1, seed, 10 + seed, "rllib") for seed in (0, 1)] + [entry(2, 0, None, "rllib")]
    result = scaling_result("mine", "", ["paceline bench scaling"], runs)
    ours, theirs = result["series"]
    one, two, four = ours["points"]
    assert one["speed_up"]["value"] == 1.0 and two["speed_up"]["value"] == pytest.approx(190 / 105)
    assert two["efficiency"]["value"] == pytest.approx(95 / 105) and two["efficiency"]["low"] == pytest.approx(90 / 110)
    assert two["reached"] == 1 and two["seconds_to_return"]["value"] == 2.5
    assert four["time_split"]["start"] == 5.0 and four["return_mean"]["value"] == 100.5
    assert ours["check"]["prediction"]["workers"] == 4 and ours["check"]["prediction"]["fitted_on"] == [1, 2]
    # 1/S(2) = s + (1-s)/2
    serial = 2 / (190 / 105) - 1
    assert ours["check"]["prediction"]["speed_up"]["value"] == pytest.approx(1 / (serial + (1 - serial) / 4))
    assert ours["check"]["measured"]["value"] == pytest.approx(310 / 105) and ours["prediction"]["workers"] == 8
    assert [(row["workers"], row["over"]) for row in result["engines"]] == [(1, "rllib")]
    assert result["engines"][0]["ratio"]["value"] == pytest.approx(105 / 10.5)
    failed = theirs["points"][1]
    assert (failed["done"], failed["failed"], failed["speed_up"], theirs["check"]) == (0, 1, None, None)
    text = scaling_tables.page(result)
    assert (
        "| ray | 2 | 2 of 2 | 5.3 (5.0–5.6) | 100.5 (100.0–101.0) | 190 (180–200) | 1.81× (1.64–2.00) | 90 % (82–100)"
        in text
    )
    assert "| rllib | 2 | 0 of 1 (1 failed) | – | – | – | – | – | – |" in text and "2.5 (1 of 2 runs)" in text
    assert "- `rllib-w2-s0` failed: no memory" in text and "- ray, 4 workers: learner-bound: 75 %" in text
    assert "check: 1, 2 workers predict" in text and "the machine had 2 cores" in text
    assert "ray over rllib | 10.00×" in text and "different machines" not in text
    slow = scaling_result("mine", "", [], [entry(1, 0, 100.0), entry(2, 0, 70.0)])
    assert (
        "2 workers are slower than 1. Speed-up falls as workers are added, so no forecast is made."
        in scaling_tables.page(slow)
    )
    other = {**MACHINE, "cpu": "Other"}
    mixed = scaling_result("mine", "", [], [entry(1, 0, 9.0), entry(2, 0, 9.0, machine=other)])
    assert "made on different machines (CPU, 2 cores; Other, 2 cores)" in scaling_tables.page(mixed)


def test_the_time_to_a_return_is_no_luck_of_few_episodes() -> None:
    columns = {"return_mean": [50.0, 20.0, 40.0, 45.0], "episodes": [1, 99, 100, 130], "train_seconds": [1, 2, 3, 4]}
    metrics = {name: np.array(values, np.float64) for name, values in {**columns, "env_steps": [1, 2, 3, 4]}.items()}
    run = RunData(Path("x"), "x", "finished", "all steps done", metrics=metrics)
    assert [seconds_to_return(run, limit) for limit in (40.0, 44.0, 50.0)] == [3.0, 4.0, None]
    stopped = dataclasses.replace(run, config={"stop": {"return_mean": 45.0}})
    assert seconds_to_return(stopped, 45.0) is None  # no evaluation agreed
    agreed = dataclasses.replace(
        stopped, reason="return 45.0 over the last 100 episodes, 46.0 in 20 evaluation episodes"
    )
    assert seconds_to_return(agreed, 45.0) == 4.0


def test_a_study_and_a_run_that_fails(here: Path, cli: Cli) -> None:
    """Real runs: one process, two workers on Ray, and then an environment that does not exist."""
    small = ["--set", "ppo.rollout_steps=32", "--set", "ppo.epochs=1", "--out", "st"]
    words = ["bench", "scaling", "--iterations", "3", "--seeds", "1", *small]
    result = cli(*words, "--workers", "1,2")
    assert result.code == 0, result.err
    tree = json.loads(Path("st/scaling.json").read_text())
    assert [run["state"] for run in tree["runs"]] == ["done", "done"]
    assert {path.suffix for path in Path("st").glob("scaling.*")} == {".json", ".md", ".csv", ".png"}
    # By hand, from the files: what an independent reader makes of them.
    lines = [(Path("st") / run["name"] / "metrics.jsonl").read_text().splitlines() for run in tree["runs"]]
    last = [json.loads(line[-1]) for line in lines]
    rates = [row["env_steps"] / row["train_seconds"] for row in last]
    points = tree["series"][0]["points"]
    assert [point["steps_per_second"]["value"] for point in points] == pytest.approx(rates)
    assert points[1]["speed_up"]["value"] == pytest.approx(rates[1] / rates[0])
    assert points[1]["efficiency"]["value"] == pytest.approx(rates[1] / rates[0] / 2)
    for point, row in zip(points, last, strict=True):
        split = {name[5:-8]: value for name, value in row.items() if name.startswith("time_")}
        assert point["time_split"] == pytest.approx(split)
        assert sum(split.values()) == pytest.approx(point["wall_seconds"]["value"], rel=0.02)
        # The start is most of such a short run, and not what its speed-up is bound by.
        assert point["verdict"] and not point["verdict"].startswith(("set-up", "unknown"))

    before = Path("st/CartPole-v1-ppo-auto-w1-s0/metrics.jsonl").stat().st_mtime_ns
    result = cli(*words, "--workers", "1", "--envs", "CartPole-v1,NoSuchEnv-v0")
    assert result.code == 1 and result.out.count("already done") == 1 and "--retry" in result.out
    assert Path("st/CartPole-v1-ppo-auto-w1-s0/metrics.jsonl").stat().st_mtime_ns == before
    assert "[2/2] NoSuchEnv-v0-ppo-auto-w1-s0  failed: " in result.out
    rows = list(csv.DictReader(Path("st/scaling.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["done", "done", "failed"] and "NoSuchEnv" in rows[2]["reason"]
    assert "skipped without --retry" in cli(*words, "--workers", "1", "--envs", "NoSuchEnv-v0").out
    result = cli("compare", "st")
    assert result.code == 0 and "- NoSuchEnv-v0-ppo-auto-w1-s0: failed: " in result.out, result.err
    result = cli(*words, "--workers", "1", "--set", "ppo.gamma=0.5")
    assert result.code == 2 and "with ppo.gamma=0.98, not 0.5" in result.err
