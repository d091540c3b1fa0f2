"""Proximal policy optimisation (Schulman et al., 2017), the clipped variant.

Collect a rollout, estimate advantages by GAE, then pass over it `epochs` times in minibatches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from paceline.algorithms.base import MAX_LOG_RATIO, Loss, Metrics
from paceline.algorithms.on_policy import OnPolicy, OnPolicySettings
from paceline.algorithms.rows import LossRows
from paceline.config.values import Fraction, OrAuto, Positive, Schedule
from paceline.lazy import torch

if TYPE_CHECKING:
    from typing import Self

    from paceline.models.outputs import Outputs

KL_MARGIN = 1.5
MINIBATCHES, LEAST_ROWS, MOST_ROWS = 4, 256, 2048  # of images, where their size is left to us


class PPO(OnPolicy):
    class Settings(OnPolicySettings):
        rollout_steps: Positive = 128
        """Steps of each environment between updates."""
        epochs: Annotated[Positive, Field(le=10_000)] = 10
        """Passes over each rollout."""
        minibatch_size: OrAuto = 256
        """Maximum number of rows per optimizer step; a rollout is split into equal minibatches no larger than this. 0
        (or `auto`): 256 for vectors; for images a quarter of the rollout, between 256 and 2048."""
        learning_rate: Annotated[float, Field(gt=0)] = 3e-4
        """Learning rate of Adam."""
        gae_lambda: Fraction = 0.95
        """Lambda of GAE: 0 bootstraps after one step, 1 sums rewards to the end of the rollout."""
        normalize_advantage: bool = True
        """Normalise the advantages of a rollout to mean 0 and standard deviation 1."""
        clip: Annotated[float, Field(gt=0)] = 0.2
        """Clip range: how far the probability ratio may move from 1."""
        clip_schedule: Schedule = "constant"
        """`linear` lowers `clip` to zero over the budget."""
        value_clip: Annotated[float, Field(gt=0)] | None = None
        """Clip range of the value: how far it may move from the value predicted at collection."""
        target_kl: Annotated[float, Field(gt=0)] | None = None
        """Stop learning from a rollout when the KL divergence from the policy that collected it exceeds 1.5 times
        this."""

        changeable: ClassVar[tuple[str, ...]] = (*OnPolicySettings.changeable, "clip")
        largest: ClassVar[str | None] = "minibatch_size"

        def rows_per_step(self, slots: int) -> int:
            return min(self.minibatch_size or slots, slots)

        def passes(self) -> int:
            return self.epochs

        def has_auto_size(self) -> bool:
            return self.minibatch_size == 0

        def with_auto_size(self, slots: int | None) -> Self:
            default: int = type(self).model_fields["minibatch_size"].default
            images = min(max((slots or 0) // MINIBATCHES, LEAST_ROWS), MOST_ROWS)
            rows = self.minibatch_size or (default if slots is None else images)
            return self.model_copy(update={"minibatch_size": rows})

        def fitted(self, slots: int) -> Self:
            return self if self.minibatch_size <= slots else self.model_copy(update={"minibatch_size": slots})

        def for_workers(self, workers: int, learning_rate_factor: float) -> Self:
            grown = {"minibatch_size": workers * self.minibatch_size}
            return super().for_workers(workers, learning_rate_factor).model_copy(update=grown)

        def sizes_text(self) -> str:
            return f"minibatch {self.minibatch_size}"

    hyper: Settings
    several_policies = True
    statistics = (*OnPolicy.statistics, "clip_fraction")
    can_overlap = True
    rllib = "PPO"
    faster_learning = "a larger ppo.minibatch_size or fewer ppo.epochs"

    def setup(self) -> None:
        self.epochs, self.minibatch_size = self.hyper.epochs, self.hyper.minibatch_size
        self.watches_every_step = self.hyper.target_kl is not None

    def loss(self, rows: LossRows, out: Outputs) -> Loss:
        hyper, clip = self.hyper, self.annealed["clip"]
        log_ratio = (out.log_prob(rows.action) - rows.log_prob).clamp(max=MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        policy_loss = -rows.mean(torch.minimum(ratio * rows.advantage, clipped * rows.advantage))

        error = (out.value - rows.target).square()
        if hyper.value_clip is not None:
            near = rows.value + (out.value - rows.value).clamp(-hyper.value_clip, hyper.value_clip)
            error = torch.maximum(error, (near - rows.target).square())
        value_loss = rows.mean(error)

        entropy = rows.mean(out.entropy())
        loss = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * entropy
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": rows.mean(ratio - 1 - log_ratio),
            "clip_fraction": rows.mean((ratio != clipped).float()),
        }

    def enough(self, statistics: Metrics) -> bool:
        """The policy has moved too far. All members of a group come to the same decision."""
        assert self.hyper.target_kl is not None
        kl = self.group.mean_(torch.tensor([statistics["approx_kl"]], dtype=torch.float64))
        return not float(kl[0]) <= KL_MARGIN * self.hyper.target_kl
