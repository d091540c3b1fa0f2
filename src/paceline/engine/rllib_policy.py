"""RLlib's weights ↔ our policy's, where the networks are the same: see `rllib_settings.model_of`.

Ours: convolutions if there are images, then the towers `policy` and `value`, or one for both; `log_std`. Theirs: an
encoder, or one for actor and critic each, and heads `pi` (of DQN `af`) and `vf` on it. Between the layers of theirs
are activations, which count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.engine.rllib_settings import Image

Arrays = dict[str, NDArray[Any]]
KINDS = ("weight", "bias")


def from_rllib(config: RunConfig, image: Image | None, theirs: Arrays, own: Arrays) -> Arrays:
    """The state of our policy with RLlib's weights. `own`: that state as it is, for its names and shapes.

    SAC has no value of a state, and a deviation that depends on it: the one is left at zero, the other out.
    """
    arrays = {name: np.zeros_like(value) for name, value in own.items()}
    for ours, their in _same(config, image):
        value = theirs[their]
        if image is not None and _takes_features(config, their):
            channels, height, width = image.features
            value = value.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
        value = value.reshape(-1, *own[ours].shape[1:])
        arrays[ours] = value[: len(own[ours])] if config.algo == "sac" else value  # of its actions the means alone
    if _is_joined(config):
        for kind in KINDS:
            name = f"{_towers(image)}.policy.{len(config.model.hidden)}.{kind}"
            arrays[name] = np.concatenate([theirs[f"{_head(config, image)}.{kind}"], theirs[f"vf.net.mlp.0.{kind}"]])
    if "log_std" in own and config.algo != "sac":
        arrays["log_std"] = theirs["pi.log_std"]
    if "epsilon" in own:
        arrays["epsilon"] = own["epsilon"]
    return arrays


def to_rllib(config: RunConfig, image: Image | None, arrays: Arrays, theirs: Arrays) -> Arrays:
    """The inverse: RLlib's weights `theirs`, with those of our policy put in. Of SAC all but the critics and the
    deviation."""
    weights = {name: value.copy() for name, value in theirs.items()}
    for ours, their in _same(config, image):
        value, shape = arrays[ours], theirs[their].shape
        if image is not None and _takes_features(config, their):
            value = value.reshape(-1, *image.features).transpose(0, 2, 3, 1)
        weights[their][: len(value)] = value.reshape(-1, *shape[1:])
    if _is_joined(config):
        for kind in KINDS:
            both = arrays[f"{_towers(image)}.policy.{len(config.model.hidden)}.{kind}"]
            weights[f"{_head(config, image)}.{kind}"], weights[f"vf.net.mlp.0.{kind}"] = both[:-1], both[-1:]
    if "log_std" in arrays and config.algo != "sac":
        weights["pi.log_std"] = arrays["log_std"]
    return weights


def _has_value(config: RunConfig) -> bool:
    return config.algo != "sac" and (config.algo != "dqn" or config.dqn.dueling)


def _is_joined(config: RunConfig) -> bool:
    """Whether the last layer of ours has the outputs of two of theirs."""
    return config.model.shared and _has_value(config)


def _towers(image: Image | None) -> str:
    return "net" if image is None else "net.head"


def _head(config: RunConfig, image: Image | None) -> str:
    """The last layer of theirs for the policy."""
    layers = 0 if image is None or config.model.shared else len(config.model.hidden)
    return f"{'af' if config.algo == 'dqn' else 'pi'}.net.mlp.{2 * layers}"


def _takes_features(config: RunConfig, their: str) -> bool:
    """Whether these weights are of a layer after the convolutions: theirs are flattened with the channels last. What is
    shared is a convolution itself, and flattens nothing."""
    return their.endswith(".mlp.0.weight") and not config.model.shared


def _same(config: RunConfig, image: Image | None) -> Iterator[tuple[str, str]]:
    """Names of the same array, ours and theirs."""
    for ours, theirs in _layers(config, image):
        for kind in KINDS:
            yield f"{ours}.{kind}", f"{theirs}.{kind}"


def _layers(config: RunConfig, image: Image | None) -> Iterator[tuple[str, str]]:
    shared, count, towers = config.model.shared, len(config.model.hidden), _towers(image)
    encoder = {"sac": "pi_encoder", "dqn": "encoder"}.get(config.algo, "encoder.encoder")
    if image is not None:
        depth = len(image.filters)
        for layer in range(depth):
            yield f"net.convolutions.0.{2 * layer}", f"{encoder}.net.0.cnn.{2 * layer}"
        for layer in range(count):
            if shared:  # they are convolutions, too
                yield f"net.head.policy.{layer}", f"{encoder}.net.0.cnn.{2 * (depth + layer)}"
                continue
            yield f"net.head.policy.{layer}", f"{_head(config, image).partition('.')[0]}.net.mlp.{2 * layer}"
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
        head = _head(config, image)
        yield f"{towers}.policy.{count}", head
        if _has_value(config):
            yield f"{towers}.value.{count}", f"vf.{head.partition('.')[2]}"
