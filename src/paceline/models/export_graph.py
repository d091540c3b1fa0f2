"""The network of an export: a policy as one torch module, from the environment's observations to its actions.

The codecs and `Policy.prepare` compute the same with numpy; an export is compared with them before it is written.
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
from paceline.models.actor_critics import MAX_LOG_STD, MIN_LOG_STD, ContinuousPolicy, GaussianActor
from paceline.models.heads import GaussianHead, MixedHead
from paceline.models.masking import masked_tensor
from paceline.models.normalizer import CLIP
from paceline.models.policy import Policy
from paceline.models.q import QPolicy
from paceline.spaces import MASK, ActionPart, Array, Leaf

MEMORY, NEXT_MEMORY = "memory", "next_memory"
# Torch cannot compute with these types, so the next wider one is used.
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
    """`forward` takes the leaves of a batch of observations as `inputs` lists them and returns what `outputs` lists."""

    mean: Tensor
    scale: Tensor
    limit: Tensor
    log_std: Tensor

    def __init__(self, policy: Policy, *, value: bool = True, deviation: bool = True) -> None:
        """`value`, `deviation`: whether the policy has learned a value and a standard deviation."""
        super().__init__()
        self.observation, self.action = policy.observation, policy.action
        self._spaces = [_space_at(policy.observation.space, leaf.path) for leaf in policy.observation.leaves]
        self.inputs = [_input(leaf, space) for leaf, space in zip(policy.observation.leaves, self._spaces, strict=True)]
        if self.observation.mask:
            meaning = "1 for each valid action" + ("" if len(self.action.nvec) == 1 else ", all choices concatenated")
            self.inputs.append(Port(MASK, (sum(self.action.nvec),), np.dtype(np.int8), meaning))
        self.memory = policy.memory_width
        if self.memory:
            meaning = f"zeros at the start of an episode, then the last {NEXT_MEMORY}"
            self.inputs.append(Port(MEMORY, (self.memory,), np.dtype(np.float32), meaning))
        self.is_q = isinstance(policy, QPolicy)
        self.dueling = isinstance(policy, QPolicy) and policy.online.dueling
        self.value = value
        self.squash = policy.action.squash or isinstance(policy, ContinuousPolicy)
        self.gives_log_std = isinstance(policy.head, GaussianActor)
        """Whether the network's outputs are means and the logarithms of deviations."""
        if isinstance(policy, QPolicy):
            policy.online.quiet()
        self.net: Any = policy.net
        scaling = policy.scaling()
        self._scales = scaling is not None
        if scaling is not None:
            size = policy.observation.net_size
            limit = np.full(size, CLIP, np.float32)
            for leaf in policy.observation.images:
                limit[leaf.start : leaf.stop] = np.inf
            for name, array in zip(("mean", "scale", "limit"), (*scaling, limit), strict=True):
                self.register_buffer(name, torch.from_numpy(array[:size]))
        numbers = policy.head.numbers if isinstance(policy.head, MixedHead) else policy.head
        self.deviates = deviation and isinstance(numbers, GaussianHead)
        if isinstance(numbers, GaussianHead):
            self.register_buffer("log_std", torch.from_numpy(numbers.log_std.copy()))
        self.actions = [_output(part, self.is_q) for part in self.action.parts]
        """One output for each part of the action, the first of all outputs."""
        self.outputs = [*self.actions, *self._outputs()]

    def _outputs(self) -> list[Port]:
        float32, numbers, logits = np.dtype(np.float32), (self.action.dim,), (sum(self.action.nvec),)
        deviates = self.deviates or self.gives_log_std
        ports: list[Port] = []
        if self.is_q:
            ports.append(Port("q_values", logits, float32, "the value of each action"))
        elif self.action.nvec:
            choices = "" if len(self.action.nvec) == 1 else f" of {len(self.action.nvec)} choices, concatenated"
            ports.append(Port("logits", logits, float32, f"log-probabilities{choices}, up to a constant"))
        if self.action.dim:
            ports.append(Port("mean", numbers, float32, "the action before squashing, scaling and clipping"))
        if deviates:
            ports.append(Port("log_std", numbers, float32, "logarithm of its standard deviation"))
        if self.value:
            ports.append(Port("value", (), float32, "expected discounted return, on the scale of learning"))
        if self.memory:
            ports.append(Port(NEXT_MEMORY, (self.memory,), float32, "the memory after this observation"))
        return ports

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = len(self._spaces)
        mask = inputs[leaves] if self.observation.mask else None
        x = self._encode(inputs[:leaves])
        if self._scales:
            x = (x - self.mean) * self.scale
            x = torch.maximum(torch.minimum(x, self.limit), -self.limit)
        out, value, *memory = self.net.step(x, inputs[-1]) if self.memory else self.net(x)
        if self.dueling:
            out = out + (value.unsqueeze(1) - out.mean(1, keepdim=True))
        out = masked_tensor(out, mask)
        if self.is_q:
            value = out.amax(1)
        log_std = None
        if self.gives_log_std:
            out, log_std = out.chunk(2, 1)
        sizes = [size for size in (sum(self.action.nvec), self.action.dim) if size]
        results = [*self._act(out), *torch.split(out, sizes, 1)]
        if log_std is not None:
            results.append(log_std.clamp(MIN_LOG_STD, MAX_LOG_STD))
        if self.deviates:
            results.append(self.log_std.expand_as(results[-1]))
        return (*results, *([value] if self.value else []), *memory)

    def _encode(self, inputs: Sequence[Tensor]) -> Tensor:
        """As `ObservationCodec.encode`."""
        parts = []
        for leaf, space, value in zip(self.observation.leaves, self._spaces, inputs, strict=True):
            size = math.prod(space.shape or ())
            if leaf.kind == "image":
                image = _channels_first(value, leaf)
                if self.observation.is_image:
                    return image if leaf.scale != 1.0 else image.float()
                parts.append(image.reshape(-1, size).float())
            elif leaf.kind == "onehot":
                which, wanted = _columns(leaf)
                parts.append((value.reshape(-1, size)[:, which] == wanted).float())
            else:
                parts.append(value.reshape(-1, size).float())
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _act(self, out: Tensor) -> list[Tensor]:
        """As `Head.mode` and `ActionCodec.decode_parts`."""
        chosen = self._choose(out) if self.action.nvec else out
        count, means, acts = len(self.action.nvec), out[:, sum(self.action.nvec) :], []
        for part, port in zip(self.action.parts, self.actions, strict=True):
            if part.start < count:
                columns = chosen[:, part.start : part.stop]
                acts.append(columns.reshape(-1, *port.shape).to(_torch_type(port)))
            else:
                acts.append(self._scaled(means, slice(part.start - count, part.stop - count), port))
        return acts

    def _choose(self, out: Tensor) -> Tensor:
        first = torch.from_numpy(self.action.offset.astype(np.int64))
        stops = np.cumsum(self.action.nvec).tolist()
        choices = [out[:, stop - n : stop] for n, stop in zip(self.action.nvec, stops, strict=True)]
        return torch.cat([choice.argmax(1, keepdim=True) for choice in choices], dim=1) + first

    def _scaled(self, means: Tensor, columns: slice, port: Port) -> Tensor:
        # 64 bits for integers and float64, as exact as the environment's own arithmetic; 32 bits for float32 and less.
        exact = np.float32 if port.dtype in (np.float32, np.float16) else np.float64
        center, scale, low, high = (
            torch.from_numpy(bound[columns].astype(exact))
            for bound in (self.action.center, self.action.scale, self.action.low, self.action.high)
        )
        out = means[:, columns]
        unit = (torch.tanh(out) if self.squash else out).to(center.dtype)
        real = torch.minimum(torch.maximum(center + scale * unit, low), high)
        return real.reshape(-1, *port.shape).to(_torch_type(port))


