import numpy as np
import pytest

from paceline.stats import (
    bootstrap_interval,
    improvement_interval,
    iqm,
    performance_profile,
    probability_of_improvement,
    profile_interval,
    ratio_interval,
    stratified_bootstrap_interval,
    summarize,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 1000], 2.5),
        ([1000, 3, 2, 1], 2.5),  # order doesn't matter
        ([0, 1, 2, 3, 4, 5, 6, 100], 3.5),  # two go from each end
        ([0, 1, 2, 3, 100], 2.0),  # a quarter of 5 rounds down to one
        ([1, 2, 6], 3.0),  # too few to cut
        ([7], 7.0),
        ([[1, 2], [3, 1000]], 2.5),
    ],
)
def test_iqm(values: list[float], expected: float) -> None:
    assert iqm(values) == expected


def test_interval_of_a_constant_is_that_constant() -> None:
    assert bootstrap_interval([5.0, 5.0, 5.0]) == (5.0, 5.0)
    assert bootstrap_interval([3.0]) == (3.0, 3.0)


def test_interval_of_a_coin_has_the_binomial_quantiles() -> None:
    # A resample of 50 zeros and 50 ones has binomial(100, 1/2) ones: 2.5 % and 97.5 % quantiles are 40 and 60.
    low, high = bootstrap_interval([0.0] * 50 + [1.0] * 50)
    assert low == pytest.approx(0.40, abs=0.011)
    assert high == pytest.approx(0.60, abs=0.011)


def test_interval_narrows_with_confidence_and_is_repeatable() -> None:
    sample = np.random.default_rng(1).normal(size=40)
    wide, narrow = bootstrap_interval(sample), bootstrap_interval(sample, confidence=0.5)
    assert wide[0] < narrow[0] < sample.mean() < narrow[1] < wide[1]
    assert bootstrap_interval(sample) == wide
    assert bootstrap_interval(sample, seed=1) != wide


def test_interval_of_another_statistic() -> None:
    sample = [1.0, 2.0, 3.0, 4.0, 1000.0]
    # The least of 5 draws is above 2 with probability (3/5)^5 = 7.8 %, above 3 with (2/5)^5 = 1.0 %.
    assert bootstrap_interval(sample, statistic=np.min) == (1.0, 3.0)
    assert bootstrap_interval(sample, statistic=iqm) != bootstrap_interval(sample)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(100):
        low, high = bootstrap_interval(rng.normal(size=30), resamples=200, seed=seed)
        hits += low <= 0.0 <= high
    assert 85 <= hits <= 100


def test_summary_by_hand() -> None:
    summary = summarize([10.0, 20.0, 30.0, 100.0], [1, 2, 3, 6])
    low, high = summary.pop("return_ci_low"), summary.pop("return_ci_high")
    assert 10.0 < low < 40.0 < high <= 100.0
    assert summary == {
        "return_mean": 40.0,
        "return_std": pytest.approx(np.sqrt((30**2 + 20**2 + 10**2 + 60**2) / 4)),
        "return_median": 25.0,
        "return_iqm": 25.0,
        "return_min": 10.0,
        "return_max": 100.0,
        "length_mean": 3.0,
        "length_std": pytest.approx(np.sqrt((4 + 1 + 0 + 9) / 4)),
        "length_min": 1,
        "length_max": 6,
        "episodes": 4,
    }
    assert all(type(value) in (int, float) for value in summarize([1.0], [1]).values())  # JSON takes no numpy scalars


def test_bad_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        iqm([])
    with pytest.raises(ValueError, match="2 returns and 1 lengths"):
        summarize([1.0, 2.0], [1])
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_interval([1.0], confidence=95)


def test_stratified_interval_against_every_resample() -> None:
    strata = [[0.0, 1.0], [10.0, 14.0]]
    # 2 x 2 draws of each stratum, all equally likely: the sums 0 1 1 2 and 20 24 24 28, divided by 4.
    every = sorted((a + b) / 4 for a in (0, 1, 1, 2) for b in (20, 24, 24, 28))
    seen: list[float] = []
    stratified_bootstrap_interval(strata, lambda values: seen.append(values.mean()) or 0.0, resamples=16_000)
    assert sorted(set(seen)) == sorted(set(every))
    for value in set(every):
        assert seen.count(value) == pytest.approx(1000 * every.count(value), rel=0.15)
    assert stratified_bootstrap_interval(strata, np.mean) == (5.0, 7.5)  # 1 in 16 each, more than 2.5 %


def test_stratified_interval_against_a_plain_loop() -> None:
    data = np.random.default_rng(2)
    strata = [data.normal(mean, 1.0, size) for mean, size in ((0.0, 3), (5.0, 4), (9.0, 8))]
    rng = np.random.default_rng(7)
    draws = []
    for _ in range(4000):
        pooled: list[float] = []
        for stratum in strata:
            pooled += [float(stratum[rng.integers(len(stratum))]) for _ in stratum]
        draws.append(iqm(pooled))
    expected = np.quantile(draws, [0.025, 0.975])
    assert stratified_bootstrap_interval(strata, resamples=4000) == pytest.approx(tuple(expected), abs=0.05)


