from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.config import UserError
from paceline.report.compare import page
from paceline.report.figures import draw_comparison
from paceline.results.comparison import Comparison, compare
from paceline.results.groups import group
from paceline.results.runs import load_runs
from paceline.run.directory import append_line

MakeRun = Callable[..., Path]
UP = [float(value) for value in range(10, 110, 10)]


def compared(folder: Path, by: list[str] | None = None, **asked: object) -> Comparison:
    return compare(group(load_runs([folder]), by), **asked)  # type: ignore[arg-type]


def test_figures_by_hand(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in range(4):
        make_run(f"a{seed}", [value + seed for value in UP], config={"seed": seed})
        make_run(f"b{seed}", [*UP[:5], 20.0, *UP[6:]], config={"seed": seed}, engine="ray", workers=2, seconds=0.5)
    found = compared(tmp_path, threshold=95.0)
    one, two = found.results
    assert found.horizon == {"CartPole-v1": 1000.0} and found.unit == "return" and found.threshold == 95.0
    assert one.scores == [100.0, 101.0, 102.0, 103.0] and one.score.value == 101.5 and one.mean == 101.5
    assert one.std == pytest.approx(np.std([0, 1, 2, 3], ddof=1)) and one.fall == 0.0 and two.fall == 30.0
    assert one.score.low is not None and 100 <= one.score.low < 101.5 < (one.score.high or 0) <= 103
    # Up to the first row, at 100 steps, the least of any run; then a line from 10 to 100, and 1.5 for the mean seed.
    assert one.area.value == pytest.approx((9 * 10 + 10.75 + 90 * 56.5) / 100)
    assert one.reached is not None and one.reached.runs == 4
    assert one.reached.steps is not None and one.reached.steps.value == 1000.0
    assert one.reached.seconds is not None and one.reached.seconds.value == 15.0
    assert two.reached is not None and two.reached.seconds is not None and two.reached.seconds.value == 10.0
    assert one.steps_per_second.value == 100.0 and two.steps_per_second.value == 200.0
    assert one.speed_up is None and two.speed_up is not None and two.speed_up.value == 2.0 == two.speed_up.low
    assert any("fewer than 5 runs" in note and one.label in note for note in found.notes)
    (better,) = found.improvements
    assert better.probability == (3 + 0.5) / 4 and better.label == "local, 1 worker" and better.over == "ray, 2 workers"
    assert one.time_split == {"start": 5.0, "env": 2.5, "learn": 7.5}
    assert one.profile.share[0] == 1.0 and one.profile.share[-1] == 0.0 and one.profile.thresholds[-1] == 103.0


def test_at_equal_time(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("slow", UP, config={"seed": 0})
    make_run("fast", UP, engine="ray", workers=2, seconds=0.5)
    found = compared(tmp_path, at="time")
    assert found.horizon == {"CartPole-v1": 10.0}  # the fast one ends after 5 s of start and 10 x 0.5 s
    fast, slow = sorted(found.results, key=lambda one: -one.score.value)
    assert fast.scores == [100.0] and slow.scores == [50.0] and slow.score.low is None
    assert any("a single run" in note for note in found.notes)
    assert any("at 10 wall seconds, where the shortest run ends" in note for note in found.notes)


def test_a_run_is_not_given_a_score_it_has_not_got_yet(make_run: MakeRun, tmp_path: Path) -> None:
    """One has ended after 10 s of wall time, of the other the first row comes after 13."""
    make_run("quick", UP, seconds=0.5)
    make_run("slow", [77.0, *UP[1:]], engine="ray", workers=2, seconds=8.0)
    found = compared(tmp_path, at="time")
    assert found.horizon == {"CartPole-v1": 13.0}
    quick, slow = found.results
    assert quick.scores == [100.0] and slow.scores == [77.0]
    assert slow.area.value == pytest.approx((99 * 10 + (10 + 77) / 2) / 100) and slow.curve is not None
    assert slow.curve.x == [13.0] and quick.curve is not None and quick.curve.x[0] > 5


def test_a_shorter_run_sets_the_place(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("long", UP)
    make_run("short", UP[:4], config={"ppo": {"epochs": 3}}, env_steps=400)
    found = compared(tmp_path)
    assert [one.scores for one in found.results] == [[40.0], [40.0]] and found.results[0].last.value == 100.0


def test_runs_that_did_not_finish_are_no_figures(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, state in enumerate(("done", "done", "failed", "stopped")):
        make_run(f"a{seed}", UP[: 10 if state == "done" else 3], config={"seed": seed}, state=state)
    found = compared(tmp_path)
    assert found.results[0].names == ["a0", "a1"] and found.horizon == {"CartPole-v1": 1000.0}
    assert found.results[0].counts == {"finished": 2, "failed": 1, "interrupted": 1}
    make_run("alone/b", state="failed")
    with pytest.raises(UserError, match="no run has finished with figures"):
        compared(tmp_path / "alone")


def test_two_environments_need_a_common_scale(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(f"cart{seed}", [value * 5 for value in UP], config={"seed": seed})
        acro = [value - 200.0 for value in UP]
        make_run(f"acro{seed}", acro, config={"seed": seed, "env": {"id": "Acrobot-v1"}})
    with pytest.raises(UserError, match=r"different tasks \(Acrobot-v1; CartPole-v1\).*--mixed"):
        compared(tmp_path)
    part = compared(tmp_path, ["algo"], ranges={"Acrobot-v1": (-500.0, 0.0)})  # what has a range, and the rest alone
    assert part.tasks == ["Acrobot-v1"] and part.results[0].scores == [0.8, 0.8] and part.results[0].reached is None
    assert [one.tasks for one in part.by_task] == [["Acrobot-v1"], ["CartPole-v1"]]
    assert "no score range is known for CartPole-v1" in part.notes[0] and "--range CartPole-v1=0,500" in part.notes[0]
    none = compared(tmp_path, ["algo"], ranges={})
    assert none.results == [] and len(none.by_task) == 2
    runs = load_runs([tmp_path])
    assert page(none, group(runs, ["algo"]), runs, {}).startswith("Several tasks, none of them with a known range")
    assert "CartPole-v1" not in page(part, group(runs, ["algo"]), runs, {"Acrobot-v1": (-500.0, 0.0)}).splitlines()[0]
    found = compared(tmp_path, ["algo"], ranges={"Acrobot-v1": (-500.0, 0.0), "CartPole-v1": (0.0, 500.0)})
    (both,) = found.results
    assert found.unit == "normalised score" and sorted(both.scores) == [0.8, 0.8, 1.0, 1.0]
    # Everything of several tasks is on the common scale, or is not given.
    assert 0 < both.area.value < 1 and both.last.value == pytest.approx(0.9) and both.curve is None
    assert both.reached is None and [one.tasks for one in found.by_task] == [["Acrobot-v1"], ["CartPole-v1"]]
    assert found.by_task[1].results[0].score.value == 500.0


def test_groups_are_scored_over_the_tasks_that_all_have(make_run: MakeRun, tmp_path: Path) -> None:
    """A group of the easy task alone would be first, whatever it can."""
    cart, acro = (0.0, 500.0), (-500.0, 0.0)
    for seed in (0, 1):
        for algo in ("ppo", "a2c"):
            make_run(f"cart-{algo}{seed}", [value * 4 for value in UP], config={"seed": seed, "algo": algo})
        acrobot = {"seed": seed, "env": {"id": "Acrobot-v1"}}
        make_run(f"acro{seed}", [value - 500.0 for value in UP], config=acrobot, seconds=9.0 + seed)
    found = compared(tmp_path, ["algo"], ranges={"CartPole-v1": cart, "Acrobot-v1": acro})
    assert {one.label: (one.score.value, one.wall_seconds.value) for one in found.results} == {
        "ppo": (0.8, 15.0),
        "a2c": (0.8, 15.0),
    }
    assert found.improvements[0].probability == 0.5
    assert "a2c: no finished run of Acrobot-v1" in found.notes and any("use only CartPole-v1" in n for n in found.notes)
    assert [[one.label for one in task.results] for task in found.by_task] == [["ppo"], ["ppo", "a2c"]]

    for seed in (0, 1):
        shutil.rmtree(tmp_path / f"cart-ppo{seed}")
    found = compared(tmp_path, ["algo"], ranges={"CartPole-v1": cart, "Acrobot-v1": acro})
    assert found.results == [] and any("there is no overall score" in note for note in found.notes)
    text = page(found, group(load_runs([tmp_path]), ["algo"]), load_runs([tmp_path]), None)
    assert "–" in text.splitlines()[2] and "- ppo: no finished run of CartPole-v1" in text
    draw_comparison(found, tmp_path / "compare.png")


def test_intervals_of_several_tasks_are_those_within_them(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(f"cart{seed}", config={"seed": seed}, seconds=1.0 + 0.01 * seed)
        make_run(f"acro{seed}", config={"seed": seed, "env": {"id": "Acrobot-v1"}}, seconds=50.0 + seed)
    scales = {"CartPole-v1": (0.0, 500.0), "Acrobot-v1": (-500.0, 500.0)}
    (one,) = compared(tmp_path, ["algo"], ranges=scales).results
    for estimate in (one.wall_seconds, one.area, one.last):
        assert estimate.low is not None and estimate.high is not None
        assert estimate.high - estimate.low < 0.1 * abs(estimate.value)
    assert one.steps_per_second.low is not None and one.steps_per_second.low > 0.9 * one.steps_per_second.value
    shutil.rmtree(tmp_path / "acro0")
    shutil.rmtree(tmp_path / "acro1")
    found = compared(tmp_path, ["algo"], ranges=scales)
    assert found.results[0].score.low is None and found.results[0].wall_seconds.low is None
    assert "a single run, so no interval: ppo" in found.notes


def test_one_run_alone_gives_no_interval_of_a_difference(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(f"a{seed}", [value + seed for value in UP], config={"seed": seed})
    make_run("b", engine="ray", workers=2)
    (better,) = compared(tmp_path).improvements
    assert (better.low, better.high) == (None, None)


def test_the_same_game_by_other_rules_is_another_task(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    make_run("b", config={"env": {"max_episode_steps": 50}})
    with pytest.raises(UserError, match=r"CartPole-v1; CartPole-v1 max_episode_steps=50"):
        compared(tmp_path)


def test_other_metrics(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run("a"), make_run("b", config={"seed": 1})
    for path, value in ((first, 7.0), (second, 9.0)):
        for steps in (500, 1000):
            append_line(path / "eval.jsonl", {"env_steps": steps, "return_mean": value, "episodes": 5})
        append_line(path / "eval.jsonl", {"env_steps": 1000, "return_mean": 99.0, "kind": "random"})
    assert compared(tmp_path, metric="eval").results[0].scores == [7.0, 9.0]
    assert compared(tmp_path, metric="time_learn_seconds").unit == "time_learn_seconds"
    (second / "eval.jsonl").unlink()
    with pytest.raises(UserError, match="b: no eval; leave"):
        compared(tmp_path, metric="eval")


def test_what_to_know_before_believing_it(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    make_run("b", config={"seed": 1}, version="0.0.1")
    assert any("different versions of paceline: 0.0.1" in note for note in compared(tmp_path).notes)


def test_evaluations_of_training_and_of_the_verb(make_run: MakeRun, tmp_path: Path) -> None:
    """Those of the run's own kind and environment; several of one checkpoint are one."""
    path = make_run("a", UP)
    rows = [
        {"env_steps": 500, "return_mean": 50.0, "episodes": 20},
        {"env_steps": 1000, "return_mean": 90.0, "episodes": 20, "kind": "deterministic"},
        {"env_steps": 1000, "return_mean": 70.0, "episodes": 60, "kind": "deterministic"},
        {"env_steps": 1000, "return_mean": 1.0, "episodes": 20, "kind": "random"},
        {"env_steps": 1000, "return_mean": 2.0, "episodes": 20, "kind": "stochastic"},
        {"env_steps": 1000, "return_mean": 3.0, "episodes": 20, "kind": "deterministic", "levels": "test"},
        {"env_steps": 200, "return_mean": 20.0, "episodes": 5, "kind": "deterministic"},
    ]
    for row in rows:
        append_line(path / "eval.jsonl", row)
    (one,) = compared(tmp_path, metric="eval").results
    assert one.scores == [75.0] and one.curve is not None and one.curve.x[0] == 200.0
    config = path / "config.yaml"
    config.write_text(config.read_text() + "eval: {stochastic: true}\n")
    (one,) = compared(tmp_path, metric="eval").results
    assert one.scores == [2.0]  # the row of the training is of the same kind now, at 500 steps
