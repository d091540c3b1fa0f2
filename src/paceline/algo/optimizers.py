"""Optimizers over one flat parameter buffer: one call a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def clip_norm_(gradient: Tensor, longest: float) -> float:
    """Scale the gradient down to length `longest` (0: leave it); returns the length it had."""
    if gradient.is_cuda:
        norm = float(gradient.norm())
        if 0 < longest < norm:
            gradient.mul_(longest / (norm + 1e-6))
        return norm
    flat = gradient.numpy()
    norm = math.sqrt(float(np.dot(flat, flat)))
    if 0 < longest < norm:
        np.multiply(flat, np.float32(longest / (norm + 1e-6)), out=flat)
    return norm


class Adam:
    """Torch's fused Adam kernel, called directly: on a small network its Optimizer class costs more than the step.

    `parts`: slices of the flat buffer that can be stepped one by one.
    """

    def __init__(
        self, parameters: Tensor, gradient: Tensor, *, eps: float = 1e-5, parts: Sequence[slice] = (slice(None),)
    ) -> None:
        self._eps = eps
        self._first, self._second = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._steps = torch.zeros(len(parts), device=parameters.device)
        self._step_of = list(self._steps)  # views
        buffers = (parameters, gradient, self._first, self._second)
        self._parts = [[[b[part]] for b in buffers] for part in parts]

    def step(self, learning_rate: float | Tensor) -> None:
        for part in range(len(self._parts)):
            self.step_part(part, learning_rate)

    def step_part(self, part: int, learning_rate: float | Tensor) -> None:
        """Step one part; an optimizer step is over when each had its turn."""
        step = self._step_of[part].add_(1)
        parameters, gradient, first, second = self._parts[part]
        torch._fused_adam_(
            parameters,
            gradient,
            first,
            second,
            [],
            [step],
            lr=learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def tensors(self, parameters: Tensor) -> list[Tensor]:
        """All that a step changes."""
        return [*self.flats(parameters), self._steps]

    def flats(self, parameters: Tensor) -> list[Tensor]:
        """The parameters and what is kept of them."""
        return [parameters, self._first, self._second]

    def stepped(self, part: int, steps: int) -> None:
        """Another has made these steps of this part, and its moments are here."""
        self._steps[part] += steps

    def state(self) -> dict[str, NDArray[Any]]:
        arrays = {"first": self._first, "second": self._second, "step": self._steps[0]}
        return {name: array.cpu().numpy() for name, array in arrays.items()}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        for own, name in ((self._first, "first"), (self._second, "second"), (self._steps, "step")):
            own.copy_(torch.from_numpy(np.array(state[name])))


class RMSprop:
    """As in the A3C paper's code: epsilon inside the root, the mean square starting at 1."""

    def __init__(self, parameters: Tensor, gradient: Tensor, *, decay: float = 0.99, eps: float = 1e-5) -> None:
        self._decay, self._eps = decay, eps
        self._parameters, self._gradient = parameters, gradient
        self._square = torch.ones_like(parameters)

    def step(self, learning_rate: float) -> None:
        self._square.mul_(self._decay).addcmul_(self._gradient, self._gradient, value=1 - self._decay)
        self._parameters.addcdiv_(self._gradient, (self._square + self._eps).sqrt_(), value=-learning_rate)

    def state(self) -> dict[str, NDArray[Any]]:
        return {"square": self._square.cpu().numpy()}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        self._square.copy_(torch.from_numpy(np.array(state["square"])))


OPTIMIZERS: dict[str, type[Adam] | type[RMSprop]] = {"adam": Adam, "rmsprop": RMSprop}
