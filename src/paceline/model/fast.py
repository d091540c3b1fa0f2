"""`MlpActorCritic` without autograd: forward and backward by hand, in numpy, on the same parameters.

For the small networks of control tasks the time of a step is overhead, not arithmetic. Here a pass is some twenty calls
of about a microsecond into preallocated arrays; numpy's float32 tanh is also several times faster than torch's, and its
matrix products are as fast. Only in large layers do two of torch's fused kernels save a pass over memory. Any depth,
width and activation of `MlpActorCritic`, shared or in two towers; the two are learned at once in two threads where that
pays.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.model.nets import MlpActorCritic

Floats = NDArray[np.float32]
Loss = Callable[[Floats], Floats]
"""Outputs → the gradient of the loss with respect to them."""
JointLoss = Callable[[Floats, Floats], tuple[Floats, Floats]]
"""Policy outputs `[K, B]` and values `[B]` → the gradient of the loss with respect to both."""

Work = Callable[[], object]

ONE = np.float32(1.0)
MAX_WORKSPACES = 512
LARGE = 24_000  # elements of a layer from which on torch's fused kernels are worth their greater overhead
WIDE, FEW = 16_384, 4  # weights of a layer from which on they are for fewer rows, too; and how many rows at least
MIN_PARALLEL_PRODUCTS = 4_000_000  # multiplications in one tower's forward pass, below which a second thread never pays


@dataclass
class Workspace:
    """Arrays for one number of rows B: views into common storage."""

    h: list[Floats]  # [B, H] after each hidden layer
    d: list[Floats]  # [B, H] gradients of the same
    slope: list[Floats]  # [B, H] derivatives of the activation
    h_torch: list[Tensor]  # the same as `h` and `d`
    d_torch: list[Tensor]
    large: list[bool]  # layers for which torch's fused kernels are worth it
    rows: Floats  # [B, K], the last layer before its bias
    out: Floats  # [K, B]
    ones: Floats  # [B]


class Tower:
    """Linear layers with activations between. Gradients are written over what was there, not added to it."""

    def __init__(self, layers: nn.ModuleList, activation: str) -> None:
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self._weights: list[Floats] = [layer.weight.detach().numpy() for layer in linears]
        self._biases: list[Floats] = [layer.bias.detach().numpy() for layer in linears]
        self._torch = [(layer.bias.detach(), layer.weight.detach().t()) for layer in linears]
        self._d_weights = [_grad(layer.weight) for layer in linears]
        self._d_biases = [_grad(layer.bias) for layer in linears]
        self._last_bias = self._biases[-1][:, None]
        self._widths = [len(weight) for weight in self._weights]
        self.products = sum(weight.size for weight in self._weights)
        self.parameters = self.products + sum(bias.size for bias in self._biases)
        self._activation = activation
        self._storage: list[Floats] = []
        self._most_rows = 0
        self._workspaces: dict[int, Workspace] = {}

    def forward(self, x: Floats) -> Floats:
        """`x [B, D]` → `[K, B]`: this tower's array, good until the next call."""
        space = self._workspaces.get(len(x)) or self._make_workspace(len(x))
        h = x
        for layer, after in enumerate(space.h):
            if space.large[layer]:
                bias_torch, weight_torch = self._torch[layer]
                torch.addmm(bias_torch, torch.from_numpy(h), weight_torch, out=space.h_torch[layer])
            else:
                np.matmul(h, self._weights[layer].T, out=after)
                np.add(after, self._biases[layer], out=after)
            self._activate(after, space.h_torch[layer])
            h = after
        np.matmul(h, self._weights[-1].T, out=space.rows)
        np.add(space.rows.T, self._last_bias, out=space.out)
        self._x, self._last = x, space
        return space.out

    @property
    def out(self) -> Floats:
        """What the last forward pass returned."""
        return self._last.out

    def backward(self, d_out: Floats) -> None:
        """The gradient of the last forward pass, given d loss / d output `[K, B]`."""
        space = self._last
        d = d_out
        np.add.reduce(d, axis=1, out=self._d_biases[-1])
        for layer in range(len(self._weights) - 1, -1, -1):
            np.matmul(d, space.h[layer - 1] if layer else self._x, out=self._d_weights[layer])
            if layer:
                below = space.d[layer - 1]
                if len(d) == 1:  # an outer product, which matmul leaves to a slow loop
                    np.multiply(d.T, self._weights[layer], out=below)
                else:
                    np.matmul(d.T, self._weights[layer], out=below)
                self._activation_backward(space, layer - 1)
                np.matmul(space.ones, below, out=self._d_biases[layer - 1])
                d = below.T

    def _activate(self, h: Floats, h_torch: Tensor) -> None:
        if self._activation == "tanh":
            np.tanh(h, out=h)
        elif self._activation == "relu":
            torch.relu_(h_torch)  # numpy's maximum takes four times as long
        else:
            np.copyto(h, np.expm1(np.minimum(h, 0)), where=h < 0)

    def _activation_backward(self, space: Workspace, layer: int) -> None:
        """The gradient after the activation → before it, in place, from the activation's value."""
        if self._activation == "tanh" and space.large[layer]:
            h_torch, d_torch = space.h_torch[layer], space.d_torch[layer]
            torch.ops.aten.tanh_backward.grad_input(d_torch, h_torch, grad_input=d_torch)
            return
        h, d, out = space.h[layer], space.d[layer], space.slope[layer]
        if self._activation == "tanh":
            np.multiply(h, h, out=out)
            np.subtract(ONE, out, out=out)
        elif self._activation == "relu":
            np.greater(h, 0, out=out, casting="unsafe")
        else:
            np.minimum(h, 0, out=out)
            np.add(out, ONE, out=out)
        np.multiply(d, out, out=d)

    def _make_workspace(self, rows: int) -> Workspace:
        """Views of the rows asked for. Their number changes with the valid rows of a rollout; the storage is one."""
        hidden, outputs = self._widths[:-1], self._widths[-1]
        if rows > self._most_rows:
            self._most_rows = rows
            self._storage = [np.empty(rows * n, np.float32) for n in (*hidden, *hidden, *hidden, outputs, outputs, 1)]
            self._storage[-1][...] = 1
            self._workspaces = {}
        if len(self._workspaces) >= MAX_WORKSPACES:
            self._workspaces = {}
        shapes = [*[(rows, n) for n in (*hidden, *hidden, *hidden, outputs)], (outputs, rows), (rows,)]
        views = [s[: math.prod(shape)].reshape(shape) for s, shape in zip(self._storage, shapes, strict=True)]
        n = len(hidden)
        h, d, slope = views[:n], views[n : 2 * n], views[2 * n : 3 * n]
        wide = [rows >= FEW and weight.size >= WIDE for weight in self._weights[:-1]]
        large = [view.size >= LARGE or is_wide for view, is_wide in zip(h, wide, strict=True)]
        torches = [[torch.from_numpy(view) for view in side] for side in (h, d)]
        space = Workspace(h, d, slope, torches[0], torches[1], large, *views[3 * n :])
        self._workspaces[rows] = space
        return space


