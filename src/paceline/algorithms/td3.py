"""Twin delayed DDPG (Fujimoto et al., 2018): a deterministic actor, the smaller of two critics as the target, noise on
the target's actions, and an actor that learns at every other step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from paceline.algorithms.base import Loss
from paceline.algorithms.continuous import ContinuousControl, ContinuousSettings, Transitions
from paceline.algorithms.optimizers import Optimizer, SeparateAdam
from paceline.config.values import Positive
from paceline.lazy import torch

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.models.actor_critics import ContinuousPolicy
    from paceline.models.policy import Policy
    from paceline.spaces import ActionCodec, ObservationCodec


class TD3(ContinuousControl):
    class Settings(ContinuousSettings):
        exploration_noise: Annotated[float, Field(ge=0)] = 0.1
        """Standard deviation of the noise on actions, for bounds of -1 and 1."""
        target_noise: Annotated[float, Field(ge=0)] = 0.2
        """The same for the actions of the target, which smooths it."""
        target_noise_clip: Annotated[float, Field(ge=0)] = 0.5
        """Largest noise on the actions of the target."""
        policy_delay: Positive = 2
        """Optimizer steps of the critics per step of the actor and update of the target networks."""

    hyper: Settings
    optimizer: SeparateAdam
    faster_learning = "a smaller td3.updates_per_step"
    statistics = ("q_mean", "td_error_mean", "critic_loss", "policy_loss")
    metrics: ClassVar[dict[str, str]] = ContinuousControl.metrics

    @classmethod
    def make_policy(
        cls, config: RunConfig, observation: ObservationCodec, action: ActionCodec, *, seed: int = 0
    ) -> Policy:
        from paceline.models.actor_critics import ContinuousPolicy, DeterministicActor

        hyper: Any = config.hyper
        return ContinuousPolicy(
            observation,
            action,
            config.model,
            DeterministicActor(action.dim, hyper.exploration_noise),
            name=config.algorithm_name,
            seed=seed,
            normalize_observation=config.env.normalize_observation,
            target_actor=True,
        )

    def make_optimizer(self) -> Optimizer:
        nets = self.policy.learned
        return SeparateAdam(nets.parameters, nets.gradient, [nets.critic_slice, nets.actor_slice], eps=1e-8)

    @property
    def moves_actor(self) -> bool:
        return (self.optimizer_steps + 1) % self.hyper.policy_delay == 0

    def choose_parts(self, moves_actor: bool) -> None:
        self.optimizer.active = [True, moves_actor]

    def loss(self, rows: Transitions, out: ContinuousPolicy) -> Loss:
        hyper = self.hyper
        with torch.no_grad():
            noise = (hyper.target_noise * rows.next_noise).clamp(-hyper.target_noise_clip, hyper.target_noise_clip)
            next_action = (torch.tanh(out.target_actor(rows.next_obs)) + noise).clamp(-1, 1)
            target = rows.reward + rows.discount * out.target_q(rows.next_obs, next_action).amin(0)
        q = out.q(rows.obs, rows.action)
        critic_loss = 0.5 * (q - target).square().mean(1).sum()
        policy_loss = q.new_zeros(())
        if self.moves_actor:
            policy_loss = -out.frozen_q(rows.obs, torch.tanh(out.actor(rows.obs)))[0].mean()
        return critic_loss + policy_loss, {
            "q_mean": q.mean(),
            "td_error_mean": (q - target).abs().mean(),
            "critic_loss": critic_loss,
            "policy_loss": policy_loss * hyper.policy_delay,  # a mean over all steps is then one over the actor's
        }
