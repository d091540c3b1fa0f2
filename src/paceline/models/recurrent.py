"""Networks with memory: a recurrent layer between the observations, or the features of images, and the towers.

The memory of an environment is one row of numbers: the output of a GRU, or the output and the cell of an LSTM. It is
zero at the start of an episode. Acting takes one step at a time; learning runs whole sequences in one call.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from paceline.config import ModelConfig
from paceline.models.nets import PASS_BYTES, CnnActorCritic, MlpActorCritic
from paceline.spaces import Array, ObservationCodec

Floats = NDArray[np.float32]
PARAMETERS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


class Sequences:
    """Observations of several sequences, R rows in any order: row r is step `step[r]` of sequence `sequence[r]`."""

    def __init__(self, x: Array, sequence: Array, step: Array, memory: Floats) -> None:
        """`x [R, …]`: prepared observations. `memory [Q, S]`: before the first step of each sequence."""
        self.x, self.sequence, self.step, self.memory = x, sequence, step, memory

    @classmethod
    def cut(cls, x: Array, mask: Array, valid: Array, memory: Floats, length: int) -> Sequences:
        """The states of a rollout that `mask` selects, `[T, N]` or `[T+1, N]`, whose observations are `x [R, …]`.

        A new sequence begins every `length` steps, where the collector has stored `memory [C, N, S]`, and with each
        episode, where the memory is zero. A row that only resets (not `valid [T, N]`) shows the last observation of an
        episode: it is the last state of that episode's sequence.
        """
        steps = len(valid)
        first = np.zeros((steps + 1, valid.shape[1]), np.bool_)
        first[:steps:length] = True
        first[1:] |= ~valid
        columns, times = np.nonzero(first.T)
        stored = (times % length == 0) & (times < steps)
        start = np.zeros((len(times), memory.shape[2]), np.float32)
        start[stored] = memory[times[stored] // length, columns[stored]]
        ids = np.cumsum(first.T).reshape(first.T.shape).T - 1  # numbered column by column, as `columns` and `times`
        t, n = np.nonzero(mask)
        sequence = ids[t, n]
        return cls(x, sequence, t - times[sequence], start)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Any) -> Sequences:
        """Some of the rows; a sequence may lose its end, but nothing before."""
        return Sequences(self.x[rows], self.sequence[rows], self.step[rows], self.memory)

    def columns(self) -> tuple[Array, Floats]:
        """The place of each row's sequence among those that occur, `[R]`, and the memory they begin with."""
        lengths = np.bincount(self.sequence, minlength=len(self.memory))
        used = np.flatnonzero(lengths)
        place = np.zeros(len(lengths), np.int64)
        place[used] = np.arange(len(used))
        return place[self.sequence], self.memory[used]


