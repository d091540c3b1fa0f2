"""Spaces → an actor-critic whose parameters and gradients live in one flat buffer each.

`forward` and `backward` are all that an algorithm uses. For an MLP they run in `fast.py`; for images and for a
user's own network torch runs the network and its autograd, from the same gradient of the outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.model.fast import FastMlp, Floats
from paceline.model.heads import Head, make_head
from paceline.model.nets import CnnActorCritic, MlpActorCritic
from paceline.model.normalizer import CLIP, RunningMoments
from paceline.plugins import load_attribute
from paceline.spaces import ActionCodec, Array, ObservationCodec


class Policy:
    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        *,
        seed: int = 0,
        normalize_observation: bool = False,
    ) -> None:
        self.observation, self.action = observation, action
        _refuse_unused(observation, action, config, normalize_observation)
        generator = torch.Generator().manual_seed(seed)
        self.net = _make_net(observation, action.num_outputs, config, generator, seed)
        self._log_std = nn.Parameter(torch.full((action.dim,), config.log_std_init))
        self.parameters, self.gradient = _flatten([*self.net.parameters(), self._log_std])
        self.fast = FastMlp(self.net) if isinstance(self.net, MlpActorCritic) else None
        assert self._log_std.grad is not None
        self.head: Head = make_head(action, self._log_std.detach().numpy(), self._log_std.grad.numpy())
        self.moments = RunningMoments(observation.size) if normalize_observation else None
        self._scale: tuple[Floats, Floats] | None = None
        self._correlation = config.noise_correlation
        self._noise: Floats | None = None

    # -- acting -----------------------------------------------------------------------------------------------------

    def act(self, observation: Array, noise: Floats) -> tuple[Array, Floats, Floats]:
        """Actions `[N, k]` for `observation [N, …]`, their log-probabilities, and values."""
        out, value = self._infer(self.prepare(observation))
        action, log_prob = self.head.sample(out, noise)
        return action, log_prob, value

    def best(self, observation: Array) -> Array:
        """The most likely actions `[N, k]`."""
        out, _ = self._infer(self.prepare(observation))
        return self.head.mode(out)

    def value(self, observation: Array) -> Floats:
        _, value = self._infer(self.prepare(observation))
        return value

    def draw_noise(self, rng: np.random.Generator, steps: int, num_envs: int) -> Floats:
        """Noise for a rollout, `[T, N, k]`; correlated in time if `model.noise_correlation` says so."""
        noise = self.head.noise(rng, (steps, num_envs))
        if self._correlation:
            # A first-order process whose every step is still a standard normal: log-probabilities stay right.
            keep, fresh = np.float32(self._correlation), np.float32(np.sqrt(1 - self._correlation**2))
            last = noise[0] if self._noise is None else keep * self._noise + fresh * noise[0]
            noise[0] = last
            for t in range(1, steps):
                noise[t] = last = keep * last + fresh * noise[t]
            self._noise = last.copy()
        return noise

    # -- learning ---------------------------------------------------------------------------------------------------

    def prepare(self, observation: Array) -> Array:
        """`[B, …]` as the network takes it: normalised if the run does that."""
        if self.moments is None:
            return observation
        if self._scale is None:
            scale = 1.0 / self.moments.deviation
            mean = self.moments.mean.copy()
            for leaf in self.observation.images:  # pixels among a vector keep their scale
                scale[leaf.start : leaf.stop], mean[leaf.start : leaf.stop] = 1.0, 0.0
            self._scale = mean.astype(np.float32), scale.astype(np.float32)
        mean32, scale32 = self._scale
        scaled: Array = (observation - mean32) * scale32
        if not self.observation.images:
            np.clip(scaled, -CLIP, CLIP, out=scaled)
        return scaled

    def normalizer_changed(self) -> None:
        self._scale = None

    def forward(self, x: Array) -> tuple[Floats, Floats]:
        """Prepared observations `[B, …]` → outputs `[K, B]`, values `[B]`, remembered for `backward`."""
        if self.fast is not None:
            return self.fast.forward(x)
        self._graph: tuple[Tensor, Tensor] = self.net(torch.from_numpy(x))
        out, value = self._graph
        return out.detach().numpy().T, value.detach().numpy()

    def backward(self, d_out: Floats, d_value: Floats) -> None:
        """The gradient of the last `forward` into `self.gradient`."""
        if self.fast is not None:
            self.fast.backward(d_out, d_value)
            return
        for parameter in self.net.parameters():  # not log_std: the head has written that
            assert parameter.grad is not None
            parameter.grad.zero_()
        d = [torch.from_numpy(np.ascontiguousarray(d_out.T)), torch.from_numpy(d_value)]
        torch.autograd.backward(list(self._graph), d)

    def _infer(self, x: Array) -> tuple[Floats, Floats]:
        if self.fast is not None:
            return self.fast.forward(x)
        with torch.inference_mode():
            out, value = self.net(torch.from_numpy(x))
        return out.numpy().T, value.numpy()

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Named arrays: everything needed to act."""
        arrays = {f"net.{name}": p.detach().numpy() for name, p in self.net.named_parameters()}
        arrays |= {f"net.{name}": b.numpy() for name, b in self.net.named_buffers()}
        if self.action.is_continuous:
            arrays["log_std"] = self._log_std.detach().numpy()
        if self.moments is not None:
            arrays |= {f"normalizer.{name}": value for name, value in self.moments.state().items()}
        return arrays

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        own = {name: value.shape for name, value in self.state().items()}
        given = {name: value.shape for name, value in arrays.items()}
        if own != given:
            differing = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
            raise UserError(
                f"these weights are of another network: {differing[0]} is {given.get(differing[0], 'absent')} there, "
                f"{own.get(differing[0], 'absent')} here; the env and the model section must be the same"
            )
        with torch.no_grad():
            for name, tensor in [*self.net.named_parameters(), *self.net.named_buffers()]:
                tensor.copy_(torch.from_numpy(np.array(arrays[f"net.{name}"])))
            if self.action.is_continuous:
                self._log_std.copy_(torch.from_numpy(np.array(arrays["log_std"])))
        if self.moments is not None:
            self.moments.load({n: arrays[f"normalizer.{n}"] for n in ("mean", "var", "count")})
            self.normalizer_changed()

    def noise_state(self) -> Floats | None:
        return self._noise

    def load_noise_state(self, noise: Floats | None) -> None:
        self._noise = None if noise is None else np.array(noise, np.float32)


