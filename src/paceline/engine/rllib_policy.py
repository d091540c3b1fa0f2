"""RLlib's weights ↔ our policy's, where the networks are the same: hidden layers, then one linear layer.

Ours: `net.policy.K.weight`, `net.value.K.weight`, `log_std`. Theirs: an encoder, and heads `pi` (of DQN `af`) and `vf`
on it; between the linear layers of their MLPs are activations, which count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig

Arrays = dict[str, NDArray[Any]]
KINDS = ("weight", "bias")


def from_rllib(config: RunConfig, theirs: Arrays, own: Arrays) -> Arrays:
    """The state of our policy with RLlib's weights. `own`: that state as it is, for its names and shapes.

    SAC has no value of a state, and a deviation that depends on it: the one is left at zero, the other out.
    """
    arrays = {name: np.zeros_like(value) for name, value in own.items()}
    for ours, their in _hidden(config):
        arrays[ours] = theirs[their]
    last = len(config.model.hidden)
    first = _first_head(config)
    for kind in KINDS:
        name = f"net.policy.{last}.{kind}"
        head = theirs[f"{first}.net.mlp.0.{kind}"]
        if config.algo == "sac" or (config.algo == "dqn" and not config.dqn.dueling):
            arrays[name] = head[: len(own[name])]
        elif config.model.shared:
            arrays[name] = np.concatenate([head, theirs[f"vf.net.mlp.0.{kind}"]])
        else:
            arrays[name], arrays[f"net.value.{last}.{kind}"] = head, theirs[f"vf.net.mlp.0.{kind}"]
    if "log_std" in own and config.algo != "sac":
        arrays["log_std"] = theirs["pi.log_std"]
    if "epsilon" in own:
        arrays["epsilon"] = own["epsilon"]
    return arrays


def to_rllib(config: RunConfig, arrays: Arrays, theirs: Arrays) -> Arrays:
    """The inverse: RLlib's weights `theirs`, with those of our policy put in. Of SAC all but the critics and the
    deviation."""
    weights = {name: value.copy() for name, value in theirs.items()}
    for ours, their in _hidden(config):
        weights[their] = arrays[ours]
    last = len(config.model.hidden)
    first = _first_head(config)
    for kind in KINDS:
        head = arrays[f"net.policy.{last}.{kind}"]
        if config.algo == "sac" or (config.algo == "dqn" and not config.dqn.dueling):
            weights[f"{first}.net.mlp.0.{kind}"][: len(head)] = head
        elif config.model.shared:
            weights[f"{first}.net.mlp.0.{kind}"], weights[f"vf.net.mlp.0.{kind}"] = head[:-1], head[-1:]
        else:
            weights[f"{first}.net.mlp.0.{kind}"] = head
            weights[f"vf.net.mlp.0.{kind}"] = arrays[f"net.value.{last}.{kind}"]
    if "log_std" in arrays and config.algo != "sac":
        weights["pi.log_std"] = arrays["log_std"]
    return weights


def _first_head(config: RunConfig) -> str:
    return "af" if config.algo == "dqn" else "pi"


def _hidden(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Names of the same array, ours and theirs."""
    if config.algo == "sac":
        towers = {"policy": "pi_encoder"}
    elif config.algo == "dqn":
        towers = {"policy": "encoder"}
    elif config.model.shared:
        towers = {"policy": "encoder.encoder"}
    else:
        towers = {"policy": "encoder.actor_encoder", "value": "encoder.critic_encoder"}
    for ours, theirs in towers.items():
        for layer in range(len(config.model.hidden)):
            for kind in KINDS:
                yield f"net.{ours}.{layer}.{kind}", f"{theirs}.net.mlp.{2 * layer}.{kind}"
