"""`MlpActorCritic` without autograd: forward and backward by hand, in numpy, on the same parameters.

For the small networks of control tasks the time of a step is overhead, not arithmetic. Here a pass is some twenty calls
of about a microsecond into preallocated arrays; numpy's float32 tanh is also several times faster than torch's, and its
matrix products are as fast. Only in large layers do two of torch's fused kernels save a pass over memory. Supports any
depth, width and activation of `MlpActorCritic`, shared or in two towers, which two threads learn at once where that
pays."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.models.nets import MlpActorCritic

Floats = NDArray[np.float32]
Gradient = Callable[[Floats], Floats]
"""Outputs → the gradient of the loss with respect to them."""
JointGradient = Callable[[Floats, Floats], tuple[Floats, Floats]]
"""Policy outputs `[K, B]` and values `[B]` → the gradient of the loss with respect to both."""

Work = Callable[[], object]

ONE = np.float32(1.0)
MAX_WORKSPACES = 512
LARGE = 24_000  # elements of a layer from which torch's fused kernels are worth their overhead
WIDE, FEW = 16_384, 4  # weights of a layer from which they pay off for fewer rows, too; and the least rows
MIN_PARALLEL_PRODUCTS = 4_000_000  # multiplications in one tower's forward pass, below which a second thread never pays


@dataclass
class Workspace:
    """Arrays for one number of rows B: views into common storage."""

    h: list[Floats]  # [B, H] after each hidden layer
    d: list[Floats]  # [B, H] gradients of the same
    slope: list[Floats]  # [B, H] derivatives of the activation
    h_torch: list[Any]  # the same as `h` and `d`, as tensors; without torch None
    d_torch: list[Any]
    large: list[bool]  # layers for which torch's fused kernels are worth it
    rows: Floats  # [B, K], the last layer before its bias
    out: Floats  # [K, B]
    ones: Floats  # [B]


class Tower:
    """Linear layers with activations between. `backward` overwrites gradients; it does not add to them."""

    def __init__(self, layers: nn.ModuleList | Sequence[tuple[Floats, Floats]], activation: str) -> None:
        """`layers`: of a network in torch; or weights and biases, for a tower without gradients that needs no torch."""
        self._in_torch = not isinstance(layers, Sequence)
        self._weights: list[Floats]
        self._biases: list[Floats]
        if isinstance(layers, Sequence):
            self._weights, self._biases = [weight for weight, _ in layers], [bias for _, bias in layers]
        else:
            linears = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
            self._weights = [layer.weight.detach().numpy() for layer in linears]
            self._biases = [layer.bias.detach().numpy() for layer in linears]
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
        """`x [B, D]` → `[K, B]`, in an array that is valid until the next call."""
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
        """The result of the last forward pass."""
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
                self._propagate(d, space, layer)
                np.matmul(space.ones, below, out=self._d_biases[layer - 1])
                d = below.T
        self._d_first = d

    def d_input(self) -> Floats:
        """d loss / d x `[B, D]`, after `backward`."""
        gradient: Floats = self._d_first.T @ self._weights[0]
        return gradient

    def input_gradient(self, d_out: Floats, columns: slice) -> Floats:
        """d loss / d x `[B, n]` of these columns of the last input; the gradients of the weights stay as they are."""
        space, d = self._last, d_out
        for layer in range(len(self._weights) - 1, 0, -1):
            self._propagate(d, space, layer)
            d = space.d[layer - 1].T
        gradient: Floats = d.T @ self._weights[0][:, columns]
        return gradient

    def _propagate(self, d: Floats, space: Workspace, layer: int) -> None:
        """The gradient of a layer's outputs `[K, B]` → that before the activation below it, in `space.d`."""
        below = space.d[layer - 1]
        if len(d) > 1:
            np.matmul(d.T, self._weights[layer], out=below)
        elif space.large[layer - 1]:  # an outer product, which matmul leaves to a slow loop
            torch.mul(torch.from_numpy(d).t(), self._torch[layer][1].t(), out=space.d_torch[layer - 1])
        else:
            np.multiply(d.T, self._weights[layer], out=below)
        self._activation_backward(space, layer - 1)

    def _activate(self, h: Floats, h_torch: Any) -> None:
        if self._activation == "tanh":
            np.tanh(h, out=h)
        elif self._activation == "relu" and h_torch is None:
            np.maximum(h, 0, out=h)
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
        if self._activation == "relu":
            h_torch, d_torch = space.h_torch[layer], space.d_torch[layer]
            torch.ops.aten.threshold_backward.grad_input(d_torch, h_torch, 0, grad_input=d_torch)
            return
        h, d, out = space.h[layer], space.d[layer], space.slope[layer]
        if self._activation == "tanh":
            np.multiply(h, h, out=out)
            np.subtract(ONE, out, out=out)
        else:
            np.minimum(h, 0, out=out)
            np.add(out, ONE, out=out)
        np.multiply(d, out, out=d)

    def _make_workspace(self, rows: int) -> Workspace:
        """Views into common storage: the number of rows changes with the valid rows of a rollout."""
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
        large = [self._in_torch and (view.size >= LARGE or is_wide) for view, is_wide in zip(h, wide, strict=True)]
        torches = [[torch.from_numpy(view) if self._in_torch else None for view in side] for side in (h, d)]
        space = Workspace(h, d, slope, torches[0], torches[1], large, *views[3 * n :])
        self._workspaces[rows] = space
        return space


