from __future__ import annotations

import numpy as np
import pytest

from paceline.rollout.sum_tree import SumTree


@pytest.mark.parametrize("size", [1, 64, 65, 5000])
def test_each_leaf_has_its_share_of_the_sum(size: int) -> None:
    rng = np.random.default_rng(1)
    weights = rng.random(size) * (rng.random(size) < 0.7)
    weights[size // 2] = 2.0
    tree = SumTree(size)
    tree.set(np.arange(size), weights)
    assert tree.total == pytest.approx(weights.sum())
    # The middle of each leaf's share of the running sum finds this leaf, and so do the points just within its ends.
    ends = np.cumsum(weights)
    some = np.flatnonzero(weights)
    for at in (0.001, 0.5, 0.999):
        np.testing.assert_array_equal(tree.find((ends - weights + at * weights)[some]), some)


def test_weights_that_change_and_those_that_are_gone() -> None:
    rng, tree, weights = np.random.default_rng(2), SumTree(1000), np.zeros(1000)
    for _ in range(50):
        index = rng.integers(1000, size=30)
        new = rng.random(30) * (rng.random(30) < 0.5)
        for i, w in zip(index, new, strict=True):  # of an index that is there twice the last counts
            weights[i] = w
        tree.set(index, new)
    np.testing.assert_array_equal(tree.leaves(), weights)
    found = tree.find(rng.random(20_000) * tree.total)
    assert (weights[found] > 0).all()
    np.testing.assert_allclose(np.bincount(found, minlength=1000) / 20_000, weights / weights.sum(), atol=0.004)


def test_the_very_end_of_the_sum_is_a_leaf_that_weighs_something() -> None:
    tree = SumTree(200)
    tree.set(np.asarray([3, 70]), np.asarray([0.1, 0.2]))
    np.testing.assert_array_equal(tree.find(np.asarray([0.0, tree.total, 1e9])), [3, 70, 70])


def test_a_copy_by_its_leaves() -> None:
    tree, other = SumTree(300), SumTree(300)
    tree.set(np.arange(300), np.arange(300.0))
    other.load(tree.leaves())
    mass = np.linspace(0, tree.total - 1, 50)
    np.testing.assert_array_equal(other.find(mass), tree.find(mass))
