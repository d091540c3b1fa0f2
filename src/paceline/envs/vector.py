"""Vector environments: N environments stepped as one, in Gymnasium's NEXT_STEP autoreset mode.

The step after the end of an episode ignores the action, resets the environment and returns the first observation with
reward 0, so `obs[t+1]` is always the true successor of `obs[t]`.

`SyncVector` (sync_vector.py) steps scalar environments in this process, `AgentsVector` (agents_vector.py) those of
several agents. `NativeVector` (native_vector.py) wraps an environment's own vector implementation, `AsyncVector`
(async_vector.py) uses processes, `PoolVector` (pool.py) the threads of a C++ library.
Each episode of a scalar environment has its own seed, derived from (seed, worker, resumes, environment, episode), so
that a run interrupted in the middle of an episode can replay it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Required, TypedDict

import gymnasium
import numpy as np
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.envs.masks import MaskReader
from paceline.envs.restarts import Restarts
from paceline.spaces import ActionCodec, Array, Channels, ObservationCodec
from paceline.team_spaces import SHARED, Policies, TeamSpaces

RESTART = 1_000_000_000  # resumes that a restart counts as, for its seeds
State = dict[str, Any]  # JSON or arrays
StepResult = tuple[Array, Array, Array, Array]  # observation, reward, terminated, truncated
Env = gymnasium.Env[Any, Any]


class VectorOptions(TypedDict, total=False):
    """Options of every vector environment. `resumes`: how often the run was resumed; `first_env`: the number of this
    worker's environments in earlier vectors; `squash`: see `ActionCodec`; `channels`: see `ObservationCodec`; `masked`:
    whether to use action masks; None: if the environments have any, which may take a first reset to know; `policies`:
    the setting `multi_agent.policies`."""

    seed: Required[int]
    worker: int
    resumes: int
    first_env: int
    squash: bool
    channels: Channels
    policies: Policies
    masked: bool | None


class VectorEnv(ABC):
    """A subclass defines `step`, or both `send` and `receive`. They return internal buffers: copy what must outlive the
    next call."""

    def __init__(
        self,
        num_envs: int,
        observation_space: Any,
        action_space: Any,
        *,
        seed: int,
        worker: int = 0,
        resumes: int = 0,
        first_env: int = 0,
        squash: bool = False,
        channels: Channels = "auto",
        masked: bool | None = None,
        policies: Policies = SHARED,
        agents: Sequence[Any] = (),
        team: TeamSpaces | None = None,
    ) -> None:
        self.num_envs = num_envs
        self.agents = tuple(agents)
        """The names of the agents of each environment; empty for environments of one agent."""
        rows = self.rows = num_envs * max(1, len(self.agents))
        """N: one for each agent of each environment."""
        if policies != SHARED and not agents:
            raise UserError("multi_agent.policies is for environments of several agents; this one has one")
        self.team = team
        """With several agents: their policies, unless all share one."""
        self._entropy: tuple[int, ...] = (seed, worker, resumes)
        self._first_env = first_env
        self.masks: MaskReader | None = None
        if team is None:
            self.action: Any = ActionCodec(action_space, squash=squash)
            self.masks = None if masked is False else self._find_masks(masked)
            mask = self.action.nvec if self.masks else ()
            self.observation: Any = ObservationCodec(observation_space, channels, mask)
        else:
            self.observation, self.action = team.observation, team.action
        self._may_mask = masked is None and self.masks is None
        self._obs: Array = np.zeros((rows, *self.observation.shape), self.observation.dtype)
        self._reward: NDArray[np.float64] = np.zeros(rows)
        self._terminated: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self._truncated: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        several = bool(self.agents)
        self.valid: NDArray[np.bool_] | None = np.zeros(rows, np.bool_) if several else None
        """With several agents: whose row of the last step is a real one."""
        self.stepped: NDArray[np.bool_] | None = np.zeros(num_envs, np.bool_) if several else None
        """With several agents: the environments that the last step did not reset."""
        self.over: NDArray[np.bool_] | None = np.zeros(num_envs, np.bool_) if several else None
        """With several agents: the environments whose episode ended with the last step."""
        self.finished_metrics: list[tuple[int, dict[str, float]]] = []
        """Environment and `info["metrics"]` of finished episodes; the collector empties it."""
        self.note: str = self.observation.note if team is None else ""
        """What users should know about these environments, if anything. Complete after `reset`."""
        self.failed: list[int] = []
        """Environments that failed in the last step and were or will be started again. What the step returned for them
        is no successor of the observation before: at best it is the first observation of another episode. Whoever
        steps the vector empties the list."""
        self.env_restarts = 0
        """Environments started again after a failure; the collector sets it back to 0."""
        self._restarts = Restarts(num_envs, 0)

    def _find_masks(self, masked: bool | None) -> MaskReader | None:
        """How to read action masks, if there are any. `masked`: there must be."""
        return None

    @property
    def first_error(self) -> str:
        """The first failure of all, with its traceback."""
        return self._restarts.first_error

    @abstractmethod
    def reset(self) -> Array: ...

    def step(self, action: Array) -> StepResult:
        """`action [N, *shape]` → observation, reward, terminated, truncated."""
        self.send(action)
        return self.receive()

    def send(self, action: Array) -> None:
        """Start a step. Environments with their own threads or processes work while the caller does something else."""
        self._sent = action.copy()  # the caller may reuse its buffer before `receive`

    def receive(self) -> StepResult:
        """Wait for the step that `send` started."""
        return self.step(self._sent)

    def _buffers(self) -> list[Array]:
        """Where the results of a step are, but for the observations: one or more entries for each environment."""
        several = (self.valid, self.stepped, self.over)
        return [self._reward, self._terminated, self._truncated, *(b for b in several if b is not None)]

    def _use_buffers(self, obs: Array, buffers: Sequence[Array]) -> None:
        """Use these from now on."""
        self._obs = obs
        self._reward, self._terminated, self._truncated, *several = buffers
        if several:
            self.valid, self.stepped, self.over = several

    def by_env(self, result: StepResult) -> tuple[Array, Array]:
        """The rewards of the agents of each environment `[E, A]`, and whether its episode ended `[E]`."""
        _, reward, terminated, truncated = result
        ended = terminated | truncated if self.over is None else self.over.copy()
        return reward.reshape(self.num_envs, -1), ended

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of all environments, also of those that are made later."""
        raise UserError(f"env.{name} cannot be set: the vector env of these environments has no attributes")

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        """Use these seeds from the next `reset` on."""
        self._entropy = (seed, worker, resumes)

    def restart(self) -> Array:
        """Reset amid episodes, with other seeds than before."""
        seed, worker, resumes = self._entropy
        self.reseed(seed, worker, resumes + RESTART)
        return self.reset()

    def state(self) -> State | None:
        """Everything needed to continue exactly; None if the environments cannot be saved."""
        return None

    def restore(self, state: State, observation: Array) -> bool:
        """Return to `state`, in which `observation` was the last one. False: not possible; call `reset`."""
        return False

    def close(self) -> None:
        return None


def seed_from(key: Sequence[int]) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


def part_of(buffer: Array, envs: slice, num_envs: int) -> Array:
    """The entries of some environments."""
    each = len(buffer) // num_envs
    return buffer[envs.start * each : envs.stop * each]


def view(raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Shared memory as an array."""
    return np.frombuffer(raw, dtype, count=math.prod(shape)).reshape(shape)
