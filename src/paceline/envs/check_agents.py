"""The part of `paceline envs check` that is about several agents."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from paceline.config import UserError
from paceline.envs.check_report import CheckReport, describe, short, short_space
from paceline.envs.contract import structure_fault
from paceline.envs.multi_agent import AgentsEnv, check_agents_step, check_names
from paceline.spaces import MASK, ActionCodec, Channels, ObservationCodec

STEPS, SECONDS, SHOWN_STEPS = 200, 3.0, 5


def check_agents(env: AgentsEnv, make: Callable[[], Any], report: CheckReport, channels: Channels) -> None:
    """Play random episodes and add what is wrong to the report."""
    report.spaces = [f"{len(env.agents)} agents: {', '.join(map(str, env.agents[:8]))}"]
    for name in env.agents:
        own = f"{short_space(env.observation_spaces[name])}, action {short_space(env.action_spaces[name])}"
        report.spaces.append(f"{name}: observation {own}")
        ObservationCodec(env.observation_spaces[name], channels)
        ActionCodec(env.action_spaces[name])
        env.action_spaces[name].seed(20_011)
    try:
        first = _walk(env, report)
        other = make()
        try:
            second = _walk(other, CheckReport(report.id))
        finally:
            other.close()
    except UserError as error:
        report.problem(str(error))
    except Exception as error:  # the env may raise anything
        report.problem(describe(error))
    else:
        if not all(data_equivalence(a, b, exact=True) for a, b in zip(first, second, strict=False)):
            report.warn("two instances with the same seed differ: draw from a generator made in reset(seed=...)")


def _walk(env: AgentsEnv, report: CheckReport) -> list[Any]:
    """The observations of random episodes, reset by reset and step by step."""
    for number, name in enumerate(env.agents):
        env.action_spaces[name].seed(number)
    shown, steps, began = True, 0, time.perf_counter()
    here, infos = _reset(env, 123)
    seen, reset_seconds = [here], time.perf_counter() - began
    while steps < STEPS and time.perf_counter() - began < SECONDS:
        actions = {name: _sample(env, name, observation, infos) for name, observation in here.items()}
        result = env.step(actions)
        steps += 1
        check_agents_step(result, env)
        for name, observation in result[0].items():
            if fault := structure_fault(observation, env.observation_spaces[name], f"the observation of {name}"):
                report.problem(f"{fault} (at step {steps})")
        for name, reward in result[1].items():
            if not math.isfinite(reward):
                report.problem(f"the reward of {name} is {reward} at step {steps}, not finite")
        here, reward, over = env.after(result)
        if shown and steps <= SHOWN_STEPS:
            row = (short(actions)[:60], short(dict(result[0]))[:60], short(reward), "over" if over else "")
            report.episode.append((str(steps), *row))
            shown = not over
        seen.append(result[0])
        infos = result[4]
        if over:
            before = time.perf_counter()
            here, infos = _reset(env, None)
            reset_seconds += time.perf_counter() - before
    seconds = time.perf_counter() - began
    report.steps_per_second, report.reset_share = steps / seconds, reset_seconds / seconds
    return seen


def _reset(env: AgentsEnv, seed: int | None) -> Any:
    result = env.reset(seed=seed)
    if not (isinstance(result, tuple) and len(result) == 2 and hasattr(result[0], "items")):
        raise UserError(f"reset must return two dictionaries by agent (observations, infos), not {short(result)}")
    check_names(result[0], env)
    return result


def _sample(env: AgentsEnv, name: Any, observation: Any, infos: Any) -> Any:
    """A random action that is valid, if the env gives masks."""
    info = infos.get(name) if isinstance(infos, Mapping) else None
    places = [place for place in (observation, info) if isinstance(place, Mapping) and MASK in place]
    space = env.action_spaces[name]
    if not places or not isinstance(space, spaces.Discrete):
        return space.sample()
    return space.sample(mask=np.asarray(places[0][MASK], np.int8))
