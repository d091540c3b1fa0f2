"""IMPALA (Espeholt et al., 2018): an actor-critic that learns from rollouts of slightly older policies.

V-trace corrects the value targets and the policy gradient for the difference. With `surrogate_clip` the policy's loss
is PPO's (APPO); with `replay_ratio` it learns from earlier batches too.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from paceline.algorithms.autograd import gradient_over_batch
from paceline.algorithms.base import MAX_LOG_RATIO, Algorithm, Loss, Metrics, scaled_rewards
from paceline.algorithms.on_policy import ActorCriticSettings
from paceline.algorithms.optimizers import OPTIMIZERS, Optimizer
from paceline.algorithms.returns import vtrace
from paceline.algorithms.rows import Floats
from paceline.config.values import Fraction, Positive
from paceline.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.outputs import Outputs
    from paceline.rollout.batch import Batch

CLIPPED = 1.001  # times the bound: rounding alone takes half of the ratios of one and the same policy beyond 1


class Trajectories:
    """A batch as V-trace needs it: the states to run the network on, and which of them are learned from."""

    def __init__(self, batch: Batch, reward: Floats, weight: float, device: Any) -> None:
        self.batch, self.reward, self.weight = batch, reward, weight
        valid = batch.valid
        # Only states that are learned or bootstrapped from enter the network: an observation after an end may be NaN,
        # and 0 x NaN is NaN.
        learned = np.concatenate([valid, np.zeros_like(valid[:1])])
        self.needed = learned.copy()  # [T+1, N]
        self.needed[1:] |= valid & ~batch.terminated
        self.learned = learned[self.needed]  # of the needed ones
        self.action, self.log_prob = batch.action[valid], batch.logp[valid]
        self.device = device
        self.value: Floats = np.zeros(self.needed.shape, np.float32)  # [T+1, N], filled in by `IMPALA.vtrace`
        self.target: Floats = np.zeros(valid.shape, np.float32)  # [T, N], likewise

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows that are learned from, of all members together."""
        return values.sum() * self.weight