@dataclass
class MlpArrays:
    """An MLP as arrays: weights and biases of each tower."""

    policy: Sequence[tuple[Floats, Floats]]
    value: Sequence[tuple[Floats, Floats]]
    shared: bool
    activation: str


class NumpyMlp:
    def __init__(self, net: MlpActorCritic | MlpArrays) -> None:
        self._policy = Tower(net.policy, net.activation)
        self._value = None if net.shared else Tower(net.value, net.activation)
        self._helper: HelperThread | None = None
        self._chooser = ThreadChooser()
        self.threads = 1

    @property
    def towers(self) -> list[Tower]:
        """The towers of the policy and the value, or the one they share."""
        return [self._policy] if self._value is None else [self._policy, self._value]

    def use_threads(self, most: int, rows: int) -> int:
        """Learn from minibatches of `rows` with one thread, or with one per tower if that pays; returns how many."""
        self.threads = min(most, 2) if self.pays_in_two_threads(rows) else 1
        return self.threads

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
        """`x [B, D]` → policy outputs `[K, B]`, values `[B]`; valid until the next call."""
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

    def learn(self, x: Floats, policy_gradient: Gradient, value_gradient: Gradient) -> None:
        """Forward, both gradients of the loss, backward."""
        policy, value = self._policy, self._value
        if value is None:
            out, values = self.forward(x)
            self.backward(policy_gradient(out), value_gradient(values))
            return
        began, run_both = time.perf_counter(), self._choose_runner()
        run_both(
            lambda: policy.backward(policy_gradient(policy.forward(x))),
            lambda: value.backward(value_gradient(value.forward(x)[0])[None]),
        )
        self._chooser.took(time.perf_counter() - began)

    def learn_jointly(self, x: Floats, gradient: JointGradient) -> None:
        """The same for a loss that needs policy and value at once: the towers meet between forward and backward."""
        policy, value = self._policy, self._value
        if value is None:
            self.backward(*gradient(*self.forward(x)))
            return
        began, run_both = time.perf_counter(), self._choose_runner()
        run_both(lambda: policy.forward(x), lambda: value.forward(x))
        d_out, d_value = gradient(policy.out, value.out[0])
        run_both(lambda: policy.backward(d_out), lambda: value.backward(d_value[None]))
        self._chooser.took(time.perf_counter() - began)

    def input_gradient(self) -> Floats:
        """d loss / d x `[B, D]`, after a gradient of the weights."""
        gradient = self._policy.d_input()
        if self._value is not None:
            gradient += self._value.d_input()
        return gradient

    def _choose_runner(self) -> Callable[[Work, Work], None]:
        """For work on two towers, which have nothing in common: one after the other, or at once if that is faster."""
        if self.threads < 2 or not self._chooser.choose():
            return _in_turn
        if self._helper is None:
            self._helper = HelperThread()
        return self._helper.both


def _in_turn(here: Work, there: Work) -> None:
    here()
    there()


class ThreadChooser:
    """One thread or two: whichever is faster at present. The other is tried again from time to time, because other load
    on the machine changes the answer. The results are the same, bit for bit.
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


class HelperThread:
    """A second thread that waits for work. numpy and torch release the interpreter lock while they compute. Work that
    it has not begun when the result is needed is done by the caller, so a thread that gets no core costs next to
    nothing."""

    def __init__(self) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._offered: deque[Work] = deque()  # one at most, to be taken by either
        self._error: BaseException | None = None
        self._busy = False
        threading.Thread(target=self._serve, daemon=True, name="paceline-helper").start()

    def both(self, here: Work, there: Work) -> None:
        """Run both, one in each thread; returns when both are done."""
        self.begin(there)
        try:
            here()
        finally:
            self.join()

    def begin(self, work: Work) -> None:
        """Start it in the other thread, which must be idle."""
        self._busy = True
        self._offered.append(work)
        if self._go.locked():  # otherwise it has not yet woken from the call before
            self._go.release()

    def join(self) -> None:
        """Wait until the work begun, if any, is done."""
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
        # Torch counts its threads per thread: without this it would give this one a team of its own that spins.
        torch.set_num_threads(1)
        while True:
            self._go.acquire()
            try:
                work = self._offered.pop()
            except IndexError:  # the caller has done it
                continue
            try:
                with np.errstate(all="ignore"):  # numpy keeps this per thread; the loop reports what is not finite
                    work()
            except BaseException as error:  # raised again in `join`
                self._error = error
            self._done.release()


def _grad(parameter: Tensor) -> Floats:
    assert parameter.grad is not None
    grad: Floats = parameter.grad.numpy()
    return grad
