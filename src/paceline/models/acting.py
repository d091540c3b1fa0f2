"""Acting with an MLP in numpy. A worker that only collects needs no more, and does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.config import ModelConfig
from paceline.models.heads import make_head
from paceline.models.masking import masked
from paceline.models.normalizer import CLIP, RunningMoments
from paceline.models.numpy_mlp import Floats, MlpArrays, NumpyMlp
from paceline.spaces import ActionCodec, Array, ObservationCodec


class ActingPolicy:
    """What all policies on the CPU share: from observations to actions and values."""

    observation: ObservationCodec
    action: ActionCodec
    head: Any
    fast: NumpyMlp | None
    """The network, if it is an MLP."""
    moments: RunningMoments | None
    """Of the observations, if the run normalises them."""
    _scale: tuple[Floats, Floats] | None = None
    is_gpu = False
    memory_width = 0
    """Numbers of memory that acting keeps for each environment; 0: none."""

    def act(
        self, observation: Array, noise: Floats, memory: Floats | None = None
    ) -> tuple[Array, Floats | None, Floats | None]:
        """Actions `[N, k]` for `observation [N, …]`, their log-probabilities and values.

        Both are None for an MLP: one call of `evaluate_actions` over a whole rollout is cheaper than one at every step.
        `memory`: see `recurrent_policy.py`.
        """
        x = self.prepare(observation)
        if self.fast is not None:
            return self.head.sample(self._policy_outputs(x), noise), None, None
        out, value = self._infer(x)
        action = self.head.sample(out, noise)
        return action, self.head.evaluate(out, action)[0], value

    def evaluate_actions(self, observation: Array, action: Array) -> tuple[Floats, Floats]:
        """Log-probabilities `[B]` of actions taken in `observation [B, …]`, and values `[B]`."""
        out, value = self._infer(self.prepare(observation))
        return self.head.evaluate(out, action)[0], value

    def greedy(self, observation: Array, memory: Floats | None = None) -> Array:
        """The most likely actions `[N, k]`."""
        action: Array = self.head.mode(self._policy_outputs(self.prepare(observation)))
        return action

    def outputs(self, observation: Array, memory: Floats | None = None) -> tuple[Floats, Floats]:
        """What `greedy` chooses by, `[K, N]`, and values `[N]`: both without noise."""
        return self._infer(self.prepare(observation))

    def value(self, observation: Array, memory: Floats | None = None) -> Floats:
        x = self.prepare(observation)
        return self.fast.value(self.observation.split(x)[0]) if self.fast is not None else self._infer(x)[1]

    def start_memory(self, num_envs: int) -> Floats | None:
        """The memory of environments whose episodes begin, `[N, S]`: zero; None without memory."""
        return np.zeros((num_envs, self.memory_width), np.float32) if self.memory_width else None

    def prepare(self, observation: Array) -> Array:
        """Observations `[B, …]` as the network takes them: normalised if the run does that."""
        scaling = self.scaling()
        if scaling is None:
            return observation
        mean32, scale32 = scaling
        scaled: Array = (observation - mean32) * scale32
        for leaf in self.observation.leaves:
            if leaf.kind != "image":
                part = scaled[:, leaf.start : leaf.stop]
                np.clip(part, -CLIP, CLIP, out=part)
        return scaled

    def scaling(self) -> tuple[Floats, Floats] | None:
        """The mean to subtract and the factor to multiply by, if the run normalises observations."""
        if self.moments is not None and self._scale is None:
            scale = 1.0 / self.moments.deviation
            mean = self.moments.mean.copy()
            kept = [slice(leaf.start, leaf.stop) for leaf in self.observation.images]
            for part in (*kept, self.observation.mask_columns):  # pixels inside a vector and masks stay as they are
                scale[part], mean[part] = 1.0, 0.0
            self._scale = mean.astype(np.float32), scale.astype(np.float32)
        return self._scale

    def normalizer_changed(self) -> None:
        self._scale = None

    def _policy_outputs(self, x: Array) -> Floats:
        """The policy's outputs `[K, B]` alone."""
        if self.fast is None:
            return self._infer(x)[0]
        inputs, mask = self.observation.split(x)
        return masked(self.fast.policy(inputs), mask)

    def _infer(self, x: Array) -> tuple[Floats, Floats]:
        assert self.fast is not None
        inputs, mask = self.observation.split(x)
        out, value = self.fast.forward(inputs)
        return masked(out, mask), value


class MlpActor(ActingPolicy):
    """An MLP that acts with the weights of a learner."""

    def __init__(
        self, observation: ObservationCodec, action: ActionCodec, config: ModelConfig, *, normalize_observation: bool
    ) -> None:
        self.observation, self.action = observation, action
        outputs = action.num_outputs
        towers = [outputs + 1] if config.shared else [outputs, 1]
        widths = [[observation.net_size, *config.hidden, last] for last in towers]
        layers = [[(b, a) for a, b in itertools.pairwise(width)] for width in widths]
        size = action.dim + sum(b * a + b for tower in layers for b, a in tower)
        self.parameters: Floats = np.zeros(size, np.float32)
        """In the order of `Policy.parameters`."""
        log_std, rest = self.parameters[: action.dim], iter(_views(self.parameters[action.dim :], layers))
        arrays = [[(next(rest), next(rest)) for _ in tower] for tower in layers]
        self.fast = NumpyMlp(MlpArrays(arrays[0], arrays[-1], config.shared, config.activation))
        self.head = make_head(action, log_std, np.zeros_like(log_std))
        self.moments = RunningMoments(observation.size) if normalize_observation else None

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Take over what `Algorithm.weights` returned."""
        self.parameters[...] = weights["parameters"]
        if self.moments is not None:
            self.moments.load({name: weights[f"observation.{name}"] for name in self.moments.state()})
        self.normalizer_changed()


def _views(flat: Floats, layers: list[list[tuple[int, int]]]) -> Iterator[Floats]:
    """Weight and bias of each layer in turn."""
    at = 0
    for outputs, inputs in itertools.chain(*layers):
        yield flat[at : at + outputs * inputs].reshape(outputs, inputs)
        yield flat[at + outputs * inputs : at + outputs * inputs + outputs]
        at += outputs * (inputs + 1)