class IMPALA(Algorithm):
    class Settings(ActorCriticSettings):
        rollout_steps: Positive = 20
        """Steps of each environment in one rollout, which an actor sends to the learner."""
        batch_size: Positive = 512
        """Minimum number of rows per update; whole rollouts are added until it is reached."""
        learning_rate: Annotated[float, Field(gt=0)] = 6e-4
        """Learning rate of the optimizer."""
        optimizer: Literal["rmsprop", "adam"] = "adam"
        """Adam, or RMSprop as in the paper."""
        normalize_advantage: bool = False
        """Normalise the advantages of a batch to mean 0 and standard deviation 1."""
        trace_lambda: Fraction = 1.0
        """Lambda of V-trace, the decay of its traces; 1 in the paper."""
        clip_rho: Annotated[float, Field(gt=0)] = 1.0
        """Maximum importance weight of V-trace's temporal differences. It determines the policy whose values are
        learned."""
        clip_c: Annotated[float, Field(gt=0)] = 1.0
        """Maximum importance weight of V-trace's traces. It determines how fast the values are learned."""
        clip_pg_rho: Annotated[float, Field(gt=0)] = 1.0
        """Maximum importance weight of the policy gradient."""
        surrogate_clip: Annotated[float, Field(gt=0)] | None = None
        """Use PPO's clipped surrogate loss with this clip range instead of the policy gradient (APPO)."""
        replay_ratio: Annotated[float, Field(ge=0, le=1_000)] = 0.0
        """Updates on replayed batches for each update on new data."""
        replay_batches: Positive = 16
        """Number of past batches kept for replay."""

        largest: ClassVar[str | None] = "batch_size"

        def rows_per_step(self, slots: int) -> int:
            return max(self.batch_size, slots)

        def rollouts_per_update(self, slots: int) -> int:
            return math.ceil(self.batch_size / slots)

        def replayed(self) -> float:
            return self.replay_ratio

        def sizes_text(self) -> str:
            return f"batch {self.batch_size}"

    hyper: Settings
    sharing = "rollouts"
    acts_by_weights = True
    several_learners = True
    several_policies = True
    has_memory = True
    rllib = "IMPALA"
    faster_learning = "a larger impala.batch_size"
    statistics = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl", "importance_mean", "clip_fraction")
    metrics: ClassVar[dict[str, str]] = {
        "importance_mean": "IMPALA: mean probability ratio of the learner's policy to the actor's"
    }

    def make_optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.hyper.optimizer](self.policy.parameters, self.policy.gradient)

    def setup(self) -> None:
        self._earlier: deque[Batch] = deque(maxlen=self.hyper.replay_batches)

    def loss(self, rows: Trajectories, out: Outputs) -> Loss:
        hyper, acted = self.hyper, out.select(rows.learned)
        log_prob = acted.log_prob(rows.tensor(rows.action))
        log_ratio = (log_prob - rows.tensor(rows.log_prob)).clamp(max=MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        corrected = self.vtrace(rows, out.value.detach().cpu().numpy(), ratio.detach().cpu().numpy())
        advantage, target = (rows.tensor(array) for array in corrected)
        if hyper.surrogate_clip is None:
            policy_loss = -rows.mean(ratio.detach().clamp(max=hyper.clip_pg_rho) * advantage * log_prob)
        else:
            clipped = ratio.clamp(1 - hyper.surrogate_clip, 1 + hyper.surrogate_clip)
            policy_loss = -rows.mean(torch.minimum(ratio * advantage, clipped * advantage))
        value_loss = rows.mean((acted.value - target).square())
        entropy = rows.mean(acted.entropy())
        loss = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * entropy
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": rows.mean(ratio - 1 - log_ratio),
            "importance_mean": rows.mean(ratio),
            "clip_fraction": rows.mean((ratio > CLIPPED * hyper.clip_rho).float()),
        }

    def vtrace(self, rows: Trajectories, value: Floats, ratio: Floats) -> tuple[Floats, Floats]:
        """Advantages and value targets of the rows that are learned from, `[R]`: constants in the loss.

        `value`: of the needed states. `ratio`: of the rows that are learned from.
        """
        hyper, batch, valid = self.hyper, rows.batch, rows.batch.valid
        ratios = np.zeros(valid.shape, np.float32)
        rows.value[rows.needed], ratios[valid] = value, ratio
        advantages, rows.target = vtrace(
            rows.reward,
            rows.value,
            ratios,
            batch.terminated,
            batch.truncated,
            gamma=hyper.gamma,
            trace_lambda=hyper.trace_lambda,
            clip_rho=hyper.clip_rho,
            clip_c=hyper.clip_c,
        )
        advantage: Floats = advantages[valid]
        if hyper.normalize_advantage:
            self.normalize(advantage)  # before it is weighted: a shift then leaves the gradient's mean alone
        return advantage, rows.target[valid]

    # -- an update --------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, remaining: float) -> Metrics:
        learning_rate = self.anneal(remaining)
        losses, value, target = self.gradients(batch, self.rewards(batch))
        norm = self.apply(learning_rate)
        if self.hyper.replay_ratio:
            self._replay(batch, learning_rate)
        metrics = self.finish(batch, losses, value, target)
        return metrics | {"gradient_norm": norm, "learning_rate": learning_rate, "epochs_done": 1}

    def gradients(self, batch: Batch, reward: Floats) -> tuple[Metrics, Floats, Floats]:
        """The gradient of the loss of a batch into the policy's flat gradient.

        Returns the statistics, and the values and targets of the valid rows.
        """
        count = sum(self.row_counts(batch.rows))
        if not batch.rows:  # other members of the group may have rows
            if self.hyper.normalize_advantage:
                self.normalize(np.zeros(0, np.float32))
            self.policy.gradient.zero_()
            return dict.fromkeys(self.statistics, 0.0), np.zeros(0, np.float32), np.zeros(0, np.float32)
        rows = Trajectories(batch, reward, self.group.size / count, self.policy.device)
        x = self.inputs(batch, rows.needed)
        if self.accelerator is not None:
            metrics: Metrics = self.accelerator.gradients(rows, x)
        else:
            metrics = gradient_over_batch(self, rows, x)
        return metrics, rows.value[:-1][batch.valid], rows.target[batch.valid]

    def _replay(self, batch: Batch, learning_rate: float) -> None:
        """Steps on earlier batches, with their rewards at today's scale; then the new one becomes one of them."""
        ratio, earlier_batches = self.hyper.replay_ratio, list(self._earlier) or [batch]
        # Their number follows from the version, so that it is the same for all members of a group.
        for _ in range(math.floor((self.version + 1) * ratio) - math.floor(self.version * ratio)):
            earlier = earlier_batches[int(self.rng.integers(len(earlier_batches)))]
            moments = self._reward_moments
            self.gradients(earlier, earlier.reward if moments is None else scaled_rewards(earlier.reward, moments))
            self.apply(learning_rate)
        self._earlier.append(batch.join([batch.arrays()]))  # a copy: the collector fills its batch again

    def state(self) -> dict[str, Any]:
        return super().state() | {"earlier": [batch.on_cpu() for batch in self._earlier]}

    def load(self, state: dict[str, Any]) -> None:
        from paceline.rollout.batch import Batch

        super().load(state)
        self._earlier.clear()
        self._earlier.extend(Batch.join([arrays]) for arrays in state["earlier"])