class RecurrentActorCritic(nn.Module):
    """Policy outputs `[R, K]` and values `[R]` of `Sequences`. One recurrent layer serves both towers."""

    def __init__(
        self, observation: ObservationCodec, config: ModelConfig, outputs: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        size = self.size = config.memory_size
        self.sequence_length = config.sequence_length
        self.is_lstm = config.memory == "lstm"
        self.width = 2 * size if self.is_lstm else size
        """Numbers of memory for each environment."""
        self.images: CnnActorCritic | None = None
        inputs = observation.net_size
        if observation.images:
            self.images = CnnActorCritic(observation, config, outputs, generator, head_inputs=size)
            inputs = self.images.features
        else:
            self.head = MlpActorCritic(size, config.hidden, config.activation, config.shared, outputs, generator)
        self.layer: nn.RNNBase = nn.LSTM(inputs, size) if self.is_lstm else nn.GRU(inputs, size)
        w, u, b, b_h = self.layer_parameters()
        for gate in range(len(w) // size):  # as the other layers: inputs of size 1 make outputs of size 1
            part = slice(gate * size, (gate + 1) * size)
            nn.init.orthogonal_(w.detach()[part], math.sqrt(2), generator=generator)
            nn.init.orthogonal_(u.detach()[part], generator=generator)
        for bias in (b, b_h):
            nn.init.zeros_(bias)
        # The gate that forgets, the second of both kinds. A bias of log(n) keeps a number for about n steps: with units
        # for all spans up to a sequence, the first gradients already reach as far back (Tallec and Ollivier, 2018).
        spans = np.geomspace(1, max(2, config.sequence_length - 1), size)
        b.detach()[size : 2 * size] = torch.from_numpy(np.log(spans).astype(np.float32))

    @property
    def towers(self) -> MlpActorCritic:
        return self.head if self.images is None else self.images.head

    def layer_parameters(self) -> list[Tensor]:
        """The weights for the features and for the layer's own output, and the biases of both."""
        return [getattr(self.layer, name) for name in PARAMETERS]

    def forward(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        out, value = self.towers(self.remember(sequences))
        return out, value

    def remember(self, sequences: Sequences) -> Tensor:
        """The output of the recurrent layer for each row, `[R, H]`: all sequences in one call, padded to one length."""
        column, start = sequences.columns()
        features = self.features(torch.from_numpy(np.ascontiguousarray(sequences.x)))
        place = torch.from_numpy(sequences.step * len(start) + column)
        steps = int(sequences.step.max()) + 1
        padded = features.new_zeros(steps * len(start), features.shape[1]).index_copy(0, place, features)
        memory = torch.from_numpy(start)[None]
        begin: Any = tuple(part.contiguous() for part in torch.split(memory, self.size, 2)) if self.is_lstm else memory
        out, _ = self.layer(padded.view(steps, len(start), -1), begin)
        rows: Tensor = out.reshape(-1, self.size).index_select(0, place)
        return rows

    def features(self, x: Tensor) -> Tensor:
        """`x [R, …]` → the inputs of the recurrent layer. Many images go through in parts that are computed again for
        the gradient, which bounds the memory they take."""
        if self.images is None:
            return x
        parts = math.ceil(len(x) * self.images.row_bytes / PASS_BYTES)
        if parts <= 1 or not torch.is_grad_enabled():
            return self.images.join_features(x)
        some = [
            torch.utils.checkpoint.checkpoint(self.images.join_features, part, use_reentrant=False)
            for part in x.chunk(parts)
        ]
        return torch.cat(some)

    def step(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Policy outputs `[N, K]`, values `[N]` and the new memory, after one step from `memory [N, S]`."""
        (w, u, b, b_h), h = self.layer_parameters(), memory[:, : self.size]
        given, kept = linear(self.features(x), w, b), linear(h, u, b_h)
        if self.is_lstm:
            i, f, g, o = (given + kept).chunk(4, 1)
            c = torch.sigmoid(f) * memory[:, self.size :] + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            memory = torch.cat([h, c], 1)
        else:
            (r, z, n), (r_h, z_h, n_h) = given.chunk(3, 1), kept.chunk(3, 1)
            update = torch.sigmoid(z + z_h)
            memory = h = (1 - update) * torch.tanh(n + torch.sigmoid(r + r_h) * n_h) + update * h
        out, value = self.towers(h)
        return out, value, memory


class NumpyCell:
    """One step of the recurrent layer in numpy, on the same parameters: a step for a few environments costs torch
    mostly overhead."""

    def __init__(self, net: RecurrentActorCritic) -> None:
        self._w, self._u, self._b, self._b_h = (p.detach().numpy() for p in net.layer_parameters())
        self._size, self._is_lstm = net.size, net.is_lstm

    def step(self, x: Floats, memory: Floats) -> Floats:
        """The output `[N, H]` for features `x [N, F]`; `memory [N, S]` is changed in place."""
        n, h = self._size, memory[:, : self._size]
        given = x @ self._w.T
        kept = h @ self._u.T
        given += self._b
        kept += self._b_h
        if self._is_lstm:
            given += kept
            g = np.tanh(given[:, 2 * n : 3 * n])
            gates = _sigmoid(given)
            c = memory[:, n:]
            c *= gates[:, n : 2 * n]
            c += gates[:, :n] * g
            np.multiply(gates[:, 3 * n :], np.tanh(c), out=h)
            return h
        gates = _sigmoid(given[:, : 2 * n] + kept[:, : 2 * n])
        new = np.tanh(given[:, 2 * n :] + gates[:, :n] * kept[:, 2 * n :])
        h -= new
        h *= gates[:, n:]
        h += new
        return h


def _sigmoid(x: Floats) -> Floats:
    """By tanh, which numpy computes several times as fast as the exponential; changes `x`."""
    x *= np.float32(0.5)
    np.tanh(x, out=x)
    x *= np.float32(0.5)
    x += np.float32(0.5)
    return x
