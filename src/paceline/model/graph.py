"""A policy as one torch module from the observations of the environment to its actions: what an export holds.

`spaces.py` and `Policy.prepare` do the same on numpy arrays; an export is compared with them before it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from paceline.config import UserError
from paceline.model.heads import GaussianHead
from paceline.model.normalizer import CLIP
from paceline.model.policy import Policy
from paceline.model.q import QPolicy
from paceline.spaces import MIN_IMAGE_SIDE, Array, Leaf

# Torch computes nothing with these: they come as the next wider one.
_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


@dataclass(frozen=True)
class Port:
    """An input or output: `[N, *shape]`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}  {self.dtype} [{', '.join(['N', *map(str, self.shape)])}]"


class Graph(nn.Module):
    """`forward` takes the leaves of a batch of observations, one by one, and gives what `outputs` lists."""

    mean: Tensor
    scale: Tensor
    limit: Tensor
    log_std: Tensor

    def __init__(self, policy: Policy, *, value: bool = True, deviation: bool = True) -> None:
        """`value`, `deviation`: whether the policy has learned these."""
        super().__init__()
        self.observation, self.action = policy.observation, policy.action
        self._spaces = [_space_at(policy.observation.space, leaf.path) for leaf in policy.observation.leaves]
        self.inputs = [_input(leaf, space) for leaf, space in zip(policy.observation.leaves, self._spaces, strict=True)]
        self.is_q = isinstance(policy, QPolicy)
        self.dueling = isinstance(policy, QPolicy) and policy.online.dueling
        self.value = value
        if isinstance(policy, QPolicy):
            policy.online.quiet()
        self.net = policy.net
        scaling = policy.scaling()
        self._scales = scaling is not None
        if scaling is not None:
            limit = np.full(policy.observation.size, CLIP, np.float32)
            for leaf in policy.observation.images:
                limit[leaf.start : leaf.stop] = np.inf
            for name, array in zip(("mean", "scale", "limit"), (*scaling, limit), strict=True):
                self.register_buffer(name, torch.from_numpy(array))
        self.deviates = deviation and isinstance(policy.head, GaussianHead)
        if isinstance(policy.head, GaussianHead):
            self.register_buffer("log_std", torch.from_numpy(policy.head.log_std.copy()))
        self.outputs = [Port(name, shape, dtype, meaning) for name, shape, dtype, meaning in self._outputs()]

    def _outputs(self) -> list[tuple[str, tuple[int, ...], np.dtype[Any], str]]:
        float32, space = np.dtype(np.float32), self.action.space
        wanted = np.dtype(space.dtype)
        rows: list[tuple[str, tuple[int, ...], np.dtype[Any], str]] = [
            (
                "action",
                tuple(space.shape or ()),
                np.dtype(_WIDER.get(wanted.name, wanted)),
                "the most likely action" if not self.is_q else "the best action",
            )
        ]
        shape = (self.action.num_outputs,)
        if self.is_q:
            rows.append(("q_values", shape, float32, "what each action is worth"))
        elif not self.action.is_continuous:
            choices = "" if len(self.action.nvec) == 1 else f" of {len(self.action.nvec)} choices, side by side"
            rows.append(("logits", shape, float32, f"log-probabilities{choices}, up to a constant"))
        else:
            rows.append(("mean", shape, float32, "the action before it is squashed, scaled and clipped"))
        if self.deviates:
            rows.append(("log_std", shape, float32, "log of its standard deviation"))
        if self.value:
            rows.append(("value", (), float32, "return to expect, discounted, on the scale of learning"))
        return rows

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = self._encode(inputs)
        if self._scales:
            x = (x - self.mean) * self.scale
            x = torch.maximum(torch.minimum(x, self.limit), -self.limit)
        out, value = self.net(x)
        if self.dueling:
            out = out + (value.unsqueeze(1) - out.mean(1, keepdim=True))
        if self.is_q:
            value = out.amax(1)
        results = [self._act(out), out]
        if self.deviates:
            results.append(self.log_std.expand_as(out))
        return tuple([*results, value] if self.value else results)

    def _encode(self, inputs: Sequence[Tensor]) -> Tensor:
        """As `ObservationCodec.encode`."""
        parts = []
        for leaf, space, value in zip(self.observation.leaves, self._spaces, inputs, strict=True):
            size = math.prod(space.shape or ())
            if leaf.kind == "image":
                image = _channels_first(value, tuple(space.shape or ()))
                if self.observation.is_image:
                    return image if leaf.scale != 1.0 else image.float()
                parts.append(image.reshape(-1, size).float())
            elif leaf.kind == "onehot":
                which, wanted = _columns(leaf)
                parts.append((value.reshape(-1, size)[:, which] == wanted).float())
            else:
                parts.append(value.reshape(-1, size).float())
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _act(self, out: Tensor) -> Tensor:
        """As `Head.mode` and `ActionCodec.decode`."""
        port = self.outputs[0]
        dtype = torch.from_numpy(np.zeros(0, port.dtype)).dtype
        if not self.action.is_continuous:
            first = torch.from_numpy(self.action.offset.astype(np.int64))
            stops = np.cumsum(self.action.nvec).tolist()
            parts = [out[:, stop - n : stop] for n, stop in zip(self.action.nvec, stops, strict=True)]
            best = [part.argmax(1, keepdim=True) for part in parts]
            return (torch.cat(best, dim=1) + first).reshape(-1, *port.shape).to(dtype)
        # Whole numbers and 64 bits as exactly as the environment's own arithmetic; 32 bits where that is all there is.
        exact = np.float32 if port.dtype in (np.float32, np.float16) else np.float64
        center, scale, low, high = (
            torch.from_numpy(bound.astype(exact))
            for bound in (self.action.center, self.action.scale, self.action.low, self.action.high)
        )
        unit = (torch.tanh(out) if self.action.squash else out).to(center.dtype)
        real = torch.minimum(torch.maximum(center + scale * unit, low), high)
        return real.reshape(-1, *port.shape).to(dtype)


