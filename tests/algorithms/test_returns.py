from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.algorithms.returns import explained_variance, gae, vtrace


def column(*values: float) -> Any:
    return np.array(values, np.float32)[:, None]


def flags(*values: int) -> Any:
    return np.array(values, bool)[:, None]


def run(reward: Any, value: Any, terminated: Any, truncated: Any, gamma: float, gae_lambda: float) -> tuple[Any, Any]:
    advantage, target = gae(reward, value, terminated, truncated, gamma=gamma, gae_lambda=gae_lambda)
    assert advantage.dtype == target.dtype == np.float32
    return advantage[:, 0], target[:, 0]


# One environment, gamma = lambda = 0.5, so that every number is exact in binary.
#
#   t          0     1     2     3     4
#   reward     1     2     4     8    16
#   value      2     4     6     8    10   and 12 after the end of the rollout
REWARD, VALUE = column(1, 2, 4, 8, 16), column(2, 4, 6, 8, 10, 12)
NEVER = flags(0, 0, 0, 0, 0)


def test_by_hand_without_an_end() -> None:
    # delta_t = r + 0.5 v' - v:  1+2-2 = 1,  2+3-4 = 1,  4+4-6 = 2,  8+5-8 = 5,  16+6-10 = 12
    # A_4 = 12;  A_3 = 5 + 12/4 = 8;  A_2 = 2 + 8/4 = 4;  A_1 = 1 + 4/4 = 2;  A_0 = 1 + 2/4 = 1.5
    advantage, target = run(REWARD, VALUE, NEVER, NEVER, 0.5, 0.5)
    assert advantage.tolist() == [1.5, 2, 4, 8, 12]
    assert target.tolist() == [3.5, 6, 10, 16, 22]


def test_by_hand_with_a_terminated_step() -> None:
    # Step 1 ends the episode: no future, so delta_1 = 2 - 4 = -2 and A_1 = -2; A_0 = 1 + (-2)/4 = 0.5.
    # Row 2 only resets; rows 3 and 4 are as before, A_3 = 8 and A_4 = 12.
    terminated = flags(0, 1, 0, 0, 0)
    advantage, target = run(column(1, 2, 0, 8, 16), VALUE, terminated, NEVER, 0.5, 0.5)
    assert advantage[[0, 1, 3, 4]].tolist() == [0.5, -2, 8, 12]
    assert target[[0, 1, 3, 4]].tolist() == [2.5, 2, 16, 22]


def test_by_hand_with_a_truncated_step() -> None:
    # Step 1 cuts the episode: delta_1 = 2 + 0.5 * 6 - 4 = 1 with the value of the true successor, and the trace stops:
    # A_1 = 1; A_0 = 1 + 1/4 = 1.25.
    advantage, target = run(column(1, 2, 0, 8, 16), VALUE, NEVER, flags(0, 1, 0, 0, 0), 0.5, 0.5)
    assert advantage[[0, 1, 3, 4]].tolist() == [1.25, 1, 8, 12]
    assert target[[0, 1, 3, 4]].tolist() == [3.25, 5, 16, 22]


def test_by_hand_at_the_last_step() -> None:
    # The last step: unfinished or truncated it bootstraps from value[5] = 12, terminated it does not.
    assert run(REWARD, VALUE, NEVER, NEVER, 0.5, 1.0)[0][4] == 16 + 6 - 10
    assert run(REWARD, VALUE, NEVER, flags(0, 0, 0, 0, 1), 0.5, 1.0)[0][4] == 16 + 6 - 10
    assert run(REWARD, VALUE, flags(0, 0, 0, 0, 1), NEVER, 0.5, 1.0)[0][4] == 16 - 10


def test_by_hand_lambda_0_is_the_one_step_error() -> None:
    advantage, target = run(REWARD, VALUE, NEVER, NEVER, 0.5, 0.0)
    assert advantage.tolist() == [1, 1, 2, 5, 12]
    assert target.tolist() == [3, 5, 8, 13, 22]  # r + 0.5 v'


