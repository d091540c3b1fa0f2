"""Several policies that act for the agents of one environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.numpy_mlp import Floats
from paceline.models.policy import Policy
from paceline.spaces import Array
from paceline.team_spaces import Part, TeamSpaces

Scattered = tuple[Array, Floats | None, Floats | None]


class TeamPolicy:
    """Looks like one `Policy` whose rows are those of all agents; each row goes to the policy of its agent."""

    device = torch.device("cpu")
    is_gpu = False
    fast = None

    def __init__(self, team: TeamSpaces, members: dict[str, Policy]) -> None:
        self.team, self.members = team, members
        self.observation, self.action = team.observation, team.action
        self.head = _TeamHead(self)
        self._pairs = [(index, part, members[part.name]) for index, part in enumerate(team.parts)]

    @property
    def parameters(self) -> torch.Tensor:
        """All of them, as a copy."""
        return torch.cat([member.parameters for member in self.members.values()])

    chooses_threads = True

    def use_threads(self, threads: int, rows: int) -> int:
        fast = [member.fast for member in self.members.values() if member.fast is not None]
        return max((net.use_threads(threads, rows) for net in fast), default=1)

    memory_width = 0

    def start_memory(self, num_envs: int) -> None:
        """Several policies have no memory."""
        return None

    def act(self, observation: Array, noise: Floats, memory: None = None) -> Scattered:
        actions = np.zeros((len(observation), *self.action.shape), self.action.dtype)
        logp: Floats = np.zeros(len(observation), np.float32)
        value: Floats = np.zeros(len(observation), np.float32)
        known = True
        for index, part, member in self._pairs:
            rows = self.team.rows(index, len(observation))
            own = member.act(part.read_obs(observation[rows]), noise[rows, : member.head.num_outputs])
            _put(actions, rows, own[0])
            if own[1] is None or own[2] is None:
                known = False
            else:
                logp[rows], value[rows] = own[1], own[2]
        return (actions, logp, value) if known else (actions, None, None)

    def evaluate_actions(self, observation: Array, action: Array) -> tuple[Floats, Floats]:
        logp: Floats = np.zeros(len(observation), np.float32)
        value: Floats = np.zeros(len(observation), np.float32)
        for index, part, member in self._pairs:
            rows = self.team.rows(index, len(observation))
            own = part.read_obs(observation[rows]), part.read_action(action[rows])
            logp[rows], value[rows] = member.evaluate_actions(*own)
        return logp, value

    def greedy(self, observation: Array, memory: None = None) -> Array:
        actions = np.zeros((len(observation), *self.action.shape), self.action.dtype)
        for index, part, member in self._pairs:
            rows = self.team.rows(index, len(observation))
            _put(actions, rows, member.greedy(part.read_obs(observation[rows])))
        return actions

    def value(self, observation: Array, memory: None = None) -> Floats:
        values: Floats = np.zeros(len(observation), np.float32)
        for index, part, member in self._pairs:
            rows = self.team.rows(index, len(observation))
            values[rows] = member.value(part.read_obs(observation[rows]))
        return values

    def of(self, agent: Any) -> tuple[Part, Policy]:
        """The policy that acts for an agent, by its name."""
        number = self.team.agents.index(agent) if agent in self.team.agents else self.team.agents.index(str(agent))
        part = self.team.of_agent[number]
        return part, self.members[part.name]

    def state(self) -> dict[str, NDArray[Any]]:
        return {
            f"{name}/{key}": array for name, member in self.members.items() for key, array in member.state().items()
        }

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        for name, member in self.members.items():
            start = f"{name}/"
            member.load({key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)})


class _TeamHead:
    def __init__(self, policy: TeamPolicy) -> None:
        self._policy = policy

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Random numbers `[*shape, K]`; the last axis of `shape` is that of the rows."""
        policy = self._policy
        wide: Floats = np.zeros((*shape, policy.action.num_outputs), np.float32)
        for index, _, member in policy._pairs:
            rows = policy.team.rows(index, shape[-1])
            wide[..., rows, : member.head.num_outputs] = member.head.noise(rng, (*shape[:-1], len(rows)))
        return wide


def _put(actions: Array, rows: Any, own: Array) -> None:
    actions[rows, : own.shape[1]] = own


def make_team_policy(team: TeamSpaces, make: Callable[[Part, int], Policy], seed: int) -> TeamPolicy:
    """`make(part, seed)`: one of the policies; each has its own seed."""
    seeds = [int(s.generate_state(1)[0]) for s in np.random.SeedSequence(seed).spawn(len(team.parts))]
    return TeamPolicy(team, {part.name: make(part, own) for part, own in zip(team.parts, seeds, strict=True)})
