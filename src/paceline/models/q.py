"""Q-learning networks: the value of each action, and the policy that takes the best one.

MLPs run forward and backward in `numpy_mlp.py`, without autograd; torch runs other networks. A dueling network has two
outputs: the value of the state, and the advantage of each action.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.config import ModelConfig, UserError
from paceline.models.allocator import keep_freed_memory
from paceline.models.heads import DistributionHead
from paceline.models.masking import INVALID, masked
from paceline.models.nets import MlpActorCritic, spread_uniformly
from paceline.models.normalizer import RunningMoments
from paceline.models.numpy_mlp import MIN_PARALLEL_PRODUCTS, Floats, Gradient, HelperThread, NumpyMlp, Tower
from paceline.models.policy import Policy, flatten, make_net, refuse_unused
from paceline.models.prefetch import Prefetch
from paceline.spaces import ActionCodec, Array, ObservationCodec

PREFETCH_ROWS = 512  # evaluated together by the target network, where several optimizer steps are known beforehand


class EpsilonGreedy(DistributionHead):
    """The best action, or with probability `epsilon` a random one. `masked`: the value of an invalid action is
    `INVALID`, and none is chosen."""

    def __init__(self, actions: int, epsilon: float, *, masked: bool = False) -> None:
        self.num_outputs, self.epsilon, self.masked = actions, epsilon, masked

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.random((*shape, 2), np.float32)

    def sample(self, out: Floats, noise: Floats) -> Array:
        action: Array = out.argmax(axis=0)
        explores = noise[:, 0] < self.epsilon
        if np.count_nonzero(explores):
            valid = out.T != INVALID if self.masked else None
            np.copyto(action, self._any(noise, valid), where=explores, casting="unsafe")
        return action[:, None]

    def blind(self, noise: Floats, mask: Array | None = None) -> Array | None:
        """The actions if all of them are random, so that no value is needed; otherwise None. `mask`: `[B, K]`."""
        all_of_them = np.count_nonzero(noise[:, 0] < self.epsilon) == len(noise)
        valid = None if mask is None else mask != 0
        return self._any(noise, valid).astype(np.int64)[:, None] if all_of_them else None

    def _any(self, noise: Floats, valid: Array | None) -> Array:
        """Uniform actions, of the `valid [B, K]` ones if given."""
        # A product of a number just below 1 may be rounded up to a whole number.
        if valid is None:
            which: Array = np.minimum(np.floor(noise[:, 1] * self.num_outputs), self.num_outputs - 1)
            return which
        upto = np.cumsum(valid, axis=1)
        count = upto[:, -1]
        rank = np.minimum(np.floor(noise[:, 1] * count), count - 1)
        chosen: Array = (upto > rank[:, None]).argmax(axis=1)
        return chosen

    def describe(self, out: Floats) -> dict[str, list[Floats]]:
        return {"action_values": [out.T.copy()]}

    def mode(self, out: Floats) -> Array:
        action: Array = out.argmax(axis=0)[:, None]
        return action

    def evaluate(self, out: Floats, action: Array) -> tuple[Floats, Floats]:
        actions = np.count_nonzero(out != INVALID, axis=0) if self.masked else np.full(out.shape[1], self.num_outputs)
        other = self.epsilon / actions
        best = 1 - self.epsilon + other
        probability = np.where(action[:, 0] == out.argmax(axis=0), best, other)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_prob: Floats = np.log(probability).astype(np.float32)
            entropy = -best * np.log(best) - np.where(other > 0, (actions - 1) * other * np.log(other), 0.0)
        return log_prob, entropy.astype(np.float32)

    def gradient(self, d_log_prob: Floats, d_entropy: float) -> Floats:
        """Zero: the probabilities do not change until another action is the best."""
        return np.zeros((self.num_outputs, len(d_log_prob)), np.float32)


class NumpyQ:
    """The towers of an MLP, run by `numpy_mlp.py`."""

    def __init__(self, net: MlpActorCritic) -> None:
        self._first = Tower(net.policy, net.activation)
        self._value = Tower(net.value, net.activation) if net.critic and not net.shared else None
        self._shared = net.shared
        self.towers = [tower for tower in (self._first, self._value) if tower is not None]

    def forward(self, x: Floats) -> tuple[Floats, Floats | None]:
        """Outputs `[K, B]` and, for a dueling network, the value `[B]`; valid until the next call."""
        out = self._first.forward(x)
        if self._shared:
            return out[:-1], out[-1]
        return out, None if self._value is None else self._value.forward(x)[0]

    def backward(self, d_out: Floats, d_value: Floats | None) -> None:
        if self._shared:
            assert d_value is not None
            self._first.backward(np.concatenate((d_out, d_value[None])))
            return
        self._first.backward(d_out)
        if self._value is not None:
            assert d_value is not None
            self._value.backward(d_value[None])


class QFunction:
    """A network and its flat buffers. With `noisy` each weight of a linear layer has a deviation that is learned, too
    (Fortunato et al., 2018): `parameters` are then the means followed by the deviations, and the network runs with the
    weights that `resample` drew, or with the means after `quiet`."""

    def __init__(
        self, net: nn.Module, observation: ObservationCodec, *, dueling: bool, noisy: float | None, accelerate: bool
    ) -> None:
        self.net, self.observation, self.dueling = net, observation, dueling
        self._weights, self._gradient = flatten(list(net.parameters()))
        self.parameters, self.gradient = self._weights, self._gradient
        self.fast = NumpyQ(net) if accelerate and isinstance(net, MlpActorCritic) else None
        self.is_noisy = noisy is not None
        self.noise = torch.zeros(0)
        self._is_quiet = True
        if noisy is not None:
            self.parameters = torch.cat([self._weights, self._deviations(noisy)])
            self.gradient = torch.zeros_like(self.parameters)
            self.noise = torch.zeros_like(self._weights)

    # -- noise ------------------------------------------------------------------------------------------------------

    def _linears(self) -> list[tuple[nn.Linear, slice, slice]]:
        """The linear layers, with the places of their weights and biases in the flat buffer."""
        places, begin = {}, 0
        for parameter in self.net.parameters():
            places[id(parameter)] = slice(begin, begin + parameter.numel())
            begin += parameter.numel()
        linears = [layer for layer in self.net.modules() if isinstance(layer, nn.Linear)]
        return [(layer, places[id(layer.weight)], places[id(layer.bias)]) for layer in linears]

    def _deviations(self, first: float) -> torch.Tensor:
        deviation = torch.zeros_like(self._weights)
        for layer, weight, bias in self._linears():
            deviation[weight] = deviation[bias] = first / math.sqrt(layer.in_features)
        return deviation

    def resample(self, rng: np.random.Generator) -> None:
        """Draw new noise: for each layer one number per input and per output, and their products."""
        noise = self.noise.numpy()
        for layer, weight, bias in self._linears():
            outputs, inputs = layer.out_features, layer.in_features
            drawn = rng.standard_normal(outputs + inputs, np.float32)
            drawn = np.sign(drawn) * np.sqrt(np.abs(drawn))
            np.multiply(drawn[:outputs, None], drawn[outputs:], out=noise[weight].reshape(outputs, inputs))
            noise[bias] = drawn[:outputs]
        self.refresh()

    def refresh(self) -> None:
        """Set the network's weights from the parameters and the noise."""
        if self.is_noisy:
            size = len(self._weights)
            torch.addcmul(self.parameters[:size], self.parameters[size:], self.noise, out=self._weights)
            self._is_quiet = False

    def quiet(self) -> None:
        """Set the network's weights without noise."""
        if self.is_noisy:
            self._weights.copy_(self.parameters[: len(self._weights)])
            self._is_quiet = True

    def take_means(self) -> None:
        """Set the means from the network's weights."""
        self.parameters[: len(self._weights)] = self._weights

    def take_buffers(self, other: QFunction) -> None:
        """Those of a user's network, such as the statistics of a batch normalisation."""
        for own, given in zip(self.net.buffers(), other.net.buffers(), strict=True):
            own.copy_(given)

    # -- values -----------------------------------------------------------------------------------------------------

    def values(self, x: Array) -> Floats:
        """Action values `[K, B]` of prepared observations `[B, …]`; valid until the next call."""
        inputs, mask = self.observation.split(x)
        if self.fast is not None:
            return masked(self._join(*self.fast.forward(inputs)), mask)
        self._set_training(False)
        with torch.inference_mode():
            out, value = self.net(torch.from_numpy(inputs))
        return masked(self._join(out.numpy().T, value.numpy()), mask)

    def _set_training(self, training: bool) -> None:
        """As `Policy.set_training`."""
        if self.net.training is not training:
            self.net.train(training)

    def noisy_values(self, x: Array) -> Floats:
        """Action values with the last noise drawn."""
        if self._is_quiet:
            self.refresh()
        return self.values(x)

    def forward(self, x: Array) -> torch.Tensor:
        """Action values `[B, K]` with autograd, of invalid actions too: a loss needs those of actions taken."""
        self._set_training(True)
        out, value = self.net(torch.from_numpy(self.observation.split(x)[0]))
        values: torch.Tensor = out + (value - out.mean(1))[:, None] if self.dueling else out
        return values

    def zero_gradient(self) -> None:
        self._gradient.zero_()

    def learn(self, x: Array, gradient: Gradient) -> None:
        """The gradient of a loss into `gradient`, given the one with respect to the action values `[K, B]`."""
        x, _ = self.observation.split(x)
        if self.fast is not None:
            self.fast.backward(*self._split(gradient(self._join(*self.fast.forward(x)))))
        else:
            self.zero_gradient()
            self._set_training(True)
            out, value = self.net(torch.from_numpy(x))
            d_out, d_value = self._split(gradient(self._join(out.detach().numpy().T, value.detach().numpy())))
            outputs, gradients = [out], [torch.from_numpy(np.ascontiguousarray(d_out.T))]
            if d_value is not None:
                outputs, gradients = [out, value], [*gradients, torch.from_numpy(d_value)]
            torch.autograd.backward(outputs, gradients)
        self.finish_gradient()

    def finish_gradient(self) -> None:
        """From the gradient of the network's weights to that of the parameters."""
        if self.is_noisy:
            size = len(self._weights)
            self.gradient[:size] = self._gradient
            torch.mul(self._gradient, self.noise, out=self.gradient[size:])

    def _join(self, out: Floats, value: Floats | None) -> Floats:
        if not self.dueling:
            return out
        assert value is not None
        joined: Floats = out + (value - out.mean(axis=0))
        return joined

    def _split(self, d: Floats) -> tuple[Floats, Floats | None]:
        if not self.dueling:
            return d, None
        d_value = d.sum(axis=0)
        return d - d_value / np.float32(len(d)), d_value