def test_by_hand_lambda_1_is_the_n_step_return() -> None:
    # G_4 = 16 + 6 = 22; G_3 = 8 + 11 = 19; G_2 = 4 + 9.5 = 13.5; G_1 = 2 + 6.75 = 8.75; G_0 = 1 + 4.375 = 5.375
    _, target = run(REWARD, VALUE, NEVER, NEVER, 0.5, 1.0)
    assert target.tolist() == [5.375, 8.75, 13.5, 19, 22]


def test_gamma_0_looks_at_the_reward_alone() -> None:
    _, target = run(REWARD, VALUE, NEVER, NEVER, 0.0, 0.9)
    assert target.tolist() == REWARD[:, 0].tolist()


@pytest.mark.parametrize("gae_lambda", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99, 1.0])
@pytest.mark.parametrize(("steps", "num_envs", "ends"), [(1, 40, 0.5), (30, 7, 0.15), (30, 7, 0.5), (64, 2, 0.0)])
def test_against_the_definition(
    lab: Any, steps: int, num_envs: int, ends: float, gamma: float, gae_lambda: float
) -> None:
    batch = lab.batch(lab.policy(), steps, num_envs, seed=steps, ends=ends)
    ended = batch.terminated | batch.truncated
    assert ends == 0.0 or (batch.terminated.any() and batch.truncated.any())
    assert ((~batch.valid[1:]) == ended[:-1]).all()
    given = [batch.reward, batch.value, batch.terminated, batch.truncated]
    before = [array.copy() for array in given]
    advantage, target = gae(*given, gamma=gamma, gae_lambda=gae_lambda)
    slow_advantage, slow_target = lab.advantages(batch, gamma, gae_lambda)
    np.testing.assert_allclose(advantage[batch.valid], slow_advantage[batch.valid], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(target[batch.valid], slow_target[batch.valid], rtol=1e-4, atol=2e-5)
    for array, copy in zip(given, before, strict=True):  # not in place
        np.testing.assert_array_equal(array, copy)


def test_nothing_crosses_the_end_of_an_episode(lab: Any) -> None:
    """What is on reset rows and after a termination cannot be seen before them, not even if it is no number."""
    batch = lab.batch(lab.policy(), 30, 7)
    options = {"gamma": 0.99, "gae_lambda": 0.95}
    expected, _ = gae(batch.reward, batch.value, batch.terminated, batch.truncated, **options)
    batch.reward[~batch.valid] = np.nan
    batch.value[1:][batch.terminated] = np.nan  # of the last observation of an episode that has no future
    advantage, _ = gae(batch.reward, batch.value, batch.terminated, batch.truncated, **options)
    np.testing.assert_array_equal(advantage[batch.valid], expected[batch.valid])


def test_truncation_sees_the_value_of_its_successor_and_termination_does_not(lab: Any) -> None:
    batch = lab.batch(lab.policy(), 30, 7)
    options = {"gamma": 0.9, "gae_lambda": 0.95}
    before, _ = gae(batch.reward, batch.value, batch.terminated, batch.truncated, **options)
    batch.value[1:][batch.terminated | batch.truncated] += 10
    after, _ = gae(batch.reward, batch.value, batch.terminated, batch.truncated, **options)
    change = after - before
    np.testing.assert_allclose(change[batch.truncated], 0.9 * 10, rtol=1e-5)
    np.testing.assert_allclose(change[batch.terminated], 0.0)


# -- V-trace --------------------------------------------------------------------------------------------------------


def run_vtrace(reward: Any, ratio: Any, terminated: Any, truncated: Any, **options: float) -> tuple[Any, Any]:
    options = {"gamma": 0.5, "trace_lambda": 1.0, "clip_rho": 1.0, "clip_c": 1.0} | options
    advantage, target = vtrace(reward, VALUE, ratio, terminated, truncated, **options)  # type: ignore[arg-type]
    assert advantage.dtype == target.dtype == np.float32
    return advantage[:, 0], target[:, 0]


def test_vtrace_by_hand() -> None:
    # Errors r + 0.5 v' - v as above: 1, 1, 2, 5, 12. The ratios 2, 0.5, 1, 0.25, 4 become 1, 0.5, 1, 0.25, 1.
    # rho times error: 1, 0.5, 2, 1.25, 12. v - V backwards, with 0.5 c:
    # 12;  1.25 + 12/8 = 2.75;  2 + 2.75/2 = 3.375;  0.5 + 3.375/4 = 1.34375;  1 + 1.34375/2 = 1.671875
    ratio = column(2, 0.5, 1, 0.25, 4)
    advantage, target = run_vtrace(REWARD, ratio, NEVER, NEVER)
    assert target.tolist() == [3.671875, 5.34375, 9.375, 10.75, 22]
    # r + 0.5 v_{s+1} - V with the targets above, and the value 12 at the end
    assert advantage.tolist() == [1 + 2.671875 - 2, 2 + 4.6875 - 4, 4 + 5.375 - 6, 8 + 11 - 8, 16 + 6 - 10]


def test_vtrace_by_hand_with_other_bounds() -> None:
    # rho bar 3: 2, 0.5, 1, 0.25, 3;  times error: 2, 0.5, 2, 1.25, 36.  c bar 0.5, lambda 0.5: 0.25, 0.25, 0.25, 0.125
    # 36;  1.25 + 36/16 = 3.5;  2 + 3.5/8 = 2.4375;  0.5 + 2.4375/8 = 0.8046875;  2 + 0.8046875/8 = 2.1005859375
    ratio = column(2, 0.5, 1, 0.25, 4)
    _, target = run_vtrace(REWARD, ratio, NEVER, NEVER, clip_rho=3.0, clip_c=0.5, trace_lambda=0.5)
    assert target.tolist() == [4.1005859375, 4.8046875, 8.4375, 11.5, 46]


def test_vtrace_by_hand_at_an_end() -> None:
    # Step 1 is the last of its episode, row 2 only resets. Ratios 1 and 0.5.
    reward, ratio = column(1, 2, 0, 8, 16), column(1, 0.5, 9, 1, 1)
    # Terminated: v_1 - V_1 = 0.5 (2 - 4) = -1, so v_1 = 3; v_0 - V_0 = 1 + 0.5 * -1 = 0.5.
    advantage, target = run_vtrace(reward, ratio, flags(0, 1, 0, 0, 0), NEVER)
    assert target[[0, 1, 3, 4]].tolist() == [2.5, 3, 8 + 5 + 6, 22]
    assert advantage[[0, 1, 3, 4]].tolist() == [1 + 1.5 - 2, 2 - 4, 8 + 11 - 8, 12]
    # Truncated: v_1 - V_1 = 0.5 (2 + 3 - 4) = 0.5, so v_1 = 4.5; v_0 - V_0 = 1 + 0.5 * 0.5 = 1.25.
    advantage, target = run_vtrace(reward, ratio, NEVER, flags(0, 1, 0, 0, 0))
    assert target[[0, 1, 3, 4]].tolist() == [3.25, 4.5, 19, 22]
    assert advantage[[0, 1, 3, 4]].tolist() == [1 + 2.25 - 2, 2 + 3 - 4, 11, 12]


def slow_vtrace(batch: Any, ratio: Any, gamma: float, lam: float, clip_rho: float, clip_c: float) -> tuple[Any, Any]:
    """Equation 1 of the paper, term by term: v_s = V_s + sum over t of gamma^(t-s) (product of c_i, i < t) delta_t."""
    steps, num_envs = ratio.shape
    value, target = batch.value.astype(np.float64), np.full(ratio.shape, np.nan)
    advantage = target.copy()
    for i in range(num_envs):
        for s in range(steps):
            if not batch.valid[s, i]:
                continue
            total, product, t = value[s, i], 1.0, s
            while True:
                after = 0.0 if batch.terminated[t, i] else value[t + 1, i]
                delta = min(clip_rho, ratio[t, i]) * (batch.reward[t, i] + gamma * after - value[t, i])
                total += gamma ** (t - s) * product * delta
                if batch.terminated[t, i] or batch.truncated[t, i] or t == steps - 1:
                    break
                product *= lam * min(clip_c, ratio[t, i])
                t += 1
            target[s, i] = total
    for i in range(num_envs):
        for s in range(steps):
            goes_on = s < steps - 1 and not (batch.terminated[s, i] or batch.truncated[s, i])
            after = target[s + 1, i] if goes_on else (0.0 if batch.terminated[s, i] else value[s + 1, i])
            advantage[s, i] = batch.reward[s, i] + gamma * after - value[s, i]
    return advantage, target


@pytest.mark.parametrize(
    ("clip_rho", "clip_c", "lam"), [(1.0, 1.0, 1.0), (2.0, 0.7, 0.9), (0.5, 1.5, 1.0), (9, 9, 0.0)]
)
@pytest.mark.parametrize(("steps", "num_envs", "ends"), [(1, 40, 0.5), (30, 7, 0.15), (30, 7, 0.5), (64, 2, 0.0)])
def test_vtrace_against_the_sum_in_the_paper(
    lab: Any, steps: int, num_envs: int, ends: float, clip_rho: float, clip_c: float, lam: float
) -> None:
    batch = lab.batch(lab.policy(), steps, num_envs, seed=steps, ends=ends)
    ratio = np.exp(np.random.default_rng(0).normal(size=(steps, num_envs)) * 0.7).astype(np.float32)
    given = [batch.reward, batch.value, ratio, batch.terminated, batch.truncated]
    before = [array.copy() for array in given]
    advantage, target = vtrace(*given, gamma=0.95, trace_lambda=lam, clip_rho=clip_rho, clip_c=clip_c)
    slow_advantage, slow_target = slow_vtrace(batch, ratio, 0.95, lam, clip_rho, clip_c)
    np.testing.assert_allclose(target[batch.valid], slow_target[batch.valid], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(advantage[batch.valid], slow_advantage[batch.valid], rtol=1e-4, atol=2e-5)
    for array, copy in zip(given, before, strict=True):  # not in place
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_vtrace_of_the_policy_that_acted_is_the_n_step_return(lab: Any, gamma: float) -> None:
    batch = lab.batch(lab.policy(), 30, 7)
    ends = (batch.terminated, batch.truncated)
    ratio = np.ones_like(batch.reward)
    advantage, target = vtrace(
        batch.reward, batch.value, ratio, *ends, gamma=gamma, trace_lambda=1.0, clip_rho=1.0, clip_c=3.0
    )
    n_step_advantage, n_step = gae(batch.reward, batch.value, *ends, gamma=gamma, gae_lambda=1.0)
    np.testing.assert_allclose(target[batch.valid], n_step[batch.valid], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantage[batch.valid], n_step_advantage[batch.valid], rtol=1e-4, atol=1e-5)


def test_vtrace_never_looks_across_an_end(lab: Any) -> None:
    batch = lab.batch(lab.policy(), 30, 7)
    ratio = np.exp(np.random.default_rng(0).normal(size=batch.reward.shape)).astype(np.float32)
    options = {"gamma": 0.99, "trace_lambda": 1.0, "clip_rho": 1.0, "clip_c": 1.0}
    ends = (batch.terminated, batch.truncated)
    expected = vtrace(batch.reward, batch.value, ratio, *ends, **options)
    for array in (batch.reward, ratio):
        array[~batch.valid] = np.nan
    batch.value[1:][batch.terminated] = np.nan
    for one, other in zip(vtrace(batch.reward, batch.value, ratio, *ends, **options), expected, strict=True):
        np.testing.assert_array_equal(one[batch.valid], other[batch.valid])


# -- explained variance ---------------------------------------------------------------------------------------------


def test_explained_variance() -> None:
    rng = np.random.default_rng(0)
    target = rng.normal(size=100).astype(np.float32)
    assert explained_variance(target, target) == 1.0
    assert explained_variance(target + 5, target) == pytest.approx(1.0)  # a constant error is not variance
    assert explained_variance(np.zeros(100, np.float32), target) == pytest.approx(0.0)
    assert explained_variance(-target, target) == pytest.approx(-3.0, rel=1e-4)
    assert np.isnan(explained_variance(target, np.ones(100, np.float32)))
