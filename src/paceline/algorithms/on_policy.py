"""Actor-critics that learn from their own policy's rollouts: advantages by GAE, then passes over minibatches."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from paceline.algorithms.autograd import gradient_over_rows
from paceline.algorithms.base import Algorithm, Loss, Metrics
from paceline.algorithms.returns import gae
from paceline.algorithms.rows import Floats, LossRows, Minibatches, Rows
from paceline.config.algorithm_settings import AlgorithmSettings
from paceline.config.values import Fraction
from paceline.lazy import np

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.outputs import Outputs
    from paceline.rollout.batch import Batch


class ActorCriticSettings(AlgorithmSettings):
    normalize_advantage: bool
    """Normalise the advantages of a rollout to mean 0 and standard deviation 1."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss (squared error)."""

    changeable: ClassVar[tuple[str, ...]] = (*AlgorithmSettings.changeable, "entropy_coef", "value_coef")


class OnPolicySettings(ActorCriticSettings):
    gae_lambda: Fraction
    """Lambda of GAE: 0 bootstraps after one step, 1 sums rewards to the end of the rollout."""

    changeable: ClassVar[tuple[str, ...]] = (*ActorCriticSettings.changeable, "gae_lambda")


@dataclass
class PendingUpdate:
    """An update that was begun: on a GPU it may still be under way."""

    batch: Batch
    rows: Rows
    learned: tuple[Metrics, float, int] | None
    """Statistics and gradient norm, means over the last pass, and the passes made; None: ask the GPU."""
    totals: Tensor | None = None


class OnPolicy(Algorithm):
    """Subclasses write `loss`; the default is one optimizer step on each rollout."""

    has_memory = True
    statistics: ClassVar[tuple[str, ...]] = ("policy_loss", "value_loss", "entropy", "total_loss", "approx_kl")
    epochs = 1
    """Passes over a rollout."""
    minibatch_size = 0
    """Maximum rows per optimizer step, of all workers together; 0: the whole rollout."""
    watches_every_step = False
    """Whether `enough` is asked after every minibatch."""
    _gpu: Any = None

    @abstractmethod
    def loss(self, rows: LossRows, out: Outputs) -> Loss: ...

    def enough(self, statistics: Metrics) -> bool:
        """Whether to end the passes before the next step, given the statistics of this minibatch."""
        return False

    # -- an update --------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, remaining: float) -> Metrics:
        return self.end_update(self.begin_update(batch, remaining))

    def begin_update(self, batch: Batch, remaining: float) -> PendingUpdate:
        """Start learning. On a GPU the caller may do something else before `end_update`."""
        self.anneal(remaining)
        rows = self.rows(batch)
        minibatches = self._minibatches(rows)
        if minibatches.parts and self._runs_as_gpu_graph():
            return PendingUpdate(batch, rows, None, self._begin_on_gpu(rows, minibatches))
        return PendingUpdate(batch, rows, self._learn(rows, minibatches))

    def end_update(self, pending: PendingUpdate) -> Metrics:
        learned = pending.learned or self._gpu.result(pending.totals)
        losses, norm, epochs = learned
        metrics = self.finish(pending.batch, losses, pending.rows.value, pending.rows.target)
        return metrics | {"gradient_norm": norm, "epochs_done": epochs, **self.annealed}

    def rows(self, batch: Batch) -> Rows:
        """The valid steps with advantages and value targets; the reward normaliser is brought up to date."""
        return self.estimate(batch, self.rewards(batch))

    def estimate(self, batch: Batch, reward: Floats) -> Rows:
        hyper, valid = self.hyper, batch.valid
        advantage, target = gae(
            reward, batch.value, batch.terminated, batch.truncated, gamma=hyper.gamma, gae_lambda=hyper.gae_lambda
        )
        fields = np.stack([batch.logp[valid], batch.value[:-1][valid], advantage[valid], target[valid]])
        if hyper.normalize_advantage:
            self.normalize(fields[2])
        return Rows(self.inputs(batch, valid), batch.action[valid], fields)

    def _learn(self, rows: Rows, minibatches: Minibatches) -> tuple[Metrics, float, int]:
        """All passes over the rollout."""
        learning_rate, epochs, going = self.annealed["learning_rate"], 0, True
        totals, norms, measured, applied = dict.fromkeys(self.statistics, 0.0), 0.0, 0, 0
        while going and epochs < self.epochs:
            if self.policy.memory_width and len(minibatches.parts) > 1:
                order, minibatches = self._order_sequences(rows, len(minibatches.parts))
            else:
                order = self._order(rows, minibatches)
            shuffled = rows.take(order)
            measure = epochs == self.epochs - 1 or self.watches_every_step
            totals, norms, measured, applied = dict.fromkeys(self.statistics, 0.0), 0.0, 0, 0
            for part, count in zip(minibatches.parts, minibatches.counts, strict=True):
                statistics = self.gradients(shuffled.take(part), count, measure=measure)
                for name, value in statistics.items():
                    totals[name] += value
                measured += 1
                if self.watches_every_step and self.enough(statistics):
                    going = False
                    break
                norms += self.apply(learning_rate)
                applied += 1
            epochs += 1
        means = {name: total / max(measured, 1) for name, total in totals.items()}
        return means, norms / max(applied, 1), epochs

    def _minibatches(self, rows: Rows) -> Minibatches:
        return Minibatches.of(self.row_counts(len(rows)), self.group.rank, self.minibatch_size)

    def _order(self, rows: Rows, minibatches: Minibatches) -> Any:
        """Of the rows in one pass."""
        return self.rng.permutation(len(rows)) if len(minibatches.parts) > 1 else slice(None)

    def _order_sequences(self, rows: Rows, parts: int) -> tuple[Any, Minibatches]:
        """The same for a policy with memory, and minibatches of whole sequences."""
        sequence = rows.obs.sequence
        place = self.rng.permutation(len(rows.obs.memory))
        order = np.argsort(place[sequence], kind="stable")  # a stable order keeps the steps of a sequence in order
        return order, Minibatches.of_sequences(place[sequence[order]], parts, self.group)

    def gradients(self, rows: Rows, count: int, *, measure: bool = True) -> Metrics:
        """The gradient of the loss of a minibatch into the policy's flat gradient; returns the statistics.

        `count`: rows of the minibatch on all members. Without `measure` the statistics may be left out.
        """
        if not len(rows):  # other members have some
            self.policy.gradient.zero_()
            return dict.fromkeys(self.statistics, 0.0)
        weight = self.group.size / count
        if self.accelerator is not None:
            accelerated: Metrics = self.accelerator.gradients(rows, weight, measure=measure)
            return accelerated
        return gradient_over_rows(self, rows, weight)

    # -- on a GPU ---------------------------------------------------------------------------------------------------

    def _runs_as_gpu_graph(self) -> bool:
        return self.policy.is_gpu and self.group.size == 1 and not self.watches_every_step

    def _begin_on_gpu(self, rows: Rows, minibatches: Minibatches) -> Tensor:
        from paceline.algorithms.gpu_passes import GpuPasses

        if self._gpu is None:
            frames = len(rows.obs.frames)
            self._gpu = GpuPasses(self, rows=min(self.minibatch_size or frames, frames))
        orders = [self.rng.permutation(len(rows)) for _ in range(self.epochs)]
        self.optimizer_steps += len(orders) * len(minibatches.parts)
        totals: Tensor = self._gpu.begin(rows, orders, minibatches.parts)
        return totals
