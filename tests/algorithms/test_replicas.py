"""Several members that each hold a part of the rows learn what one process that holds all of them learns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.a2c import A2C
from paceline.algorithms.impala import IMPALA
from paceline.algorithms.ppo import PPO
from paceline.algorithms.rows import Minibatches, Rows
from paceline.collective.group import Group

SHARES = [[6], [2, 4], [1, 4, 1], [3, 3]]
PPO_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"normalize_advantage": False, "max_grad_norm": 0.0},
    "everything": {"value_clip": 0.2, "max_grad_norm": 0.3, "entropy_coef": 0.01, "target_kl": 10.0},
    "stops": {"target_kl": 0.004, "learning_rate": 5e-3},
}


class Told(PPO):
    """Is told its minibatches and the order of its rows in each pass."""

    orders: list[Any]
    plan: Minibatches | None = None

    def _minibatches(self, rows: Rows) -> Minibatches:
        return super()._minibatches(rows) if self.plan is None else self.plan

    def _order(self, rows: Rows, plan: Minibatches) -> Any:
        return self.orders.pop(0)


def orders(
    batches: list[Any], minibatch: int, epochs: int, seed: int
) -> tuple[list[list[Any]], list[Any], Minibatches]:
    """Random orders for each member; and the order and minibatches of one process that come to the same."""
    rng = np.random.default_rng(seed)
    counts = [batch.env_steps for batch in batches]
    valid = np.concatenate([batch.valid for batch in batches], axis=1)
    number = np.where(valid, np.cumsum(valid).reshape(valid.shape) - 1, -1)  # of each row in the whole rollout
    stops = np.cumsum([batch.valid.shape[1] for batch in batches])
    numbers = [
        number[:, stop - batch.valid.shape[1] : stop][batch.valid] for batch, stop in zip(batches, stops, strict=True)
    ]
    plans = [Minibatches.of(counts, rank, minibatch) for rank in range(len(batches))]
    own = [[rng.permutation(count) for _ in range(epochs)] for count in counts]
    whole = [
        np.concatenate(
            [
                numbers[member][own[member][epoch][plan.parts[k]]]
                for k in range(len(plans[0].parts))
                for member, plan in enumerate(plans)
            ]
        )
        for epoch in range(epochs)
    ]
    bounds = np.cumsum([0, *plans[0].counts]).tolist()
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    return own, whole, Minibatches(parts, plans[0].counts)


def same(metrics: dict[str, float], other: dict[str, float]) -> None:
    assert metrics.keys() == other.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(other[name], rel=1e-3, abs=1e-4, nan_ok=True), name


def check(policies: list[Any], whole: Any, results: list[Any], metrics: dict[str, float]) -> None:
    for policy in policies:
        assert torch.equal(policy.parameters, policies[0].parameters)  # to the last bit
        np.testing.assert_allclose(policy.parameters, whole.parameters, rtol=1e-4, atol=1e-5)
        if whole.moments is not None:
            np.testing.assert_array_equal(policy.moments.var, policies[0].moments.var)
            np.testing.assert_allclose(policy.moments.mean, whole.moments.mean, rtol=1e-9)
            np.testing.assert_allclose(policy.moments.var, whole.moments.var, rtol=1e-9)
    for own in results:
        assert own == results[0] or any(np.isnan(v) for v in own.values())
        same(own, metrics)


@pytest.mark.parametrize("options", PPO_OPTIONS)
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(("net", "action", "normalize"), [("mlp", "gaussian", True), ("shared", "discrete", False)])
def test_ppo(lab: Any, shares: list[int], options: str, net: str, action: str, normalize: bool) -> None:
    hyper = PPO.Settings(epochs=3, minibatch_size=17, **PPO_OPTIONS[options])
    table, group = lab.members(len(shares))
    whole = lab.policy(net, action, normalize=normalize)
    policies = [lab.policy(net, action, normalize=normalize) for _ in shares]
    rng = np.random.default_rng(0)
    one = Told(whole, hyper, rng=rng, normalize_reward=normalize)
    replicas = [
        Told(policy, hyper, rng=rng, group=member, normalize_reward=normalize)
        for policy, member in zip(policies, group, strict=True)
    ]
    for seed in range(2):  # the second with the normalisers of the first
        batch = lab.batch(lab.policy(net, action, normalize=normalize), 12, 6, seed=seed)
        parts = lab.split(batch, shares)
        assert len(shares) < 3 or len({part.env_steps for part in parts}) > 1
        own, one.orders, one.plan = orders(parts, 17, 3, seed)
        for replica, told in zip(replicas, own, strict=True):
            replica.orders = told
        metrics = one.update(batch, 0.8)
        work = [lambda r=r, p=p: r.update(p, 0.8) for r, p in zip(replicas, parts, strict=True)]
        results = lab.together(work, table)
        check(policies, whole, results, metrics)
    assert {replica.optimizer_steps for replica in replicas} == {one.optimizer_steps}
    if options == "stops":
        assert metrics["epochs_done"] < 3
        assert one.optimizer_steps > 0
    else:
        assert one.optimizer_steps == 2 * 3 * len(one.plan.parts) > 6


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_a2c(lab: Any, shares: list[int], optimizer: str) -> None:
    hyper = A2C.Settings(
        learning_rate=1e-2, optimizer=optimizer, max_grad_norm=0.2, normalize_advantage=True, entropy_coef=0.01
    )
    learn_alike(lab, A2C, hyper, shares)


@pytest.mark.parametrize("surrogate", [None, 0.1])
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_impala(lab: Any, shares: list[int], surrogate: float | None) -> None:
    hyper = IMPALA.Settings(learning_rate=1e-2, normalize_advantage=True, entropy_coef=0.01, surrogate_clip=surrogate)
    learn_alike(lab, IMPALA, hyper, shares)


def learn_alike(lab: Any, algorithm: Any, hyper: Any, shares: list[int]) -> None:
    table, group = lab.members(len(shares))
    whole = lab.policy("mlp", "gaussian", normalize=True)
    policies = [lab.policy("mlp", "gaussian", normalize=True) for _ in shares]
    one = algorithm(whole, hyper, rng=np.random.default_rng(0), normalize_reward=True)
    replicas = [
        algorithm(policy, hyper, rng=np.random.default_rng(member.rank), group=member, normalize_reward=True)
        for policy, member in zip(policies, group, strict=True)
    ]
    for seed in range(3):
        batch = lab.batch(lab.policy("mlp", "gaussian", normalize=True), 12, 6, seed=seed)
        metrics = one.update(batch, 1.0)
        work = [lambda r=r, p=p: r.update(p, 1.0) for r, p in zip(replicas, lab.split(batch, shares), strict=True)]
        check(policies, whole, lab.together(work, table), metrics)
    assert {replica.optimizer_steps for replica in replicas} == {3}
    assert {replica.fingerprint() for replica in replicas} == {replicas[0].fingerprint()}


@pytest.mark.parametrize("empty", [[0], [0, 1]])
@pytest.mark.parametrize("algorithm", [PPO, A2C, IMPALA])
def test_members_without_a_single_row(lab: Any, algorithm: Any, empty: list[int]) -> None:
    """They take part in every collective, and the others learn as if they were not there."""
    options: dict[str, Any] = {"learning_rate": 1e-2, "normalize_advantage": True}
    hyper = {
        PPO: PPO.Settings(epochs=2, minibatch_size=1000, target_kl=10.0, **options),
        A2C: A2C.Settings(**options),
        IMPALA: IMPALA.Settings(**options),
    }[algorithm]
    table, group = lab.members(2)
    whole, policies = lab.policy(normalize=True), [lab.policy(normalize=True) for _ in group]
    batch = lab.batch(whole, 10, 5)
    parts = lab.split(batch, [2, 3])
    for index in empty:
        parts[index].valid[:] = False
    batch.valid[:] = np.concatenate([part.valid for part in parts], axis=1)
    one = algorithm(whole, hyper, rng=np.random.default_rng(0), normalize_reward=True)
    metrics = one.update(batch, 1.0)
    replicas = [
        algorithm(policy, hyper, rng=np.random.default_rng(1), group=member, normalize_reward=True)
        for policy, member in zip(policies, group, strict=True)
    ]
    work = [lambda r=r, p=p: r.update(p, 1.0) for r, p in zip(replicas, parts, strict=True)]
    check(policies, whole, lab.together(work, table), metrics)


def test_the_group_stops_on_its_mean_divergence_and_not_on_one_member_s(lab: Any) -> None:
    """One member is far from the policy that acted, the other is not: only the mean counts, as in one process."""
    steps = []
    for limit in (0.4, 0.6):
        table, group = lab.members(2)
        policies = [lab.policy() for _ in group]
        parts = lab.split(lab.batch(lab.policy(), 10, 4, ends=0.0), [2, 2])
        for part in parts:
            part.valid[:] = True
        replicas = []
        for policy, member, part in zip(policies, group, parts, strict=True):
            hyper = PPO.Settings(epochs=1, minibatch_size=1000)
            alone = PPO(policy, hyper, rng=np.random.default_rng(0))
            kl = 1.0
            while kl < 2.0 and member.rank == 0:  # log-probabilities of a policy further and further away
                part.logp -= np.float32(0.05)
                rows = alone.rows(part)
                kl = alone.gradients(rows, len(rows))["approx_kl"]
            limited = PPO.Settings(epochs=1, minibatch_size=1000, target_kl=limit * kl / 1.5)
            replicas.append(PPO(policy, limited, rng=np.random.default_rng(0), group=member))
        replicas[1].hyper = replicas[0].hyper
        work = [lambda r=r, p=p: r.update(p, 1.0) for r, p in zip(replicas, parts, strict=True)]
        lab.together(work, table)
        steps.append([replica.optimizer_steps for replica in replicas])
    assert steps == [[0, 0], [1, 1]]  # the mean is half of the one member's


def test_as_many_replays_for_every_member(lab: Any) -> None:
    table, group = lab.members(2)
    policies = [lab.policy() for _ in group]
    hyper = IMPALA.Settings(replay_ratio=0.7, replay_batches=3)
    replicas = [
        IMPALA(policy, hyper, rng=np.random.default_rng(member.rank), group=member)
        for policy, member in zip(policies, group, strict=True)
    ]
    for seed in range(10):
        parts = lab.split(lab.batch(policies[0], 8, 4, seed=seed), [1, 3])
        lab.together([lambda r=r, p=p: r.update(p, 1.0) for r, p in zip(replicas, parts, strict=True)], table)
        if seed == 4:  # one that has just joined has seen no earlier batch
            replicas[1].load(replicas[1].state() | {"earlier": []})
    assert [replica.optimizer_steps for replica in replicas] == [17, 17]
    assert torch.equal(policies[0].parameters, policies[1].parameters)


def test_collectives_of_an_update_are_few(lab: Any) -> None:
    """One for the rows (a gather), one for each gradient, one for the metrics, and those of what was turned on."""
    table, group = lab.members(2)
    policies = [lab.policy() for _ in group]
    parts = lab.split(lab.batch(policies[0], 12, 6), [2, 4])
    hyper = PPO.Settings(epochs=2, minibatch_size=20, normalize_advantage=False)
    replicas = [
        PPO(policy, hyper, rng=np.random.default_rng(0), group=member)
        for policy, member in zip(policies, group, strict=True)
    ]
    lab.together([lambda r=r, p=p: r.update(p, 1.0) for r, p in zip(replicas, parts, strict=True)], table)
    steps, flat = replicas[0].optimizer_steps, tuple(policies[0].parameters.shape)
    assert group[0].calls == [flat] * steps + [(12,)]


def test_alone_is_a_group_of_one(lab: Any) -> None:
    _, group = lab.members(1)
    results = []
    for member in (Group(), group[0]):
        policy = lab.policy(normalize=True)
        hyper = PPO.Settings(epochs=2, minibatch_size=20, target_kl=1.0)
        algorithm = PPO(policy, hyper, rng=np.random.default_rng(0), group=member, normalize_reward=True)
        results.append((algorithm.update(lab.batch(policy), 1.0), policy.parameters))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
