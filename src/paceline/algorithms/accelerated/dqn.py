"""DQN's gradient by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.algorithms.rows import Floats

if TYPE_CHECKING:
    from paceline.algorithms.dqn import DQN, ReplayRows


class DQNAccelerator:
    def __init__(self, algorithm: DQN) -> None:
        hyper = algorithm.hyper
        self.online, self.bound = algorithm.policy.online, np.float32(hyper.huber)
        self._gradient = np.zeros((algorithm.policy.action.nvec[0], hyper.batch_size), np.float32)
        self._index, self._share = np.arange(hyper.batch_size), np.float32(1 / hyper.batch_size)

    def gradients(self, rows: ReplayRows) -> tuple[Floats, Floats]:
        """The gradient of the loss into the policy's flat gradient; returns values and errors, `[B]`."""
        self.rows = rows
        self.online.learn(rows.obs, self.output_gradient)
        return self._value, self._error

    def output_gradient(self, q: Floats) -> Floats:
        """d loss / d q `[K, B]`: only of the actions that were taken."""
        rows = self.rows
        self._value = q[rows.action, self._index]
        self._error = self._value - rows.target()
        d = np.clip(self._error, -self.bound, self.bound)
        d *= self._share if rows.weight is None else rows.weight * self._share
        self._gradient[...] = 0
        self._gradient[rows.action, self._index] = d
        return self._gradient
