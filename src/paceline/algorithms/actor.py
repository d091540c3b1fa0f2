"""A worker that only acts: the weights of a learner instead of an algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.algorithms.base import Algorithm
from paceline.collective.group import Group

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.models.acting import MlpActor
    from paceline.spaces import ObservationCodec


def needs_only_weights(config: RunConfig, observation: ObservationCodec) -> bool:
    """Whether an actor of this run needs no more than an MLP and its weights. It then does without torch, which takes
    seconds to import and 200 MB."""
    algorithm, model = config.algorithm, config.model
    inherited = ("networks", "make_policy")
    own = (getattr(algorithm, name).__func__ is not getattr(Algorithm, name).__func__ for name in inherited)
    is_mlp = not observation.images and model.class_ is None and model.memory == "none" and model.accelerate
    return algorithm.acts_by_weights and is_mlp and not any(own)


class Actor:
    """What engines ask of an algorithm in such a worker."""

    def __init__(self, policy: MlpActor, sharing: str) -> None:
        self.policy, self.sharing, self.group = policy, sharing, Group()
        self.version = self.optimizer_steps = 0

    def load_weights(self, weights: dict[str, Any]) -> None:
        self.policy.load_weights(weights)
        self.version = int(weights["version"][0])

    def act_as(self, actor: int, actors: int) -> None:
        return

    def change(self, name: str, value: Any) -> None:
        return

    def set_scratch_dir(self, folder: Path) -> None:
        return
