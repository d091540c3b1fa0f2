"""Distributions over actions, with their gradients by hand.

Arrays are outputs-first, `out [K, B]`: numpy reduces the few outputs of many rows faster that way round. `evaluate`
remembers what `gradient` needs. `log_prob` and `entropy` are per row, `[B]`; the reward of a row is never seen here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from paceline.spaces import ActionCodec, Array

Floats = NDArray[np.float32]
TINY = np.finfo(np.float32).tiny
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Head(ABC):
    num_outputs: int

    @abstractmethod
    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Random numbers for `shape` actions, `[*shape, …]`."""

    @abstractmethod
    def sample(self, out: Floats, noise: Floats) -> Array:
        """Actions `[B, k]`."""

    @abstractmethod
    def mode(self, out: Floats) -> Array:
        """The most likely actions `[B, k]`."""

    def describe(self, out: Floats) -> dict[str, list[Floats]]:
        """What the policy thinks of its actions, by name: for each choice, or for all numbers, `[N, k]`."""
        return {}


class DistributionHead(Head):
    """One whose probabilities a loss needs."""

    @abstractmethod
    def evaluate(self, out: Floats, action: Array) -> tuple[Floats, Floats]:
        """Log-probability and entropy of each row."""

    @abstractmethod
    def gradient(self, d_log_prob: Floats, d_entropy: float) -> Floats:
        """d loss / d out `[K, B]`, given d loss / d log_prob `[B]` and d loss / d entropy (the same for each row)."""


