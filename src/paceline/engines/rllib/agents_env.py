"""Environments of several agents for RLlib's env runners. Imported where RLlib runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.rllib.env.multi_agent_env import MultiAgentEnv

from paceline.config import UserError
from paceline.engines.rllib.env import Coding, own_seed
from paceline.envs.agents_vector import MAX_EMPTY_STEPS
from paceline.envs.contract import read_metrics
from paceline.envs.multi_agent import ALL, AgentsEnv, check_agents_step
from paceline.spaces import ActionCodec, Channels, ObservationCodec


class RllibAgents(MultiAgentEnv):
    """Agents are named by text. Who ends and who comes follows the same rules as `AgentsVector`."""

    def __init__(self, env: AgentsEnv, channels: Channels, runner: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._env, self._runner = env, runner
        self._names = {str(agent): agent for agent in env.agents}
        self._coding = {
            name: Coding(
                ObservationCodec(env.observation_spaces[agent], channels), ActionCodec(env.action_spaces[agent])
            )
            for name, agent in self._names.items()
        }
        self.possible_agents = list(self._names)
        self.agents: list[Any] = []
        self.observation_spaces = {name: coding.observation_space for name, coding in self._coding.items()}
        self.action_spaces = {name: coding.action_space for name, coding in self._coding.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observations, _ = self._env.reset(seed=own_seed(seed, self._runner))
        self._seen: dict[str, Any] = {}  # the last observation of each agent of the episode
        self.agents = self._see(observations)
        return {name: self._seen[name] for name in self.agents}, {}

    def _see(self, observations: Mapping[Any, Any]) -> list[str]:
        names = [str(agent) for agent in observations]
        for name, observation in zip(names, observations.values(), strict=True):
            self._seen[name] = self._coding[name].encode(observation)
        return names

    def step(self, actions: dict[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        acted = list(self.agents)
        over, rewards, ends, cuts, infos = self._advance(actions)
        for _ in range(MAX_EMPTY_STEPS):  # an environment may be without agents for a while
            if over or self.agents:
                break
            over, *_, infos = self._advance({})
        shown = {name: self._seen[name] for name in dict.fromkeys([*acted, *self.agents])}
        ends[ALL] = over and not any(cuts.values())
        cuts[ALL] = over and not ends[ALL]
        return shown, rewards, ends, cuts, {acted[0]: {"metrics": _metrics(infos)}} if over and acted else {}

    def _advance(self, actions: dict[str, Any]) -> tuple[bool, dict[str, float], dict[str, bool], dict[str, bool], Any]:
        result = self._env.step({self._names[name]: self._coding[name].decode(a) for name, a in actions.items()})
        check_agents_step(result, self._env)
        observations, rewards, terminated, truncated, infos = result
        known = set(self._seen)
        names = self._see(observations)
        everyone = bool(terminated.get(ALL)), bool(truncated.get(ALL))
        ends, cuts = {}, {}
        for name in self.agents:
            agent = self._names[name]
            end, cut = bool(terminated.get(agent, everyone[0])), bool(truncated.get(agent, everyone[1]))
            if any(everyone) and not end and not cut:
                end, cut = everyone
            ends[name], cuts[name] = end, not end and (cut or name not in names)
        new = [name for name in names if name not in self.agents and not any(everyone)]
        new = [name for name in new if not terminated.get(self._names[name]) and not truncated.get(self._names[name])]
        for name in known.intersection(new):
            raise UserError(f"agent {name} came back, which RLlib does not support: use --engine local or ray")
        own = {name: float(rewards.get(self._names[name], 0.0)) for name in self.agents}
        self.agents = [name for name in self.agents if not ends[name] and not cuts[name]] + new
        over = any(everyone) or (not self.agents and ALL not in terminated and ALL not in truncated)
        if over:
            self.agents = []
        return over, own, ends, cuts, infos

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


def _metrics(infos: Mapping[Any, Any]) -> list[dict[str, float]]:
    found = [infos, *(info for info in infos.values() if isinstance(info, Mapping))]
    return [read_metrics(info["metrics"]) for info in found if "metrics" in info]
