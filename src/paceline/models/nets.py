"""Actor-critic networks in plain torch. Each maps observations `[B, …]` to policy outputs `[B, K]` and values `[B]`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
IMPALA_CHANNELS = (16, 32, 32)
PASS_BYTES = 600_000_000
"""Memory that one pass forward and backward over images may take. Larger passes are not faster."""
BYTES_PER_ACTIVATION = 10.0  # measured: at the peak of learning 2.5 copies of each input and output of a convolution


class MlpActorCritic(nn.Module):
    """Two towers, `policy` and `value`; with `shared` a single tower, whose last output is the value. Without a
    `critic` there is one tower, and values are 0.

    `numpy_mlp.py` computes the same and its gradient without autograd; a test compares the two.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        activation: str,
        shared: bool,
        outputs: int,
        generator: torch.Generator,
        *,
        critic: bool = True,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.shared = shared and critic
        self.critic = critic
        if self.shared:
            self.policy = _tower([inputs, *hidden, outputs + 1], generator)
        else:
            self.policy = _tower([inputs, *hidden, outputs], generator)
        if critic and not shared:
            self.value = _tower([inputs, *hidden, 1], generator)
        # A small policy layer makes the first policy nearly uniform for every observation.
        with torch.no_grad():
            last = self.policy[-1]
            assert isinstance(last, nn.Linear)
            last.weight[:outputs] *= 0.01

    @property
    def hidden_layers(self) -> list[nn.Linear]:
        towers = [self.policy, self.value] if self.critic and not self.shared else [self.policy]
        return [layer for tower in towers for layer in tower[:-1] if isinstance(layer, nn.Linear)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self._run(self.policy, x)
        if self.shared:
            return out[:, :-1], out[:, -1]
        if not self.critic:
            return out, out.new_zeros(out.shape[0])
        return out, self._run(self.value, x).squeeze(1)

    def _run(self, tower: nn.ModuleList, h: Tensor) -> Tensor:
        for layer in tower[:-1]:
            h = ACTIVATIONS[self.activation](layer(h))
        out: Tensor = tower[-1](h)
        return out


class CnnActorCritic(nn.Module):
    """Convolutions over each image, then an `MlpActorCritic` over their features and the other observations.

    The towers of policy and value share the convolutions. With `cnn=nature hidden=[512] activation=relu` this is the
    network of rl-cluster-benchmark, with `cnn=impala hidden=[256] activation=relu shared=true` that of the Procgen
    paper.
    """

    def __init__(
        self,
        observation: ObservationCodec,
        config: ModelConfig,
        outputs: int,
        generator: torch.Generator,
        *,
        critic: bool = True,
        head_inputs: int | None = None,
    ) -> None:
        """`head_inputs`: of the MLP, where another layer comes before it; by default the features themselves."""
        super().__init__()
        self.is_image = observation.is_image
        self.leaves = observation.leaves
        self.convolutions = nn.ModuleList()
        self.half_precision = False
        """Whether convolutions run in 16 bits; the rest uses 32."""
        self.row_bytes = 0
        """Approximate memory that learning from one row takes."""
        features = 0
        for leaf in self.leaves:
            if leaf.kind != "image":
                features += leaf.stop - leaf.start
                continue
            stack = _convolutions(leaf.shape, config, generator)
            self.convolutions.append(stack)
            width, activations = _measure(stack, leaf.shape)
            features += width
            self.row_bytes += int(BYTES_PER_ACTIVATION * activations)
        self.features = features
        """The number of features of a row, other observations included."""
        inputs = features if head_inputs is None else head_inputs
        self.head = MlpActorCritic(
            inputs, config.hidden, config.activation, config.shared, outputs, generator, critic=critic
        )
        self._stacks: list[Callable[[Tensor], Tensor]] = list(self.convolutions)
        if config.cnn == "impala":
            for layer in [m for m in self.modules() if isinstance(m, nn.Conv2d)] + self.head.hidden_layers:
                # As in OpenAI's code for both papers (TensorFlow's default). Orthogonal weights of the other networks'
                # size would double the variance at each addition in the residual blocks.
                nn.init.xavier_uniform_(layer.weight, generator=generator)

    def compile_convolutions(self) -> None:
        """Compile them with torch.compile, which takes most of a minute and fuses the operations between them."""
        for pool in (module for module in self.modules() if isinstance(module, MaxPool)):
            pool.compiled = True
        self._stacks = [torch.compile(stack, dynamic=False) for stack in self.convolutions]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x, self._stacks)

    def run(self, x: Tensor, convolutions: Iterable[Callable[[Tensor], Tensor]]) -> tuple[Tensor, Tensor]:
        """Forward with the given convolutions, compiled or not."""
        policy, value = self.head(self.join_features(x, convolutions))
        return policy, value

    def join_features(self, x: Tensor, convolutions: Iterable[Callable[[Tensor], Tensor]] | None = None) -> Tensor:
        """The features of the images and the other observations, `[B, F]`."""
        parts, stacks = [], iter(convolutions or self.convolutions)
        for leaf in self.leaves:
            part = x if self.is_image else x[:, leaf.start : leaf.stop]
            if leaf.kind == "image":
                image = part.reshape(-1, *leaf.shape)
                # Dividing in place saves a pass over memory for thousands of images.
                image = image.float().div_(leaf.scale) if image.dtype == torch.uint8 else image / leaf.scale
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_precision):
                    part = next(stacks)(image.contiguous(memory_format=torch.channels_last)).float()
            parts.append(part)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