class QPolicy(Policy):
    """A policy that acts by action values. `target` is the target network of Q-learning."""

    head: EpsilonGreedy

    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        hyper: Any,
        *,
        seed: int = 0,
        normalize_observation: bool = False,
    ) -> None:
        self.observation, self.action = observation, action
        refuse_unused(observation, action, config, normalize_observation)
        if len(action.nvec) != 1 or action.dim:
            raise UserError(f"--algo dqn is for one discrete action, but the env has {action.space}: use ppo or impala")
        if config.shared and not hyper.dueling:
            raise UserError(
                "model.shared=true needs two outputs to share layers, but dqn has one: also set dqn.dueling=true"
            )
        generator = torch.Generator().manual_seed(seed)
        self.net = make_net(observation, action.nvec[0], config, generator, seed, critic=hyper.dueling)
        if config.class_ is None:
            spread_uniformly(self.net, generator)
        noisy = hyper.noisy_deviation if hyper.exploration == "noisy" else None
        twin = copy.deepcopy(self.net)
        self.online, self.target = (
            QFunction(net, observation, dueling=hyper.dueling, noisy=noisy, accelerate=config.accelerate)
            for net in (self.net, twin)
        )
        self.parameters, self.gradient = self.online.parameters, self.online.gradient
        self.target_parameters = self.target.parameters
        self.accelerate = config.accelerate
        self.fast: NumpyMlp | None = None
        if observation.images:
            keep_freed_memory()
        self.helper: HelperThread | None = None  # a second thread
        self.keeps_values = hyper.prioritized
        """Whether acting records the values of the action and of the best one."""
        epsilon = 0.0 if noisy is not None else hyper.epsilon_start
        self.head = EpsilonGreedy(action.nvec[0], epsilon, masked=bool(observation.mask))
        self.moments = RunningMoments(observation.size) if normalize_observation else None
        self._scale: tuple[Floats, Floats] | None = None

    @property
    def chooses_threads(self) -> bool:
        return self.online.fast is not None

    def use_threads(self, threads: int, rows: int) -> int:
        """Choose the number of threads and return it: two at most for an MLP, if the target network has enough to
        evaluate ahead of time. `rows`: known beforehand."""
        fast = self.online.fast
        assert fast is not None
        products = PREFETCH_ROWS * sum(tower.products for tower in fast.towers)
        if threads < 2 or rows <= PREFETCH_ROWS or products < MIN_PARALLEL_PRODUCTS:
            return 1
        self.helper = HelperThread()
        return 2

    def target_lookup(self, x: Array, rows: int) -> TargetLookup:
        """The target network's values of prepared observations `x`, needed `rows` at a time."""
        return TargetLookup(self, x, rows)

    def act(
        self, observation: Array, noise: Floats, memory: Floats | None = None
    ) -> tuple[Array, Floats | None, Floats | None]:
        """Actions `[N, 1]`; their values and those of the best ones, if these are kept."""
        if not self.keeps_values:
            action = self.head.blind(noise, self.observation.split(observation)[1])
            if action is None:
                action = self.head.sample(self.online.noisy_values(self.prepare(observation)), noise)
            return action, None, None
        values = self.online.noisy_values(self.prepare(observation))
        action = self.head.sample(values, noise)
        return action, values[action[:, 0], np.arange(len(action))], values.max(axis=0)

    def evaluate_actions(self, observation: Array, action: Array) -> tuple[Floats, Floats]:
        """The values of the actions, and of the best ones."""
        values = self.online.noisy_values(self.prepare(observation))
        return values[action[:, 0], np.arange(len(action))], values.max(axis=0)

    def value(self, observation: Array, memory: Floats | None = None) -> Floats:
        best: Floats = self.online.noisy_values(self.prepare(observation)).max(axis=0)
        return best

    def outputs(self, observation: Array, memory: Floats | None = None) -> tuple[Floats, Floats]:
        self.online.quiet()
        values = self.online.values(self.prepare(observation))
        return values, values.max(axis=0)

    def greedy(self, observation: Array, memory: Floats | None = None) -> Array:
        return self.head.mode(self.outputs(observation)[0])

    def state(self) -> dict[str, NDArray[Any]]:
        self.online.quiet()
        arrays = super().state() | {"epsilon": np.asarray(self.head.epsilon)}
        if self.online.is_noisy:
            means = {name: array.copy() for name, array in arrays.items()}  # the next noise overwrites them
            arrays = means | {"deviations": self.parameters[len(self.parameters) // 2 :].numpy()}
        return arrays

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.online.quiet()
        super().load(arrays)
        self.head.epsilon = float(arrays["epsilon"])
        if self.online.is_noisy:
            self.online.take_means()
            self.parameters[len(self.parameters) // 2 :] = torch.from_numpy(np.array(arrays["deviations"]))
        self.target.parameters.copy_(self.parameters)
        self.target.take_buffers(self.online)
        self.target.quiet()


class TargetLookup:
    """The target network's values, computed ahead of time by a second thread. Leave the block to end that."""

    def __init__(self, policy: QPolicy, x: Array, rows: int) -> None:
        self._target, self._x = policy.target, x
        self._values = np.empty((policy.action.nvec[0], len(x)), np.float32)
        self._piece = max(1, PREFETCH_ROWS // rows) * rows  # whole optimizer steps
        self._prefetch = Prefetch(self._look_up, math.ceil(len(x) / self._piece), policy.helper)

    def __enter__(self) -> TargetLookup:
        self._prefetch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._prefetch.__exit__(*error)

    def values(self, part: slice) -> Floats:
        """`[K, B]` of these rows; waits for them."""
        self._prefetch.need(part.start // self._piece)
        return self._values[:, part]

    def _look_up(self, number: int) -> None:
        part = slice(number * self._piece, (number + 1) * self._piece)
        self._values[:, part] = self._target.values(self._x[part])
