"""Play exactly N episodes without a bias towards short ones: each environment plays a fixed number of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.envs.restarts import EnvError
from paceline.envs.vector import VectorEnv
from paceline.models.acting import ActingPolicy
from paceline.rollout.baselines import Baseline
from paceline.rollout.batch import Episode
from paceline.rollout.teams import team_episode

MAX_EVAL_ENVS = 32
EVAL_WORKER = 1_000_000  # a worker number for the seeds of evaluation, which no worker has
MAX_EPISODE_STEPS = 100_000  # an episode that never ends is cut here
MAX_FAILURES = 20  # of one episode. After that it counts up to its failure: it might never be complete
MAX_DOWN_SECONDS = 300.0  # for an environment that failed to start again


def eval_envs(episodes: int) -> int:
    return min(episodes, MAX_EVAL_ENVS)


def per_agent(episodes: Sequence[Episode]) -> dict[str, float]:
    """With several agents: their mean return, and that of the agents of each policy; empty without episodes."""
    if not episodes:
        return {}
    row = {"return_per_agent_mean": float(np.mean([e.total / max(1, e.agents) for e in episodes]))}
    for name in dict.fromkeys(name for e in episodes for name in e.policies):
        row[f"policy/{name}/return_mean"] = float(np.mean([e.policies[name] for e in episodes if name in e.policies]))
    return row


def env_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The means of `info["metrics"]` over played episodes, as `env/NAME`."""
    names = sorted({name for episode in episodes for name in episode.metrics})
    return {f"env/{name}": float(np.mean([e.metrics[name] for e in episodes if name in e.metrics])) for name in names}


def team_row(agent_steps: int, episodes: Sequence[Episode]) -> dict[str, float]:
    """What a row has besides, with several agents; empty without their steps."""
    return {"agent_steps": agent_steps, **per_agent(episodes)} if agent_steps else {}


def statistics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of training episodes; empty without any. `return_episodes` says how many they are: the first ones to end
    are the shortest."""
    row: dict[str, float] = {"return_episodes": len(episodes)} if episodes else {}
    for name, values in (("return", [e.total for e in episodes]), ("length", [e.length for e in episodes])):
        if values:
            array = np.asarray(values, np.float64)
            row |= {
                f"{name}_mean": float(array.mean()),
                f"{name}_std": float(array.std()),
                f"{name}_min": float(array.min()),
                f"{name}_max": float(array.max()),
            }
    return row


def play(
    env: VectorEnv,
    policy: ActingPolicy | Baseline,
    episodes: int,
    *,
    rng: np.random.Generator | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play `episodes` episodes from a reset; sample actions if `rng` is given, else take the most likely ones.

    Results are sorted by environment, then time, so that they do not depend on which environment finishes first. After
    an episode that was cut, an environment waits for a reset: of its own, or of all when none has more to play before.
    An episode whose environment fails and is started again (`env.restart_on_error`) does not count: the next one does.
    """

    def episode(index: Any, steps: int) -> Episode:
        if env.agents:
            return team_episode(total[index], acted[index], steps, env.team)
        return Episode(float(total[index, 0]), steps)

    n = env.num_envs
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    finished: list[list[Episode]] = [[] for _ in range(n)]
    total, length = np.zeros((n, max(1, len(env.agents)))), np.zeros(n, np.int64)
    ended, cut = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    failures = np.zeros(n, np.int64)  # of the current episode
    acted = np.zeros((n, len(env.agents)), np.bool_)  # who took part in the current episode
    down: dict[int, float] = {}  # since when
    env.failed.clear()
    env.finished_metrics.clear()
    memory = None if isinstance(policy, Baseline) else policy.start_memory(env.rows)
    observation = env.reset().copy()
    while (unfinished := np.array([len(own) for own in finished]) < quota).any():
        if cut[unfinished].all():
            observation = env.restart().copy()
            ended[:] = cut[:] = False
            memory = None if memory is None else np.zeros_like(memory)
        if rng is None or isinstance(policy, Baseline):
            action = policy.greedy(observation, memory)
        else:
            action, _, _ = policy.act(observation, policy.head.noise(rng, (env.rows,)), memory)
        counted = ~ended & ~cut
        on_step()
        result = env.step(action)
        if memory is not None and env.valid is not None:
            memory[~env.valid] = 0  # agents that are not there, or that this step has reset
        elif memory is not None:
            memory[ended] = 0  # this step has only reset them
            memory[env.failed] = 0
        observation, (reward, ended) = result[0], env.by_env(result)
        total += np.where(counted[:, None], reward, 0.0)
        length += counted
        if env.valid is not None:
            acted |= env.valid.reshape(acted.shape) & counted[:, None]
        if env.failed or down:
            now = time.monotonic()
            down = {i: down.get(i, now) for i in env.failed}
            if down and now - min(down.values()) > MAX_DOWN_SECONDS:
                raise EnvError(f"an environment did not start again for {MAX_DOWN_SECONDS:g} s:\n{env.first_error}")
            for i in env.failed:
                failures[i] += length[i] > 1  # else it has not played since the last failure
                if failures[i] > MAX_FAILURES and len(finished[i]) < quota[i]:
                    finished[i].append(episode(i, int(length[i]) - 1))
                    failures[i] = 0
                total[i] = 0.0
                length[i] = 0
                acted[i] = False
                cut[i] = False  # it has been reset
            env.failed.clear()
        over = counted & (ended | (length >= MAX_EPISODE_STEPS))
        for index in np.flatnonzero(over):
            if len(finished[index]) < quota[index]:
                own = [metrics for env_index, metrics in env.finished_metrics if env_index == index]
                finished[index].append(replace(episode(index, int(length[index])), metrics=_means(own)))
        env.finished_metrics.clear()
        cut = (cut | over) & ~ended
        total[over] = 0.0
        length[over] = failures[over] = 0
        acted[over] = False
    return [episode for own in finished for episode in own]


def _means(several: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in several for name in each)
    return {name: float(np.mean([each[name] for each in several if name in each])) for name in names}
