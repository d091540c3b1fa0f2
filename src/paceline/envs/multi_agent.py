"""Environments of several agents, brought to one form: the five dictionaries of PettingZoo's parallel API.

Known are PettingZoo's parallel environments, its AEC environments through its own converter, RLlib's `MultiAgentEnv`, a
user's class like one of these, and Gymnasium environments whose spaces are Dicts by agent (mobile-env).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

from paceline.config import UserError
from paceline.envs.contract import layers
from paceline.team_spaces import SHARED, Policies, TeamSpaces

ALL = "__all__"
"""The key of a flag that holds for all agents, as in RLlib."""
Flags = Mapping[Any, bool]
Step = tuple[Mapping[Any, Any], Mapping[Any, float], Flags, Flags, Mapping[Any, Any]]


class AgentsEnv:
    """One environment of several agents. `agents`: the names of all that can take part; each has a row."""

    def __init__(self, env: Any, env_id: str, max_episode_steps: int | None = None) -> None:
        self.env, self._limit, self._steps = _parallel(env, env_id), max_episode_steps, 0
        self.agents = _names(self.env, env_id)
        self.observation_spaces = {name: _space(self.env, "observation_space", name, env_id) for name in self.agents}
        self.action_spaces = {name: _space(self.env, "action_space", name, env_id) for name in self.agents}
        self.metadata: Mapping[str, Any] = getattr(env, "metadata", None) or {}
        self._id = env_id

    def team(self, policies: Policies, **options: Any) -> TeamSpaces | None:
        """The spaces of several policies; None for one that all agents share. `options`: see `TeamSpaces`."""
        if policies == SHARED:
            return None
        observations, actions = list(self.observation_spaces.values()), list(self.action_spaces.values())
        return TeamSpaces(self.agents, observations, actions, policies, **options)

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The space that all agents share."""
        return self._shared("observation space", self.observation_spaces)

    @property
    def action_space(self) -> spaces.Space[Any]:
        return self._shared("action space", self.action_spaces)

    def _shared(self, kind: str, own: dict[Any, spaces.Space[Any]]) -> spaces.Space[Any]:
        first, *others = self.agents
        for other in others:
            if own[other] != own[first]:
                raise UserError(
                    f"env.id={self._id}: the {kind} of {other} is {own[other]}, that of {first} is {own[first]}; one "
                    "policy needs equal spaces: set multi_agent.policies=each, or name policies there"
                )
        return own[first]

    def reset(self, *, seed: int | None = None) -> Any:
        """Observations of the agents that are there, and infos."""
        self._steps = 0
        return self.env.reset(seed=seed)

    def step(self, actions: dict[Any, Any]) -> Any:
        """Five dictionaries by agent. A flag that is no dictionary, and a time limit, become flags for `ALL`."""
        result = self.env.step(actions)
        self._steps += 1
        if not (isinstance(result, tuple) and len(result) == 5):
            return result
        observations, rewards, terminated, truncated, infos = result
        if not isinstance(terminated, Mapping):
            terminated = {ALL: bool(terminated)}
        if not isinstance(truncated, Mapping):
            truncated = {ALL: bool(truncated)}
        if self._limit is not None and self._steps >= self._limit and not terminated.get(ALL, False):
            truncated = {**truncated, ALL: True}
        return observations, rewards, terminated, truncated, infos

    def after(self, result: Step) -> tuple[dict[Any, Any], float, bool]:
        """What a step leads to: the observations of those who act next, the sum of the rewards, whether it is over."""
        observations, rewards, terminated, truncated, _ = result
        here = {
            name: observation
            for name, observation in observations.items()
            if not terminated.get(name) and not truncated.get(name)
        }
        for_all = [flags[ALL] for flags in (terminated, truncated) if ALL in flags]
        return here, float(sum(rewards.values())), any(for_all) if for_all else not here

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def spaces_of(env: Any, options: Any) -> dict[str, Any]:
    """The arguments of a vector environment that tell its spaces. `options`: see `VectorOptions`."""
    if not isinstance(env, AgentsEnv):
        return {"observation_space": env.observation_space, "action_space": env.action_space}
    own = {name: options[name] for name in ("squash", "channels", "masked") if name in options}
    team = env.team(options.get("policies", SHARED), **own)
    if team is not None:
        return {"observation_space": None, "action_space": None, "agents": env.agents, "team": team}
    return {"observation_space": env.observation_space, "action_space": env.action_space, "agents": env.agents}


