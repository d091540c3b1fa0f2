"""The network's outputs as an algorithm's loss reads them, in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.spaces import ActionCodec


class Outputs:
    """For B states: a distribution over actions, and a value each."""

    def __init__(self, raw: Tensor, value: Tensor, action: ActionCodec, log_std: Tensor) -> None:
        self.raw = raw
        """`[B, K]`: logits of choices, then means of numbers."""
        self.value = value
        """`[B]`"""
        self._action, self._log_std = action, log_std

    def log_prob(self, action: Tensor) -> Tensor:
        """The log-probability of `action [B, k]`, `[B]`."""
        if self._action.is_continuous:
            return self._numbers_log_prob(action, self.raw)
        chosen = [p.gather(1, action[:, k : k + 1].long()) for k, p in enumerate(self._log_probs())]
        log_prob = torch.cat(chosen, 1).sum(1) if len(chosen) > 1 else chosen[0][:, 0]
        if self._action.is_mixed:
            log_prob = log_prob + self._numbers_log_prob(action[:, len(chosen) :], self._split()[-1])
        return log_prob

    def _numbers_log_prob(self, action: Tensor, mean: Tensor) -> Tensor:
        z = (action - mean) * (-self._log_std).exp()
        constant = self._log_std.sum() + len(self._log_std) * 0.5 * math.log(2 * math.pi)
        log_prob = -0.5 * z.square().sum(1) - constant
        if self._action.squash:
            # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not lose its digits at large u.
            slope = 2 * (math.log(2) - action - torch.nn.functional.softplus(-2 * action))
            log_prob = log_prob - slope.sum(1)
        return log_prob

    def entropy(self) -> Tensor:
        """`[B]`; of squashed actions that of the normal before tanh."""
        if self._action.is_continuous:
            return self._numbers_entropy().expand(len(self.raw))
        choices = torch.stack([-(p.exp() * p).sum(1) for p in self._log_probs()]).sum(0)
        return choices + self._numbers_entropy() if self._action.is_mixed else choices

    def _numbers_entropy(self) -> Tensor:
        return self._log_std.sum() + len(self._log_std) * (0.5 + 0.5 * math.log(2 * math.pi))

    def select(self, rows: Any) -> Outputs:
        """The outputs for some of the states."""
        mask = torch.as_tensor(rows, device=self.raw.device)
        return Outputs(self.raw[mask], self.value[mask], self._action, self._log_std)

    def require_gradients(self) -> None:
        """Become leaves, whose gradients autograd fills in."""
        self.raw, self.value = (t.detach().requires_grad_() for t in (self.raw, self.value))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """After a backward pass: with respect to `raw` and `value`."""
        assert self.raw.grad is not None and self.value.grad is not None
        return self.raw.grad, self.value.grad

    def _log_probs(self) -> list[Tensor]:
        return [torch.log_softmax(part, 1) for part in self._split()[: len(self._action.nvec)]]

    def _split(self) -> list[Tensor]:
        """The logits of each choice, and the means if there are numbers."""
        numbers = [self._action.dim] if self._action.dim else []
        return list(torch.split(self.raw, [*self._action.nvec, *numbers], 1))
