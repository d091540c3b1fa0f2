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
    """Two towers side by side in one `[2, in, out]` weight per layer, or one shared torso in `[1, in, out]`.

    `fast.py` computes the same, and its gradient, without torch; a test compares the two.
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
        towers = 1 if shared else 2
        widths = [inputs, *hidden]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise(widths):
            weight = torch.empty(towers, fan_in, fan_out)
            for tower in range(towers):
                nn.init.orthogonal_(weight[tower], math.sqrt(2), generator=generator)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(towers, 1, fan_out)))
        # A small policy layer: the first policy is nearly uniform, whatever the observation.
        self.policy_weight = nn.Parameter(
            nn.init.orthogonal_(torch.empty(widths[-1], outputs), 0.01, generator=generator)
        )
        self.policy_bias = nn.Parameter(torch.zeros(outputs))
        self.value_weight = nn.Parameter(nn.init.orthogonal_(torch.empty(widths[-1], 1), 1.0, generator=generator))
        self.value_bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.unsqueeze(0)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            h = ACTIVATIONS[self.activation](torch.matmul(h, weight) + bias)
        policy = h[0] @ self.policy_weight + self.policy_bias
        value = h[-1] @ self.value_weight + self.value_bias
        return policy, value.squeeze(1)


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
