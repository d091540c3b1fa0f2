"""`MlpActorCritic` without autograd: forward and backward by hand, on the same parameters.

For the small networks of control tasks the time of a step is overhead, not arithmetic. Here a pass is some twenty calls
of a microsecond or two into preallocated arrays. numpy's float32 tanh is several times faster than torch's, torch's
addmm takes the bias for free, so each does what it does best on the same memory. Any depth, width and activation of
`MlpActorCritic`, shared or in two towers; the two towers are learned side by side in two threads where that pays.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.model.nets import MlpActorCritic

Floats = NDArray[np.float32]
Loss = Callable[[Floats], Floats]
"""Outputs → the gradient of the loss with respect to them."""

MAX_WORKSPACES = 512
MIN_PARALLEL_PRODUCTS = 4_000_000  # multiplications in one tower's forward pass, below which a second thread costs more

_BACKWARD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    # In place on the gradient, from the value of the activation: the kernels that autograd would call.
    "tanh": lambda d, h: torch.ops.aten.tanh_backward.grad_input(d, h, grad_input=d),
    "relu": lambda d, h: torch.ops.aten.threshold_backward.grad_input(d, h, 0, grad_input=d),
    "elu": lambda d, h: torch.ops.aten.elu_backward.grad_input(d, 1, 1, 1, True, h, grad_input=d),
}


@dataclass
class Workspace:
    """Arrays for one number of rows B, as torch and as numpy see them: views into common storage."""

    h: list[Tensor]  # [B, H] after each hidden layer
    h_numpy: list[Floats]
    d: list[Tensor]  # [B, H] gradients of the same
    d_numpy: list[Floats]
    rows: Floats  # [B, K], the last layer before its bias
    out: Floats  # [K, B]
    ones: Floats  # [B]


class Tower:
    """Linear layers with activations between. Gradients are written over what was there, not added to it."""

    def __init__(self, layers: nn.ModuleList, activation: str) -> None:
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self._weights = [layer.weight.detach() for layer in linears]
        self._weights_t = [weight.t() for weight in self._weights]
        self._weights_numpy = [weight.numpy() for weight in self._weights]
        self._biases = [layer.bias.detach() for layer in linears]
        self._last_bias = self._biases[-1].numpy()[:, None]
        self._d_weights = [_grad(layer.weight) for layer in linears]
        self._d_biases = [_grad(layer.bias) for layer in linears]
        self._widths = [len(weight) for weight in self._weights]
        self.products = sum(weight.numel() for weight in self._weights)
        self._activation, self._activation_backward = activation, _BACKWARD[activation]
        self._storage: list[Tensor] = []
        self._most_rows = 0
        self._workspaces: dict[int, Workspace] = {}

    def forward(self, x: Floats) -> Floats:
        """`x [B, D]` → `[K, B]`: this tower's array, good until the next call."""
        space = self._workspaces.get(len(x)) or self._make_workspace(len(x))
        h = torch.from_numpy(x)
        layers = zip(self._biases, self._weights_t, space.h, space.h_numpy, strict=False)
        for bias, weight, after, after_numpy in layers:
            torch.addmm(bias, h, weight, out=after)
            if self._activation == "tanh":
                np.tanh(after_numpy, out=after_numpy)
            elif self._activation == "relu":
                torch.relu_(after)
            else:
                torch.nn.functional.elu_(after)
            h = after
        np.matmul(h.numpy(), self._weights_numpy[-1].T, out=space.rows)
        np.add(space.rows.T, self._last_bias, out=space.out)
        self._x, self._last = x, space
        return space.out

    def backward(self, d_out: Floats) -> None:
        """The gradient of the last forward pass, given d loss / d output `[K, B]`."""
        space = self._last
        d, d_bias = d_out, d_out.sum(axis=1)
        for layer in range(len(self._weights) - 1, -1, -1):
            below = space.h_numpy[layer - 1] if layer else self._x
            np.matmul(d, below, out=self._d_weights[layer])
            self._d_biases[layer][...] = d_bias
            if layer:
                d_below = space.d_numpy[layer - 1]
                if len(d) == 1:  # numpy leaves an outer product to a slow loop
                    torch.mm(torch.from_numpy(d.T), self._weights[layer], out=space.d[layer - 1])
                else:
                    np.matmul(d.T, self._weights_numpy[layer], out=d_below)
                self._activation_backward(space.d[layer - 1], space.h[layer - 1])
                d, d_bias = d_below.T, np.matmul(space.ones, d_below)

    def _make_workspace(self, rows: int) -> Workspace:
        """Views of the rows asked for. Their number changes with the valid rows of a rollout; the storage is one."""
        hidden, outputs = self._widths[:-1], self._widths[-1]
        if rows > self._most_rows:
            self._most_rows = rows
            self._storage = [torch.empty(rows * width) for width in (*hidden, *hidden, outputs, outputs)]
            self._workspaces = {}
        if len(self._workspaces) >= MAX_WORKSPACES:
            self._workspaces = {}
        shapes = [*[(rows, width) for width in (*hidden, *hidden, outputs)], (outputs, rows)]
        views = [s[: math.prod(shape)].view(shape) for s, shape in zip(self._storage, shapes, strict=True)]
        n = len(hidden)
        h, d = views[:n], views[n : 2 * n]
        space = Workspace(
            h,
            [a.numpy() for a in h],
            d,
            [a.numpy() for a in d],
            views[-2].numpy(),
            views[-1].numpy(),
            np.ones(rows, np.float32),
        )
        self._workspaces[rows] = space
        return space