class FastMlp:
    def __init__(self, net: MlpActorCritic) -> None:
        self._policy = Tower(net.policy, net.activation)
        self._value = None if net.shared else Tower(net.value, net.activation)
        self._twin: Twin | None = None
        self._pace = Pace()
        self.threads = 1

    @property
    def towers(self) -> list[Tower]:
        """That of the policy and that of the value, or the one they share."""
        return [self._policy] if self._value is None else [self._policy, self._value]

    def apart(self, policy_work: Work, value_work: Work) -> None:
        """Work on each tower, at once where that pays."""
        if self.threads < 2:
            _in_turn(policy_work, value_work)
            return
        if self._twin is None:
            self._twin = Twin()
        self._twin.both(policy_work, value_work)

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
        if value is None:
            out, values = self.forward(x)
            self.backward(policy_loss(out), value_loss(values))
            return

        def learn_policy() -> None:
            self._policy.backward(policy_loss(self._policy.forward(x)))

        def learn_value() -> None:
            value.backward(value_loss(value.forward(x)[0])[None])

        began, both = time.perf_counter(), self._way()
        both(learn_policy, learn_value)
        self._pace.took(time.perf_counter() - began)

    def learn_jointly(self, x: Floats, loss: JointLoss) -> None:
        """The same for a loss that needs policy and value at once: the towers meet between forward and backward."""
        value = self._value
        if value is None:
            self.backward(*loss(*self.forward(x)))
            return
        began, both = time.perf_counter(), self._way()
        both(lambda: self._policy.forward(x), lambda: value.forward(x))
        d_out, d_value = loss(self._policy.out, value.out[0])
        both(lambda: self._policy.backward(d_out), lambda: value.backward(d_value[None]))
        self._pace.took(time.perf_counter() - began)

    def _way(self) -> Callable[[Work, Work], None]:
        """To work on two towers: one after the other, or at once if that is faster."""
        if self.threads < 2 or not self._pace.choose():
            return _in_turn
        if self._twin is None:
            self._twin = Twin()
        return self._twin.both


