"""Your own network: residual blocks with layer norm, for vector observations.

    paceline train --env CartPole-v1 --set model.class=examples/network.py:ResidualNet --threads 1

A network this small is quickest with one thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ResidualNet(nn.Module):
    """Built as `ResidualNet(observation_shape, num_outputs, **model.kwargs)`; torch's generator is seeded by the run.

    `num_outputs` is the number of logits (the sum over several choices) or, for continuous actions, of means.
    """

    def __init__(self, observation_shape: tuple[int, ...], num_outputs: int, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(math.prod(observation_shape), width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(blocks)
        )
        self.policy, self.value = nn.Linear(width, num_outputs), nn.Linear(width, 1)
        with torch.no_grad():
            self.policy.weight *= 0.01  # a first policy that prefers nothing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Observations `[B, …]` to policy outputs `[B, num_outputs]` and values `[B]`."""
        h = self.first(x.flatten(1).float())
        for block in self.blocks:
            h = h + block(h)
        return self.policy(h), self.value(h).squeeze(1)