def has_agents(env: Any) -> bool:
    """Whether an environment has several agents."""
    *_, base = layers(env)
    bases = type(base).__mro__
    if any(b.__module__.partition(".")[0] == "pettingzoo" or b.__name__ == "MultiAgentEnv" for b in bases):
        return True
    if getattr(base, "possible_agents", None):
        return True
    return isinstance(env, gymnasium.Env) and _has_spaces_by_agent(env)


def _has_spaces_by_agent(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether both spaces are Dicts by agent. If the names could also be those of parts, the reward of one step tells:
    it is a dictionary, too."""
    pair = getattr(env, "observation_space", None), getattr(env, "action_space", None)
    if not all(isinstance(space, spaces.Dict) for space in pair):
        return False
    observed, acted = (set(space.spaces) for space in pair if isinstance(space, spaces.Dict))
    if observed != acted:
        return False
    if not all(isinstance(name, str) for name in observed):
        return True
    env.reset(seed=0)
    return isinstance(env.step(env.action_space.sample())[1], Mapping)


def check_agents_step(result: Any, env: AgentsEnv) -> None:
    """Raise UserError for the first fault in what `step` returned."""
    if not (isinstance(result, tuple) and len(result) == 5):
        given = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise UserError(
            "the env's step must return five dictionaries by agent (observations, rewards, terminations, truncations, "
            f"infos), not {given}"
        )
    for part, name in zip(result, ("observations", "rewards", "terminations", "truncations", "infos"), strict=True):
        if not isinstance(part, Mapping):
            raise UserError(f"the env's step returned a {type(part).__name__} as {name}; expected a dict by agent")
    check_names(result[0], env)
    for agent, reward in result[1].items():
        try:
            float(reward)
        except (TypeError, ValueError):
            raise UserError(
                f"the env's step returned a {type(reward).__name__} as the reward of {agent}; expected a number"
            ) from None


def check_names(observations: Mapping[Any, Any], env: AgentsEnv) -> None:
    for name in observations:
        if name not in env.observation_spaces:
            known = ", ".join(map(str, env.agents[:5])) + (", …" if len(env.agents) > 5 else "")
            raise UserError(f"the env returned an observation of {name!r}, which is not in possible_agents ({known})")


def _parallel(env: Any, env_id: str) -> Any:
    """An AEC environment of PettingZoo as a parallel one; others as they are."""
    if not hasattr(env, "agent_iter"):
        return env
    if not getattr(env, "metadata", {}).get("is_parallelizable"):
        raise UserError(
            f"env.id={env_id}: its agents take turns; supported are envs where all act at once (in PettingZoo, "
            "parallel ones and those with `is_parallelizable` in their metadata)"
        )
    from pettingzoo.utils import aec_to_parallel

    return aec_to_parallel(env)


def _names(env: Any, env_id: str) -> tuple[Any, ...]:
    *_, base = layers(env)
    for place in ("possible_agents", "observation_spaces", "agents"):
        found = getattr(base, place, None)
        if found and not callable(found):
            return tuple(found)
    if isinstance(getattr(env, "observation_space", None), spaces.Dict):
        return tuple(env.observation_space.spaces)
    raise UserError(f"env.id={env_id}: the env does not name its agents; set `possible_agents`, a list, in __init__")


def _space(env: Any, kind: str, name: Any, env_id: str) -> spaces.Space[Any]:
    """`kind`: observation_space or action_space. It is a method, a dictionary, or one space for all."""
    *_, base = layers(env)
    own = getattr(env, kind, None)
    found: Any = own(name) if callable(own) and not isinstance(own, spaces.Space) else None
    table = getattr(base, f"{kind}s", None) if found is None else None
    if found is None and isinstance(table, Mapping | spaces.Dict):
        found = table.get(name)
    if found is None and isinstance(own, spaces.Dict | Mapping):
        found = own.get(name)
    if found is None:
        found = own
    if not isinstance(found, spaces.Space):
        raise UserError(f"env.id={env_id}: {name} has no {kind} (a gymnasium.Space); give {kind}s, a dict by agent")
    return found
