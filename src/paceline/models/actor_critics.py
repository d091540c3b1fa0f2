"""An actor and two critics, for bounded continuous actions.

Actions are in [-1, 1] here; `ActionCodec.decode` scales them to the bounds of the environment. Parameters and gradients
live in one flat buffer each: the actor's first, then the critics', then what else the algorithm trains.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.models.heads import Floats, Head
from paceline.models.nets import MlpActorCritic, spread_uniformly
from paceline.models.normalizer import RunningMoments
from paceline.models.numpy_mlp import MIN_PARALLEL_PRODUCTS, HelperThread, NumpyMlp, Tower
from paceline.models.policy import Policy, flatten, refuse_unused
from paceline.spaces import ActionCodec, Array, ObservationCodec

MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0


class SquashedHead(Head):
    """The tanh of a normal, or of its mean; during the warm-up uniform actions."""

    def __init__(self, actions: int) -> None:
        self.actions = actions
        self.is_random = False

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.standard_normal((*shape, self.actions), np.float32)

    def sample(self, out: Floats, noise: Floats) -> Array:
        return uniform(noise) if self.is_random else self.explore(out, noise)

    @abstractmethod
    def explore(self, out: Floats, noise: Floats) -> Array:
        """Actions with noise, `[B, A]`."""

    def mode(self, out: Floats) -> Array:
        return np.tanh(out[: self.actions].T)


class GaussianActor(SquashedHead):
    """SAC: the outputs are the mean and the logarithm of the deviation."""

    def __init__(self, actions: int) -> None:
        super().__init__(actions)
        self.num_outputs = 2 * actions

    def describe(self, out: Floats) -> dict[str, list[Floats]]:
        mean, log_std = out[: self.actions], np.clip(out[self.actions :], MIN_LOG_STD, MAX_LOG_STD)
        return {"mean": [mean.T.copy()], "std": [np.exp(log_std).T]}

    def explore(self, out: Floats, noise: Floats) -> Array:
        mean, log_std = out[: self.actions], np.clip(out[self.actions :], MIN_LOG_STD, MAX_LOG_STD)
        action: Array = np.tanh((mean + np.exp(log_std) * noise.T).T)
        return action


class DeterministicActor(SquashedHead):
    """TD3: the output is the action, and acting adds noise to it."""

    def __init__(self, actions: int, deviation: float) -> None:
        super().__init__(actions)
        self.num_outputs, self.deviation = actions, np.float32(deviation)

    def explore(self, out: Floats, noise: Floats) -> Array:
        action: Array = np.clip(np.tanh(out.T) + self.deviation * noise, -1, 1)
        return action


def uniform(noise: Floats) -> Array:
    """Normal numbers → numbers uniform in [-1, 1]."""
    values: Array = torch.erf(torch.from_numpy(noise / np.float32(math.sqrt(2)))).numpy()
    return values


class Critics(nn.Module):
    """Two networks that each estimate the value of an action, and further trained parameters of an algorithm."""

    first: MlpActorCritic
    second: MlpActorCritic

    def __init__(self, first: MlpActorCritic, second: MlpActorCritic, others: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.first, self.second = first, second
        for name, parameter in others.items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """`x [B, D + A]`, observations beside actions → values `[2, B]`."""
        return torch.stack([critic(x)[0][:, 0] for critic in (self.first, self.second)])


class ContinuousPolicy(Policy):
    head: SquashedHead
    net: MlpActorCritic
    extra: Critics

    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        head: SquashedHead,
        *,
        name: str,
        seed: int = 0,
        normalize_observation: bool = False,
        target_actor: bool = False,
        others: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """`name`: of the algorithm, for errors. `target_actor`: the actor has a target network, too."""
        self.observation, self.action, self.head = observation, action, head
        refuse_unused(observation, action, config, normalize_observation)
        check_actor(name, observation, action, config)
        generator = torch.Generator().manual_seed(seed)

        def make(inputs: int, outputs: int) -> MlpActorCritic:
            net = MlpActorCritic(inputs, config.hidden, config.activation, False, outputs, generator, critic=False)
            spread_uniformly(net, generator)
            return net

        self.net = make(observation.size, head.num_outputs)
        critics = [make(observation.size + action.dim, 1) for _ in range(2)]
        self.extra = Critics(critics[0], critics[1], others or {})
        size, critic_size = (sum(p.numel() for p in net.parameters()) for net in (self.net, critics[0]))
        self.actor_slice, self.critic_slice = slice(0, size), slice(size, size + 2 * critic_size)
        self.target_slice = slice(0 if target_actor else size, size + 2 * critic_size)
        """What of the parameters has a target network."""
        self._lay_out()
        self.learned = self
        """The networks that learn: these, or a copy on a GPU."""
        self.accelerate = config.accelerate
        self.fast: NumpyMlp | None = None
        self._tower = Tower(self.net.policy, self.net.activation) if self.accelerate else None
        self.helper: HelperThread | None = None  # a second thread
        self.moments = RunningMoments(observation.size) if normalize_observation else None
        self._scale: tuple[Floats, Floats] | None = None

    has_log_std = False

    def _lay_out(self) -> None:
        """Bring the parameters into flat buffers, and make the target networks."""
        self.others = {name: p for name, p in self.extra.named_parameters() if "." not in name}
        """What else the algorithm trains, by name."""
        self.parameters, self.gradient = flatten(self.trained())
        first, second = copy.deepcopy(self.extra.first), copy.deepcopy(self.extra.second)
        self.target_critics = Critics(first, second, {})
        self.target_net = None if self.target_slice.start else copy.deepcopy(self.net)
        ahead = [] if self.target_net is None else list(self.target_net.parameters())
        self.target_parameters, _ = flatten([*ahead, *self.target_critics.parameters()])
        self._frozen = {name: p.detach() for name, p in self.extra.named_parameters()}

    def trained(self) -> list[nn.Parameter]:
        critics = [*self.extra.first.parameters(), *self.extra.second.parameters()]
        return [*self.net.parameters(), *critics, *self.others.values()]

    @property
    def chooses_threads(self) -> bool:
        return self._tower is not None

    def use_threads(self, threads: int, rows: int) -> int:
        """Two at most, one for each critic, if a minibatch of `rows` is worth it."""
        products = rows * sum(p.numel() for p in self.extra.first.parameters())
        if threads < 2 or products < MIN_PARALLEL_PRODUCTS or self.learned is not self:
            return 1
        self.helper = HelperThread()
        return 2

    # -- acting -----------------------------------------------------------------------------------------------------

    def act(
        self, observation: Array, noise: Floats, memory: Floats | None = None
    ) -> tuple[Array, Floats | None, Floats | None]:
        return self.head.sample(self.outputs(observation)[0], noise), None, None

    def greedy(self, observation: Array, memory: Floats | None = None) -> Array:
        return self.head.mode(self.outputs(observation)[0])

    def outputs(self, observation: Array, memory: Floats | None = None) -> tuple[Floats, Floats]:
        x = self.prepare(observation)
        if self._tower is not None:
            out = self._tower.forward(x)
        else:
            with torch.inference_mode():
                out = self.net(torch.from_numpy(x))[0].numpy().T
        return out, np.zeros(len(x), np.float32)

    # -- learning, in torch -----------------------------------------------------------------------------------------

    def actor(self, obs: Tensor) -> Tensor:
        """The actor's outputs `[B, K]`."""
        out: Tensor = self.net(obs)[0]
        return out

    def target_actor(self, obs: Tensor) -> Tensor:
        assert self.target_net is not None
        out: Tensor = self.target_net(obs)[0]
        return out

    def q(self, obs: Tensor, action: Tensor) -> Tensor:
        """The critics' values of actions, `[2, B]`."""
        values: Tensor = self.extra(torch.cat([obs, action], 1))
        return values

    def frozen_q(self, obs: Tensor, action: Tensor) -> Tensor:
        """The same; its gradient reaches the actions, but not the critics."""
        values: Tensor = torch.func.functional_call(self.extra, self._frozen, torch.cat([obs, action], 1))
        return values

    def target_q(self, obs: Tensor, action: Tensor) -> Tensor:
        values: Tensor = self.target_critics(torch.cat([obs, action], 1))
        return values

    def move_targets(self, tau: float) -> None:
        self.target_parameters.lerp_(self.parameters[self.target_slice], tau)

    # -- learning on a GPU ------------------------------------------------------------------------------------------

    def learn_on(self, device: str) -> None:
        """Learn with a copy of the networks on this device. Acting stays here, with the weights of `fetch_actor`."""
        learned = copy.copy(self)
        learned.device = torch.device(device)
        learned.net, learned.extra = copy.deepcopy(self.net).to(device), copy.deepcopy(self.extra).to(device)
        learned._lay_out()
        self.learned, self.accelerate = learned, False
        self.send()

    def send(self) -> None:
        """Give all weights to the networks that learn."""
        if self.learned is not self:
            self.learned.parameters.copy_(self.parameters)
            self.learned.target_parameters.copy_(self.target_parameters)

    def fetch(self) -> None:
        """Take over all weights from the networks that learn."""
        if self.learned is not self:
            self.parameters.copy_(self.learned.parameters)
            self.target_parameters.copy_(self.learned.target_parameters)

    def fetch_actor(self) -> None:
        if self.learned is not self:
            self.parameters[self.actor_slice].copy_(self.learned.parameters[self.actor_slice])

    def load(self, arrays: dict[str, Any]) -> None:
        super().load(arrays)
        self.target_parameters.copy_(self.parameters[self.target_slice])
        self.send()


def check_actor(name: str, observation: ObservationCodec, action: ActionCodec, config: ModelConfig) -> None:
    if not action.is_continuous:
        raise UserError(f"--algo {name} is for continuous actions, but the env has {action.space}: use dqn or ppo")
    if not action.is_bounded:
        raise UserError(f"--algo {name} needs finite action bounds, but the env has {action.space}: use ppo")
    if observation.images or config.class_ is not None:
        what = "images" if observation.images else f"model.class={config.class_}"
        raise UserError(f"--algo {name} has MLPs for vectors only, not {what}: use ppo or impala")
    if config.shared:
        raise UserError(f"model.shared=true is not for --algo {name}: its actor and critics share no layers")
    if config.squash or config.log_std_init:
        key = "squash" if config.squash else "log_std_init"
        raise UserError(f"model.{key} is not for --algo {name}, whose actions always end in tanh")
