"""A policy with memory (`model.memory`)."""

from __future__ import annotations

from typing import Any

import torch

from paceline.models.masking import masked, masked_tensor
from paceline.models.numpy_mlp import Floats, Gradient, JointGradient, NumpyMlp
from paceline.models.outputs import Outputs
from paceline.models.policy import Policy
from paceline.models.recurrent import NumpyCell, RecurrentActorCritic, Sequences
from paceline.spaces import Array


class RecurrentPolicy(Policy):
    """Acting takes the memory `[N, S]` of the environments and brings it up to date in place. Whoever steps the
    environments sets the rows of new episodes to zero. Learning takes `Sequences`."""

    net: RecurrentActorCritic

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.memory_width, self.sequence_length = self.net.width, self.net.sequence_length
        self._cell = NumpyCell(self.net) if self.accelerate else None
        self._towers = NumpyMlp(self.net.towers) if self.accelerate else None

    # -- acting -----------------------------------------------------------------------------------------------------

    def act(
        self, observation: Array, noise: Floats, memory: Floats | None = None
    ) -> tuple[Array, Floats | None, Floats | None]:
        out, value = self.outputs(observation, memory)
        action = self.head.sample(out, noise)
        return action, self.head.evaluate(out, action)[0], value

    def greedy(self, observation: Array, memory: Floats | None = None) -> Array:
        action: Array = self.head.mode(self.outputs(observation, memory)[0])
        return action

    def value(self, observation: Array, memory: Floats | None = None) -> Floats:
        """The memory stays as it is."""
        assert memory is not None
        return self.outputs(observation, memory.copy())[1]

    def outputs(self, observation: Array, memory: Floats | None = None) -> tuple[Floats, Floats]:
        assert memory is not None
        x, mask = self.observation.split(self.prepare(observation))
        if self._cell is None or self._towers is None:
            with torch.inference_mode():
                raw, values, after = self.net.step(torch.from_numpy(x), torch.from_numpy(memory))
            memory[...] = after.numpy()
            return masked(raw.numpy().T, mask), values.numpy()
        if self.net.images is not None:
            with torch.inference_mode():
                x = self.net.features(torch.from_numpy(x)).numpy()
        out, value = self._towers.forward(self._cell.step(x, memory))
        return masked(out, mask), value

    # -- learning ---------------------------------------------------------------------------------------------------

    def sequences(self, x: Array, mask: Array, valid: Array, memory: Any) -> Sequences:
        return Sequences.cut(x, mask, valid, memory, self.sequence_length)

    def forward(self, x: Any) -> Outputs:
        mask = self.observation.split(x.x)[1]
        out, value = self.net(self._inputs(x))
        out = masked_tensor(out, None if mask is None else torch.from_numpy(mask))
        return Outputs(out, value, self.action, self._log_std)

    def learn(self, x: Any, policy_gradient: Gradient, value_gradient: Gradient, *, add: bool = False) -> None:
        assert not add and self._towers is not None
        towers, h, mask = self._towers, self._remember(x), self.observation.split(x.x)[1]
        towers.learn(h.detach().numpy(), lambda out: policy_gradient(masked(out, mask)), value_gradient)
        h.backward(torch.from_numpy(towers.input_gradient()))  # type: ignore[no-untyped-call]

    def learn_jointly(self, x: Any, gradient: JointGradient) -> None:
        assert self._towers is not None
        towers, h, mask = self._towers, self._remember(x), self.observation.split(x.x)[1]
        towers.learn_jointly(h.detach().numpy(), lambda out, value: gradient(masked(out, mask), value))
        h.backward(torch.from_numpy(towers.input_gradient()))  # type: ignore[no-untyped-call]

    def _remember(self, x: Sequences) -> torch.Tensor:
        """The inputs of the towers, with autograd. The gradients of the layers before them are set to zero."""
        self.gradient.zero_()
        return self.net.remember(self._inputs(x))

    def _inputs(self, x: Sequences) -> Sequences:
        """Without the masks of actions."""
        return Sequences(self.observation.split(x.x)[0], x.sequence, x.step, x.memory)
