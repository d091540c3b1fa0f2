"""The passes over a rollout on a GPU: one optimizer step is one CUDA graph, and nothing waits in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.rows import LossRows, Rows
from paceline.models.gpu import GpuPolicy, captured

if TYPE_CHECKING:
    from paceline.algorithms.base import Metrics
    from paceline.algorithms.on_policy import OnPolicy


class GpuPasses:
    """Runs `algorithm.loss` on minibatches that are copied into the same memory each time, as a graph needs it."""

    def __init__(self, algorithm: OnPolicy, *, rows: int) -> None:
        """`rows`: most in one minibatch."""
        policy, optimizer = algorithm.policy, algorithm.optimizer
        assert isinstance(policy, GpuPolicy)
        self._algorithm, self._policy, self._optimizer = algorithm, policy, optimizer
        self._rows, self._device = rows, policy.device
        self._x = torch.zeros(rows, *policy.observation.shape, dtype=torch.uint8, device=self._device)
        self._annealed = {name: torch.zeros((), device=self._device) for name in algorithm.annealed}
        self._totals = torch.zeros(len(algorithm.statistics) + 1, device=self._device)
        self._names: tuple[str, ...] = ()
        self._table = torch.zeros(0)
        self._step: Callable[[], None] | None = None
        self._minibatches = self._epochs = 0

    def begin(self, rows: Rows, orders: Sequence[Any], parts: Sequence[slice]) -> Tensor:
        """Queue all passes. `orders`: of the rows, one for each pass. The result goes to `result`."""
        algorithm, count = self._algorithm, len(rows)
        values = algorithm.annealed
        for name, tensor in self._annealed.items():
            tensor.fill_(values[name])
        algorithm.annealed = self._annealed
        # The columns: action, the fields, weight. The last row has no weight: minibatches are filled up with it, since
        # a graph has one size.
        table = np.zeros((len(rows.names) + 2, count + 1), np.float32)
        table[0, :count] = rows.action[:, 0]
        table[1:-1, :count] = rows.fields
        on_device = torch.from_numpy(table).to(self._device)
        frames = torch.cat([rows.obs.index, rows.obs.index[:1]])
        places = np.full((len(orders), len(parts), self._rows), count)
        for epoch, order in enumerate(orders):
            for k, part in enumerate(parts):
                places[epoch, k, : part.stop - part.start] = order[part]
        all_places = torch.from_numpy(places).to(self._device)
        step = self._step or self._prepare(rows)
        for epoch in range(len(orders)):
            if epoch == len(orders) - 1:
                self._totals.zero_()
            for k, part in enumerate(parts):
                chosen = all_places[epoch, k]
                on_device[-1, :count] = 1.0 / (part.stop - part.start)
                torch.index_select(on_device, 1, chosen, out=self._table)
                torch.index_select(rows.obs.frames, 0, frames[chosen], out=self._x)
                step()
        algorithm.annealed = values
        self._minibatches, self._epochs = len(parts), len(orders)
        return self._totals.clone()

    def result(self, totals: Tensor) -> tuple[Metrics, float, int]:
        """Wait for the passes: statistics and gradient norm, means over the last pass, and the number of passes."""
        *statistics, norm = (totals / self._minibatches).tolist()
        return dict(zip(self._algorithm.statistics, statistics, strict=True)), norm, self._epochs

    def _prepare(self, rows: Rows) -> Callable[[], None]:
        self._names = rows.names
        self._table = torch.zeros(len(rows.names) + 2, self._rows, device=self._device)
        self._step = self._work
        if self._device.type == "cuda":
            changed = [*self._optimizer.tensors(), self._totals, *self._policy.net.buffers()]
            kept = [tensor.clone() for tensor in changed]
            self._step = captured(self._work)
            for tensor, value in zip(changed, kept, strict=True):
                tensor.copy_(value)
        return self._step

    def _work(self) -> None:
        """One optimizer step."""
        policy, algorithm = self._policy, self._algorithm
        rows = LossRows(self._x, self._table[0].long()[:, None], self._table[1:-1], self._names, weight=self._table[-1])
        loss, statistics = algorithm.loss(rows, policy.forward_padded(self._x))
        parameters = policy.trained()
        with torch.no_grad():
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            pairs = [
                (p.grad, g) for p, g in zip(parameters, gradients, strict=True) if p.grad is not None and g is not None
            ]
            torch._foreach_copy_([own for own, _ in pairs], [new for _, new in pairs])
            norm = policy.gradient.norm()
            longest = algorithm.hyper.max_grad_norm
            if longest > 0:
                policy.gradient.mul_((longest / (norm + 1e-6)).clamp(max=1.0))
            self._optimizer.step(self._annealed["learning_rate"])
            found = {**statistics, "total_loss": loss}
            self._totals += torch.stack([*(found[name] for name in algorithm.statistics), norm])
