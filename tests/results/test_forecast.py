from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import UserError
from paceline.results.forecast import Conditions, forecast
from paceline.results.forecast_parts import growth, measurement
from paceline.results.forecast_simulation import Duration, Link, actors_and_learner, slowest
from paceline.results.runs import RunData, load_runs

DATA = Path(__file__).parents[2] / "examples/forecast"
ROWS, STEPS, PASSES = 4096, 64, 10  # of an iteration
ENV_ROW, ACT_CALL, LEARN_STEP, LEARN_ROW = 2e-4, 1e-3, 3e-4, 2e-5
EXCHANGE, PER_MEMBER, DRIVER = 2e-4, 1e-5, 0.004
ITERATIONS = 12


def parts(workers: int) -> dict[str, float]:
    """Seconds of an iteration of PPO with strong scaling: 32 environments x 128 steps, 64 optimizer steps."""
    rows = ROWS / workers
    calls = 128 if workers <= 32 else rows
    sync = STEPS * (EXCHANGE + PER_MEMBER * workers) if workers > 1 else 0.0
    learn = STEPS * LEARN_STEP + LEARN_ROW * PASSES * rows
    return {"env": ENV_ROW * rows, "act": ACT_CALL * calls, "learn": learn, "sync": sync, "idle": DRIVER}


def speed(workers: int) -> float:
    return ROWS / sum(parts(workers).values())


def run(workers: int, seconds: dict[str, float] | None = None, **changes: Any) -> RunData:
    seconds, number = seconds or parts(workers), np.arange(1.0, ITERATIONS + 1)
    total = sum(seconds.values())
    metrics = {
        "iteration": number,
        "env_steps": ROWS * number,
        "optimizer_steps": STEPS * number,
        "wall_seconds": 5.0 + workers + total * number,
        "train_seconds": total * number,
        "time_start_seconds": np.full(ITERATIONS, 5.0 + workers),
        **{f"time_{part}_seconds": spent * number for part, spent in seconds.items()},
    }
    config = {
        "algo": "ppo",
        "env": {"id": "CartPole-v1", "envs_per_worker": 32},
        "ppo": {"rollout_steps": 128, "epochs": PASSES, "minibatch_size": 640},
        "engine": {"name": "ray", "workers": workers, "scaling": "strong"},
    }
    summary = {"workers": workers, "nodes": 1, "engine": "ray", "parameters": 9000}
    summary["hosts"] = [{"workers": workers, "cores": 64}]
    known: dict[str, Any] = {"config": config, "summary": summary, "metrics": metrics, "state": "finished"}
    return RunData(Path(f"w{workers}"), f"w{workers}", reason="", **(known | changes))


def simulated(runs: list[RunData], workers: list[int], hold_out: tuple[int, ...] = (), **there: Any) -> dict[str, Any]:
    (series,) = forecast(runs, workers, Conditions(**there), hold_out)["series"]
    return dict(series)


# -- the simulators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 8, 512])
def test_the_slowest_of_exponential_times_is_a_harmonic_number(workers: int) -> None:
    harmonic = sum(1 / k for k in range(1, workers + 1))
    found = slowest(Duration(2.0, 2.0), 0.0, workers, np.random.default_rng(0), 20_000)
    assert found == pytest.approx(2.0 * harmonic, rel=0.03)


def test_slow_workers_and_long_tails_cost_more() -> None:
    rng = np.random.default_rng(0)
    even = slowest(Duration(1.0, 0.2), 0.0, 256, rng)
    assert slowest(Duration(1.0, 0.0), 0.0, 256, rng) == 1.0
    assert slowest(Duration(1.0, 0.2), 0.2, 256, rng) > even
    assert slowest(Duration(1.0, 0.2, heavy=True), 0.0, 256, rng) > even
    drawn = Duration(3.0, 1.5, heavy=True).draw(rng, 200_000)
    assert drawn.mean() == pytest.approx(3.0, rel=0.01) and drawn.std() == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_many_actors_and_a_learner_are_an_m_d_1_queue(load: float) -> None:
    found = actors_and_learner(1000, Duration(1000.0, 1000.0), Duration(load), np.random.default_rng(0), updates=40_000)
    assert found.rollouts_per_second == pytest.approx(1.0, rel=0.03)
    assert found.learner_busy == pytest.approx(load, rel=0.03)
    assert found.waiting_seconds == pytest.approx(load * load / (2 * (1 - load)), rel=0.1)


def test_actors_saturate_the_learner_or_the_driver() -> None:
    def rate(actors: int, update: float, **more: Any) -> float:
        found = actors_and_learner(actors, Duration(1.0, 0.1), Duration(update), np.random.default_rng(0), **more)
        return found.rollouts_per_second

    assert rate(8, 0.01) == pytest.approx(8, rel=0.05)
    assert rate(512, 0.01) == pytest.approx(100, rel=0.01)
    assert rate(512, 0.08, rollouts_per_update=8) == pytest.approx(100, rel=0.01)
    assert rate(512, 0.001, driver_seconds=0.02) == pytest.approx(50, rel=0.01)
    assert rate(1, 0.001, driver_seconds=0.5, ahead=False) == pytest.approx(1 / 1.5, rel=0.05)
    assert rate(1, 0.001, driver_seconds=0.5) == pytest.approx(1.0, rel=0.05)


def test_an_exchange_between_hosts_is_a_ring() -> None:
    link = Link(latency_seconds=1e-3, bytes_per_second=1e6)
    assert link.all_reduce(4000, 1) == 0.0
    assert link.all_reduce(4000, 2) == pytest.approx(2 * (1e-3 + 2e-3))
    assert link.all_reduce(4000, 8) == pytest.approx(14 * (1e-3 + 5e-4))


