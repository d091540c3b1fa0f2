"""IMPALA (Espeholt et al., 2018): an actor-critic that learns from rollouts of policies somewhat older than its own.

V-trace corrects the value targets and the policy gradient for the difference. With `surrogate_clip` the policy's loss
is PPO's, which is then known as APPO; with `replay_ratio` it learns from earlier batches too.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from paceline.algo.base import MAX_LOG_RATIO, Algorithm, Floats, Metrics, scaled_rewards
from paceline.algo.optimizers import OPTIMIZERS
from paceline.algo.returns import vtrace
from paceline.config import ImpalaConfig
from paceline.group import Group
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

LOSSES = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl", "importance_mean", "clip_fraction")
CLIPPED = 1.001  # times the bound: rounding alone takes half of the ratios of one and the same policy beyond 1


class Impala(Algorithm):
    schedule = "rollouts"
    hyper: ImpalaConfig

    def __init__(
        self,
        policy: Policy,
        hyper: ImpalaConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        super().__init__(policy, hyper, rng=rng, group=group, normalize_reward=normalize_reward)
        self.optimizer = OPTIMIZERS[hyper.optimizer](policy.parameters, policy.gradient)
        self._earlier: deque[Batch] = deque(maxlen=hyper.replay_batches)

    def update(self, batch: Batch, remaining: float) -> Metrics:
        learning_rate = self.learning_rate(remaining)
        losses, value, target = self.gradients(batch, self._rewards(batch))
        norm = self.apply(learning_rate)
        if self.hyper.replay_ratio:
            self._replay(batch, learning_rate)
        metrics = self.finish(batch, losses, value, target)
        return metrics | {"gradient_norm": norm, "learning_rate": learning_rate, "epochs_done": 1}

    def gradients(self, batch: Batch, reward: Floats) -> tuple[Metrics, Floats, Floats]:
        """The gradient of the loss of a batch into the policy's flat gradient.

        Returns LOSSES, and the values and targets of the valid rows. Each of those weighs `group.size / count`, `count`
        being that of all members.
        """
        hyper, head, valid = self.hyper, self.policy.head, batch.valid
        rows, count = batch.env_steps, sum(self.row_counts(batch.env_steps))
        if not rows:  # the others of the group may have some
            if hyper.normalize_advantage:
                self._normalize(np.zeros(0, np.float32))
            self.policy.gradient.zero_()
            return dict.fromkeys(LOSSES, 0.0), np.zeros(0, np.float32), np.zeros(0, np.float32)
        n = np.float32(self.group.size / count)
        # Only states that are learned or bootstrapped from enter the network: what comes after an end may be no
        # number, and 0 x NaN is NaN.
        learned = np.concatenate([valid, np.zeros_like(valid[:1])])
        needed = learned.copy()
        needed[1:] |= valid & ~batch.terminated
        learned = learned[needed]
        value = np.zeros(needed.shape, np.float32)
        ratios, targets = np.zeros(valid.shape, np.float32), np.zeros(valid.shape, np.float32)
        metrics: Metrics = {}

        def loss(out: Floats, values: Floats) -> tuple[Floats, Floats]:
            log_prob, entropy = head.evaluate(out[:, learned], batch.action[valid])
            log_ratio = np.minimum(log_prob - batch.logp[valid], MAX_LOG_RATIO)
            ratio = np.exp(log_ratio)
            value[needed], ratios[valid] = values, ratio
            advantages, targets[...] = vtrace(
                reward,
                value,
                ratios,
                batch.terminated,
                batch.truncated,
                gamma=hyper.gamma,
                trace_lambda=hyper.trace_lambda,
                clip_rho=hyper.clip_rho,
                clip_c=hyper.clip_c,
            )
            advantage = advantages[valid]
            if hyper.normalize_advantage:
                self._normalize(advantage)  # before it is weighted: a shift then leaves the gradient's mean alone
            policy_loss, d_log_prob = self._policy_loss(log_prob, ratio, advantage)
            error = values[learned] - targets[valid]
            metrics["policy_loss"] = float(policy_loss.sum() * n)
            metrics["value_loss"] = float(np.dot(error, error) * n)
            metrics["entropy"] = float(entropy.sum() * n)
            metrics["approx_kl"] = float((ratio - 1 - log_ratio).sum() * n)
            metrics["importance_mean"] = float(ratio.sum() * n)
            metrics["clip_fraction"] = float(np.count_nonzero(ratio > CLIPPED * hyper.clip_rho) * n)
            d_out, d_value = np.zeros_like(out), np.zeros_like(values)
            d_out[:, learned] = head.gradient(d_log_prob * n, -hyper.entropy_coef * float(n))
            d_value[learned] = error * (2 * np.float32(hyper.value_coef) * n)
            return d_out, d_value

        self.policy.learn_jointly(self.policy.prepare(batch.states(needed)), loss)
        weighted = hyper.value_coef * metrics["value_loss"] - hyper.entropy_coef * metrics["entropy"]
        metrics["total_loss"] = metrics["policy_loss"] + weighted
        return metrics, value[:-1][valid], targets[valid]

    def _policy_loss(self, log_prob: Floats, ratio: Floats, advantage: Floats) -> tuple[Floats, Floats]:
        """Of each row, and its derivative with respect to the log-probability.

        The policy gradient weighs the advantage by the clipped ratio, as a constant. The surrogate does not: the ratio
        is in it already.
        """
        hyper = self.hyper
        if hyper.surrogate_clip is None:
            weighted = np.minimum(ratio, np.float32(hyper.clip_pg_rho)) * advantage
            return -weighted * log_prob, -weighted
        low, high = np.float32(1 - hyper.surrogate_clip), np.float32(1 + hyper.surrogate_clip)
        surrogate = ratio * advantage
        bounded = np.minimum(np.maximum(ratio, low), high) * advantage
        return -np.minimum(surrogate, bounded), -surrogate * (surrogate <= bounded)

    def _replay(self, batch: Batch, learning_rate: float) -> None:
        """Steps on earlier batches, with their rewards at today's scale; then the new one becomes one of them."""
        ratio, pool = self.hyper.replay_ratio, list(self._earlier) or [batch]
        # Their number follows from the version, so that it is the same for all members of a group.
        for _ in range(math.floor((self.version + 1) * ratio) - math.floor(self.version * ratio)):
            earlier = pool[int(self.rng.integers(len(pool)))]
            moments = self._reward_moments
            self.gradients(earlier, earlier.reward if moments is None else scaled_rewards(earlier, moments))
            self.apply(learning_rate)
        self._earlier.append(Batch.join([batch.arrays()]))  # a copy: the collector fills its batch again

    def state(self) -> dict[str, Any]:
        return super().state() | {"earlier": [batch.on_cpu() for batch in self._earlier]}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._earlier.clear()
        self._earlier.extend(Batch.join([arrays]) for arrays in state["earlier"])
