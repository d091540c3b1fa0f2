"""Which runs are shown as a speed-up of others, and the forecast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.results import scaling_laws as laws
from paceline.results.groups import group
from paceline.results.runs import load_runs
from paceline.results.scaling_series import ScalingSeries, scaling_series

WriteRun = Callable[..., Path]
Config = dict[str, Any]


@pytest.fixture
def found(tmp_path: Path, write_run: WriteRun) -> Callable[..., list[ScalingSeries]]:
    """The series of runs, given as (engine, workers, settings)."""

    def find(*runs: tuple[str, int, Config]) -> list[ScalingSeries]:
        for number, (engine, workers, config) in enumerate(runs):
            path = tmp_path / f"{number:02}"
            write_run(path, engine=engine, workers=workers, speed=1000.0 * workers, config=config)
        return scaling_series(group(load_runs([tmp_path])))

    return find


def kinds(found: list[ScalingSeries]) -> list[list[tuple[str, int]]]:
    return [[(point.group.used[0].engine, point.workers) for point in series.points] for series in found]


def test_workers_are_compared_within_a_kind(found: Callable[..., list[ScalingSeries]]) -> None:
    """`auto` is local with one worker and ray with more: one kind. Another learning rate is another."""
    rates: list[Config] = [{"ppo": {"learning_rate": rate}} for rate in (0.001, 0.002)]
    made = found(*((engine, workers, rate) for engine, workers in (("local", 1), ("ray", 2)) for rate in rates))
    assert kinds(made) == [[("local", 1), ("ray", 2)]] * 2
    assert [series.points[1].efficiency.value for series in made] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"hidden": [1024, 1024]}},
        {"ppo": {"epochs": 1}},
        {"ppo": {"minibatch_size": 32}},
        {"env": {"frame_stack": 4}},
        {"engine": {"scaling": "weak"}},
    ],
)
def test_another_setting_is_no_speed_up(found: Callable[..., list[ScalingSeries]], other: Config) -> None:
    assert found(("ray", 1, {}), ("ray", 4, other)) == []


def test_what_may_grow_with_the_workers(found: Callable[..., list[ScalingSeries]]) -> None:
    def grown(workers: int) -> Config:
        envs = {"envs_per_worker": 8 * workers}
        return {"env": envs, "ppo": {"minibatch_size": 64 * workers}, "stop": {"total_steps": 1000 * workers}}

    assert kinds(found(*(("ray", workers, grown(workers)) for workers in (1, 2)))) == [[("ray", 1), ("ray", 2)]]


def test_what_could_grow_and_does_not_tells_kinds_apart(found: Callable[..., list[ScalingSeries]]) -> None:
    envs: list[Config] = [{"env": {"envs_per_worker": many}} for many in (8, 16)]
    made = found(*(("ray", workers, config) for workers in (1, 2) for config in envs))
    assert kinds(made) == [[("ray", 1), ("ray", 2)]] * 2
    assert all(len({p.group.used[0].value("env.envs_per_worker") for p in series.points}) == 1 for series in made)


def test_an_engine_is_compared_with_itself(found: Callable[..., list[ScalingSeries]]) -> None:
    sizes = [("local", 1), ("ray", 2), ("rllib", 1), ("rllib", 2)]
    made = found(*((engine, workers, {}) for engine, workers in sizes))
    assert kinds(made) == [sizes[:2], sizes[2:]]
    assert made[0].points[1].speed_up.value == pytest.approx(2.0)


def test_ray_has_a_base_of_its_own(found: Callable[..., list[ScalingSeries]]) -> None:
    made = found(("local", 1, {}), ("ray", 1, {}), ("ray", 2, {}))
    assert kinds(made) == [[("ray", 1), ("ray", 2)]]


def test_a_forecast_is_widened_by_how_wrong_one_was(tmp_path: Path, write_run: WriteRun) -> None:
    """As in `scaling.md`, of the same runs."""
    for workers, speed in ((1, 1000.0), (2, 1900.0), (4, 2400.0)):
        for seed in (0, 1):
            path = tmp_path / f"{workers}-{seed}"
            write_run(path, workers=workers, seed=seed, speed=speed * (1 + 0.02 * seed))
    (series,) = scaling_series(group(load_runs([tmp_path])))
    samples = {point.workers: [run.steps_per_second for run in point.group.used] for point in series.points}
    assert series.check is not None and series.check.error > 0.1
    assert series.prediction == laws.predict("amdahl", samples, 8, series.check.error)
    assert series.prediction != laws.predict("amdahl", samples, 8)
