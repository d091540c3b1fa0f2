"""Proximal policy optimisation (Schulman et al., 2017), the clipped variant.

Collect a rollout, estimate advantages by GAE, then pass over it `epochs` times in minibatches. The gradient of the loss
with respect to the network's outputs is written out by hand in `gradients`; the network takes it from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.algo.base import MAX_LOG_RATIO, Floats, Metrics, OnPolicy, Rows
from paceline.algo.device import DevicePasses
from paceline.algo.optimizers import Adam
from paceline.config import PPOConfig
from paceline.group import Group
from paceline.model.device import DevicePolicy
from paceline.model.fast import Loss
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

Statistics = NDArray[np.float64]
Learned = tuple[Statistics, float, int]
"""STATISTICS and gradient norm, means of the last pass, and the passes made."""
Order = NDArray[np.int64] | slice
STATISTICS = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl", "clip_fraction")
KL_MARGIN = 1.5


class PPO(OnPolicy):
    schedule = "replicas"
    hyper: PPOConfig

    def __init__(
        self,
        policy: Policy,
        hyper: PPOConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        super().__init__(policy, hyper, rng=rng, group=group, normalize_reward=normalize_reward)
        self.adam = self.optimizer = Adam(policy.parameters, policy.gradient, parts=policy.parts)
        self._passes: DevicePasses | None = None

    def update(self, batch: Batch, remaining: float) -> Metrics:
        return self.begin_update(batch, remaining)()

    def begin_update(self, batch: Batch, remaining: float) -> Callable[[], Metrics]:
        """Learning on a GPU goes on while the caller does something else; what is returned waits for it."""
        hyper = self.hyper
        learning_rate = self.learning_rate(remaining)
        clip = self.scheduled(hyper.clip, hyper.clip_schedule, remaining)
        rows = self.rows(batch)
        plan = self._plan(rows)
        learned = self._begin_passes(rows, plan, clip, learning_rate)

        def end() -> Metrics:
            totals, norm, epochs = learned()
            losses = dict(zip(STATISTICS, totals.tolist(), strict=True))
            metrics = self.finish(batch, losses, rows.fields[1], rows.fields[3])
            passes = {"gradient_norm": norm, "learning_rate": learning_rate, "clip": clip, "epochs_done": epochs}
            return metrics | passes

        return end

    def _begin_passes(self, rows: Rows, plan: Plan, clip: float, learning_rate: float) -> Callable[[], Learned]:
        if plan.parts and self._fits_device():
            return self._begin_on_device(rows, plan, clip, learning_rate)
        learn = self._learn_apart if plan.parts and self._towers_are_apart() else self._learn_together
        outcome = learn(rows, plan, clip, learning_rate)
        return lambda: outcome

    def _fits_device(self) -> bool:
        return isinstance(self.policy, DevicePolicy) and self.group.size == 1 and self.hyper.target_kl is None

    def _begin_on_device(self, rows: Rows, plan: Plan, clip: float, learning_rate: float) -> Callable[[], Learned]:
        assert isinstance(self.policy, DevicePolicy)
        if self._passes is None:
            largest = min(self.hyper.minibatch_size, len(rows.obs.frames))
            self._passes = DevicePasses(self.policy, self.hyper, self.adam, rows=largest)
        orders = [self.rng.permutation(len(rows)) for _ in range(self.hyper.epochs)]
        outcome = self._passes.begin(rows, orders, plan.parts, clip, learning_rate)
        self.optimizer_steps += len(orders) * len(plan.parts)

        def learned() -> Learned:
            totals, norm = outcome()
            return np.asarray(totals), norm, len(orders)

        return learned

    def _learn_together(self, rows: Rows, plan: Plan, clip: float, learning_rate: float) -> Learned:
        """Pass over the rollout."""
        hyper, epochs, on = self.hyper, 0, True
        while on and epochs < hyper.epochs:
            shuffled = rows.take(self._order(rows, plan))
            measure = epochs == hyper.epochs - 1 or hyper.target_kl is not None
            totals, norms, measured, applied = np.zeros(len(STATISTICS)), 0.0, 0, 0
            for part, count in zip(plan.parts, plan.counts, strict=True):
                statistics = self.gradients(shuffled.take(part), count, clip, measure=measure)
                totals += statistics
                measured += 1
                if hyper.target_kl is not None and not self._kl(statistics) <= KL_MARGIN * hyper.target_kl:
                    on = False
                    break
                norms += self.apply(learning_rate)
                applied += 1
            epochs += 1
        return totals / max(measured, 1), norms / max(applied, 1), epochs

    def _kl(self, statistics: Statistics) -> float:
        """Of the minibatch of the whole group: all members come to the same decision."""
        return float(self.group.mean_(torch.tensor([statistics[4]], dtype=torch.float64))[0])

    def _towers_are_apart(self) -> bool:
        """Nothing joins policy and value: no weights, no clipping of a common gradient, no KL stop. And there are two
        members at most, one for each."""
        hyper = self.hyper
        free = hyper.target_kl is None and hyper.max_grad_norm == 0 and len(self.policy.parts) == 2
        return free and self.group.size <= 2

    def _learn_apart(self, rows: Rows, plan: Plan, clip: float, learning_rate: float) -> Learned:
        """The same, with the same minibatches: each tower goes through all passes by itself, which two threads can do
        at once. Or two members: they exchange rows before and towers after it, and no gradients at all.
        """
        fast = self.policy.fast
        assert fast is not None
        orders, parts = [self._order(rows, plan) for _ in range(self.hyper.epochs)], plan.parts
        if self.group.size == 2:
            rows, orders, parts = self._rows_of_both(rows, orders)
        statistics, squares = np.zeros((len(parts), len(STATISTICS))), np.zeros((len(parts), 2))
        flats = [self.policy.gradient[part].numpy() for part in self.policy.parts]

        def work(index: int) -> None:
            tower, flat = fast.towers[index], flats[index]
            for epoch, order in enumerate(orders):
                shuffled, last = rows.take(order), epoch == len(orders) - 1
                for row, part in enumerate(parts):
                    minibatch = shuffled.take(part)
                    count = self.group.size * len(minibatch)  # a row weighs as among all, though all are here
                    loss = self._losses(minibatch, count, clip, statistics[row], measure=last)[index]
                    out = tower.forward(minibatch.obs)
                    tower.backward(loss(out) if index == 0 else loss(out[0])[None])
                    if last:
                        squares[row, index] = np.dot(flat, flat)
                    self.adam.step_part(index, learning_rate)

        if self.group.size == 2:
            work(self.group.rank)
            self._exchange_towers(len(orders) * len(parts), statistics, squares)
        else:
            fast.apart(lambda: work(0), lambda: work(1))
        self.optimizer_steps += len(orders) * len(parts)
        statistics[:, 3] = self._total_loss(statistics)
        return statistics.mean(axis=0), float(np.sqrt(squares.sum(axis=1)).mean()), len(orders)

    def _rows_of_both(self, rows: Rows, orders: list[Order]) -> tuple[Rows, list[Order], list[slice]]:
        """The rows of both members, and the minibatches: of each pass those of the one and of the other, together."""
        counts = self.row_counts(len(rows))
        plans = [Plan.of(counts, rank, self.hyper.minibatch_size) for rank in range(2)]
        width, kind = rows.obs.shape[1], rows.action.dtype
        table = self._from_both(np.hstack([rows.obs, rows.action.astype(np.float32), rows.fields.T]), counts)
        own = np.stack([np.arange(len(rows), dtype=np.float64)[order] for order in orders], axis=1)
        places = self._from_both(own, counts).astype(np.int64)
        places[counts[0] :] += counts[0]
        both = Rows(
            np.ascontiguousarray(table[:, :width]),
            table[:, width:-4].astype(kind),
            np.ascontiguousarray(table[:, -4:].T),
        )
        halves = [places[: counts[0]], places[counts[0] :]]
        order: list[Order] = [
            np.concatenate(
                [
                    half[plan.parts[k], e]
                    for k in range(len(plans[0].parts))
                    for half, plan in zip(halves, plans, strict=True)
                ]
            )
            for e in range(len(orders))
        ]
        bounds = itertools.accumulate(plans[0].counts, initial=0)
        return both, order, [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def _from_both(self, own: NDArray[Any], counts: list[int]) -> NDArray[Any]:
        table = np.zeros((sum(counts), own.shape[1]), own.dtype)
        table[slice(0, counts[0]) if self.group.rank == 0 else slice(counts[0], None)] = own
        self.group.mean_(torch.from_numpy(table))
        table *= 2  # the other half of the mean is zero
        return table

    def _exchange_towers(self, steps: int, statistics: Statistics, squares: Statistics) -> None:
        """Each member has learned one tower: take the other, the optimizer's moments with it."""
        theirs = self.policy.parts[1 - self.group.rank]
        for flat in self.adam.flats(self.policy.parameters):
            flat[theirs] = 0
            self.group.mean_(flat)
            flat *= 2
        self.adam.stepped(1 - self.group.rank, steps)
        for table in (statistics, squares):
            self.group.mean_(torch.from_numpy(table))
            table *= 2

    def _plan(self, rows: Rows) -> Plan:
        return Plan.of(self.row_counts(len(rows)), self.group.rank, self.hyper.minibatch_size)

    def _order(self, rows: Rows, plan: Plan) -> Order:
        return self.rng.permutation(len(rows)) if len(plan.parts) > 1 else slice(None)

    def gradients(self, rows: Rows, count: int, clip: float, *, measure: bool = True) -> Statistics:
        """The gradient of the loss of these rows into the policy's flat gradient; returns STATISTICS if asked to.

        Each row weighs `group.size / count`, `count` being that of the minibatch's rows on all members.
        """
        statistics = np.zeros(len(STATISTICS))
        if not len(rows):  # the others have some
            self.policy.gradient.zero_()
            return statistics
        parts = self.policy.passes(len(rows))
        for part in parts:
            some, sums = (rows.take(part) if len(parts) > 1 else rows), np.zeros(len(STATISTICS))
            self.policy.learn(some.obs, *self._losses(some, count, clip, sums, measure=measure), add=part.start > 0)
            statistics += sums
        statistics[3] = self._total_loss(statistics)
        return statistics

    def _total_loss(self, statistics: Statistics) -> Statistics:
        policy, value, entropy = statistics[..., 0], statistics[..., 1], statistics[..., 2]
        total: Statistics = policy + self.hyper.value_coef * value - self.hyper.entropy_coef * entropy
        return total

    def _losses(
        self, rows: Rows, count: int, clip: float, statistics: Statistics, *, measure: bool
    ) -> tuple[Loss, Loss]:
        """Of policy and value, as gradients with respect to the outputs; they fill in `statistics`."""
        hyper, head = self.hyper, self.policy.head
        old_logp, old_value, advantage, target = rows.fields
        n, low, high = self.group.size / count, np.float32(1 - clip), np.float32(1 + clip)

        def policy_loss(out: Floats) -> Floats:
            log_prob, entropy = head.evaluate(out, rows.action)
            log_ratio = np.minimum(log_prob - old_logp, MAX_LOG_RATIO)
            ratio = np.exp(log_ratio)
            surrogate = ratio * advantage
            # min(ratio A, clip(ratio) A) is flat, so without gradient, where A asks for what the clip already gave.
            bounded = np.minimum(np.maximum(ratio, low), high) * advantage
            d_log_prob = surrogate * (surrogate <= bounded)
            d_log_prob *= np.float32(-n)
            if measure:
                statistics[0] = -np.minimum(surrogate, bounded).sum() * n
                statistics[2] = entropy.sum() * n
                statistics[4] = (ratio - 1 - log_ratio).sum() * n
                statistics[5] = np.count_nonzero((ratio < low) | (ratio > high)) * n
            return head.gradient(d_log_prob, -hyper.entropy_coef * n)

        def value_loss(value: Floats) -> Floats:
            error = value - target
            d_value: Floats = error * np.float32(2 * hyper.value_coef * n)
            if hyper.value_clip is None:
                statistics[1] = np.dot(error, error) * n
                return d_value
            moved = value - old_value
            clipped_error = old_value + np.clip(moved, -hyper.value_clip, hyper.value_clip) - target
            # max(error^2, clipped_error^2): where the clipped one counts, it is flat beyond the clip.
            statistics[1] = np.maximum(error * error, clipped_error * clipped_error).sum() * n
            d_value[(np.abs(clipped_error) > np.abs(error)) & (np.abs(moved) > hyper.value_clip)] = 0
            return d_value

        return policy_loss, value_loss


@dataclass(frozen=True)
class Plan:
    """The minibatches of one pass: as few as fit, all as large as the others."""

    parts: list[slice]
    """Of this member's rows."""
    counts: list[int]
    """Rows of all members in the same minibatch."""

    @classmethod
    def of(cls, rows: list[int], rank: int, largest: int) -> Plan:
        """`rows`: of each member, by rank. `largest`: of the whole group.

        Every member cuts its own rows into as many parts, so that all know all sizes without asking.
        """
        minibatches = -(-sum(rows) // largest)
        cuts = [equal_parts(own, minibatches) for own in rows]
        counts = [sum(part.stop - part.start for part in parts) for parts in zip(*cuts, strict=True)]
        # With more members than rows in a minibatch, one may come out empty for all.
        return cls([p for p, n in zip(cuts[rank], counts, strict=True) if n], [n for n in counts if n])


def equal_parts(rows: int, count: int) -> list[slice]:
    """`count` slices as long as each other to within one row: no tiny last minibatch with a full step."""
    bounds = [rows * k // count for k in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
