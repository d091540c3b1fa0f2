"""Soft actor-critic (Haarnoja et al., 2018): the actor maximises value and entropy, two critics judge it, and the
temperature between the two terms is tuned so that the entropy stays near a target.

All gradients of a step come from the weights before it, as in the authors' code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from paceline.algorithms.base import Loss
from paceline.algorithms.continuous import ContinuousControl, ContinuousSettings, Transitions
from paceline.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.config import RunConfig
    from paceline.models.actor_critics import ContinuousPolicy
    from paceline.models.policy import Policy
    from paceline.spaces import ActionCodec, ObservationCodec


class SAC(ContinuousControl):
    class Settings(ContinuousSettings):
        temperature: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
        """Weight of the entropy; `auto` tunes it."""
        temperature_start: Annotated[float, Field(gt=0)] = 1.0
        """With `temperature=auto`: its initial value."""
        target_entropy: Literal["auto"] | float = "auto"
        """With `temperature=auto`: the entropy to stay near; `auto` is minus the number of action dimensions."""

    hyper: Settings
    rllib = "SAC"
    faster_learning = "a smaller sac.updates_per_step"
    statistics = ("q_mean", "td_error_mean", "critic_loss", "policy_loss", "entropy", "temperature")
    metrics: ClassVar[dict[str, str]] = {
        **ContinuousControl.metrics,
        "temperature": "SAC: weight of the entropy",
    }

    @classmethod
    def make_policy(
        cls, config: RunConfig, observation: ObservationCodec, action: ActionCodec, *, seed: int = 0
    ) -> Policy:
        if config.engine.name == "rllib":  # a copy of RLlib's actor
            return super().make_policy(config, observation, action, seed=seed)
        from paceline.models.actor_critics import ContinuousPolicy, GaussianActor

        hyper: Any = config.hyper
        tuned = hyper.temperature == "auto"
        log_start = torch.full((), math.log(hyper.temperature_start))
        return ContinuousPolicy(
            observation,
            action,
            config.model,
            GaussianActor(action.dim),
            name=config.algorithm_name,
            seed=seed,
            normalize_observation=config.env.normalize_observation,
            others={"log_temperature": torch.nn.Parameter(log_start)} if tuned else None,
        )

    def setup(self) -> None:
        super().setup()
        target = self.hyper.target_entropy
        self.target_entropy = -float(self.policy.action.dim) if target == "auto" else target

    @property
    def log_temperature(self) -> Tensor | None:
        """None if the temperature is fixed."""
        return self.policy.others.get("log_temperature")

    def loss(self, rows: Transitions, out: ContinuousPolicy) -> Loss:
        log_temperature = out.others.get("log_temperature")
        if log_temperature is None:
            temperature = torch.full((), float(self.hyper.temperature), device=rows.reward.device)
        else:
            temperature = log_temperature.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = sample(out.actor(rows.next_obs), rows.next_noise)
            next_value = out.target_q(rows.next_obs, next_action).amin(0) - temperature * next_log_prob
            target = rows.reward + rows.discount * next_value
        q = out.q(rows.obs, rows.action)
        critic_loss = 0.5 * (q - target).square().mean(1).sum()
        action, log_prob = sample(out.actor(rows.obs), rows.noise)
        policy_loss = (temperature * log_prob - out.frozen_q(rows.obs, action).amin(0)).mean()
        loss = critic_loss + policy_loss
        if log_temperature is not None:
            loss = loss - log_temperature * (log_prob.detach() + self.target_entropy).mean()
        return loss, {
            "q_mean": q.mean(),
            "td_error_mean": (q - target).abs().mean(),
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "entropy": -log_prob.mean(),
            "temperature": temperature,
        }

    def temperature(self) -> float:
        log = self.log_temperature
        return float(self.hyper.temperature) if log is None else math.exp(log.item())


def sample(out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions `[B, A]` from the actor's outputs `[B, 2A]` and normal noise `[B, A]`, and their log-probabilities."""
    from paceline.models.actor_critics import MAX_LOG_STD, MIN_LOG_STD

    mean, log_std = out.chunk(2, 1)
    log_std = log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)
    u = mean + log_std.exp() * noise
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not lose its digits at large u.
    slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - slope
    return torch.tanh(u), log_prob.sum(1)
