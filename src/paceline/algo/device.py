"""PPO's passes over a rollout on a GPU: one optimizer step is one CUDA graph, and nothing is waited for in between.

The loss is that of `ppo.py`, written for autograd; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.algo.base import MAX_LOG_RATIO, Rows
from paceline.algo.optimizers import Adam
from paceline.config import PPOConfig
from paceline.model.device import DevicePolicy, captured

FIELDS = 6  # action, logp and value of the policy that acted, advantage, target, weight

Outcome = tuple[list[float], float]
"""STATISTICS of `ppo.py` and gradient norm, means of the last pass."""


class DevicePasses:
    def __init__(self, policy: DevicePolicy, hyper: PPOConfig, adam: Adam, *, rows: int) -> None:
        """`rows`: most in one minibatch."""
        device, observation = policy.device, policy.observation
        self._policy, self._hyper, self._adam, self._device = policy, hyper, adam, device
        self._x = torch.zeros(rows, *observation.shape, dtype=torch.uint8, device=device)
        self._fields = torch.zeros(FIELDS, rows, device=device)
        self._clip, self._learning_rate = torch.zeros((), device=device), torch.zeros((), device=device)
        self._totals = torch.zeros(7, device=device)
        self._step: Callable[[], None] = self._work
        if device.type == "cuda":
            kept = [tensor.clone() for tensor in self._changed()]
            self._step = captured(self._work)
            for tensor, value in zip(self._changed(), kept, strict=True):
                tensor.copy_(value)

    def _changed(self) -> list[Tensor]:
        return [*self._adam.tensors(self._policy.parameters), self._totals]

    def begin(
        self, rows: Rows, orders: Sequence[np.ndarray], parts: Sequence[slice], clip: float, learning_rate: float
    ) -> Callable[[], Outcome]:
        """Ask for all passes; what is returned waits for them. `orders`: of the rows, one for each pass."""
        count = len(rows)
        self._clip.fill_(clip)
        self._learning_rate.fill_(learning_rate)
        # The last column is a row without weight: minibatches are filled up with it, since a graph has one size.
        table = np.zeros((FIELDS, count + 1), np.float32)
        table[0, :count] = rows.action[:, 0]
        table[1:5, :count] = rows.fields
        on_device = torch.from_numpy(table).to(self._device)
        frames = torch.cat([rows.obs.index, rows.obs.index[:1]])
        size = len(self._x)
        places = np.full((len(orders), len(parts), size), count)
        for epoch, order in enumerate(orders):
            for k, part in enumerate(parts):
                places[epoch, k, : part.stop - part.start] = order[part]
        all_places = torch.from_numpy(places).to(self._device)
        for epoch in range(len(orders)):
            if epoch == len(orders) - 1:
                self._totals.zero_()
            for k, part in enumerate(parts):
                chosen = all_places[epoch, k]
                on_device[5, :count] = 1.0 / (part.stop - part.start)
                torch.index_select(on_device, 1, chosen, out=self._fields)
                torch.index_select(rows.obs.frames, 0, frames[chosen], out=self._x)
                self._step()
        totals = self._totals.clone()

        def outcome() -> Outcome:
            means = (totals / len(parts)).tolist()
            return means[:6], means[6]

        return outcome

    def _work(self) -> None:
        """One optimizer step."""
        policy, hyper = self._policy, self._hyper
        action, old_logp, old_value, advantage, target, weight = self._fields
        out, value = policy.forward(self._x)
        log_p = torch.log_softmax(out, 1)
        log_ratio = (log_p.gather(1, action.long()[:, None])[:, 0] - old_logp).clamp(max=float(MAX_LOG_RATIO))
        ratio = log_ratio.exp()
        low, high = 1 - self._clip, 1 + self._clip
        surrogate = torch.minimum(ratio * advantage, torch.minimum(torch.maximum(ratio, low), high) * advantage)
        policy_loss = -(weight * surrogate).sum()
        entropy = -(weight * (log_p.exp() * log_p).sum(1)).sum()
        error = (value - target).square()
        if hyper.value_clip is not None:
            moved = (value - old_value).clamp(-hyper.value_clip, hyper.value_clip)
            error = torch.maximum(error, (old_value + moved - target).square())
        value_loss = (weight * error).sum()
        loss = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * entropy
        parameters = list(policy.net.parameters())
        with torch.no_grad():
            gradients = torch.autograd.grad(loss, parameters)
            torch._foreach_copy_([p.grad for p in parameters if p.grad is not None], gradients)
            norm = policy.gradient.norm()
            if hyper.max_grad_norm > 0:
                policy.gradient.mul_((hyper.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self._adam.step(self._learning_rate)
            kl = (weight * (ratio - 1 - log_ratio)).sum()
            clipped = (weight * ((ratio < low) | (ratio > high))).sum()
            self._totals += torch.stack([policy_loss, value_loss, entropy, loss, kl, clipped, norm])
