"""Spaces → an actor-critic whose parameters and gradients live in one flat buffer each.

An algorithm uses `learn` and gives the gradient of its loss with respect to the network's outputs. For an MLP the rest
runs in `fast.py`; for images and for a user's own network torch runs the network and its autograd.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.model.fast import FastMlp, Floats, JointLoss, Loss
from paceline.model.heads import Head, make_head
from paceline.model.memory import keep_freed_memory
from paceline.model.nets import CnnActorCritic, MlpActorCritic
from paceline.model.normalizer import CLIP, RunningMoments
from paceline.plugins import load_attribute
from paceline.spaces import ActionCodec, Array, ObservationCodec

PASS_BYTES = 600_000_000
"""Memory that one pass forward and backward over images may take. Larger passes are not faster."""


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
        refuse_unused(observation, action, config, normalize_observation)
        generator = torch.Generator().manual_seed(seed)
        self.net = make_net(observation, action.num_outputs, config, generator, seed)
        self._log_std = nn.Parameter(torch.full((action.dim,), config.log_std_init))
        self.parameters, self.gradient = flatten([self._log_std, *self.net.parameters()])
        self.fast = FastMlp(self.net) if isinstance(self.net, MlpActorCritic) else None
        if observation.images:
            keep_freed_memory()
        self.parts = [slice(0, len(self.parameters))]
        """Of the flat buffers: those of the policy and of the value, if they have nothing in common."""
        if self.fast is not None and len(self.fast.towers) == 2:
            value = len(self.parameters) - self.fast.towers[1].parameters
            self.parts = [slice(0, value), slice(value, len(self.parameters))]
        assert self._log_std.grad is not None
        self.head: Head = make_head(action, self._log_std.detach().numpy(), self._log_std.grad.numpy())
        self.moments = RunningMoments(observation.size) if normalize_observation else None
        self._scale: tuple[Floats, Floats] | None = None

    # -- acting -----------------------------------------------------------------------------------------------------

    def act(self, observation: Array, noise: Floats) -> tuple[Array, Floats | None, Floats | None]:
        """Actions `[N, k]` for `observation [N, …]`, their log-probabilities and values.

        Both are None for an MLP: one pass of `judge` over a whole rollout is cheaper than a few calls at every step.
        """
        x = self.prepare(observation)
        if self.fast is not None:
            return self.head.sample(self.fast.policy(x), noise), None, None
        out, value = self._infer(x)
        action = self.head.sample(out, noise)
        return action, self.head.evaluate(out, action)[0], value

    def judge(self, observation: Array, action: Array) -> tuple[Floats, Floats]:
        """Log-probabilities `[B]` of actions taken in `observation [B, …]`, and values `[B]`."""
        out, value = self._infer(self.prepare(observation))
        return self.head.evaluate(out, action)[0], value

    def best(self, observation: Array) -> Array:
        """The most likely actions `[N, k]`."""
        x = self.prepare(observation)
        return self.head.mode(self.fast.policy(x) if self.fast is not None else self._infer(x)[0])

    def outputs(self, observation: Array) -> tuple[Floats, Floats]:
        """What `best` goes by, `[K, N]`, and values `[N]`: both without noise."""
        return self._infer(self.prepare(observation))

    def value(self, observation: Array) -> Floats:
        x = self.prepare(observation)
        return self.fast.value(x) if self.fast is not None else self._infer(x)[1]

    # -- learning ---------------------------------------------------------------------------------------------------

    def prepare(self, observation: Array) -> Array:
        """`[B, …]` as the network takes it: normalised if the run does that."""
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
        """What is taken from an observation, and what the rest is multiplied by, if the run normalises."""
        if self.moments is not None and self._scale is None:
            scale = 1.0 / self.moments.deviation
            mean = self.moments.mean.copy()
            for leaf in self.observation.images:  # pixels among a vector keep their scale
                scale[leaf.start : leaf.stop], mean[leaf.start : leaf.stop] = 1.0, 0.0
            self._scale = mean.astype(np.float32), scale.astype(np.float32)
        return self._scale

    def normalizer_changed(self) -> None:
        self._scale = None

    def passes(self, rows: int) -> list[slice]:
        """Parts of a minibatch to `learn` one after the other, so that the memory it takes has a limit."""
        if not isinstance(self.net, CnnActorCritic):
            return [slice(0, rows)]
        count = max(1, math.ceil(rows * self.net.row_bytes / PASS_BYTES))
        bounds = [rows * k // count for k in range(count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]

    def learn(self, x: Array, policy_loss: Loss, value_loss: Loss, *, add: bool = False) -> None:
        """The gradient of a loss into `self.gradient`, or `add` it to the one of the passes before.

        `x`: prepared observations `[B, …]`. `policy_loss` is given the policy's outputs `[K, B]` and returns the
        gradient with respect to them; `value_loss` the same for the values `[B]`. They may run in different threads.
        """
        if self.fast is not None:
            assert not add  # its gradient is written over, and one pass does for any number of rows
            self.fast.learn(x, policy_loss, value_loss)
            return
        self._learn_in_torch(x, lambda out, value: (policy_loss(out), value_loss(value)), add=add)

    def learn_jointly(self, x: Array, loss: JointLoss) -> None:
        """The same for a loss whose gradient for one output of one row depends on all outputs of all rows."""
        if self.fast is not None:
            self.fast.learn_jointly(x, loss)
            return
        parts = self.passes(len(x))
        if len(parts) == 1:
            self._learn_in_torch(x, loss)
            return
        # The loss wants all outputs before the first backward pass. To keep what that needs of all rows would take the
        # memory that passes are to save: the outputs are computed twice, a third more work.
        outputs = [self._infer(x[part]) for part in parts]
        out, value = np.concatenate([o for o, _ in outputs], axis=1), np.concatenate([v for _, v in outputs])
        d_out, d_value = loss(out, value)
        self.gradient[self.action.dim :].zero_()  # before it is the head's, which the loss has written
        for part in parts:
            _backward(self.net(torch.from_numpy(x[part])), d_out[:, part], d_value[part])

    def _learn_in_torch(self, x: Array, loss: JointLoss, *, add: bool = False) -> None:
        of_head, of_net = self.gradient[: self.action.dim], self.gradient[self.action.dim :]
        before = of_head.clone()
        out, value = self.net(torch.from_numpy(x))
        d_out, d_value = loss(out.detach().numpy().T, value.detach().numpy())  # the head writes over its gradient
        if add:
            of_head += before
        else:
            of_net.zero_()
        _backward((out, value), d_out, d_value)

    def _infer(self, x: Array) -> tuple[Floats, Floats]:
        if self.fast is not None:
            return self.fast.forward(x)
        with torch.inference_mode():
            out, value = self.net(torch.from_numpy(x))
        return out.numpy().T, value.numpy()

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Named arrays: everything needed to act."""
        arrays = {f"net.{name}": p.detach().cpu().numpy() for name, p in self.net.named_parameters()}
        arrays |= {f"net.{name}": b.cpu().numpy() for name, b in self.net.named_buffers()}
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


