"""The currency between collecting and learning: one rollout, time-major, allocated once and filled in place.

T steps of N environments. In NEXT_STEP autoreset `obs[t+1]` is always the true successor of `obs[t]`, so an episode
that was truncated bootstraps from `value[t+1]`, and the one step after each episode that only resets is
`valid=False`: never trained on, never counted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.model.device import DeviceRows
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
    obs: Any  # [T+1, N, …] as the env gave it, images as uint8: an array, or a tensor on a device
    action: Array  # [T, N, k]
    logp: Floats  # [T, N] of the policy that acted; of DQN with priorities what the action is worth to it
    value: Floats  # [T+1, N] of the policy that acted; of DQN with priorities what the best action is worth to it
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

    def states(self, wanted: Bools) -> Any:
        """Observations `[R, …]` of those that are wanted, of `[T+1, N]` or of `[T, N]`."""
        if isinstance(self.obs, np.ndarray):
            return self.obs[: len(wanted)][wanted]
        frames = self.obs.flatten(0, 1)
        return DeviceRows(frames, frames.new_tensor(np.flatnonzero(wanted), dtype=torch.int64))

    def head(self, steps: int) -> Batch:
        """The first `steps` steps, as views."""
        return replace(
            self,
            **{name: getattr(self, name)[:steps] for name in PER_STEP},
            **{name: getattr(self, name)[: steps + 1] for name in PER_STATE},
        )

    def arrays(self) -> dict[str, Any]:
        """What another process needs to learn from it."""
        return {name: getattr(self, name) for name in (*PER_STATE, *PER_STEP)}

    def copied_arrays(self) -> dict[str, Any]:
        """The same, which the collector does not write over."""
        return {name: copy.deepcopy(array) for name, array in self.arrays().items()}

    def on_cpu(self) -> dict[str, Array]:
        """The same as arrays only."""
        obs = self.obs if isinstance(self.obs, np.ndarray) else self.obs.cpu().numpy()
        return self.arrays() | {"obs": obs}

    @classmethod
    def join(cls, parts: Sequence[dict[str, Any]]) -> Batch:
        """Rollouts of as many steps each, side by side as one of more environments."""
        joined: dict[str, Any] = {}
        for name in (*PER_STATE, *PER_STEP):
            arrays = [part[name] for part in parts]
            on_device = isinstance(arrays[0], torch.Tensor)
            joined[name] = torch.cat(arrays, dim=1) if on_device else np.concatenate(arrays, axis=1)
        return cls(**joined)


PER_STATE = ("obs", "value")  # [T+1, N, …]
PER_STEP = ("action", "logp", "reward", "discounted", "terminated", "truncated", "valid")  # [T, N, …]