def test_growth_from_several_sizes_and_from_one() -> None:
    line = growth([1, 2, 4], [1.5, 2.0, 3.0], 0.0)
    assert (line.base, line.slope) == pytest.approx((1.0, 0.5)) and line.at(10) == pytest.approx(6.0)
    assert growth([1, 2, 4], [1.0, 1.0, 1.0], 0.0).at(99) == pytest.approx(1.0)
    falling = growth([1, 2, 4], [4.0, 3.0, 1.0], 0.0, [1, 1, 1])
    assert falling.slope == 0.0 and falling.base == pytest.approx(8 / 3)
    assert growth([1, 2], [0.0, 1.0], 0.0, [1, 1]).base == 0.0  # never below zero
    assert [growth([4], [2.0], power).at(16) for power in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 4.0, 8.0])
    assert growth([], [], 1.0).at(5) == 0.0


# -- a forecast from known parts --------------------------------------------------------------------------------------


def test_strong_scaling_is_forecast_from_its_parts() -> None:
    found = simulated([run(n) for n in (1, 2, 4)], [8, 16, 256])
    for point in found["points"]:
        exact = speed(point["workers"])
        rate = point["steps_per_second"]
        assert rate["value"] == pytest.approx(exact, rel=0.02)
        assert rate["low"] <= exact * 1.02 and rate["high"] >= exact * 0.98
        assert sum(point["shares"].values()) == pytest.approx(1.0)
    few, _, many = found["points"]
    assert many["bound"] == "exchange" and many["efficiency"]["value"] < 0.1 < few["efficiency"]["value"]
    assert few["start_seconds"] == pytest.approx(13.0)
    (check,) = found["checks"]
    assert (check["workers"], check["fitted_on"]) == (4, [1, 2]) and abs(check["error"]) < 0.02
    (curve,) = found["curves"]
    assert curve["workers"][0] == 1 and curve["workers"][-1] == 256
    assert curve["bend"]["cause"] == "act"  # up to 32 workers each acts as often as one alone
    assert curve["fastest"] < 256  # the exchange grows with every worker


def test_cores_and_links() -> None:
    runs = [run(n) for n in (1, 2, 4)]
    alone, shared = simulated(runs, [32])["points"][0], simulated(runs, [32], cores=8)["points"][0]
    assert shared["steps_per_second"]["value"] < 0.6 * alone["steps_per_second"]["value"]
    assert shared["bound"] == "cores"
    near, far = (
        simulated(runs, [32], nodes=(8,), link=Link(latency))["points"][0]["steps_per_second"]["value"]
        for latency in (1e-5, 1e-2)
    )
    seconds = ROWS / far - ROWS / near
    assert seconds == pytest.approx(STEPS * 14 * (1e-2 - 1e-5), rel=0.01)


def test_one_run_gives_a_wider_interval_and_says_what_it_lacks() -> None:
    one, three = simulated([run(2)], [64]), simulated([run(n) for n in (1, 2, 4)], [64])

    def width(series: dict[str, Any]) -> float:
        rate = series["points"][0]["steps_per_second"]
        return float(math.log(rate["high"] / rate["low"]))

    assert width(one) > width(three) + 0.1
    assert one["points"][0]["start_seconds"] is None and not one["checks"]
    assert "all runs have 2 worker(s)" in "\n".join(one["remarks"])
    lone = "\n".join(simulated([run(1)], [64], nodes=(2,))["remarks"])
    assert "the exchange within a node is unknown" in lone and "0.1 ms and 10 Gbit/s" in lone


def test_stragglers_grow_with_the_workers() -> None:
    uneven = run(1)
    times = np.random.default_rng(0).gamma(25, 1 / 25, ITERATIONS).cumsum()
    uneven.metrics["time_env_seconds"][:] = times  # type: ignore[index]
    few, many = simulated([uneven], [2, 32])["points"]
    assert few["shares"]["stragglers"] < many["shares"]["stragglers"]


def test_what_cannot_be_used() -> None:
    good, bad = [run(n) for n in (1, 2)], run(4, state="failed")
    result = forecast([*good, bad], [8], Conditions())
    assert result["problems"] == ["w4: not used: failed"] and len(result["series"]) == 1
    with pytest.raises(UserError, match="not used: failed"):
        forecast([bad], [8], Conditions())
    with pytest.raises(UserError, match="RLlib"):
        forecast([run(1, summary={"engine": "rllib"})], [8], Conditions())
    with pytest.raises(UserError, match="no run has 3 workers"):
        forecast(good, [8], Conditions(), [3])
    with pytest.raises(UserError, match="all runs are held out"):
        forecast(good, [8], Conditions(), [1, 2])
    short = run(1, metrics={name: column[:3] for name, column in run(1).metrics.items()})
    with pytest.raises(UserError, match="at least 4"):
        measurement(short)


# -- held-out measurements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_eight_and_sixteen_sleeping_workers_from_one_two_and_four(algo: str) -> None:
    found = simulated(load_runs([DATA / algo]), [128], (8, 16))
    assert [check["workers"] for check in found["checks"]] == [8, 16]
    assert all(check["fitted_on"] == [1, 2, 4] for check in found["checks"])
    assert max(abs(check["error"]) for check in found["checks"]) < 0.15
    (point,) = found["points"]
    assert 20 < point["speed_up"]["value"] <= 1.05 * 128
    assert point["steps_per_second"]["low"] < point["steps_per_second"]["value"] <= point["steps_per_second"]["high"]
