"""A user's own network (`model.class`): made, and tested before anything is learned with it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.config.plugins import load_attribute
from paceline.spaces import ObservationCodec

ROWS = 2
TOLERANCE = 1e-3
"""Relative to the largest output: products of other sizes round differently, and a network may use 16 bits."""

Pair = tuple[Tensor, Tensor]


def make_own_net(observation: ObservationCodec, outputs: int, config: ModelConfig, seed: int) -> nn.Module:
    make = load_attribute(config.class_ or "", "model.class")
    net: nn.Module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            net = make(observation.net_shape, outputs, **config.kwargs)
            if not isinstance(net, nn.Module):
                raise UserError(f"expected a torch.nn.Module, not {type(net).__name__}")
            fault = find_fault(net, observation, outputs)
        except UserError as error:
            fault = str(error)
        except Exception as error:  # the user's code may raise anything; it is their input
            raise UserError(f"model.class={config.class_}: {type(error).__name__}: {error}") from error
    if fault:
        raise UserError(f"model.class={config.class_}: {fault}")
    return net


@torch.no_grad()
def find_fault(net: nn.Module, observation: ObservationCodec, outputs: int) -> str:
    """Why the network cannot act, or nothing. It must give each row the same outputs at any time, in any company."""
    net.eval()
    x = _observations(observation)
    first = net(x)
    if fault := _shape_fault(first, ROWS, outputs):
        return fault
    if _differ(first, net(x)):
        return (
            "two passes over the same observations give different outputs, though the network is in eval mode: use "
            "torch.nn.Dropout or F.dropout(x, training=self.training), and keep no state from one call to the next"
        )
    alone = [net(x[row : row + 1]) for row in range(ROWS)]
    for pair in alone:
        if fault := _shape_fault(pair, 1, outputs):
            return fault
    if _differ(first, (torch.cat([policy for policy, _ in alone]), torch.cat([value for _, value in alone]))):
        return (
            "the outputs of an observation depend on the others in the batch, as with an LSTM that takes the batch "
            "for a sequence: the first dimension counts independent observations"
        )
    return ""


def _observations(observation: ObservationCodec) -> Tensor:
    """Samples of the space, as the network gets them."""
    space = copy.deepcopy(observation.space)  # the env may draw from its own
    space.seed(0)
    rows = np.zeros((ROWS, *observation.shape), observation.dtype)
    for row in rows:
        observation.encode_one(space.sample(), row)
    inputs, _ = observation.split(rows)
    return torch.from_numpy(inputs)


def _shape_fault(result: Any, rows: int, outputs: int) -> str:
    policy, value = result
    shapes = [list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}" for x in (policy, value)]
    if shapes == [[rows, outputs], [rows]]:
        return ""
    return (
        f"forward must return policy outputs [B, {outputs}] and values [B], but returned {shapes[0]} and {shapes[1]} "
        f"for B = {rows}"
    )


def _differ(a: Pair, b: Pair) -> bool:
    for one, other in zip(a, b, strict=True):
        wide, wider = one.double(), other.double()
        scale = wide[wide.isfinite()].abs().max().item() if wide.isfinite().any() else 0.0
        if not torch.allclose(wide, wider, rtol=0.0, atol=TOLERANCE * scale + 1e-6, equal_nan=True):
            return True
    return False