class CategoricalHead(DistributionHead):
    """One categorical per entry of `nvec`, side by side: Discrete, MultiDiscrete, MultiBinary."""

    def __init__(self, nvec: tuple[int, ...]) -> None:
        self.nvec = nvec
        self.num_outputs = sum(nvec)
        stops = np.cumsum(nvec).tolist()
        self._parts = [slice(stop - n, stop) for n, stop in zip(nvec, stops, strict=True)]

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Gumbel noise: the class with the largest sum of logit and noise is a sample."""
        noise: Floats = rng.standard_exponential((*shape, self.num_outputs), np.float32)
        # A zero, one in ten million, would become infinite noise, which even an invalid action would win with.
        np.maximum(noise, TINY, out=noise)
        np.log(noise, out=noise)
        return np.negative(noise, out=noise)

    def sample(self, out: Floats, noise: Floats) -> Array:
        scores: Floats = out.T + noise
        if len(self._parts) == 1:
            action: Array = scores.argmax(axis=1)[:, None]
            return action
        return np.stack([scores[:, part].argmax(axis=1) for part in self._parts], axis=1)

    def mode(self, out: Floats) -> Array:
        return np.stack([out[part].argmax(0) for part in self._parts], axis=1)

    def describe(self, out: Floats) -> dict[str, list[Floats]]:
        powers = [np.exp(out[part] - out[part].max(axis=0)) for part in self._parts]
        return {"probabilities": [(power / power.sum(axis=0)).T for power in powers]}

    def evaluate(self, out: Floats, action: Array) -> tuple[Floats, Floats]:
        rows = np.arange(out.shape[1])
        self._chosen = [(action[:, k], rows) for k in range(len(self.nvec))]
        self._p, self._log_p = np.empty_like(out), np.empty_like(out)
        self._entropies: list[Floats] = []
        log_probs = []
        for chosen, part in zip(self._chosen, self._parts, strict=True):
            logits, p, log_p = out[part], self._p[part], self._log_p[part]
            np.subtract(logits, np.maximum.reduce(logits, axis=0), out=log_p)
            np.exp(log_p, out=p)
            total = np.add.reduce(p, axis=0)
            np.divide(p, total, out=p)
            np.subtract(log_p, np.log(total), out=log_p)
            self._entropies.append(-np.add.reduce(p * log_p, axis=0))
            log_probs.append(log_p[chosen])
        return sum(log_probs[1:], log_probs[0]), sum(self._entropies[1:], self._entropies[0])

    def gradient(self, d_log_prob: Floats, d_entropy: float) -> Floats:
        d_out: Floats = -self._p * d_log_prob
        for chosen, part, entropy in zip(self._chosen, self._parts, self._entropies, strict=True):
            d_part = d_out[part]
            d_part[chosen] += d_log_prob
            if d_entropy:
                d_part -= np.float32(d_entropy) * self._p[part] * (self._log_p[part] + entropy)
        return d_out


class GaussianHead(DistributionHead):
    """Independent normals with one learned deviation per dimension; with `squash`, for the action before tanh.

    The action kept in the batch is the one before clipping or squashing, so the change of variables of tanh is the same
    for the old and the new policy. The entropy is that of the normal.
    """

    def __init__(self, log_std: Floats, d_log_std: Floats, *, squash: bool) -> None:
        self.num_outputs = len(log_std)
        self.log_std, self.d_log_std, self.squash = log_std, d_log_std, squash

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.standard_normal((*shape, self.num_outputs), np.float32)

    def sample(self, out: Floats, noise: Floats) -> Array:
        return out.T + np.exp(self.log_std) * noise

    def mode(self, out: Floats) -> Array:
        return out.T.copy()

    def describe(self, out: Floats) -> dict[str, list[Floats]]:
        return {"mean": [out.T.copy()], "std": [np.broadcast_to(np.exp(self.log_std), out.T.shape).copy()]}

    def evaluate(self, out: Floats, action: Array) -> tuple[Floats, Floats]:
        self._inverse_std = np.exp(-self.log_std)[:, None]
        self._z = (action.T - out) * self._inverse_std
        each = float(np.add.reduce(self.log_std)) + self.num_outputs * (0.5 + HALF_LOG_2PI)
        return self._log_prob(self._z, action), np.full(out.shape[1], each, np.float32)

    def gradient(self, d_log_prob: Floats, d_entropy: float) -> Floats:
        weighted = self._z * d_log_prob
        np.add.reduce(weighted * self._z, axis=1, out=self.d_log_std)
        self.d_log_std += np.float32(d_entropy * len(d_log_prob) - float(np.add.reduce(d_log_prob, dtype=np.float64)))
        d_out: Floats = weighted * self._inverse_std
        return d_out

    def _log_prob(self, z: Floats, action: Array) -> Floats:
        constant = float(np.add.reduce(self.log_std)) + self.num_outputs * HALF_LOG_2PI
        log_prob: Floats = -0.5 * np.add.reduce(z * z, axis=0) - np.float32(constant)
        if self.squash:
            # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not lose its digits at large u.
            slope = 2 * (math.log(2) - action - np.logaddexp(0, -2 * action))
            log_prob -= np.add.reduce(slope, axis=1)
        return log_prob


class MixedHead(DistributionHead):
    """Choices and numbers, which are independent: log-probabilities and entropies are sums over both."""

    def __init__(self, choices: CategoricalHead, numbers: GaussianHead) -> None:
        self.choices, self.numbers = choices, numbers
        self.num_outputs = choices.num_outputs + numbers.num_outputs
        self._outputs, self._columns = choices.num_outputs, len(choices.nvec)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        both: Floats = np.concatenate([self.choices.noise(rng, shape), self.numbers.noise(rng, shape)], axis=-1)
        return both

    def sample(self, out: Floats, noise: Floats) -> Array:
        k = self._outputs
        chosen = self.choices.sample(out[:k], noise[:, :k])
        return np.concatenate([chosen.astype(np.float32), self.numbers.sample(out[k:], noise[:, k:])], axis=1)

    def mode(self, out: Floats) -> Array:
        k = self._outputs
        return np.concatenate([self.choices.mode(out[:k]).astype(np.float32), self.numbers.mode(out[k:])], axis=1)

    def describe(self, out: Floats) -> dict[str, list[Floats]]:
        return self.choices.describe(out[: self._outputs]) | self.numbers.describe(out[self._outputs :])

    def evaluate(self, out: Floats, action: Array) -> tuple[Floats, Floats]:
        chosen = self.choices.evaluate(out[: self._outputs], action[:, : self._columns].astype(np.int64))
        given = self.numbers.evaluate(out[self._outputs :], action[:, self._columns :])
        return chosen[0] + given[0], chosen[1] + given[1]

    def gradient(self, d_log_prob: Floats, d_entropy: float) -> Floats:
        parts = [self.choices.gradient(d_log_prob, d_entropy), self.numbers.gradient(d_log_prob, d_entropy)]
        both: Floats = np.concatenate(parts)
        return both


def make_head(action: ActionCodec, log_std: Floats, d_log_std: Floats) -> DistributionHead:
    if not action.dim:
        return CategoricalHead(action.nvec)
    numbers = GaussianHead(log_std, d_log_std, squash=action.squash)
    return MixedHead(CategoricalHead(action.nvec), numbers) if action.nvec else numbers
