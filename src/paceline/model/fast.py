"""`MlpActorCritic` without torch: forward and backward by hand, in numpy, on the same parameters.

For the small networks of control tasks the time of a step is overhead, not arithmetic. Here a pass is some twenty calls
of about a microsecond into preallocated arrays; numpy's float32 tanh is also several times faster than torch's, and its
matrix products are as fast. Any depth, width and activation of `MlpActorCritic`, shared or in two towers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.model.nets import MlpActorCritic

Floats = NDArray[np.float32]
ONE = np.float32(1.0)
MAX_WORKSPACES = 512


@dataclass
class Workspace:
    """Arrays for one number of rows B: views into common storage."""

    h: list[Floats]  # [G, B, H] after each hidden layer
    d: list[Floats]  # [G, B, H] gradients of the same
    slope: list[Floats]
    out: Floats  # [K, B]
    value: Floats  # [B]


class FastMlp:
    """Gradients are written over what was there, not added to it."""

    def __init__(self, net: MlpActorCritic) -> None:
        parameters = dict(net.named_parameters())
        view = {name: p.detach().numpy() for name, p in parameters.items()}
        grad = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
        layers = range(len(net.weights))
        self._w = [view[f"weights.{i}"] for i in layers]
        self._b = [view[f"biases.{i}"] for i in layers]
        self._dw = [grad[f"weights.{i}"] for i in layers]
        self._db = [grad[f"biases.{i}"] for i in layers]
        self._policy_w, self._policy_b = view["policy_weight"], view["policy_bias"][:, None]
        self._value_w, self._value_b = view["value_weight"][:, 0], view["value_bias"]
        self._d_policy_w, self._d_policy_b = grad["policy_weight"], grad["policy_bias"]
        self._d_value_w, self._d_value_b = grad["value_weight"][:, 0], grad["value_bias"]
        self._activation = net.activation
        self._towers = self._w[0].shape[0] if self._w else 1
        self._widths = [w.shape[2] for w in self._w]
        self._storage: list[Floats] = []
        self._rows = 0
        self._workspaces: dict[int, Workspace] = {}

    def forward(self, x: Floats) -> tuple[Floats, Floats]:
        """`x [B, D]` → out `[K, B]`, value `[B]`: this object's arrays, good until the next call."""
        space = self._workspaces.get(len(x)) or self._make_workspace(len(x))
        h: Floats = x[None]
        for w, b, after in zip(self._w, self._b, space.h, strict=True):
            np.matmul(h, w, out=after)
            np.add(after, b, out=after)
            self._activate(after)
            h = after
        np.matmul(self._policy_w.T, h[0].T, out=space.out)
        np.add(space.out, self._policy_b, out=space.out)
        np.matmul(h[-1], self._value_w, out=space.value)
        np.add(space.value, self._value_b, out=space.value)
        self._x, self._last = x, space
        return space.out, space.value

    def backward(self, d_out: Floats, d_value: Floats) -> None:
        """The gradient of the last forward pass, into the parameters' `.grad`."""
        space = self._last
        h = space.h[-1] if space.h else self._x[None]
        np.matmul(h[0].T, d_out.T, out=self._d_policy_w)
        np.add.reduce(d_out, axis=1, out=self._d_policy_b)
        np.matmul(d_value, h[-1], out=self._d_value_w)
        self._d_value_b[0] = np.add.reduce(d_value)
        if not space.h:
            return
        d = space.d[-1]
        np.matmul(d_out.T, self._policy_w.T, out=d[0])
        if self._towers == 1:
            d[0] += d_value[:, None] * self._value_w
        else:
            np.multiply(d_value[:, None], self._value_w, out=d[1])
        for layer in range(len(self._w) - 1, -1, -1):
            d = space.d[layer]
            self._slope(space.h[layer], space.slope[layer])
            np.multiply(d, space.slope[layer], out=d)
            below = space.h[layer - 1] if layer else self._x[None]
            np.matmul(below.transpose(0, 2, 1), d, out=self._dw[layer])
            np.add.reduce(d, axis=1, keepdims=True, out=self._db[layer])
            if layer:
                np.matmul(d, self._w[layer].transpose(0, 2, 1), out=space.d[layer - 1])

    def _activate(self, h: Floats) -> None:
        if self._activation == "tanh":
            np.tanh(h, out=h)
        elif self._activation == "relu":
            np.maximum(h, 0, out=h)
        else:
            np.copyto(h, np.expm1(np.minimum(h, 0)), where=h < 0)

    def _slope(self, h: Floats, out: Floats) -> None:
        """The derivative of the activation, from its value."""
        if self._activation == "tanh":
            np.multiply(h, h, out=out)
            np.subtract(ONE, out, out=out)
        elif self._activation == "relu":
            np.greater(h, 0, out=out, casting="unsafe")
        else:
            np.minimum(h, 0, out=out)
            np.add(out, ONE, out=out)

    def _make_workspace(self, rows: int) -> Workspace:
        """Views of the rows asked for. Their number changes with the valid rows of a rollout; the storage is one."""
        outputs = self._policy_w.shape[1]
        if rows > self._rows:
            self._rows = rows
            sizes = [self._towers * rows * width for width in self._widths]
            self._storage = [np.empty(n, np.float32) for n in (*sizes, *sizes, *sizes, outputs * rows, rows)]
            self._workspaces = {}
        if len(self._workspaces) >= MAX_WORKSPACES:
            self._workspaces = {}
        shapes = [(self._towers, rows, width) for width in self._widths]
        all_shapes = [*shapes, *shapes, *shapes, (outputs, rows), (rows,)]
        views = [s[: np.prod(shape)].reshape(shape) for s, shape in zip(self._storage, all_shapes, strict=True)]
        n = len(shapes)
        space = Workspace(views[:n], views[n : 2 * n], views[2 * n : 3 * n], views[-2], views[-1])
        self._workspaces[rows] = space
        return space
