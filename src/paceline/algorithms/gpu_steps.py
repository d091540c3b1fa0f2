"""The optimizer steps of SAC and TD3 on a GPU: each is one CUDA graph, and nothing waits between them.

Everything here also runs on the CPU, without graphs: that is how it is tested where there is no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.algorithms.rows import Floats
from paceline.models.gpu import captured

if TYPE_CHECKING:
    from paceline.algorithms.base import Metrics
    from paceline.algorithms.continuous import ContinuousControl, Transitions


class GpuSteps:
    """Runs `algorithm.loss` on rows that are copied into the same memory each time, as a graph needs it."""

    def __init__(self, algorithm: ContinuousControl) -> None:
        policy, self._algorithm = algorithm.policy, algorithm
        self._nets, self._device = policy.learned, policy.learned.device
        observations, actions = policy.observation.size, policy.action.dim
        widths = (observations, actions, 1, observations, 1, actions, actions)  # of the fields of `Transitions`
        bounds = [0, *itertools.accumulate(widths)]
        self._columns = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self._size = algorithm.hyper.batch_size
        self._rows = torch.zeros(self._size, bounds[-1], device=self._device)
        self._learning_rate = torch.zeros((), device=self._device)
        self._names = (*algorithm.statistics, "total_loss", "gradient_norm")
        self._totals = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        self._steps: dict[bool, Callable[[], None]] = {}  # by whether the step moves the actor

    def run(self, rows: Transitions, learning_rate: float) -> int:
        """Queue the optimizer steps on these rows, as many as they are batches; returns how many."""
        algorithm = self._algorithm
        assert algorithm.group.size == 1
        table: Floats = np.empty((len(rows.reward), self._columns[-1].stop), np.float32)
        for columns, field in zip(self._columns, vars(rows).values(), strict=True):
            table[:, columns] = field if field.ndim == 2 else field[:, None]
        on_device = torch.from_numpy(table).to(self._device)
        self._learning_rate.fill_(learning_rate)
        starts = range(0, len(table), self._size)
        for begin in starts:
            self._rows.copy_(on_device[begin : begin + self._size])
            moves = algorithm.moves_actor
            (self._steps.get(moves) or self._prepare(moves))()
            algorithm.optimizer_steps += 1
            algorithm.target_updates += moves
        return len(starts)

    def take_totals(self) -> Metrics:
        """Wait for all steps; the sums of their statistics since the last call."""
        totals = dict(zip(self._names, self._totals.tolist(), strict=True))
        self._totals.zero_()
        return totals

    def _prepare(self, moves: bool) -> Callable[[], None]:
        """The step as a graph. Making it takes some steps, whose effects are undone."""
        self._steps[moves] = lambda: self._work(moves)
        if self._device.type == "cuda":
            changed = [*self._algorithm.optimizer.tensors(), self._nets.target_parameters, self._totals]
            kept = [tensor.clone() for tensor in changed]
            self._steps[moves] = captured(self._steps[moves])
            for tensor, value in zip(changed, kept, strict=True):
                tensor.copy_(value)
        return self._steps[moves]

    def _work(self, moves: bool) -> None:
        """One optimizer step."""
        from paceline.algorithms.continuous import Transitions

        algorithm, nets, hyper = self._algorithm, self._nets, self._algorithm.hyper
        obs, action, reward, next_obs, discount, *noise = (self._rows[:, columns] for columns in self._columns)
        rows = Transitions(obs, action, reward[:, 0], next_obs, discount[:, 0], *noise)
        loss, statistics = algorithm.loss(rows, nets)
        parameters = nets.trained()
        with torch.no_grad():
            nets.gradient.zero_()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            both = zip(parameters, gradients, strict=True)
            pairs = [(p.grad, g) for p, g in both if p.grad is not None and g is not None]
            torch._foreach_copy_([own for own, _ in pairs], [new for _, new in pairs])
            norm = nets.gradient.norm()
            if hyper.max_grad_norm > 0:
                nets.gradient.mul_((hyper.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            algorithm.choose_parts(moves)
            algorithm.optimizer.step(self._learning_rate)
            if moves:
                nets.move_targets(hyper.tau)
            found = {**statistics, "total_loss": loss, "gradient_norm": norm}
            self._totals += torch.stack([found[name].double() for name in self._names])
