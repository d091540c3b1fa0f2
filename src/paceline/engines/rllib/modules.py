"""RLlib's networks ("modules"), one for each policy, and paceline's copies of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from paceline.config import RunConfig, UserError
from paceline.engines.rllib import settings as rllib_settings
from paceline.engines.rllib.env import MODULE, SHARED_MODULE, with_rllib_spaces
from paceline.engines.rllib.weights import Arrays, from_rllib, to_rllib
from paceline.engines.team import check_frozen, load_frozen
from paceline.envs.contract import check_reset, reset_env
from paceline.envs.masks import INFO, offered
from paceline.envs.multi_agent import AgentsEnv
from paceline.envs.vector import Env
from paceline.models.policy import Policy
from paceline.spaces import MASK, ActionCodec, ObservationCodec, space_to_json
from paceline.team_spaces import SHARED, TeamSpaces, describe_agents
from paceline.training.checkpoint_spaces import make_team


class Modules:
    """`policy`: the copy, one `Policy` or, for several, a `TeamPolicy`. `policy_of`: the module of each agent, empty
    for a single one. `squash`: actions end in tanh."""

    policy: Any

    def __init__(self, config: RunConfig, env: Env | AgentsEnv) -> None:
        """Raises UserError for what RLlib does not support."""
        self._config, self.squash = config, False
        self.team: TeamSpaces | None = None
        self.policy_of: dict[str, str] = {}
        if isinstance(env, AgentsEnv):
            self._read_agents(env)
        else:
            self._read_single(env)
        only = SHARED_MODULE if self.policy_of else MODULE
        members: dict[str, Policy] = {only: self.policy} if self.team is None else self.policy.members
        self._members = {
            name: (member, rllib_settings.convolutions_of(config, member.observation))
            for name, member in members.items()
        }
        self.learning = [name for name in members if name not in config.multi_agent.frozen]

    def _read_single(self, env: Env) -> None:
        config = self._config
        if config.multi_agent.policies != SHARED:
            raise UserError("multi_agent.policies is for environments of several agents; this one has one")
        result = reset_env(env, config.seed)
        check_reset(result, env.observation_space)
        self._refuse_masks(offered(env) or (INFO if MASK in result[1] else ""))
        space = with_rllib_spaces(env, config.env.channels).action_space
        if config.algo == "sac" and not isinstance(space, spaces.Box | spaces.Discrete):
            raise UserError(f"RLlib's SAC supports Box and Discrete actions, but the env has {env.action_space}")
        self.squash = config.algo == "sac" and ActionCodec(env.action_space).is_continuous
        if self.squash and config.eval.stochastic:
            raise UserError(
                "eval.stochastic=true is not supported by sac: paceline's copy of RLlib's policy cannot sample actions"
            )
        self._make_policy(env)

    def _read_agents(self, env: AgentsEnv) -> None:
        config, observations = self._config, list(env.observation_spaces.values())
        if config.algo in rllib_settings.OFF_POLICY:
            raise UserError(
                f"env.id={config.env.id} has several agents, which --engine rllib trains with ppo and impala, not "
                f"{config.algo}: use --engine local or ray"
            )
        for key, value in (("observation", config.env.normalize_observation), ("reward", config.env.normalize_reward)):
            if value:
                raise UserError(f"env.normalize_{key}=true: --engine rllib normalises only for a single agent")
        if config.env.vector == "async":
            raise UserError("env.vector=async: RLlib steps environments of several agents in one process; leave it out")
        infos = reset_env(env, config.seed)[1]
        has_key = any(isinstance(space, spaces.Dict) and MASK in space.spaces for space in observations)
        in_info = any(isinstance(info, Mapping) and MASK in info for info in infos.values())
        self._refuse_masks(f"observation[{MASK!r}]" if has_key else INFO if in_info else "")
        self.team = env.team(config.multi_agent.policies, channels=config.env.channels, masked=False)
        if self.team is None:
            self._make_policy(env)
            self.policy_of = {str(agent): SHARED_MODULE for agent in env.agents}
        else:
            self.policy = make_team(config, self.team)
            check_frozen(config, self.policy)
            load_frozen(config, self.policy)
            self.policy_of = {str(agent): self.team.of_agent[n].name for n, agent in enumerate(env.agents)}

    def _refuse_masks(self, where: str) -> None:
        if where and self._config.env.action_mask == "auto":
            raise UserError(
                f"the env offers {where}, and --engine rllib has no action masks: use --engine local or ray, or set "
                "env.action_mask=ignore to ignore them"
            )

    def _make_policy(self, env: Env | AgentsEnv) -> None:
        config = self._config
        observation = ObservationCodec(env.observation_space, config.env.channels)
        action = ActionCodec(env.action_space, squash=self.squash)
        self.policy = config.algorithm.make_policy(config, observation, action)

    @property
    def has_images(self) -> bool:
        return any(convolutions is not None for _, convolutions in self._members.values())

    def networks(self) -> dict[str, dict[str, Any]]:
        """The arguments of RLlib's model, for each module."""
        return {
            name: rllib_settings.model_of(self._config, convolutions, continuous=member.action.is_continuous)
            for name, (member, convolutions) in self._members.items()
        }

    def parameters(self, algorithm: Any) -> int:
        return sum(
            array.size
            for name in self._members
            for key, array in _weights(algorithm, name).items()
            if not _is_extra(key)
        )

    def read(self, algorithm: Any, **changes: Any) -> None:
        """Copy RLlib's weights. `changes`: of the copy's other arrays."""
        for name, (member, convolutions) in self._members.items():
            state = member.state()
            state |= {key: np.asarray(value) for key, value in changes.items() if key in state}
            member.load(from_rllib(self._config, convolutions, _weights(algorithm, name), state))

    def write(self, algorithm: Any) -> None:
        """Give RLlib the weights of the copy."""
        group = algorithm.learner_group
        group.set_weights(
            {
                name: to_rllib(self._config, convolutions, member.state(), _weights(algorithm, name))
                for name, (member, convolutions) in self._members.items()
            }
        )
        algorithm.env_runner_group.sync_weights(from_worker_or_learner_group=group, inference_only=True)

    def metrics(
        self, learners: Mapping[str, Any], read: Callable[[Mapping[str, Any]], dict[str, float]]
    ) -> dict[str, float]:
        """`read`: the metrics of one learner. Those of several policies as `policy/NAME/METRIC`, beside their means."""
        own = {name: read(learners.get(name, {})) for name in self.learning}
        if self.team is None:
            return next(iter(own.values()))
        metrics = {f"policy/{name}/{key}": value for name, found in own.items() for key, value in found.items()}
        for key in dict.fromkeys(key for found in own.values() for key in found):
            metrics[key] = float(np.mean([found[key] for found in own.values() if key in found]))
        return metrics

    def describe(self) -> list[str]:
        return describe_agents(list(self.policy_of), self.team, self._config.multi_agent.frozen)

    def notes(self) -> list[str]:
        """What users should know about the spaces."""
        notes = [member.observation.note for member, _ in self._members.values()]
        return list(dict.fromkeys(note for note in notes if note))

    def spaces(self) -> dict[str, Any]:
        """For a checkpoint."""
        if self.team is not None:
            return {"team": self.team.to_json()}
        observation, action = self.policy.observation.space, self.policy.action.space
        return {"observation": space_to_json(observation), "action": space_to_json(action)}


def _weights(algorithm: Any, name: str) -> Arrays:
    return {key: np.asarray(array) for key, array in algorithm.learner_group.get_weights()[name].items()}


def _is_extra(name: str) -> bool:
    """Not learned: constants and target networks."""
    return name.endswith("_const") or name.startswith(("_old", "_target", "target"))
