"""`Batch`: one rollout of T steps in N environments, passed from collecting to learning.

Arrays are time-major, allocated once and filled in place. In NEXT_STEP autoreset `obs[t+1]` is always the true
successor of `obs[t]`, so a truncated episode bootstraps from `value[t+1]`. The step after the end of an episode only
resets the environment: it has `valid=False` and is neither trained on nor counted.

A step in which an environment failed (`env.restart_on_error`) is such a row, too: the step before it is marked as
truncated and bootstraps from the last good observation. If the failed step is the first of a rollout, only its
`valid=False` tells.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.lazy import torch
from paceline.spaces import ActionCodec, Array, ObservationCodec

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Episode:
    """A finished episode: its undiscounted return, from rewards as the environment gave them, and its length."""

    total: float
    length: int
    step: int = 0
    """The step of its rollout at which it ended."""
    agents: int = 1
    """How many agents took part. `total` is the sum over them."""
    policies: dict[str, float] = field(default_factory=dict)
    """With several policies: the mean return of the agents of each that took part."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of a played episode: its `info["metrics"]`, with several agents their means."""


@dataclass
class Batch:
    """One rollout. T: steps, N: environments (with several agents: agents of environments), k: components of an
    action.

    Values and log-probabilities belong to the weights that acted. With prioritised DQN `value` holds the value of the
    best action and `logp` the value of the chosen one. Rows with `valid=False` have reward 0 and an unused action.
    """

    obs: Any  # [T+1, N, …] not normalised, images as uint8; a numpy array, or a tensor on a GPU
    action: Array  # [T, N, k] int64 indices or float32, before `ActionCodec.decode`
    logp: Floats  # [T, N] log-probability of the action
    value: Floats  # [T+1, N] value of the observation
    reward: Floats  # [T, N] not normalised; clipped to [-1, 1] with env.clip_reward
    discounted: Floats  # [T, N] running discounted return of the episode; only for env.normalize_reward
    terminated: Bools  # [T, N]
    truncated: Bools  # [T, N]
    valid: Bools  # [T, N]
    memory: Any = None  # [C, N, S] of a policy with memory, before the first step of each of C sequences
    version: int = 0  # of the weights that acted
    episodes: list[Episode] = field(default_factory=list)  # finished in this rollout
    env_metrics: list[dict[str, float]] = field(default_factory=list)  # `info["metrics"]` of finished episodes
    team_steps: int | None = None  # with several agents: steps of environments, each with a row for every agent
    env_restarts: int = 0  # environments that failed in this rollout and were started again
    env_error: str = ""  # with restarts: the first failure of these environments since the start

    @classmethod
    def empty(cls, steps: int, num_envs: int, observation: ObservationCodec, action: ActionCodec) -> Batch:
        slots, floats, bools = (steps, num_envs), np.float32, np.bool_
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
    def rows(self) -> int:
        """Steps to learn from: valid steps of all agents of all environments."""
        return int(np.count_nonzero(self.valid))

    @property
    def env_steps(self) -> int:
        return self.rows if self.team_steps is None else self.team_steps

    @property
    def agent_steps(self) -> int:
        """`rows` of environments with several agents, otherwise 0."""
        return 0 if self.team_steps is None else self.rows

    def states(self, mask: Bools) -> Any:
        """The observations `[R, …]` selected by `mask`, which is `[T+1, N]` or `[T, N]`."""
        if isinstance(self.obs, np.ndarray):
            return self.obs[: len(mask)][mask]
        from paceline.models.gpu import DeviceRows

        frames = self.obs.flatten(0, 1)
        return DeviceRows(frames, frames.new_tensor(np.flatnonzero(mask), dtype=torch.int64))

    def head(self, steps: int) -> Batch:
        """The first `steps` steps, as views."""
        return replace(
            self,
            **{name: getattr(self, name)[:steps] for name in PER_STEP},
            **{name: getattr(self, name)[: steps + 1] for name in PER_STATE},
        )

    def arrays(self) -> dict[str, Any]:
        """All arrays, by name: what another process needs to learn from the batch."""
        names = (*PER_STATE, *PER_STEP) if self.memory is None else (*PER_STATE, *PER_STEP, "memory")
        return {name: getattr(self, name) for name in names}

    def copied_arrays(self) -> dict[str, Any]:
        """Copies of `arrays`, which the next rollout does not overwrite."""
        return {name: copy.deepcopy(array) for name, array in self.arrays().items()}

    def on_cpu(self) -> dict[str, Array]:
        """`arrays` with the observations in CPU memory."""
        obs = self.obs if isinstance(self.obs, np.ndarray) else self.obs.cpu().numpy()
        return self.arrays() | {"obs": obs}

    @classmethod
    def join(cls, parts: Sequence[dict[str, Any]]) -> Batch:
        """Rollouts of equal length, as one batch with all their environments."""
        joined: dict[str, Any] = {}
        for name in parts[0]:
            arrays = [part[name] for part in parts]
            on_device = not isinstance(arrays[0], np.ndarray)
            joined[name] = torch.cat(arrays, dim=1) if on_device else np.concatenate(arrays, axis=1)
        return cls(**joined)


PER_STATE = ("obs", "value")  # [T+1, N, …]
PER_STEP = ("action", "logp", "reward", "discounted", "terminated", "truncated", "valid")  # [T, N, …]
