"""What every algorithm's settings have in common, and what engines ask of them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar, Self

from pydantic import Field

from paceline.config.values import Fraction, Positive, Schedule, Section


class AlgorithmSettings(Section):
    """The settings of an algorithm: a section of the configuration named after it.

    A setting `NAME` with a companion `NAME_schedule` is annealed: the algorithm reads its present value from
    `annealed`."""

    rollout_steps: Positive
    """Steps of each environment between updates."""
    learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the optimizer."""
    learning_rate_schedule: Schedule = "constant"
    """`linear` lowers the learning rate to zero over the budget."""
    gamma: Fraction = 0.99
    """Discount factor."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.5
    """Gradients with a larger norm are scaled down to this norm; 0 turns clipping off."""

    changeable: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    """Settings that a callback may change while a run trains: the algorithm reads them anew for each update."""
    largest: ClassVar[str | None] = None
    """The setting to lower when memory runs out."""

    def rows_per_step(self, slots: int) -> int:
        """Rows of one optimizer step. `slots`: steps x environments of a rollout."""
        return slots

    def rows_known_ahead(self, slots: int) -> int:
        """Rows of the optimizer steps whose data is known beforehand, which a second thread may prepare."""
        return self.rows_per_step(slots)

    def rollouts_per_update(self, slots: int) -> int:
        return 1

    def rounds_per_iteration(self) -> int:
        """Rounds of collecting and learning in one iteration, that is for one row of metrics."""
        return 1

    def passes(self) -> int:
        """How often each new row is learned from."""
        return 1

    def replayed(self) -> float:
        """How often, on average, it is learned from again later."""
        return 0.0

    def replay_rows_in_memory(self) -> int:
        return 0

    def has_auto_size(self) -> bool:
        """Whether a size is left to the machine (`auto`)."""
        return False

    def with_auto_size(self, slots: int | None) -> Self:
        """With numbers for sizes left to the machine. `slots`: of a rollout of images, None for vectors."""
        return self

    def fitted(self, slots: int) -> Self:
        """With sizes that a rollout of `slots` rows can fill."""
        return self

    def for_workers(self, workers: int, learning_rate_factor: float) -> Self:
        """Weak scaling: what grows with the number of workers has grown."""
        return self.model_copy(update={"learning_rate": learning_rate_factor * self.learning_rate})

    def for_actors(self, envs: int) -> Self:
        """What an actor with `envs` environments collects before it sends data to the learner."""
        return self

    def sizes_text(self) -> str:
        """The sizes of an update in words, such as `minibatch 256`; empty for a whole rollout."""
        return ""


@cache
def scheduled(settings: type[Section]) -> list[str]:
    """The names of the settings that have a schedule."""
    return [name for name in settings.model_fields if f"{name}_schedule" in settings.model_fields]
