"""Proximal policy optimisation (Schulman et al., 2017), the clipped variant.

Collect a rollout, estimate advantages by GAE, then pass over it `epochs` times in minibatches. The gradient of the loss
with respect to the network's outputs is written out by hand in `gradients`; the network takes it from there.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from paceline.algo.base import Algorithm, Floats, Metrics, Rows
from paceline.algo.optimizers import Adam, clip_norm_
from paceline.config import PPOConfig
from paceline.group import Group
from paceline.model.fast import Loss
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

Statistics = NDArray[np.float64]
STATISTICS = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl", "clip_fraction")
KL_MARGIN = 1.5
MAX_LOG_RATIO = np.float32(20)  # the exponential of more is soon infinite


class PPO(Algorithm):
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
        self.hyper = hyper
        self.adam = self.optimizer = Adam(policy.parameters, policy.gradient, parts=policy.parts)

    def update(self, batch: Batch, remaining: float) -> Metrics:
        hyper = self.hyper
        learning_rate = self.scheduled(hyper.learning_rate, hyper.learning_rate_schedule, remaining)
        clip = self.scheduled(hyper.clip, hyper.clip_schedule, remaining)
        rows = self.rows(batch)
        parts = equal_parts(len(rows), hyper.minibatch_size)
        if self._towers_are_apart():
            totals, norm, epochs = self._learn_apart(rows, parts, clip, learning_rate)
        else:
            totals, norm, epochs = self._learn_together(rows, parts, clip, learning_rate)
        metrics = dict(zip(STATISTICS, totals.tolist(), strict=True))
        metrics |= {"gradient_norm": norm, "learning_rate": learning_rate, "clip": clip, "epochs_done": epochs}
        return self.finish(batch, rows, metrics)

    def _learn_together(
        self, rows: Rows, parts: list[slice], clip: float, learning_rate: float
    ) -> tuple[Statistics, float, int]:
        """Pass over the rollout; returns STATISTICS and gradient norm, means of the last pass, and the passes made."""
        hyper, epochs, on = self.hyper, 0, True
        while on and epochs < hyper.epochs:
            shuffled = rows.take(self._order(rows, parts))
            measure = epochs == hyper.epochs - 1 or hyper.target_kl is not None
            totals, norms, measured, applied = np.zeros(len(STATISTICS)), 0.0, 0, 0
            for part in parts:
                statistics = self.gradients(shuffled.take(part), clip, measure=measure)
                totals += statistics
                measured += 1
                if hyper.target_kl is not None and not self.group.all_ok(statistics[4] <= KL_MARGIN * hyper.target_kl):
                    on = False
                    break
                norms += self.apply(learning_rate)
                applied += 1
            epochs += 1
        return totals / max(measured, 1), norms / max(applied, 1), epochs

    def _towers_are_apart(self) -> bool:
        """Nothing joins policy and value: no weights, no clipping of a common gradient, no KL stop, no other member."""
        hyper = self.hyper
        alone = self.group.size == 1 and hyper.target_kl is None and hyper.max_grad_norm == 0
        return alone and len(self.policy.parts) == 2

    def _learn_apart(
        self, rows: Rows, parts: list[slice], clip: float, learning_rate: float
    ) -> tuple[Statistics, float, int]:
        """The same, bit for bit: each tower goes through all passes by itself, which two threads can do at once."""
        fast = self.policy.fast
        assert fast is not None
        orders = [self._order(rows, parts) for _ in range(self.hyper.epochs)]
        statistics, squares = np.zeros((len(parts), len(STATISTICS))), np.zeros((len(parts), 2))
        flats = [self.policy.gradient[part].numpy() for part in self.policy.parts]

        def work(index: int) -> None:
            tower, flat = fast.towers[index], flats[index]
            for epoch, order in enumerate(orders):
                shuffled, last = rows.take(order), epoch == len(orders) - 1
                for row, part in enumerate(parts):
                    minibatch = shuffled.take(part)
                    loss = self._losses(minibatch, clip, statistics[row], measure=last)[index]
                    out = tower.forward(minibatch.obs)
                    tower.backward(loss(out) if index == 0 else loss(out[0])[None])
                    if last:
                        squares[row, index] = np.dot(flat, flat)
                    self.adam.step_part(index, learning_rate)

        fast.apart(lambda: work(0), lambda: work(1))
        self.optimizer_steps += len(orders) * len(parts)
        statistics[:, 3] = self._total_loss(statistics)
        return statistics.mean(axis=0), float(np.sqrt(squares.sum(axis=1)).mean()), len(orders)

    def _order(self, rows: Rows, parts: list[slice]) -> NDArray[np.int64] | slice:
        return self.rng.permutation(len(rows)) if len(parts) > 1 else slice(None)

    def gradients(self, rows: Rows, clip: float, *, measure: bool = True) -> Statistics:
        """The gradient of the loss of these rows into the policy's flat gradient; returns STATISTICS if asked to."""
        statistics = np.zeros(len(STATISTICS))
        self.policy.learn(rows.obs, *self._losses(rows, clip, statistics, measure=measure))
        statistics[3] = self._total_loss(statistics)
        return statistics

    def _total_loss(self, statistics: Statistics) -> Statistics:
        policy, value, entropy = statistics[..., 0], statistics[..., 1], statistics[..., 2]
        total: Statistics = policy + self.hyper.value_coef * value - self.hyper.entropy_coef * entropy
        return total

    def _losses(self, rows: Rows, clip: float, statistics: Statistics, *, measure: bool) -> tuple[Loss, Loss]:
        """Of policy and value, as gradients with respect to the outputs; they fill in `statistics`."""
        hyper, head = self.hyper, self.policy.head
        old_logp, old_value, advantage, target = rows.fields
        n, low, high = 1.0 / len(rows), np.float32(1 - clip), np.float32(1 + clip)

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

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradient of the whole group; returns its length before clipping."""
        self.group.mean_(self.policy.gradient)
        norm = clip_norm_(self.policy.gradient, self.hyper.max_grad_norm)
        self.optimizer.step(learning_rate)
        self.optimizer_steps += 1
        return norm


def equal_parts(rows: int, largest: int) -> list[slice]:
    """As few slices as fit, all as long as the others to within one row: no tiny last minibatch with a full step."""
    count = -(-rows // largest)
    bounds = [rows * k // count for k in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
