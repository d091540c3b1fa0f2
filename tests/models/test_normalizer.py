from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.collective.group import Group
from paceline.models.normalizer import EPSILON, RunningMoments


class Twins(Group):
    """A group of two whose members hold the same: the mean over them is what each has."""

    size = 2


def batches(center: float, spread: float) -> list[Any]:
    rng = np.random.default_rng(0)
    return [(center + spread * rng.normal(size=(n, 3)) * [1, 2, 0.1]).astype(np.float32) for n in (1, 7, 500, 2, 64)]


@pytest.mark.parametrize(("center", "spread"), [(0.0, 1.0), (1000.0, 1.0), (-30.0, 0.01), (1e5, 3.0)])
def test_moments_over_batches_are_those_of_all_rows(center: float, spread: float) -> None:
    moments, rows = RunningMoments(3), batches(center, spread)
    for batch in rows:
        moments.update(batch, Group())
    everything = np.concatenate(rows).astype(np.float64)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-3)
    np.testing.assert_allclose(moments.deviation, np.sqrt(everything.var(0) + EPSILON), rtol=1e-3)
    assert moments.count == pytest.approx(len(everything))


def test_the_order_and_size_of_batches_do_not_matter() -> None:
    rows = batches(5.0, 2.0)
    one, other = RunningMoments(3), RunningMoments(3)
    one.update(np.concatenate(rows), Group())
    for batch in reversed(rows):
        other.update(batch, Group())
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-9)
    np.testing.assert_allclose(one.var, other.var, rtol=1e-9)


def test_before_the_first_row_nothing_is_changed() -> None:
    moments = RunningMoments(2)
    moments.update(np.zeros((0, 2), np.float32), Group())
    assert moments.mean.tolist() == [0, 0]
    np.testing.assert_allclose(moments.deviation, 1.0)


def test_a_constant_column_has_no_negative_variance() -> None:
    moments = RunningMoments(1)
    for _ in range(10):
        moments.update(np.full((100, 1), 1234.567, np.float32), Group())
    assert 0.0 <= moments.var[0] < 1e-6
    assert np.float32(moments.mean[0]) == np.float32(1234.567)


def test_members_of_a_group_count_all_rows_of_all() -> None:
    rows = batches(3.0, 1.0)
    alone, together = RunningMoments(3), RunningMoments(3)
    for batch in rows:
        alone.update(np.concatenate([batch, batch]), Group())
        together.update(batch, Twins())
    np.testing.assert_allclose(together.mean, alone.mean, rtol=1e-12)
    np.testing.assert_allclose(together.var, alone.var, rtol=1e-9)
    assert together.count == alone.count


def test_sums_add_up_and_are_merged_elsewhere() -> None:
    """As workers send them: rows that a learner never sees."""
    rows = batches(3.0, 1.0)
    here, there = RunningMoments(3), RunningMoments(3)
    for batch in rows:
        here.update(batch, Group())
    there.merge(RunningMoments.sums(rows[0]))
    ahead = there.with_sums(RunningMoments.sums(rows[1]))
    assert (there.count, ahead.count) == (1, 8)
    there.merge(np.sum([RunningMoments.sums(batch) for batch in rows[1:]], axis=0))
    np.testing.assert_allclose(there.mean, here.mean, rtol=1e-12)
    np.testing.assert_allclose(there.var, here.var, rtol=1e-9)
    assert there.count == here.count
    two = np.concatenate(rows[:2]).astype(np.float64)
    np.testing.assert_allclose(ahead.mean, two.mean(0), rtol=1e-9)  # a copy of its own
    np.testing.assert_allclose(ahead.var, two.var(0), rtol=1e-6)


def test_saved_and_loaded() -> None:
    moments, other = RunningMoments(3), RunningMoments(3)
    rows = batches(3.0, 1.0)
    moments.update(rows[2], Group())
    state = {name: array.copy() for name, array in moments.state().items()}
    other.load(state)
    for m in (moments, other):
        m.update(rows[4], Group())
    for name, array in other.state().items():
        np.testing.assert_array_equal(array, moments.state()[name])
    assert not np.array_equal(state["mean"], moments.state()["mean"])
