"""Spaces → an actor-critic whose parameters and gradients live in one flat buffer each.

A loss in torch takes `forward`, and autograd does the rest. An accelerator takes `learn` and gives the gradient of its
loss with respect to the network's outputs; MLPs then run in `numpy_mlp.py`, other networks in torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.models.acting import ActingPolicy
from paceline.models.allocator import keep_freed_memory
from paceline.models.heads import make_head
from paceline.models.masking import masked, masked_tensor
from paceline.models.nets import PASS_BYTES, CnnActorCritic, MlpActorCritic
from paceline.models.normalizer import RunningMoments
from paceline.models.numpy_mlp import Floats, Gradient, JointGradient, NumpyMlp
from paceline.models.outputs import Outputs
from paceline.models.own_net import make_own_net
from paceline.models.recurrent import RecurrentActorCritic
from paceline.spaces import ActionCodec, Array, ObservationCodec


class Policy(ActingPolicy):
    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        *,
        seed: int = 0,
        normalize_observation: bool = False,
        extra: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        """`extra`: makes the other networks of the algorithm, if it has any."""
        self.observation, self.action = observation, action
        refuse_unused(observation, action, config, normalize_observation)
        generator = torch.Generator().manual_seed(seed)
        self.net = make_net(observation, action.num_outputs, config, generator, seed)
        self._log_std = nn.Parameter(torch.full((action.dim,), config.log_std_init))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.extra = extra()
        self.parameters, self.gradient = flatten(self.trained())
        self.accelerate = config.accelerate
        self.fast = NumpyMlp(self.net) if self.accelerate and isinstance(self.net, MlpActorCritic) else None
        if observation.images:
            keep_freed_memory()
        assert self._log_std.grad is not None
        self.head: Any = make_head(action, self._log_std.detach().numpy(), self._log_std.grad.numpy())
        self.moments = RunningMoments(observation.size) if normalize_observation else None

    device = torch.device("cpu")
    has_log_std = True
    """Whether continuous actions have a learned deviation beside the network's outputs."""
    extra: nn.Module | None = None

    def trained(self) -> list[nn.Parameter]:
        """The parameters in the order of the flat buffers."""
        own = [] if self.extra is None else [p for p in self.extra.parameters() if p.requires_grad]
        return [self._log_std, *self.net.parameters(), *own]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that belong to the weights but are not trained: buffers, and frozen parameters of `extra`."""
        yield from self.net.named_buffers()
        if self.extra is not None:
            frozen = [(name, p.data) for name, p in self.extra.named_parameters() if not p.requires_grad]
            yield from ((f"extra.{name}", tensor) for name, tensor in [*self.extra.named_buffers(), *frozen])

    @property
    def chooses_threads(self) -> bool:
        """Whether `use_threads` says how many threads learn."""
        return False

    def use_threads(self, threads: int, rows: int) -> int:
        """Prepare to learn with `threads` at most; returns how many. `rows`: known beforehand."""
        return threads

    def running_statistics(self) -> list[Tensor]:
        """Of batch normalisation in a user's network: learning changes them, but no gradient carries them."""
        norms = [module for module in self.net.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        return [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]

    def set_training(self, training: bool) -> None:
        """Switch a user's network, whose dropout and batch normalisation learn in one way and act in another."""
        if self.net.training is not training:
            self.net.train(training)

    # -- learning -------------------------------------------------------------------------------------------------

    def passes(self, rows: int) -> list[slice]:
        """Parts of a minibatch to learn from one after the other, which bounds the memory it takes."""
        if not isinstance(self.net, CnnActorCritic):
            return [slice(0, rows)]
        count = max(1, math.ceil(rows * self.net.row_bytes / PASS_BYTES))
        bounds = [rows * k // count for k in range(count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]

    def sequences(self, x: Any, mask: Array, valid: Array, memory: Any) -> Any:
        """Prepared observations as the network learns from them; see `Sequences.cut`."""
        return x

    def forward(self, x: Any) -> Outputs:
        """The outputs for prepared observations, with autograd."""
        self.set_training(True)
        inputs, mask = self.observation.split(torch.from_numpy(x) if isinstance(x, np.ndarray) else x)
        out, value = self.net(inputs)
        return Outputs(masked_tensor(out, mask), value, self.action, self._log_std)

    def forward_in_parts(self, x: Any, parts: Sequence[slice]) -> Outputs:
        some = [self.forward(x[part]) for part in parts]
        raw, value = torch.cat([out.raw for out in some]), torch.cat([out.value for out in some])
        return Outputs(raw, value, self.action, self._log_std)

    def learn(self, x: Array, policy_gradient: Gradient, value_gradient: Gradient, *, add: bool = False) -> None:
        """The gradient of a loss into `self.gradient`, or `add` it to that of the passes before.

        `x`: prepared observations `[B, …]`. `policy_gradient` maps the policy's outputs `[K, B]` to the gradient of the
        loss with respect to them, `value_gradient` does so for the values `[B]`. They may run in different threads.
        """
        if self.fast is not None:
            assert not add  # it overwrites its gradient, and takes any number of rows in one pass
            inputs, mask = self.observation.split(x)
            if mask is not None:
                self.fast.learn(inputs, lambda out: policy_gradient(masked(out, mask)), value_gradient)
            else:
                self.fast.learn(x, policy_gradient, value_gradient)
            return
        self._learn_in_torch(x, lambda out, value: (policy_gradient(out), value_gradient(value)), add=add)

    def learn_jointly(self, x: Array, gradient: JointGradient) -> None:
        """The same for a loss whose gradient for one output of one row depends on all outputs of all rows."""
        inputs, mask = self.observation.split(x)
        if self.fast is not None:
            self.fast.learn_jointly(inputs, lambda out, value: gradient(masked(out, mask), value))
            return
        parts = self.passes(len(x))
        if len(parts) == 1:
            self._learn_in_torch(x, gradient)
            return
        # See `gradient_over_batch` in algorithms/autograd.py: the outputs are computed twice.
        outputs = [self._infer(x[part]) for part in parts]
        out, value = np.concatenate([o for o, _ in outputs], axis=1), np.concatenate([v for _, v in outputs])
        d_out, d_value = gradient(out, value)
        self.gradient[self.action.dim :].zero_()  # what comes before belongs to the head, which has written it
        self.set_training(True)
        for part in parts:
            _backward(self.net(torch.from_numpy(inputs[part])), d_out[:, part], d_value[part])

    def _learn_in_torch(self, x: Array, gradient: JointGradient, *, add: bool = False) -> None:
        of_head, of_net = self.gradient[: self.action.dim], self.gradient[self.action.dim :]
        before = of_head.clone()
        self.set_training(True)
        inputs, mask = self.observation.split(x)
        out, value = self.net(torch.from_numpy(inputs))
        # The head overwrites its gradient.
        d_out, d_value = gradient(masked(out.detach().numpy().T, mask), value.detach().numpy())
        if add:
            of_head += before
        else:
            of_net.zero_()
        _backward((out, value), d_out, d_value)

    def _infer(self, x: Array) -> tuple[Floats, Floats]:
        if self.fast is not None:
            return super()._infer(x)
        inputs, mask = self.observation.split(x)
        self.set_training(False)
        with torch.inference_mode():
            out, value = self.net(torch.from_numpy(inputs))
        return masked(out.numpy().T, mask), value.numpy()

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Named arrays: everything needed to act."""
        arrays = {f"net.{name}": p.detach().cpu().numpy() for name, p in self.net.named_parameters()}
        arrays |= {f"net.{name}": b.cpu().numpy() for name, b in self.net.named_buffers()}
        if self.extra is not None:
            arrays |= {f"extra.{name}": tensor.cpu().numpy() for name, tensor in self.extra.state_dict().items()}
        if self.has_log_std and self.action.dim:
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
                f"the weights belong to another network: {differing[0]} is {given.get(differing[0], 'absent')} there, "
                f"{own.get(differing[0], 'absent')} here; the env and the model section must be the same"
            )
        with torch.no_grad():
            for name, tensor in [*self.net.named_parameters(), *self.net.named_buffers()]:
                tensor.copy_(torch.from_numpy(np.array(arrays[f"net.{name}"])))
            for name, tensor in self.extra.state_dict().items() if self.extra is not None else ():
                tensor.copy_(torch.from_numpy(np.array(arrays[f"extra.{name}"])))
            if self.has_log_std and self.action.dim:
                self._log_std.copy_(torch.from_numpy(np.array(arrays["log_std"])))
        if self.moments is not None:
            self.moments.load({n: arrays[f"normalizer.{n}"] for n in ("mean", "var", "count")})
            self.normalizer_changed()


def _backward(outputs: tuple[Tensor, Tensor], d_out: Floats, d_value: Floats) -> None:
    """Backpropagate `d_out [K, B]` and `d_value [B]`, adding to the gradients."""
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
        return make_own_net(observation, outputs, config, seed)
    if config.memory != "none":
        return RecurrentActorCritic(observation, config, outputs, generator)
    if observation.images:
        return CnnActorCritic(observation, config, outputs, generator, critic=critic)
    return MlpActorCritic(
        observation.net_size, config.hidden, config.activation, config.shared, outputs, generator, critic=critic
    )


def flatten(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters and their gradients into one flat buffer each; the modules keep views."""
    sizes = [p.numel() for p in parameters]
    flat, gradient = (torch.zeros(sum(sizes), device=parameters[0].device) for _ in range(2))
    for p, part, grad in zip(parameters, torch.split(flat, sizes), torch.split(gradient, sizes), strict=True):
        if p.dtype != torch.float32:
            raise UserError(f"model.class: parameters must be float32, but one is {p.dtype}")
        # Keep the strides: the weight of a convolution is channels_last.
        view = part.as_strided(p.shape, p.stride(), part.storage_offset())
        view.copy_(p.detach())
        p.data = view
        p.grad = grad.as_strided(p.shape, p.stride(), grad.storage_offset())
    return flat, gradient


def refuse_unused(
    observation: ObservationCodec, action: ActionCodec, config: ModelConfig, normalize_observation: bool
) -> None:
    """Refuse settings that would have no effect."""
    if config.cnn != "auto" and not observation.images:
        raise UserError(f"model.cnn={config.cnn} is for images, but the observation is a vector of {observation.size}")
    if config.log_std_init and not action.dim:
        raise UserError(
            f"model.log_std_init={config.log_std_init} is for continuous actions, but the env has {action.space}"
        )
    if normalize_observation and observation.is_image:
        raise UserError("env.normalize_observation=true is for vectors; images are already divided by 255")