def _in_turn(here: Work, there: Work) -> None:
    here()
    there()


class Pace:
    """One thread or two: whichever is faster here and now. The other is tried again from time to time, because a busy
    neighbour turns the answer round. The results are the same, bit for bit.
    """

    ROUND, TRIES = 1024, 8

    def __init__(self) -> None:
        self._recent = ([math.inf] * self.TRIES, [math.inf] * self.TRIES)  # seconds in one thread, in two
        self._calls = 0
        self._in_two = self._best = False

    def choose(self) -> bool:
        turn = self._calls % self.ROUND
        if turn == 2 * self.TRIES:
            one, two = (sorted(seconds)[self.TRIES // 2] for seconds in self._recent)
            self._best = two < one
        self._in_two = turn % 2 == 1 if turn < 2 * self.TRIES else self._best
        self._calls += 1
        return self._in_two

    def took(self, seconds: float) -> None:
        self._recent[self._in_two][(self._calls // 2) % self.TRIES] = seconds


class Twin:
    """A second thread that waits for work. numpy and torch leave Python to the other while they compute. What it has
    not begun when it is needed is done by the one who needs it: a thread that gets no core costs next to nothing.
    """

    def __init__(self) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._offered: deque[Work] = deque()  # one at most, to be taken by either
        self._error: BaseException | None = None
        self._busy = False
        threading.Thread(target=self._serve, daemon=True, name="twin").start()

    def both(self, here: Work, there: Work) -> None:
        """Run both, one in each thread; returns when both are done."""
        self.begin(there)
        try:
            here()
        finally:
            self.join()

    def begin(self, work: Work) -> None:
        """Start it in the other thread, which has none."""
        self._busy = True
        self._offered.append(work)
        if self._go.locked():  # or it has not yet come for what it was called for before
            self._go.release()

    def join(self) -> None:
        """Until what was begun, if anything, is done."""
        if not self._busy:
            return
        self._busy = False
        try:
            work = self._offered.pop()
        except IndexError:
            self._done.acquire()
        else:
            work()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _serve(self) -> None:
        # Torch counts its threads per thread: without this it would give this one a team that spins on all cores.
        torch.set_num_threads(1)
        while True:
            self._go.acquire()
            try:
                work = self._offered.pop()
            except IndexError:  # the other has done it
                continue
            try:
                with np.errstate(all="ignore"):  # numpy keeps this per thread; the loop reports what is not finite
                    work()
            except BaseException as error:  # it is raised again in `join`
                self._error = error
            self._done.release()


def _grad(parameter: Tensor) -> Floats:
    assert parameter.grad is not None
    grad: Floats = parameter.grad.numpy()
    return grad