def _backward(outputs: tuple[Tensor, Tensor], d_out: Floats, d_value: Floats) -> None:
    """Add to the gradients what `d_out [K, B]` and `d_value [B]` come to."""
    gradients = [torch.from_numpy(np.ascontiguousarray(d)) for d in (d_out.T, d_value)]
    torch.autograd.backward(outputs, gradients)


def make_net(
    observation: ObservationCodec,
    outputs: int,
    config: ModelConfig,
    generator: torch.Generator,
    seed: int,
    *,
    critic: bool = True,
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
        shapes = [list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}" for x in (policy, value)]
        if shapes != [[2, outputs], [2]]:
            raise UserError(
                f"model.class={config.class_}: forward must return policy outputs [B, {outputs}] and values [B], "
                f"it returned {shapes[0]} and {shapes[1]} for B = 2"
            )
        if not isinstance(net, nn.Module):
            raise UserError(f"model.class={config.class_}: a torch.nn.Module is expected, not {type(net).__name__}")
        return net
    if observation.images:
        return CnnActorCritic(observation, config, outputs, generator, critic=critic)
    return MlpActorCritic(
        observation.size, config.hidden, config.activation, config.shared, outputs, generator, critic=critic
    )


def flatten(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters and their gradients into one flat buffer each; the modules keep views."""
    sizes = [p.numel() for p in parameters]
    flat, gradient = (torch.zeros(sum(sizes), device=parameters[0].device) for _ in range(2))
    for p, part, grad in zip(parameters, torch.split(flat, sizes), torch.split(gradient, sizes), strict=True):
        if p.dtype != torch.float32:
            raise UserError(f"model.class: parameters must be float32, one is {p.dtype}")
        # With the strides it has: the weight of a convolution is laid out channels_last.
        view = part.as_strided(p.shape, p.stride(), part.storage_offset())
        view.copy_(p.detach())
        p.data = view
        p.grad = grad.as_strided(p.shape, p.stride(), grad.storage_offset())
    return flat, gradient


def refuse_unused(
    observation: ObservationCodec, action: ActionCodec, config: ModelConfig, normalize_observation: bool
) -> None:
    """A setting is never silently ignored."""
    if config.cnn != "auto" and not observation.images:
        raise UserError(f"model.cnn={config.cnn} is for images, the observation is a vector of {observation.size}")
    if config.log_std_init and not action.is_continuous:
        raise UserError(
            f"model.log_std_init={config.log_std_init} is for continuous actions, the env has {action.space}"
        )
    if normalize_observation and observation.is_image:
        raise UserError("env.normalize_observation=true is for vectors; images are divided by 255 as they are")