class Residual(nn.Module):
    """Two convolutions, each after a ReLU, added to the input. The output of a convolution may be overwritten, because
    its gradient needs only the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.first(torch.relu(x)))
        out: Tensor = self.second(h).add_(x)
        return out


class MaxPool(nn.Module):
    """Max pooling over 3 x 3 pixels with stride 2."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.compiled and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0:
            out: Tensor = MaxPoolByHand.apply(x)  # type: ignore[no-untyped-call]
            return out
        return nn.functional.max_pool2d(x, 3, 2, padding=1)


class MaxPoolByHand(torch.autograd.Function):
    """The same for torch.compile, whose own gradient of max pooling takes a seventh of a training step on a GPU. It
    uses plain operations: a pixel in an even row and column is in one window, one in an odd row and column in four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        around = nn.functional.pad(x, (1, 0, 1, 0), value=-math.inf)
        rows, columns = x.shape[2], x.shape[3]
        best, place = around[:, :, :rows:2, :columns:2], torch.zeros((), dtype=torch.int8, device=x.device)
        for k in range(1, 9):
            dy, dx = divmod(k, 3)
            other = around[:, :, dy : dy + rows : 2, dx : dx + columns : 2]
            larger = other > best
            best, place = torch.where(larger, other, best), torch.where(larger, k, place)
        ctx.save_for_backward(place.to(torch.int8))
        return best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        d, (place,) = gradients[0], ctx.saved_tensors
        count, channels, rows, columns = d.shape
        d, place = nn.functional.pad(d, (0, 1, 0, 1)), nn.functional.pad(place, (0, 1, 0, 1), value=-1)

        def of(k: int, down: int, right: int) -> Tensor:
            """The gradient of the window at this offset, where its maximum is at k."""
            window = (slice(None), slice(None), slice(down, down + rows), slice(right, right + columns))
            return torch.where(place[window] == k, d[window], 0)

        even = torch.stack([of(4, 0, 0), of(5, 0, 0) + of(3, 0, 1)], 4)
        odd = torch.stack(
            [of(7, 0, 0) + of(1, 1, 0), of(8, 0, 0) + of(6, 0, 1) + of(2, 1, 0) + of(0, 1, 1)],
            4,
        )
        return torch.stack([even, odd], 3).reshape(count, channels, 2 * rows, 2 * columns)


class MeanOverImage(nn.Module):
    """Global average pooling: `[B, C, H, W]` → `[B, C]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _tower(widths: Sequence[int], generator: torch.Generator) -> nn.ModuleList:
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)]
    for layer in layers:
        gain = 1.0 if layer is layers[-1] else math.sqrt(2)
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
    return nn.ModuleList(layers)


def spread_uniformly(net: nn.Module, generator: torch.Generator) -> None:
    """Weights and biases uniform between -1 and 1, over the root of the number of inputs. With biases of 0, as the
    actor-critics have them, the kinks of all ReLUs would go through the origin. Observations of control tasks lie near
    it, and values learned there diverge."""
    for layer in (module for module in net.modules() if isinstance(module, nn.Linear)):
        bound = layer.in_features**-0.5
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)


def cnn_of(shape: tuple[int, ...], config: ModelConfig) -> str:
    """The name of the convolutions for images `[C, H, W]`, with `auto` resolved."""
    side = min(shape[1:])
    if config.cnn == "auto":
        return "nature" if side >= NATURE_MIN_SIDE else "small"
    if config.cnn == "nature" and side < NATURE_MIN_SIDE:
        raise UserError(
            f"model.cnn=nature needs images of at least {NATURE_MIN_SIDE} pixels, but these have {shape[1:]}"
        )
    return config.cnn


def _convolutions(shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> nn.Sequential:
    """`[B, C, H, W]` → features `[B, F]`. Weights and activations are channels_last, which is faster on CPUs and
    GPUs."""
    cnn = cnn_of(shape, config)
    layers: list[nn.Module] = []
    channels = shape[0]
    if cnn == "impala":
        for base in IMPALA_CHANNELS:
            width = max(1, round(base * config.cnn_width))
            layers += [nn.Conv2d(channels, width, 3, padding=1), MaxPool()]
            layers += [Residual(width), Residual(width)]
            channels = width
        layers.append(nn.ReLU(inplace=True))
    else:
        for width, kernel, stride in CNNS[cnn]:
            layers += [nn.Conv2d(channels, width, kernel, stride), nn.ReLU(inplace=True)]
            channels = width
    stack = nn.Sequential(*layers, MeanOverImage() if config.cnn_pool else nn.Flatten())
    for conv in (m for m in stack.modules() if isinstance(m, nn.Conv2d)):
        nn.init.orthogonal_(conv.weight, math.sqrt(2), generator=generator)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    stack.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return stack


def _measure(stack: nn.Sequential, shape: tuple[int, ...]) -> tuple[int, int]:
    """For one row: the number of features, and of all inputs and outputs of the convolutions."""
    sizes = [math.prod(shape)]
    convs = [m for m in stack.modules() if isinstance(m, nn.Conv2d)]
    hooks = [conv.register_forward_hook(lambda _module, _args, out: sizes.append(out.numel())) for conv in convs]
    with torch.no_grad():
        features: int = stack(torch.zeros(1, *shape)).shape[1]
    for hook in hooks:
        hook.remove()
    return features, sum(sizes)
