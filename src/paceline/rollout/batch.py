"""The currency between collecting and learning: one rollout, time-major, allocated once and filled in place.

T steps of N environments. In NEXT_STEP autoreset `obs[t+1]` is always the true successor of `obs[t]`, so an episode
that was truncated bootstraps from `value[t+1]`, and the one step after each episode that only resets is
`valid=False`: never trained on, never counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.spaces import ActionCodec, Array, ObservationCodec

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Episode:
    """A finished episode: the raw return and the number of steps."""

    total: float
    length: int


@dataclass
class Batch:
    obs: Array  # [T+1, N, …] as the env gave it, images as uint8
    action: Array  # [T, N, k]
    logp: Floats  # [T, N] of the policy that acted
    value: Floats  # [T+1, N] of the policy that acted
    reward: Floats  # [T, N] raw
    discounted: Floats  # [T, N] running discounted return of the episode, if rewards are normalised
    terminated: Bools  # [T, N]
    truncated: Bools  # [T, N]
    valid: Bools  # [T, N]
    version: int = 0  # of the weights that acted
    episodes: list[Episode] = field(default_factory=list)  # those that finished in this rollout
    env_metrics: list[dict[str, float]] = field(default_factory=list)  # what the environments said of them

    @classmethod
    def empty(cls, steps: int, num_envs: int, observation: ObservationCodec, action: ActionCodec) -> Batch:
        floats, bools = np.float32, np.bool_
        slots = (steps, num_envs)
        return cls(
            obs=np.zeros((steps + 1, num_envs, *observation.shape), observation.dtype),
            action=np.zeros((*slots, *action.shape), action.dtype),
            logp=np.zeros(slots, floats),
            value=np.zeros((steps + 1, num_envs), floats),
            reward=np.zeros(slots, floats),
            discounted=np.zeros(slots, floats),
            terminated=np.zeros(slots, bools),
            truncated=np.zeros(slots, bools),
            valid=np.zeros(slots, bools),
        )

    @property
    def env_steps(self) -> int:
        return int(np.count_nonzero(self.valid))

    def head(self, steps: int) -> Batch:
        """The first `steps` steps, as views."""
        return replace(
            self,
            **{name: getattr(self, name)[:steps] for name in PER_STEP},
            **{name: getattr(self, name)[: steps + 1] for name in PER_STATE},
        )

    def arrays(self) -> dict[str, Array]:
        """What another process needs to learn from it."""
        return {name: getattr(self, name) for name in (*PER_STATE, *PER_STEP)}

    @classmethod
    def join(cls, parts: Sequence[dict[str, Array]]) -> Batch:
        """Rollouts of as many steps each, side by side as one of more environments."""
        joined: dict[str, Any] = {
            name: np.concatenate([part[name] for part in parts], axis=1) for name in (*PER_STATE, *PER_STEP)
        }
        return cls(**joined)


PER_STATE = ("obs", "value")  # [T+1, N, …]
PER_STEP = ("action", "logp", "reward", "discounted", "terminated", "truncated", "valid")  # [T, N, …]