def _make_net(
    observation: ObservationCodec, outputs: int, config: ModelConfig, generator: torch.Generator, seed: int
) -> nn.Module:
    if config.class_ is not None:
        make = load_attribute(config.class_, "model.class")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                net = make(observation.shape, outputs, **config.kwargs)
                with torch.no_grad():
                    example = torch.zeros(
                        2, *observation.shape, dtype=torch.from_numpy(np.zeros(1, observation.dtype)).dtype
                    )
                    policy, value = net(example)
            except Exception as error:  # the user's code may raise anything; it is their input
                raise UserError(f"model.class={config.class_}: {type(error).__name__}: {error}") from error
        if policy.shape != (2, outputs) or value.shape != (2,):
            raise UserError(
                f"model.class={config.class_}: forward must return policy outputs [B, {outputs}] and values [B], "
                f"it returned {list(policy.shape)} and {list(value.shape)} for B = 2"
            )
        if not isinstance(net, nn.Module):
            raise UserError(f"model.class={config.class_}: a torch.nn.Module is expected, not {type(net).__name__}")
        return net
    if observation.images:
        return CnnActorCritic(observation, config, outputs, generator)
    return MlpActorCritic(observation.size, config.hidden, config.activation, config.shared, outputs, generator)


def _flatten(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters and their gradients into one flat buffer each; the modules keep views."""
    sizes = [p.numel() for p in parameters]
    flat, gradient = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    for p, part, grad in zip(parameters, torch.split(flat, sizes), torch.split(gradient, sizes), strict=True):
        if p.dtype != torch.float32:
            raise UserError(f"model.class: parameters must be float32, one is {p.dtype}")
        # With the strides it has: the weight of a convolution is laid out channels_last.
        view = part.as_strided(p.shape, p.stride(), part.storage_offset())
        view.copy_(p.detach())
        p.data = view
        p.grad = grad.as_strided(p.shape, p.stride(), grad.storage_offset())
    return flat, gradient


def _refuse_unused(
    observation: ObservationCodec, action: ActionCodec, config: ModelConfig, normalize_observation: bool
) -> None:
    """A setting is never silently ignored."""
    if config.cnn != "auto" and not observation.images:
        raise UserError(f"model.cnn={config.cnn} is for images, the observation is a vector of {observation.size}")
    if config.noise_correlation and not action.is_continuous:
        raise UserError(f"model.noise_correlation={config.noise_correlation} is for continuous actions")
    if normalize_observation and observation.is_image:
        raise UserError("env.normalize_observation=true is for vectors; images are divided by 255 as they are")