def _space_at(space: spaces.Space[Any], path: tuple[str | int, ...]) -> spaces.Space[Any]:
    for key in path:
        assert isinstance(space, spaces.Dict | spaces.Tuple)
        space = space[key]  # type: ignore[index]
    return space


def _input(leaf: Leaf, space: spaces.Space[Any]) -> Port:
    name = ".".join(["observation", *map(str, leaf.path)])
    dtype = np.dtype(space.dtype)
    if dtype.kind not in "fiub":
        raise UserError(f"the observation has {dtype} in it, which a network cannot be given")
    if leaf.kind == "onehot":
        meaning = f"one of {leaf.nvec[0]}" if len(leaf.nvec) == 1 else f"{len(leaf.nvec)} choices"
    elif leaf.kind == "image":
        meaning = "an image" + (", 0 to 255" if leaf.scale != 1.0 else "")
    else:
        meaning = "numbers"
    return Port(name, tuple(space.shape or ()), np.dtype(_WIDER.get(dtype.name, dtype)), meaning)


def _columns(leaf: Leaf) -> tuple[Tensor, Tensor]:
    """Of each column of a one-hot part: which choice it is of, and the value that makes it 1."""
    which = np.repeat(np.arange(len(leaf.nvec)), leaf.nvec)
    wanted = np.concatenate([np.arange(n) + first for n, first in zip(leaf.nvec, leaf.offsets, strict=True)])
    return torch.from_numpy(which), torch.from_numpy(wanted.astype(np.int64))


def _channels_first(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[N, *shape]` → `[N, C, H, W]`, as `spaces._channels_first`."""
    if len(shape) == 2:
        return value.unsqueeze(1)
    *stack, a, b, c = shape
    last = min(a, b) >= MIN_IMAGE_SIDE and c <= 32
    if stack:
        value = value.reshape(-1, a, b, c)
    if last:
        value, a, b, c = value.permute(0, 3, 1, 2), c, a, b
    return value.reshape(-1, stack[0] * a, b, c) if stack else value


def stack_leaves(graph: Graph, observations: Sequence[Any]) -> dict[str, Array]:
    """Observations of the environment, one by one → the inputs of the graph by name."""
    columns = {}
    for leaf, port in zip(graph.observation.leaves, graph.inputs, strict=True):
        rows = []
        for value in observations:
            for key in leaf.path:
                value = value[key]
            rows.append(np.asarray(value).astype(port.dtype).reshape(port.shape))
        columns[port.name] = np.stack(rows)
    return columns