def test_strata_are_kept_apart_and_the_seed_repeats() -> None:
    # Which game is which is no chance: without strata the interval of these means would be 0 to 100 wide.
    assert stratified_bootstrap_interval([[0.0, 0.0, 0.0], [100.0, 100.0, 100.0]], np.mean) == (50.0, 50.0)
    strata = [[1.0, 2.0, 4.0], [3.0, 7.0, 8.0]]
    assert stratified_bootstrap_interval(strata, seed=3) == stratified_bootstrap_interval(strata, seed=3)
    assert stratified_bootstrap_interval(strata, resamples=50, seed=3) != stratified_bootstrap_interval(
        strata, resamples=50, seed=4
    )


def test_probability_of_improvement_by_hand() -> None:
    assert probability_of_improvement([[2.0, 3.0]], [[1.0, 0.0]]) == 1.0
    assert probability_of_improvement([[1.0, 1.0]], [[1.0]]) == 0.5
    # 3 wins, 1 tie, 2 losses of 6: 3.5/6; and no win of 1.
    x, y = [[1.0, 3.0], [0.0]], [[0.0, 1.0, 4.0], [2.0]]
    assert probability_of_improvement(x, y) == pytest.approx(3.5 / 6 / 2)
    assert probability_of_improvement(y, x) == pytest.approx(1 - 3.5 / 6 / 2)


def test_interval_of_the_improvement_against_a_plain_loop() -> None:
    x, y = [[1.0, 3.0, 5.0], [0.0, 2.0]], [[0.0, 1.0, 4.0], [1.0, 2.0]]
    rng = np.random.default_rng(5)
    draws = []
    for _ in range(4000):
        a = [[side[rng.integers(len(side))] for _ in side] for side in x]
        b = [[side[rng.integers(len(side))] for _ in side] for side in y]
        draws.append(probability_of_improvement(a, b))
    expected = np.quantile(draws, [0.025, 0.975])
    assert improvement_interval(x, y, resamples=4000) == pytest.approx(tuple(expected), abs=0.06)
    assert improvement_interval([[5.0, 6.0]], [[1.0, 2.0]]) == (1.0, 1.0)


def test_bad_strata_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stratified_bootstrap_interval([])
    with pytest.raises(ValueError, match="at least one"):
        stratified_bootstrap_interval([[1.0], []])
    with pytest.raises(ValueError, match="1 and 2 games"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="confidence"):
        stratified_bootstrap_interval([[1.0, 2.0]], confidence=2)


# Scores of two algorithms, a run a row and a game a column, and what rliable 1.2.0 (with arch 7.2.0) makes of them:
# `metrics.aggregate_iqm`, `metrics.probability_of_improvement`, `library.get_interval_estimates` with 50,000 resamples
# and RandomState(0), `library.create_performance_profile` with 20,000.
RLIABLE_X = np.array(
    [
        [0.686, 0.805, 0.683, 0.274],
        [0.826, 0.712, 0.466, 0.745],
        [0.691, 0.674, 0.607, 0.737],
        [0.416, 0.559, 0.479, 0.750],
        [0.610, 0.527, 0.405, 0.536],
        [0.602, 0.531, 0.924, 0.852],
    ]
)
RLIABLE_Y = np.array(
    [
        [0.507, 0.293, 0.326, -0.282],
        [0.990, 0.793, 0.352, 0.682],
        [0.534, 0.284, 0.743, 0.357],
        [0.351, 0.212, 0.586, 0.420],
        [0.614, 0.268, 0.488, 0.182],
        [0.702, 0.506, 0.549, 0.573],
    ]
)
RLIABLE_TAUS = [0.0, 0.25, 0.5, 0.75, 1.0]


def test_equal_to_rliable() -> None:
    x, y = list(RLIABLE_X.T), list(RLIABLE_Y.T)
    assert iqm(RLIABLE_X) == pytest.approx(0.6356666666666666, abs=1e-12)
    assert iqm(RLIABLE_Y) == pytest.approx(0.4624166666666667, abs=1e-12)
    # 21 values: what is left is no multiple of four.
    assert iqm(np.concatenate([RLIABLE_X, RLIABLE_Y])[:7, :3]) == pytest.approx(0.5877272727272728, abs=1e-12)
    assert probability_of_improvement(x, y) == pytest.approx(0.7152777777777778, abs=1e-12)
    assert performance_profile(x, RLIABLE_TAUS) == pytest.approx([1, 1, 19 / 24, 4 / 24, 0], abs=1e-12)
    # The intervals are equal to sampling error: a hundredth, where they are some tenths wide.
    assert stratified_bootstrap_interval(x, resamples=20_000) == pytest.approx((0.5655, 0.70233), abs=0.01)
    assert stratified_bootstrap_interval(y, resamples=20_000) == pytest.approx((0.37933, 0.55875), abs=0.01)
    assert improvement_interval(x, y, resamples=20_000) == pytest.approx((0.55556, 0.86111), abs=0.01)
    low, high = profile_interval(x, RLIABLE_TAUS, resamples=20_000)
    assert low == pytest.approx([1, 1, 0.625, 1 / 24, 0], abs=0.01)
    assert high == pytest.approx([1, 1, 22 / 24, 8 / 24, 0], abs=0.01)


def test_a_tie_with_the_threshold_is_not_above_it() -> None:
    assert performance_profile([[1.0, 2.0], [3.0]], [1.0, 2.0, 3.0]) == pytest.approx([2 / 3, 1 / 3, 0])


def test_interval_of_a_ratio() -> None:
    assert ratio_interval([4.0, 4.0], [2.0]) == (2.0, 2.0)
    low, high = ratio_interval([180.0, 200.0], [100.0, 110.0])
    assert (low, high) == pytest.approx((180 / 110, 2.0))
