"""Actor-critic networks in plain torch. Each maps observations `[B, …]` to policy outputs `[B, K]` and values `[B]`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.spaces import ObservationCodec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": torch.nn.functional.elu,
}
NATURE_MIN_SIDE = 36
Conv = tuple[int, int, int]  # channels, kernel, stride
CNNS: dict[str, Sequence[Conv]] = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "small": ((16, 3, 2), (32, 3, 2)),
}


class MlpActorCritic(nn.Module):
    """Two towers, `policy` and `value`; or with `shared` one, whose last output is the value.

    `fast.py` computes the same, and its gradient, without autograd; a test compares the two.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        activation: str,
        shared: bool,
        outputs: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.shared = shared
        if shared:
            self.policy = _tower([inputs, *hidden, outputs + 1], generator)
        else:
            self.policy = _tower([inputs, *hidden, outputs], generator)
            self.value = _tower([inputs, *hidden, 1], generator)
        # A small policy layer: the first policy is nearly uniform, whatever the observation.
        with torch.no_grad():
            last = self.policy[-1]
            assert isinstance(last, nn.Linear)
            last.weight[:outputs] *= 0.01

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self._run(self.policy, x)
        if self.shared:
            return out[:, :-1], out[:, -1]
        return out, self._run(self.value, x).squeeze(1)

    def _run(self, tower: nn.ModuleList, h: Tensor) -> Tensor:
        for layer in tower[:-1]:
            h = ACTIVATIONS[self.activation](layer(h))
        out: Tensor = tower[-1](h)
        return out


class CnnActorCritic(nn.Module):
    """Convolutions over each image, then an `MlpActorCritic` over their features and the other observations."""

    def __init__(
        self, observation: ObservationCodec, config: ModelConfig, outputs: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.is_image = observation.is_image
        self.leaves = observation.leaves
        self.convolutions = nn.ModuleList()
        features = 0
        for leaf in self.leaves:
            if leaf.kind != "image":
                features += leaf.stop - leaf.start
                continue
            stack = _convolutions(leaf.shape, config.cnn, generator)
            self.convolutions.append(stack)
            with torch.no_grad():
                features += stack(torch.zeros(1, *leaf.shape)).shape[1]
        self.head = MlpActorCritic(features, config.hidden, config.activation, config.shared, outputs, generator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts, stacks = [], iter(self.convolutions)
        for leaf in self.leaves:
            part = x if self.is_image else x[:, leaf.start : leaf.stop]
            if leaf.kind == "image":
                image = part.reshape(len(x), *leaf.shape).float() / leaf.scale
                part = next(stacks)(image.contiguous(memory_format=torch.channels_last))
            parts.append(part)
        policy, value = self.head(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])
        return policy, value


def _tower(widths: Sequence[int], generator: torch.Generator) -> nn.ModuleList:
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)]
    for layer in layers:
        gain = 1.0 if layer is layers[-1] else math.sqrt(2)
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
    return nn.ModuleList(layers)


def _convolutions(shape: tuple[int, ...], name: str, generator: torch.Generator) -> nn.Sequential:
    side = min(shape[1:])
    if name == "auto":
        name = "nature" if side >= NATURE_MIN_SIDE else "small"
    if name == "nature" and side < NATURE_MIN_SIDE:
        raise UserError(f"model.cnn=nature needs images of at least {NATURE_MIN_SIDE} pixels, these are {shape[1:]}")
    layers: list[nn.Module] = []
    channels = shape[0]
    for width, kernel, stride in CNNS[name]:
        conv = nn.Conv2d(channels, width, kernel, stride)
        nn.init.orthogonal_(conv.weight, math.sqrt(2), generator=generator)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [conv, nn.ReLU()]
        channels = width
    stack = nn.Sequential(*layers, nn.Flatten())
    stack.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return stack
