"""What RLlib's env runners need: environments with spaces that RLlib supports, and a record of each episode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from paceline.code_bundle import CodeBundle, install, relocate
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.engines.rllib.normalize import RAW_RETURN, Normalized
from paceline.engines.rllib.settings import hyper_of
from paceline.envs.contract import read_metrics
from paceline.envs.make import make_env
from paceline.envs.multi_agent import AgentsEnv
from paceline.envs.vector import Env
from paceline.spaces import ActionCodec, Channels, ObservationCodec

EPISODES = "paceline_episodes"
"""Key in RLlib's results: of each finished episode its return, length, number of agents, return by policy, metrics."""
MODULE, SHARED_MODULE = "default_policy", "shared_policy"
"""Names of the network of a single agent, which is RLlib's, and of agents that share one, which must be another."""


class EnvMaker:
    """Makes environments for RLlib. `code_bundle`: the user's code, for machines that do not have it."""

    def __init__(self, settings: dict[str, Any], code_bundle: CodeBundle) -> None:
        self._settings, self._code_bundle = settings, code_bundle

    def __call__(self, context: Any) -> Any:
        install(self._code_bundle)
        config = validate(relocate(self._settings, self._code_bundle))
        place = context.worker_index, context.vector_index
        made = make_env(config.env, place=place)
        if isinstance(made, AgentsEnv):
            from paceline.engines.rllib.agents_env import RllibAgents

            return RllibAgents(made, config.env.channels, context.worker_index)
        env = with_rllib_spaces(made, config.env.channels)
        if config.env.normalize_observation or config.env.normalize_reward:
            env = Normalized(env, config.env, hyper_of(config).gamma)
        return OwnSeeds(env, context.worker_index) if context.worker_index > 1 else env


class OwnSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Independent seeds for each env runner but the first, which keeps RLlib's. RLlib seeds environment i of env runner
    w with seed + w + i, so that runners would repeat each other's episodes."""

    def __init__(self, env: Env, runner: int) -> None:
        super().__init__(env)
        self._runner = runner

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=own_seed(seed, self._runner), options=options)


def own_seed(seed: int | None, runner: int) -> int | None:
    """The seed for an env runner; the first one keeps RLlib's."""
    if seed is None or runner <= 1:
        return seed
    return int(np.random.SeedSequence((seed, runner)).generate_state(1)[0])


def with_rllib_spaces(env: Env, channels: Channels = "auto") -> Env:
    """Encode spaces that RLlib's networks do not support, as for paceline's own networks. They take one vector or one
    image, and output Discrete, MultiDiscrete or Box actions."""
    observation, action = ObservationCodec(env.observation_space, channels), ActionCodec(env.action_space)
    if observation.images and not observation.is_image:
        raise UserError(
            f"--engine rllib supports one image or one vector, but the observations are {env.observation_space}: "
            "RLlib's networks cannot combine them; use --engine local or ray"
        )
    refuse_mixed(action)
    plain = observation.is_plain and env.observation_space.dtype == np.float32
    return env if plain and _is_plain(env.action_space, action) else Encoded(env, Coding(observation, action))


def refuse_mixed(action: ActionCodec) -> None:
    if action.is_mixed:
        raise UserError(
            f"--engine rllib supports choices or numbers, but the action is {action.space}: use --engine local or ray"
        )


class Coding:
    """Spaces that RLlib supports, and observations and actions in them. Images become `float32 [H, W, C]` from 0 to 1,
    the format of RLlib's convolutions."""

    def __init__(self, observation: ObservationCodec, action: ActionCodec) -> None:
        self._observation, self._action = observation, action
        self.observation_space: spaces.Space[Any]
        self.action_space: spaces.Space[Any]
        if observation.is_image:
            (channels, height, width), top = observation.shape, 1.0 if observation.dtype == np.uint8 else np.inf
            low = 0.0 if top == 1.0 else -np.inf
            self.observation_space = spaces.Box(low, top, (height, width, channels), np.float32)
        else:
            self.observation_space = spaces.Box(-np.inf, np.inf, observation.shape, np.float32)
        if action.is_continuous:  # in the units of the codec: RLlib would scale all of them or none
            end = 1.0 if action.bounded.all() else np.inf
            self.action_space = spaces.Box(-end, end, (action.dim,), np.float32)
        elif len(action.nvec) == 1:
            self.action_space = spaces.Discrete(action.nvec[0])
        else:
            self.action_space = spaces.MultiDiscrete(list(action.nvec))

    def encode(self, observation: Any) -> Any:
        row = np.zeros(self._observation.shape, self._observation.dtype)
        self._observation.encode_one(observation, row)
        if not self._observation.is_image:
            return row
        image = np.ascontiguousarray(row.transpose(1, 2, 0), np.float32)
        return image / np.float32(255) if row.dtype == np.uint8 else image

    def decode(self, action: Any) -> Any:
        return self._action.split(np.asarray(action, self._action.dtype).reshape(1, -1))[0]


class Encoded(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Env, coding: Coding) -> None:
        super().__init__(env)
        self._coding = coding
        self.observation_space, self.action_space = coding.observation_space, coding.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._coding.encode(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(self._coding.decode(action))
        return self._coding.encode(observation), reward, terminated, truncated, info


def record_episode(*, episode: Any, prev_episode_chunks: Any = (), metrics_logger: Any, **_: Any) -> None:
    """Log each finished episode, of which RLlib only reports means. It passes the last chunk and those before it."""
    parts = [*prev_episode_chunks, episode]
    length, info = sum(len(part) for part in parts), episode.get_infos(-1) or {}
    if hasattr(episode, "agent_episodes"):
        by_agent: dict[Any, float] = defaultdict(float)
        for part in parts:
            for name, own in part.agent_episodes.items():
                by_agent[name] += own.get_return()
        total, agents, policies = sum(by_agent.values()), len(by_agent), _by_policy(by_agent, episode)
        metrics = [one for own in info.values() for one in own.get("metrics", ())]
    else:
        total = info.get(RAW_RETURN, sum(part.get_return() for part in parts))
        agents, policies = 0, {}
        metrics = [read_metrics(info["metrics"])] if "metrics" in info else []
    found = (float(total), int(length), agents, policies, metrics)
    metrics_logger.log_value(EPISODES, found, reduce="item_series")


def _by_policy(returns: Mapping[Any, float], episode: Any) -> dict[str, float]:
    """The mean return of an agent of each policy; empty if they share one."""
    found: dict[str, list[float]] = defaultdict(list)
    for agent, total in returns.items():
        found[str(episode.module_for(agent))].append(total)
    return {} if SHARED_MODULE in found else {name: float(np.mean(totals)) for name, totals in found.items()}


def _is_plain(space: gymnasium.Space[Any], codec: ActionCodec) -> bool:
    if isinstance(space, spaces.Discrete):
        return int(space.start) == 0
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ndim == 1 and not np.any(space.start)
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype != np.float32:
        return False
    ends = np.concatenate([space.bounded_below, space.bounded_above])
    return bool(codec.bounded.all() or not ends.any())
