"""What SAC and TD3 share: an actor, two critics with target networks, and optimizer steps drawn from replay."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from paceline.algorithms.base import Loss, Metrics, Weights
from paceline.algorithms.off_policy import OffPolicy, OffPolicySettings
from paceline.algorithms.optimizers import Adam, Optimizer
from paceline.config.values import Count, Positive
from paceline.lazy import np, torch

if TYPE_CHECKING:
    from paceline.algorithms.gpu_steps import GpuSteps
    from paceline.models.actor_critics import ContinuousPolicy
    from paceline.rollout.replay import Replay


class ContinuousSettings(OffPolicySettings):
    rollout_steps: Positive = 1
    """Steps of each environment per round of collecting and learning."""
    rounds: Annotated[Positive, Field(le=1_000_000)] = 256
    """Rounds of collecting and learning per iteration, that is, per row of metrics. On `ray`, an actor sends the steps
    of all rounds at once, and the learner then makes the optimizer steps of all rounds."""
    updates_per_step: Annotated[float, Field(gt=0, le=1_000)] = 1.0
    """Optimizer steps per step of an environment. The papers have 1; with 8 environments 0.125 makes one step for each
    round of them."""
    batch_size: Positive = 256
    """Rows per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Learning rate of Adam for the actor, the critics and, in SAC, the temperature."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0
    """Gradients with a larger norm are scaled down to this norm; 0 turns clipping off."""
    buffer_size: Positive = 1_000_000
    """Capacity of the replay buffer, in steps of all environments together."""
    learning_starts: Annotated[Count, Field(ge=0)] = 1500
    """Steps to collect with random actions before learning starts."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """How far the target networks move towards the online networks in an update; 1 copies them."""

    largest: ClassVar[str] = "buffer_size"

    def sizes_text(self) -> str:
        return f"batches of {self.batch_size}, {self.updates_per_step:g} per step"


@dataclass
class Transitions:
    """The rows of one optimizer step, B of them; numpy for an accelerator, tensors for a loss."""

    obs: Any  # [B, D] as the networks take them
    action: Any  # [B, A]
    reward: Any  # [B], summed over n steps
    next_obs: Any  # [B, D]
    discount: Any  # [B] of what follows; 0 after the end of an episode
    noise: Any  # [B, A], normal, for the actor's actions
    next_noise: Any  # [B, A], for those in the next states

    def take(self, part: slice) -> Transitions:
        return Transitions(*(array[part] for array in vars(self).values()))

    def tensors(self) -> Transitions:
        return Transitions(*(torch.from_numpy(np.ascontiguousarray(array)) for array in vars(self).values()))


class ContinuousControl(OffPolicy):
    """Subclasses write `loss` and say what of the gradient a step applies."""

    hyper: Any
    policy: ContinuousPolicy
    has_value = False
    learns_on_gpu = True
    gpu_inputs = "vectors"
    metrics: ClassVar[dict[str, str]] = {
        **OffPolicy.metrics,
        "critic_loss": "SAC and TD3: half the squared error of both critics",
    }

    @abstractmethod
    def loss(self, rows: Transitions, out: ContinuousPolicy) -> Loss:
        """The sum of the losses of all networks, in which each depends on its own parameters only, so that one
        backward pass gives all gradients. `out`: the networks, here or on a GPU, where nothing may wait for a
        number."""

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.engine.compile:
            raise ValueError(f"engine.compile=true is for convolutions, which {config.algorithm_name} does not have")

    def make_optimizer(self) -> Optimizer:
        learned = self.policy.learned
        return Adam(learned.parameters, learned.gradient, eps=1e-8)

    def setup(self) -> None:
        super().setup()
        self._gpu: GpuSteps | None = None
        if self.policy.learned is not self.policy:
            from paceline.algorithms.gpu_steps import GpuSteps

            self._gpu = GpuSteps(self)
        self._owed = 0.0  # optimizer steps
        self._sums = dict.fromkeys((*self.statistics, "total_loss", "gradient_norm"), 0.0)
        self._count = 0
        self.policy.head.is_random = self.hyper.learning_starts > 0

    def explore(self, ready: bool) -> None:
        self.policy.head.is_random = not ready and not self.optimizer_steps

    def learn(self, replay: Replay, new_steps: int) -> None:
        hyper, size = self.hyper, self.hyper.batch_size
        self._owed += new_steps * hyper.updates_per_step
        left = int(self._owed)
        self._owed -= left
        while left:
            steps = min(left, self.steps_per_draw())
            drawn = replay.sample(self.rng, steps * size, n_step=hyper.n_step, gamma=hyper.gamma, scaled=self.scaled)
            obs, next_obs = self.policy.prepare(drawn.obs), self.policy.prepare(drawn.next_obs)
            noise = self.rng.standard_normal((2, steps * size, self.policy.action.dim), np.float32)
            rows = Transitions(obs, drawn.action, drawn.reward, next_obs, drawn.discount, *noise)
            if self._gpu is not None:
                self._count += self._gpu.run(rows, self.annealed["learning_rate"])
            else:
                for begin in range(0, steps * size, size):
                    self._step(rows.take(slice(begin, begin + size)))
            self.steps_trained += steps * size
            left -= steps
        self.policy.fetch_actor()

    def _step(self, rows: Transitions) -> None:
        find = self._gradients if self.accelerator is None else self.accelerator.gradients
        statistics, moves = find(rows), self.moves_actor
        self.choose_parts(moves)
        statistics["gradient_norm"] = self.apply(self.annealed["learning_rate"])
        for name, value in statistics.items():
            self._sums[name] += value
        self._count += 1
        if moves:
            self.policy.move_targets(self.hyper.tau)
            self.target_updates += 1

    @property
    def moves_actor(self) -> bool:
        """Whether the coming step moves the actor and the target networks, too."""
        return True

    def choose_parts(self, moves_actor: bool) -> None:
        """Tell the optimizer what the coming step moves."""
        return

    def _gradients(self, rows: Transitions) -> Metrics:
        """The gradient of the loss into the policy's flat gradient, by autograd."""
        self.policy.gradient.zero_()
        loss, statistics = self.loss(rows.tensors(), self.policy)
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: float(value.detach()) for name, value in {**statistics, "total_loss": loss}.items()}

    def means(self) -> Metrics:
        count = self._count
        if self._gpu is not None:
            self._sums = self._gpu.take_totals()
        means = {name: total / count for name, total in self._sums.items()} if count else {}
        self._sums, self._count = dict.fromkeys(self._sums, 0.0), 0
        return means

    # -- what other processes need, saving --------------------------------------------------------------------------

    def weights(self) -> Weights:
        arrays = super().weights()
        actor = arrays["parameters"][self.policy.actor_slice].copy()  # actors need no critics
        return arrays | {"parameters": actor, "random": np.asarray([self.policy.head.is_random])}

    def load_weights(self, weights: Weights) -> None:
        whole = self.policy.parameters.numpy().copy()
        whole[self.policy.actor_slice] = weights["parameters"]
        super().load_weights(weights | {"parameters": whole})
        self.policy.send()
        self.policy.head.is_random = bool(weights["random"][0])

    def snapshot(self) -> dict[str, Any]:
        self.policy.fetch()
        return super().snapshot() | {"owed": self._owed}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.policy.send()
        self._owed = state["owed"]
        self.policy.head.is_random = not self.optimizer_steps and self.hyper.learning_starts > 0
