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
        self._steps = torch.zeros(len(parts))
        self._steps_numpy = self._steps.numpy()
        buffers = (parameters, gradient, self._first, self._second)
        self._parts = [[[b[part]] for b in buffers] for part in parts]

    def step(self, learning_rate: float) -> None:
        for part in range(len(self._parts)):
            self.step_part(part, learning_rate)

    def step_part(self, part: int, learning_rate: float) -> None:
        """Step one part; an optimizer step is over when each had its turn."""
        self._steps_numpy[part] += 1
        parameters, gradient, first, second = self._parts[part]
        torch._fused_adam_(
            parameters,
            gradient,
            first,
            second,
            [],
            [self._steps[part]],
            lr=learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def flats(self, parameters: Tensor) -> list[Tensor]:
        """The parameters and what is kept of them."""
        return [parameters, self._first, self._second]

    def stepped(self, part: int, steps: int) -> None:
        """Another has made these steps of this part, and its moments are here."""
        self._steps_numpy[part] += steps

    def state(self) -> dict[str, NDArray[Any]]:
        return {"first": self._first.numpy(), "second": self._second.numpy(), "step": self._steps[0].numpy()}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        for own, name in ((self._first, "first"), (self._second, "second"), (self._steps, "step")):
            own.copy_(torch.from_numpy(np.array(state[name])))


class RMSprop:
    """As in the A3C paper's code: epsilon inside the root, the mean square starting at 1."""

    def __init__(self, parameters: Tensor, gradient: Tensor, *, decay: float = 0.99, eps: float = 1e-5) -> None:
        self._decay, self._eps = np.float32(decay), np.float32(eps)
        self._parameters, self._gradient = parameters.numpy(), gradient.numpy()
        self._square = np.ones_like(self._parameters)

    def step(self, learning_rate: float) -> None:
        g = self._gradient
        self._square *= self._decay
        self._square += (1 - self._decay) * (g * g)
        self._parameters -= np.float32(learning_rate) * g / np.sqrt(self._square + self._eps)

    def state(self) -> dict[str, NDArray[Any]]:
        return {"square": self._square}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        self._square[...] = state["square"]


OPTIMIZERS: dict[str, type[Adam] | type[RMSprop]] = {"adam": Adam, "rmsprop": RMSprop}
