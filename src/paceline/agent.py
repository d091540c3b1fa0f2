"""A trained agent. It needs only a checkpoint, not the environment or the training script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from paceline.config import RunConfig, UserError
from paceline.config.resolve import to_tree, validate
from paceline.envs.make import make_env
from paceline.envs.masks import MaskReader, find_masks
from paceline.envs.multi_agent import AgentsEnv
from paceline.run import checkpoint
from paceline.run.kept_objects import adopt_objects, read_objects
from paceline.run.state_tree import pack, unpack
from paceline.spaces import MASK, Array
from paceline.training.checkpoint_spaces import make_team, read_spaces


@dataclass(frozen=True)
class Opinion:
    """What a policy thinks of an observation. For a batch, each field has an entry for each observation."""

    action: Any
    """The most likely action."""
    value: Any = None
    """The expected discounted return, if the algorithm learns it; for DQN, of the best action."""
    probabilities: Any = None
    """Of each action; a list of them where an action consists of several choices."""
    action_values: Any = None
    """DQN: the value of each action."""
    mean: Any = None
    """Continuous actions: mean of the normal, before it is scaled to the bounds."""
    std: Any = None
    """Continuous actions: standard deviation of the normal."""

    def __repr__(self) -> str:
        known = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"Opinion({', '.join(known)})"


class Agent:
    """A trained agent: `act` maps an observation of the environment to an action for it."""

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        arrays, tree = checkpoint.load(path)
        self.place = path if path.is_file() else path.parent.parent
        """The run directory, or the file that `save` has written."""
        adopt_objects(self.place)
        try:
            state = unpack(arrays, {key: tree[key] for key in ("engine", "loop")})
            self.config: RunConfig = validate(tree["config"])
            if state["engine"].get("squash"):  # set by the algorithm, regardless of the settings
                model = self.config.model.model_copy(update={"squash": True})
                self.config = self.config.model_copy(update={"model": model})
            observation, action, team = read_spaces(state["engine"]["spaces"], self.config)
            weights = state["engine"]["algorithm"]["policy"]
        except (KeyError, TypeError) as error:
            raise UserError(f"checkpoint {path} is not from a paceline run: it has no {error}") from None
        self.path, self.state = path, state
        self.has_noise = not state["engine"].get("without_noise", False)
        """Whether actions can be sampled; from RLlib's SAC only the most likely action is available."""
        self.policy: Any
        if team is not None:
            self.policy = make_team(self.config, team)
        else:
            self.policy = self.config.algorithm.make_policy(self.config, observation, action)
        self.policy.load(weights)
        self._rng = np.random.default_rng(seed)
        self._memory: dict[Any, Array] = {}  # of each agent; None: the only one

    @property
    def counters(self) -> dict[str, int]:
        """Iterations, environment steps and episodes of the checkpoint."""
        counters: dict[str, int] = self.state["loop"]["counters"]
        return counters

    def __repr__(self) -> str:
        algo, env = self.config.algorithm_name, self.config.env.id
        spaces = f"{_short(self.observation_space)} → {_short(self.action_space)}"
        return f"<Agent of {algo} for {env}: {spaces}; {self.path}, {self.counters['env_steps']:,} steps>"

    @property
    def observation_space(self) -> Any:
        """Of the environment; with several policies, by agent."""
        return self._of_agents(lambda policy: policy.observation.space)

    @property
    def action_space(self) -> Any:
        """Of the environment; with several policies, by agent."""
        return self._of_agents(lambda policy: policy.action.space)

    def _of_agents(self, of: Callable[[Any], Any]) -> Any:
        from paceline.models.team import TeamPolicy

        if not isinstance(self.policy, TeamPolicy):
            return of(self.policy)
        return {name: of(self._policy_of(name)) for name in self.policy.team.agents}

    def act(
        self,
        observation: Any,
        *,
        deterministic: bool = True,
        mask: Any = None,
        batch: bool | None = None,
        agent: Any = None,
    ) -> Any:
        """The action for one observation, or a list of actions for a batch of observations, as a vector environment
        gives them. `deterministic`: the most likely action, otherwise a sampled one. `mask`: which actions are valid,
        for a policy that was trained with masks (for a batch, one each); a Dict observation may contain it. `batch`:
        whether it is one; default: by its shape. `agent`: whose observation it is, in an environment of several agents
        that have memory or policies of their own.

        An agent with memory remembers what it has seen: call `reset` when an episode begins."""
        self.check(stochastic=not deterministic)
        policy = self._policy_of(agent)
        rows, is_batch = self._rows(observation, mask, batch, agent)
        memory = self._memory_of(len(rows), agent)
        if deterministic:
            action = policy.greedy(rows, memory)
        else:
            action, _, _ = policy.act(rows, policy.head.noise(self._rng, (len(rows),)), memory)
        actions = policy.action.split(action)
        return actions if is_batch else actions[0]

    def inspect(self, observation: Any, *, mask: Any = None, batch: bool | None = None, agent: Any = None) -> Opinion:
        """What the policy thinks of an observation, or of a batch: `action`, the most likely one; `value`, if the
        algorithm learns it; `probabilities` of the actions, or `mean` and `std` of continuous ones, or `action_values`
        for DQN; what does not apply is None. The arguments are those of `act`; an agent with memory does not remember
        the observation."""
        policy = self._policy_of(agent)
        rows, is_batch = self._rows(observation, mask, batch, agent)
        memory = self._memory_of(len(rows), agent)
        out, values = policy.outputs(rows, None if memory is None else memory.copy())
        actions = policy.action.split(policy.head.mode(out))

        def shown(part: Array) -> Array:
            return part if is_batch else part[0]

        found: dict[str, Any] = {}
        for name, parts in policy.head.describe(out).items():
            found[name] = shown(parts[0]) if len(parts) == 1 else [shown(part) for part in parts]
        value = (values if is_batch else float(values[0])) if self.config.algorithm.has_value else None
        return Opinion(action=actions if is_batch else actions[0], value=value, **found)

    def save(self, path: str | Path) -> Path:
        """Write what acting needs into one file, for `paceline.load`. An algorithm or network in a file of yours must
        be there when the agent is loaded."""
        path, engine = Path(path).expanduser(), self.state["engine"]
        kept = {name: engine[name] for name in ("spaces", "squash", "without_noise") if name in engine}
        kept["algorithm"] = {"policy": engine["algorithm"]["policy"]}
        arrays, tree = pack({"engine": kept, "loop": {"counters": self.counters}})
        objects = read_objects(self.place)
        extra = {} if objects is None else {"objects.json": objects}
        checkpoint.save_file(path, arrays, tree | {"config": to_tree(self.config)}, extra)
        return path

    def _rows(self, observation: Any, mask: Any, batch: bool | None, agent: Any) -> tuple[Array, bool]:
        """Observations and masks as the policy takes them, and whether they are a batch."""
        if batch is None:
            space, part = self._policy_of(agent).observation.space, observation
            for key in self._policy_of(agent).observation.leaves[0].path:
                space, part = space[key], part[key]
            batch = np.ndim(part) > len(space.shape)
        rows = self._encode_batch(observation, mask) if batch else self.encode(observation, mask, agent)[None]
        return rows, batch

    def reset(self, which: Any = None) -> None:
        """Forget what was seen, when episodes begin. `which`: in a batch, the environments whose episodes begin, as
        indices or as a mask; default: all. Without memory this does nothing."""
        if which is None:
            self._memory.clear()
        elif None in self._memory:
            self._memory[None][which] = 0

    def _memory_of(self, envs: int, agent: Any) -> Array | None:
        if not self.policy.memory_width:
            return None
        found: Array | None = self._memory.get(agent)
        if found is None:
            found = self._memory[agent] = self.policy.start_memory(envs)
        elif len(found) != envs:
            raise ValueError(
                f"agent.act: {envs} observations after {len(found)}, whose memory it has: call agent.reset()"
            )
        return found

    def _policy_of(self, agent: Any) -> Any:
        from paceline.models.team import TeamPolicy  # here, since a driver of workers does without torch

        if not isinstance(self.policy, TeamPolicy):
            return self.policy
        names = self.policy.team.agents
        if agent is None or str(agent) not in names:
            raise UserError(f"act(observation, agent=NAME): this run has several policies; agents: {', '.join(names)}")
        return self.policy.of(str(agent))[1]

    def act_for(
        self, observations: Mapping[Any, Any], infos: Any = None, *, deterministic: bool = True
    ) -> dict[Any, Any]:
        """The actions of several agents, by name. `infos`: as the environment gave them; they may contain masks."""
        actions = {}
        for name, observation in observations.items():
            info: Any = infos.get(name) if isinstance(infos, Mapping) else None
            masked = self._policy_of(name).observation.mask and isinstance(info, Mapping)
            mask = info.get(MASK) if masked else None
            actions[name] = self.act(observation, deterministic=deterministic, mask=mask, agent=name)
        return actions

    def encode(self, observation: Any, mask: Any = None, agent: Any = None) -> Array:
        """One observation and its mask as the policy takes them, without the first axis."""
        policy = self._policy_of(agent)
        codec = policy.observation
        row: Array = np.zeros(codec.shape, codec.dtype)
        codec.encode_one(observation, row)
        self._put_mask(
            row, observation.get(MASK) if mask is None and isinstance(observation, Mapping) else mask, policy
        )
        return row

    def _encode_batch(self, observation: Any, mask: Any) -> Array:
        policy = self._policy_of(None)
        codec = policy.observation
        first = observation
        for key in codec.leaves[0].path:
            first = first[key]
        rows: Array = np.zeros((len(first), *codec.shape), codec.dtype)
        codec.encode(observation, rows)
        masks = observation.get(MASK) if mask is None and isinstance(observation, Mapping) else mask
        for k, row in enumerate(rows):
            self._put_mask(row, None if masks is None else masks[k], policy)
        return rows

    def _put_mask(self, row: Array, mask: Any, policy: Any) -> None:
        codec = policy.observation
        columns = codec.mask_columns
        if not codec.mask and mask is not None:
            raise UserError("mask: this policy was trained without action masks")
        if not codec.mask:
            return
        if mask is None:
            raise UserError("this policy was trained with action masks: agent.act(observation, mask=...) needs one")
        masks = MaskReader("mask", codec.mask)
        row[columns] = masks.flat(mask, "given to act")
        masks.check(row[None, columns], lambda _: "given to act")

    def mask_of(self, env: gymnasium.Env[Any, Any], observation: Any, info: Mapping[str, Any]) -> Array | None:
        """The environment's mask of a state, if the policy needs one: what `act` takes."""
        if not self.policy.observation.mask:
            return None
        reader = find_masks(env, self.policy.action, {MASK: None})
        assert reader is not None
        return reader.read(env, observation, info, lambda: "in this state")

    def check(self, *, stochastic: bool) -> None:
        if stochastic and not self.has_noise:
            raise UserError(
                f"the policy in {self.path} cannot sample actions: a checkpoint of RLlib's SAC has only the most "
                "likely ones"
            )

    def make_env(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any] | AgentsEnv:
        """One environment with its wrappers, as in training. With several agents its observations, actions and rewards
        are dictionaries by agent."""
        adopt_objects(self.place)  # another run's may have the same names
        return make_env(self.config.env, render_mode=render_mode)


def _short(space: Any) -> str:
    """Without bounds, of which there may be thousands."""
    if isinstance(space, gymnasium.spaces.Box):
        return f"Box{space.shape}"
    if isinstance(space, Mapping):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in space.items()) + "}"
    return f"({', '.join(map(_short, space))})" if isinstance(space, gymnasium.spaces.Tuple) else str(space)
