"""Action values: a network that says what each action is worth, and the policy that takes the best one.

For an MLP forward and backward are those of `fast.py`, without autograd; for images and a user's own network torch runs
both. A dueling network has two outputs, the value of the state and what each action is better than the others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.config import DQNConfig, ModelConfig, RunConfig, UserError
from paceline.model.fast import MIN_PARALLEL_PRODUCTS, FastMlp, Floats, Tower, Twin
from paceline.model.heads import Head
from paceline.model.memory import keep_freed_memory
from paceline.model.nets import MlpActorCritic
from paceline.model.normalizer import RunningMoments
from paceline.model.policy import Policy, flatten, make_net, refuse_unused
from paceline.spaces import ActionCodec, Array, ObservationCodec

QLoss = Callable[[Floats], Floats]
"""Action values `[K, B]` → the gradient of the loss with respect to them."""
AHEAD_ROWS = 512  # that the target network looks at together, where several optimizer steps are known beforehand


class EpsilonGreedy(Head):
    """The best action, but any with probability `epsilon`."""

    def __init__(self, actions: int, epsilon: float) -> None:
        self.num_outputs, self.epsilon = actions, epsilon

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.random((*shape, 2), np.float32)

    def sample(self, out: Floats, noise: Floats) -> Array:
        action: Array = out.argmax(axis=0)
        explores = noise[:, 0] < self.epsilon
        if np.count_nonzero(explores):
            np.copyto(action, self._any(noise), where=explores, casting="unsafe")
        return action[:, None]

    def blind(self, noise: Floats) -> Array | None:
        """The actions, where none of them depends on what an action is worth."""
        all_of_them = np.count_nonzero(noise[:, 0] < self.epsilon) == len(noise)
        return self._any(noise).astype(np.int64)[:, None] if all_of_them else None

    def _any(self, noise: Floats) -> Floats:
        # Float32 has no number between 1 - 2^-24 and 1, but a product may be rounded up to a whole one.
        which: Floats = np.minimum(np.floor(noise[:, 1] * self.num_outputs), self.num_outputs - 1)
        return which

    def mode(self, out: Floats) -> Array:
        action: Array = out.argmax(axis=0)[:, None]
        return action

    def evaluate(self, out: Floats, action: Array) -> tuple[Floats, Floats]:
        other = self.epsilon / self.num_outputs
        best = 1 - self.epsilon + other
        probability = np.where(action[:, 0] == out.argmax(axis=0), best, other)
        with np.errstate(divide="ignore"):
            log_prob: Floats = np.log(probability).astype(np.float32)
        entropy = -best * math.log(best) - (self.num_outputs - 1) * (other * math.log(other) if other > 0 else 0.0)
        return log_prob, np.full(out.shape[1], entropy, np.float32)

    def gradient(self, d_log_prob: Floats, d_entropy: float) -> Floats:
        """None: the probabilities stay the same until another action is the best."""
        return np.zeros((self.num_outputs, len(d_log_prob)), np.float32)


class FastQ:
    """The towers of an MLP."""

    def __init__(self, net: MlpActorCritic) -> None:
        self._first = Tower(net.policy, net.activation)
        self._value = Tower(net.value, net.activation) if net.critic and not net.shared else None
        self._shared = net.shared
        self.towers = [tower for tower in (self._first, self._value) if tower is not None]

    def forward(self, x: Floats) -> tuple[Floats, Floats | None]:
        """Outputs `[K, B]` and the value `[B]` of a dueling network: good until the next call."""
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
    (Fortunato et al., 2018): `parameters` are then the means followed by the deviations, and the network runs with
    what `resample` has drawn, or the means after `quiet`."""

    def __init__(self, net: nn.Module, *, dueling: bool, noisy: float | None) -> None:
        self.net, self.dueling = net, dueling
        self._weights, self._gradient = flatten(list(net.parameters()))
        self.parameters, self.gradient = self._weights, self._gradient
        self.fast = FastQ(net) if isinstance(net, MlpActorCritic) else None
        self.is_noisy = noisy is not None
        self.noise = torch.zeros(0)
        self._is_quiet = True
        if noisy is not None:
            self.parameters = torch.cat([self._weights, self._deviations(noisy)])
            self.gradient = torch.zeros_like(self.parameters)
            self.noise = torch.zeros_like(self._weights)

    # -- noise ------------------------------------------------------------------------------------------------------

    def _linears(self) -> list[tuple[nn.Linear, slice, slice]]:
        """With where their weights and biases are in the flat buffer."""
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
        """New noise: of each layer one number for each input and for each output, and their products."""
        noise = self.noise.numpy()
        for layer, weight, bias in self._linears():
            outputs, inputs = layer.out_features, layer.in_features
            drawn = rng.standard_normal(outputs + inputs, np.float32)
            drawn = np.sign(drawn) * np.sqrt(np.abs(drawn))
            np.multiply(drawn[:outputs, None], drawn[outputs:], out=noise[weight].reshape(outputs, inputs))
            noise[bias] = drawn[:outputs]
        self.refresh()

    def refresh(self) -> None:
        """The network's weights from the parameters."""
        if self.is_noisy:
            size = len(self._weights)
            torch.addcmul(self.parameters[:size], self.parameters[size:], self.noise, out=self._weights)
            self._is_quiet = False

    def quiet(self) -> None:
        """The network's weights without noise."""
        if self.is_noisy:
            self._weights.copy_(self.parameters[: len(self._weights)])
            self._is_quiet = True

    def take_means(self) -> None:
        """The means from the network's weights."""
        self.parameters[: len(self._weights)] = self._weights

    # -- values -----------------------------------------------------------------------------------------------------

    def values(self, x: Array) -> Floats:
        """Action values `[K, B]` of prepared observations `[B, …]`: good until the next call."""
        if self.fast is not None:
            return self._join(*self.fast.forward(x))
        with torch.inference_mode():
            out, value = self.net(torch.from_numpy(x))
        return self._join(out.numpy().T, value.numpy())

    def noisy_values(self, x: Array) -> Floats:
        """With the noise that was drawn last."""
        if self._is_quiet:
            self.refresh()
        return self.values(x)

    def learn(self, x: Array, loss: QLoss) -> None:
        """The gradient of a loss into `gradient`."""
        if self.fast is not None:
            self.fast.backward(*self._split(loss(self._join(*self.fast.forward(x)))))
        else:
            self._gradient.zero_()
            out, value = self.net(torch.from_numpy(x))
            d_out, d_value = self._split(loss(self._join(out.detach().numpy().T, value.detach().numpy())))
            outputs, gradients = [out], [torch.from_numpy(np.ascontiguousarray(d_out.T))]
            if d_value is not None:
                outputs, gradients = [out, value], [*gradients, torch.from_numpy(d_value)]
            torch.autograd.backward(outputs, gradients)
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
    """Acts by action values. `target` is the network that the targets of learning come from."""

    head: EpsilonGreedy

    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        hyper: DQNConfig,
        *,
        seed: int = 0,
        normalize_observation: bool = False,
    ) -> None:
        self.observation, self.action = observation, action
        refuse_unused(observation, action, config, normalize_observation)
        if len(action.nvec) != 1:
            raise UserError(f"--algo dqn is for one discrete action, the env has {action.space}: use ppo or impala")
        if config.shared and not hyper.dueling:
            raise UserError("model.shared=true is for two outputs, and dqn has one: set dqn.dueling=true, too")
        generator = torch.Generator().manual_seed(seed)
        self.net = make_net(observation, action.nvec[0], config, generator, seed, critic=hyper.dueling)
        if config.class_ is None:
            _spread(self.net, generator)
        noisy = hyper.noisy_deviation if hyper.exploration == "noisy" else None
        twin = copy.deepcopy(self.net)
        self.online, self.target = (QFunction(net, dueling=hyper.dueling, noisy=noisy) for net in (self.net, twin))
        self.parameters, self.gradient = self.online.parameters, self.online.gradient
        self.parts = [slice(0, len(self.parameters))]
        self.fast: FastMlp | None = None
        if observation.images:
            keep_freed_memory()
        self.helper: Twin | None = None  # a second thread
        self.keeps_values = hyper.prioritized
        """Whether acting notes the value of the action and that of the best one."""
        self.head = EpsilonGreedy(action.nvec[0], 0.0 if noisy is not None else hyper.epsilon_start)
        self.moments = RunningMoments(observation.size) if normalize_observation else None
        self._scale: tuple[Floats, Floats] | None = None

    def use_threads(self, threads: int, rows: int) -> int:
        """Two at most for an MLP, if the target network has enough to look at ahead, of so many rows that are known
        beforehand; how many it will be."""
        fast = self.online.fast
        assert fast is not None
        products = AHEAD_ROWS * sum(tower.products for tower in fast.towers)
        if threads < 2 or rows <= AHEAD_ROWS or products < MIN_PARALLEL_PRODUCTS:
            return 1
        self.helper = Twin()
        return 2

    def act(self, observation: Array, noise: Floats) -> tuple[Array, Floats | None, Floats | None]:
        """Actions `[N, 1]`; what they and the best ones are worth, if that is kept."""
        if not self.keeps_values:
            action = self.head.blind(noise)
            if action is None:
                action = self.head.sample(self.online.noisy_values(self.prepare(observation)), noise)
            return action, None, None
        values = self.online.noisy_values(self.prepare(observation))
        action = self.head.sample(values, noise)
        return action, values[action[:, 0], np.arange(len(action))], values.max(axis=0)

    def judge(self, observation: Array, action: Array) -> tuple[Floats, Floats]:
        """What the actions and the best ones are worth."""
        values = self.online.noisy_values(self.prepare(observation))
        return values[action[:, 0], np.arange(len(action))], values.max(axis=0)

    def value(self, observation: Array) -> Floats:
        best: Floats = self.online.noisy_values(self.prepare(observation)).max(axis=0)
        return best

    def outputs(self, observation: Array) -> tuple[Floats, Floats]:
        self.online.quiet()
        values = self.online.values(self.prepare(observation))
        return values, values.max(axis=0)

    def best(self, observation: Array) -> Array:
        return self.head.mode(self.outputs(observation)[0])

    def state(self) -> dict[str, NDArray[Any]]:
        self.online.quiet()
        arrays = super().state() | {"epsilon": np.asarray(self.head.epsilon)}
        if self.online.is_noisy:
            means = {name: array.copy() for name, array in arrays.items()}  # the next noise is written over them
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
        self.target.quiet()


def _spread(net: nn.Module, generator: torch.Generator) -> None:
    """Weights and biases uniform between -1 and 1, over the root of the inputs. Biases of 0, as the actor-critics have
    them, would put all the kinks of a layer of ReLUs through the origin, near which the few numbers that control tasks
    show stay: values learned there soon run away."""
    for layer in (module for module in net.modules() if isinstance(module, nn.Linear)):
        bound = layer.in_features**-0.5
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)


def make_policy(config: RunConfig, observation: ObservationCodec, action: ActionCodec, *, seed: int = 0) -> Policy:
    """The policy of the chosen algorithm, on the CPU."""
    normalize = config.env.normalize_observation
    if config.algo == "dqn":
        return QPolicy(observation, action, config.model, config.dqn, seed=seed, normalize_observation=normalize)
    return Policy(observation, action, config.model, seed=seed, normalize_observation=normalize)