def _space_at(space: spaces.Space[Any], path: tuple[str | int, ...]) -> spaces.Space[Any]:
    for key in path:
        assert isinstance(space, spaces.Dict | spaces.Tuple)
        space = space[key]  # type: ignore[index]
    return space


def _supported(space: spaces.Space[Any]) -> np.dtype[Any]:
    dtype = np.dtype(space.dtype)
    return np.dtype(_WIDER.get(dtype.name, dtype))


def _input(leaf: Leaf, space: spaces.Space[Any]) -> Port:
    name = ".".join(["observation", *map(str, leaf.path)])
    if np.dtype(space.dtype).kind not in "fiub":
        raise UserError(f"the observation contains {space.dtype}, which a network cannot take as input")
    if leaf.kind == "onehot":
        meaning = f"one of {leaf.nvec[0]}" if len(leaf.nvec) == 1 else f"{len(leaf.nvec)} choices"
    elif leaf.kind == "image":
        meaning = "an image" + (", 0 to 255" if leaf.scale != 1.0 else "")
    else:
        meaning = "numbers"
    return Port(name, tuple(space.shape or ()), _supported(space), meaning)


def _output(part: ActionPart, is_q: bool) -> Port:
    name = ".".join(["action", *map(str, part.path)])
    meaning = "the best action" if is_q else "the most likely action"
    return Port(name, tuple(part.space.shape or ()), _supported(part.space), meaning)


def _torch_type(port: Port) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, port.dtype)).dtype


def _columns(leaf: Leaf) -> tuple[Tensor, Tensor]:
    """For each column of a one-hot leaf: the index of its category, and the value for which the column is 1."""
    which = np.repeat(np.arange(len(leaf.nvec)), leaf.nvec)
    wanted = np.concatenate([np.arange(n) + first for n, first in zip(leaf.nvec, leaf.offsets, strict=True)])
    return torch.from_numpy(which), torch.from_numpy(wanted.astype(np.int64))


def _channels_first(value: Tensor, leaf: Leaf) -> Tensor:
    """As `observations._channels_first`."""
    if leaf.channels_last:
        *others, height, width, channels = range(value.dim())
        value = value.permute(*others, channels, height, width)
    return value.reshape(-1, *leaf.shape)


def stack_leaves(graph: Graph, observations: Sequence[Any], rows: Array) -> dict[str, Array]:
    """A sequence of observations → the inputs of the graph by name. `rows`: the same, encoded, with their masks."""
    columns: dict[str, Array] = {}
    for leaf, port in zip(graph.observation.leaves, graph.inputs, strict=False):
        values = []
        for value in observations:
            for key in leaf.path:
                value = value[key]
            values.append(np.asarray(value).astype(port.dtype).reshape(port.shape))
        columns[port.name] = np.stack(values)
    if graph.observation.mask:
        columns[MASK] = graph.observation.split(rows)[1].astype(np.int8)
    if graph.memory:  # any: a memory of the network's own would not test more
        columns[MEMORY] = np.random.default_rng(0).uniform(-1, 1, (len(rows), graph.memory)).astype(np.float32)
    return columns
