"""Translate weights between RLlib's networks and paceline's, which `settings.model_of` makes equal.

A paceline policy has convolutions for images, then a tower each for `policy` and `value` or one for both, and
`log_std`. RLlib has an encoder, or one each for actor and critic, and the heads `pi` (`af` for DQN) and `vf`.
Activations count as layers in RLlib's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.engines.rllib.settings import Convolutions, hyper_of

Arrays = dict[str, NDArray[Any]]
KINDS = ("weight", "bias")


def from_rllib(config: RunConfig, convolutions: Convolutions | None, weights: Arrays, like: Arrays) -> Arrays:
    """The state of a paceline policy with RLlib's `weights`. `like`: a state with the names and shapes.

    RLlib's SAC has no state value, which stays zero, and a state-dependent deviation, which is left out.
    """
    state = {name: np.zeros_like(value) for name, value in like.items()}
    for name, rllib_name in _same(config, convolutions):
        value = weights[rllib_name]
        if convolutions is not None and _takes_features(config, rllib_name):
            channels, height, width = convolutions.features
            value = value.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
        value = value.reshape(-1, *like[name].shape[1:])
        state[name] = value[: len(like[name])] if config.algo == "sac" else value  # SAC: only the means of the actions
    if _is_joined(config):
        for name, policy_name, value_name in _joined_layers(config, convolutions):
            state[name] = np.concatenate([weights[policy_name], weights[value_name]])
    if "log_std" in like and config.algo != "sac":
        state["log_std"] = weights["pi.log_std"]
    for name in like:  # RLlib does not have these
        if name == "epsilon" or name.startswith("normalizer."):
            state[name] = like[name]
    return state


def to_rllib(config: RunConfig, convolutions: Convolutions | None, state: Arrays, like: Arrays) -> Arrays:
    """RLlib's weights `like`, with those of a paceline policy put in. For SAC, critics and deviation are kept."""
    weights = {name: value.copy() for name, value in like.items()}
    for name, rllib_name in _same(config, convolutions):
        value, shape = state[name], like[rllib_name].shape
        if convolutions is not None and _takes_features(config, rllib_name):
            value = value.reshape(-1, *convolutions.features).transpose(0, 2, 3, 1)
        weights[rllib_name][: len(value)] = value.reshape(-1, *shape[1:])
    if _is_joined(config):
        for name, policy_name, value_name in _joined_layers(config, convolutions):
            weights[policy_name], weights[value_name] = state[name][:-1], state[name][-1:]
    if "log_std" in state and config.algo != "sac":
        weights["pi.log_std"] = state["log_std"]
    return weights


def _has_value(config: RunConfig) -> bool:
    return config.algo != "sac" and (config.algo != "dqn" or hyper_of(config).dueling)


def _is_joined(config: RunConfig) -> bool:
    """Whether paceline's last layer has the outputs of two of RLlib's."""
    return config.model.shared and _has_value(config)


def _joined_layers(config: RunConfig, convolutions: Convolutions | None) -> Iterator[tuple[str, str, str]]:
    """Names of the joined last layer, and of RLlib's two layers for policy and value."""
    for kind in KINDS:
        name = f"{_towers(convolutions)}.policy.{len(config.model.hidden)}.{kind}"
        yield name, f"{_head(config, convolutions)}.{kind}", f"vf.net.mlp.0.{kind}"


def _towers(convolutions: Convolutions | None) -> str:
    return "net" if convolutions is None else "net.head"


def _head(config: RunConfig, convolutions: Convolutions | None) -> str:
    """RLlib's last layer of the policy."""
    layers = 0 if convolutions is None or config.model.shared else len(config.model.hidden)
    return f"{'af' if config.algo == 'dqn' else 'pi'}.net.mlp.{2 * layers}"


def _takes_features(config: RunConfig, rllib_name: str) -> bool:
    """Whether the layer's input is the flattened output of convolutions, which RLlib flattens with the channels last.
    Shared layers are convolutions themselves and flatten nothing."""
    return rllib_name.endswith(".mlp.0.weight") and not config.model.shared


def _same(config: RunConfig, convolutions: Convolutions | None) -> Iterator[tuple[str, str]]:
    """Names of the same array in paceline and in RLlib."""
    for name, rllib_name in _layers(config, convolutions):
        for kind in KINDS:
            yield f"{name}.{kind}", f"{rllib_name}.{kind}"


def _layers(config: RunConfig, convolutions: Convolutions | None) -> Iterator[tuple[str, str]]:
    shared, count, towers = config.model.shared, len(config.model.hidden), _towers(convolutions)
    encoder = {"sac": "pi_encoder", "dqn": "encoder"}.get(config.algo, "encoder.encoder")
    if convolutions is not None:
        depth = len(convolutions.filters)
        for layer in range(depth):
            yield f"net.convolutions.0.{2 * layer}", f"{encoder}.net.0.cnn.{2 * layer}"
        for layer in range(count):
            if shared:  # convolutions, too
                yield f"net.head.policy.{layer}", f"{encoder}.net.0.cnn.{2 * (depth + layer)}"
                continue
            yield f"net.head.policy.{layer}", f"{_head(config, convolutions).partition('.')[0]}.net.mlp.{2 * layer}"
            if _has_value(config):
                yield f"net.head.value.{layer}", f"vf.net.mlp.{2 * layer}"
    elif shared or not _has_value(config):
        for layer in range(count):
            yield f"net.policy.{layer}", f"{encoder}.net.mlp.{2 * layer}"
    else:
        for layer in range(count):
            yield f"net.policy.{layer}", f"encoder.actor_encoder.net.mlp.{2 * layer}"
            yield f"net.value.{layer}", f"encoder.critic_encoder.net.mlp.{2 * layer}"
    if not _is_joined(config):
        head = _head(config, convolutions)
        yield f"{towers}.policy.{count}", head
        if _has_value(config):
            yield f"{towers}.value.{count}", f"vf.{head.partition('.')[2]}"