class FastMlp:
    def __init__(self, net: MlpActorCritic) -> None:
        self._policy = Tower(net.policy, net.activation)
        self._value = None if net.shared else Tower(net.value, net.activation)
        self._twin: Twin | None = None
        self.threads = 1

    def pays_in_two_threads(self, rows: int) -> bool:
        return self._value is not None and rows * self._value.products >= MIN_PARALLEL_PRODUCTS

    def policy(self, x: Floats) -> Floats:
        """Policy outputs `[K, B]` alone."""
        out = self._policy.forward(x)
        return out[:-1] if self._value is None else out

    def value(self, x: Floats) -> Floats:
        """Values `[B]` alone."""
        values: Floats = self._policy.forward(x)[-1] if self._value is None else self._value.forward(x)[0]
        return values

    def forward(self, x: Floats) -> tuple[Floats, Floats]:
        """`x [B, D]` → policy outputs `[K, B]`, values `[B]`: good until the next call."""
        if self._value is None:
            out = self._policy.forward(x)
            return out[:-1], out[-1]
        return self._policy.forward(x), self._value.forward(x)[0]

    def backward(self, d_out: Floats, d_value: Floats) -> None:
        """The gradient of the last forward pass, into the parameters' `.grad`."""
        if self._value is None:
            self._policy.backward(np.concatenate((d_out, d_value[None])))
        else:
            self._policy.backward(d_out)
            self._value.backward(d_value[None])

    def learn(self, x: Floats, policy_loss: Loss, value_loss: Loss) -> None:
        """Forward, both losses, backward. Two towers have nothing in common, so that they can be learned at once."""
        value = self._value
        if value is None or self.threads < 2:
            out, values = self.forward(x)
            self.backward(policy_loss(out), value_loss(values))
            return
        if self._twin is None:
            self._twin = Twin()
        self._twin.both(
            lambda: self._policy.backward(policy_loss(self._policy.forward(x))),
            lambda: value.backward(value_loss(value.forward(x)[0])[None]),
        )


class Twin:
    """A second thread that waits for work. numpy and torch leave Python to the other while they compute."""

    def __init__(self) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._work: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, daemon=True, name="twin").start()

    def both(self, here: Callable[[], None], there: Callable[[], None]) -> None:
        """Run both, one in each thread; returns when both are done."""
        self._work = there
        self._go.release()
        try:
            here()
        finally:
            self._done.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            try:
                self._work()
            except BaseException as error:  # it is raised again in `both`
                self._error = error
            self._done.release()


def _grad(parameter: Tensor) -> Floats:
    assert parameter.grad is not None
    grad: Floats = parameter.grad.numpy()
    return grad
