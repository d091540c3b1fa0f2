"""Agents with policies of their own: which agents each policy acts for, and one array for all of their rows.

Observations and actions of policies with different spaces share one array of float32, as wide as the widest of them; a
policy uses the first columns of its rows. Rows are in the order of the environments, then of the agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.spaces import MASK, ActionCodec, Array, Channels, Leaf, ObservationCodec, space_from_json, space_to_json

SHARED, EACH = "shared", "each"
Policies = str | Mapping[str, str]
"""The setting `multi_agent.policies`."""


@dataclass(frozen=True)
class Part:
    """A policy and the agents that it acts for, by number."""

    name: str
    agents: tuple[int, ...]
    observation: ObservationCodec
    action: ActionCodec

    def read_obs(self, rows: Array) -> Array:
        """Its observations `[…, *shape]` from padded rows `[…, D]`."""
        own = rows[..., : int(np.prod(self.observation.shape))]
        return own.reshape(*rows.shape[:-1], *self.observation.shape).astype(self.observation.dtype, copy=False)

    def read_action(self, rows: Array) -> Array:
        return rows[..., : self.action.shape[0]].astype(self.action.dtype)


class PaddedObservation:
    """In place of an `ObservationCodec`."""

    images: tuple[Leaf, ...] = ()
    is_image = is_plain = False
    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.size = self.net_size = max(int(np.prod(part.observation.shape)) for part in parts)
        self.shape = self.net_shape = (self.size,)
        self.mask = next((part.observation.mask for part in parts if part.observation.mask), ())
        """Not empty if there are action masks; each part has its own."""


class PaddedAction:
    """In place of an `ActionCodec`."""

    dtype: np.dtype[Any] = np.dtype(np.float32)  # exact for indices, which are below 2^24
    nvec: tuple[int, ...] = ()

    def __init__(self, parts: Sequence[Part]) -> None:
        self.shape = (max(part.action.shape[0] for part in parts),)
        self.num_outputs = max(part.action.num_outputs for part in parts)
        self.space = ", ".join(dict.fromkeys(str(part.action.space) for part in parts))


class TeamSpaces:
    def __init__(
        self,
        agents: Sequence[Any],
        observations: Sequence[spaces.Space[Any]],
        actions: Sequence[spaces.Space[Any]],
        policies: Policies,
        *,
        squash: bool = False,
        channels: Channels = "auto",
        masked: bool | None = None,
    ) -> None:
        """`observations`, `actions`: the spaces of the agents. `policies`: the setting. `masked`: whether to use the
        action masks in Dict observations; None: if there are any."""
        self.agents = tuple(agents)
        groups = assign(self.agents, policies)
        self.parts: list[Part] = []
        for name, numbers in groups.items():
            first = numbers[0]
            for number in numbers:
                if (observations[number], actions[number]) != (observations[first], actions[first]):
                    raise UserError(
                        f"multi_agent.policies: {name} acts for {agents[first]} and {agents[number]}, whose spaces "
                        "differ; give them policies of their own"
                    )
            seen, action = observations[first], ActionCodec(actions[first], squash=squash)
            has_mask = masked is not False and isinstance(seen, spaces.Dict) and MASK in seen.spaces
            observation = ObservationCodec(seen, channels, action.nvec if has_mask else ())
            self.parts.append(Part(name, tuple(numbers), observation, action))
        self.observation: Any = PaddedObservation(self.parts)
        self.action: Any = PaddedAction(self.parts)
        self.of_agent = {number: part for part in self.parts for number in part.agents}
        self.rows = cache(self._rows)

    def _rows(self, part: int, count: int) -> NDArray[np.int64]:
        """Which of `count` rows are those of a part."""
        agents = np.asarray(self.parts[part].agents)
        starts = np.arange(0, count, len(self.agents))
        rows: NDArray[np.int64] = (starts[:, None] + agents).reshape(-1)
        return rows

    def split(self, action: Array) -> list[Any]:
        """One action for each row `[N, k]`, as environments take them."""
        found: list[Any] = [None] * len(action)
        for index, part in enumerate(self.parts):
            rows = self.rows(index, len(action))
            for row, act in zip(rows.tolist(), part.action.split(part.read_action(action[rows])), strict=True):
                found[row] = act
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "agents": [str(agent) for agent in self.agents],
            "policies": {part.name: list(part.agents) for part in self.parts},
            "observation": {part.name: space_to_json(part.observation.space) for part in self.parts},
            "action": {part.name: space_to_json(part.action.space) for part in self.parts},
            "masked": bool(self.observation.mask),
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], *, squash: bool, channels: Channels) -> TeamSpaces:
        names = {number: name for name, numbers in tree["policies"].items() for number in numbers}
        agents = tree["agents"]
        observations, actions = (
            [space_from_json(tree[kind][names[number]]) for number in range(len(agents))]
            for kind in ("observation", "action")
        )
        team = cls(agents, observations, actions, EACH, squash=squash, channels=channels, masked=tree["masked"])
        team.parts = [
            Part(name, tuple(numbers), team.parts[numbers[0]].observation, team.parts[numbers[0]].action)
            for name, numbers in tree["policies"].items()
        ]
        team.of_agent = {number: part for part in team.parts for number in part.agents}
        return team


def assign(agents: Sequence[Any], policies: Policies) -> dict[str, list[int]]:
    """The numbers of the agents of each policy."""
    if policies == EACH:
        return {str(agent): [number] for number, agent in enumerate(agents)}
    assert isinstance(policies, Mapping)
    groups: dict[str, list[int]] = {name: [] for name in policies}
    for number, agent in enumerate(agents):
        found = [name for name, pattern in policies.items() if fnmatchcase(str(agent), pattern)]
        if len(found) != 1:
            given = ", ".join(f"{name}: {pattern}" for name, pattern in policies.items())
            what = f"matches {' and '.join(found)}" if found else "matches none of them"
            raise UserError(f"multi_agent.policies={{{given}}}: agent {agent} {what}; each agent needs one policy")
        groups[found[0]].append(number)
    for name, numbers in groups.items():
        if not numbers:
            known = ", ".join(map(str, agents[:6]))
            raise UserError(f"multi_agent.policies: no agent matches {name}: {policies[name]} (agents: {known})")
    return groups


def describe_agents(agents: Sequence[Any], team: TeamSpaces | None, frozen: Mapping[str, str]) -> list[str]:
    """A line about the agents of each environment and their policies; none for a single agent."""
    if not agents:
        return []
    names = ", ".join(map(str, agents[:4])) + (", …" if len(agents) > 4 else "")
    policies = "one policy for all"
    if team is not None:
        policies = "policies " + ", ".join(
            f"{part.name} of {len(part.agents)}{' (frozen)' if part.name in frozen else ''}" for part in team.parts
        )
    return [f"agents     {len(agents)} in each env ({names}), {policies}"]
