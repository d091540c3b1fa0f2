from __future__ import annotations

import numpy as np
import pytest

from paceline.results import scaling_laws as laws
from paceline.results.estimates import Estimate, ratio_estimate


def amdahl(workers: int, serial: float) -> float:
    return 1 / (serial + (1 - serial) / workers)


def test_ratios_and_their_intervals() -> None:
    found = ratio_estimate([180.0, 200.0], [100.0, 110.0])
    assert found.value == pytest.approx(190 / 105)
    assert found.low == pytest.approx(180 / 110) and found.high == pytest.approx(200 / 100)
    assert ratio_estimate([3.0], [2.0]) == Estimate(1.5, None, None, 1)
    # A single run has an unknown scatter.
    assert ratio_estimate([3.0], [2.0, 2.0]).low is None and ratio_estimate([3.0, 4.0], [2.0]).low is None
    mixed = {1: [100.0, 101.0], 2: [180.0], 4: [300.0, 310.0]}
    fit, ahead, check = laws.fit("amdahl", mixed), laws.predict("amdahl", mixed, 8), laws.check("amdahl", mixed)
    assert fit is not None and fit.serial.low is None and ahead is not None and ahead.speed_up.low is None
    assert check is not None and check.inside is None


@pytest.mark.parametrize("serial", [0.0, 0.1, 0.6, 1.0])
def test_fits_find_the_serial_share(serial: float) -> None:
    strong = {n: [100 * amdahl(n, serial)] * 2 for n in (1, 2, 4)}
    weak = {n: [100 * (serial + (1 - serial) * n)] * 2 for n in (1, 2, 4)}
    for law, samples in (("amdahl", strong), ("gustafson", weak)):
        fit = laws.fit(law, samples)
        assert fit is not None and fit.serial.value == pytest.approx(serial, abs=1e-9) and fit.error < 1e-9
        assert fit.serial.low == pytest.approx(serial, abs=1e-9)
        check = laws.check(law, samples)
        assert check is not None and abs(check.error) < 1e-9 and check.prediction.fitted_on == [1, 2]
        ahead = laws.predict(law, samples, 8)
        exact = amdahl(8, serial) if law == "amdahl" else serial + (1 - serial) * 8
        assert ahead is not None and ahead.speed_up.value == pytest.approx(exact)
        assert ahead.steps_per_second == pytest.approx(100 * exact)


def test_a_law_that_is_not_1_based() -> None:
    """Twice the workers of two: the shares are those of two."""
    fit = laws.fit("amdahl", {2: [100.0], 4: [100 * amdahl(2, 0.3)]})
    assert fit is not None and fit.serial.value == pytest.approx(0.3) and fit.serial.low is None


def test_more_workers_that_slow_it_down_are_all_serial() -> None:
    fit = laws.fit("amdahl", {1: [100.0], 2: [60.0]})
    assert fit is not None and fit.serial.value == 1.0 and fit.error > 0.3


def test_intervals_cover_and_the_held_out_count_is_not_used() -> None:
    rng, inside, seen = np.random.default_rng(0), 0, 40
    for _ in range(seen):
        samples = {n: list(1000 * amdahl(n, 0.2) * rng.normal(1, 0.03, 4)) for n in (1, 2, 4)}
        check = laws.check("amdahl", samples)
        assert check is not None and check.inside is not None
        inside += check.inside
        changed = laws.check("amdahl", {**samples, 4: [5.0, 6.0]})
        assert changed is not None and changed.prediction == check.prediction and changed.inside is False
    assert inside >= 0.85 * seen


def test_too_few_counts_give_no_forecast() -> None:
    assert laws.fit("amdahl", {1: [1.0, 2.0]}) is None and laws.predict("amdahl", {1: [1.0]}, 2) is None
    assert laws.check("amdahl", {1: [1.0], 2: [2.0]}) is None


def test_a_forecast_that_was_wrong_before_is_less_sure() -> None:
    samples = {1: [100.0, 102.0], 2: [180.0, 182.0]}
    plain, wide = laws.predict("amdahl", samples, 4), laws.predict("amdahl", samples, 4, -0.1)
    assert plain is not None and wide is not None and plain.speed_up.value == wide.speed_up.value
    assert plain.speed_up.low is not None and wide.speed_up.low == pytest.approx(0.9 * plain.speed_up.low)
    assert plain.speed_up.high is not None and wide.speed_up.high == pytest.approx(1.1 * plain.speed_up.high)


def test_no_forecast_where_more_workers_are_slower() -> None:
    """The law ends at 1, above what was measured."""
    slower = {1: [100.0, 102.0], 2: [70.0, 71.0]}
    assert laws.is_slower(slower) and laws.predict("amdahl", slower, 4) is None
    found = laws.fit("amdahl", slower)
    assert found is not None and found.serial.value == 1.0
    assert laws.check("amdahl", {**slower, 4: [150.0, 151.0]}) is None  # nothing to hold the third against
