"""Optimizers over one flat parameter buffer: one call a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from paceline.lazy import np, torch

if TYPE_CHECKING:
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


class Optimizer(Protocol):
    """Changes the flat parameters by the flat gradient, both given at construction."""

    def step(self, learning_rate: Any) -> None: ...
    def tensors(self) -> list[Tensor]: ...
    def state(self) -> dict[str, NDArray[Any]]: ...
    def load(self, state: dict[str, NDArray[Any]]) -> None: ...


class Adam:
    """Torch's fused Adam kernel, called directly: for a small network its Optimizer class costs more than the step."""

    def __init__(self, parameters: Tensor, gradient: Tensor, *, eps: float = 1e-5) -> None:
        self._eps = eps
        self._first, self._second = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._steps = torch.zeros((), device=parameters.device)
        self._buffers: Any = [[buffer] for buffer in (parameters, gradient, self._first, self._second)]

    def step(self, learning_rate: Any) -> None:
        """`learning_rate`: a number, or a tensor where the step is part of a CUDA graph."""
        self._steps.add_(1)
        fused: Any = torch._fused_adam_
        fused(
            *self._buffers,
            [],
            [self._steps],
            lr=learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [self._buffers[0][0], self._first, self._second, self._steps]

    def state(self) -> dict[str, NDArray[Any]]:
        arrays = {"first": self._first, "second": self._second, "step": self._steps}
        return {name: array.cpu().numpy() for name, array in arrays.items()}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        for own, name in ((self._first, "first"), (self._second, "second"), (self._steps, "step")):
            own.copy_(torch.from_numpy(np.array(state[name])))


class SeparateAdam:
    """Adam for parts of a buffer, of which a step moves the `active` ones."""

    def __init__(self, parameters: Tensor, gradient: Tensor, parts: list[slice], *, eps: float) -> None:
        self._parts = [Adam(parameters[part], gradient[part], eps=eps) for part in parts]
        self.active = [True] * len(parts)

    def step(self, learning_rate: Any) -> None:
        for part, is_active in zip(self._parts, self.active, strict=True):
            if is_active:
                part.step(learning_rate)

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part.tensors()]

    def state(self) -> dict[str, NDArray[Any]]:
        return {f"{k}.{name}": array for k, part in enumerate(self._parts) for name, array in part.state().items()}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        for k, part in enumerate(self._parts):
            part.load({name: state[f"{k}.{name}"] for name in part.state()})


class RMSprop:
    """As in the A3C paper's code: epsilon inside the root, the mean square starting at 1."""

    def __init__(self, parameters: Tensor, gradient: Tensor, *, decay: float = 0.99, eps: float = 1e-5) -> None:
        self._decay, self._eps = decay, eps
        self._parameters, self._gradient = parameters, gradient
        self._square = torch.ones_like(parameters)

    def step(self, learning_rate: Any) -> None:
        self._square.mul_(self._decay).addcmul_(self._gradient, self._gradient, value=1 - self._decay)
        root = (self._square + self._eps).sqrt_()
        if isinstance(learning_rate, float):
            self._parameters.addcdiv_(self._gradient, root, value=-learning_rate)
        else:  # in a CUDA graph
            self._parameters.sub_(learning_rate * self._gradient / root)

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [self._parameters, self._square]

    def state(self) -> dict[str, NDArray[Any]]:
        return {"square": self._square.cpu().numpy()}

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        self._square.copy_(torch.from_numpy(np.array(state["square"])))


OPTIMIZERS: dict[str, type[Adam] | type[RMSprop]] = {"adam": Adam, "rmsprop": RMSprop}
