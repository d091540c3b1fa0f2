"""PPO with a random-network-distillation bonus (Burda et al., 2018): novel observations are rewarded.

A predictor learns to imitate a fixed random network; its error on an observation is the bonus. The bonus has a value
function of its own, the second head, which bootstraps past the end of an episode.

    paceline train --algo examples/algorithms/ppo_rnd.py:PpoRnd --env MountainCar-v0
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from paceline.algorithms import Loss, LossRows, Rows
from paceline.algorithms.ppo import PPO
from paceline.algorithms.returns import gae
from paceline.models.outputs import Outputs
from paceline.rollout.batch import Batch


class PpoRnd(PPO):
    class Settings(PPO.Settings):
        bonus_coef: Annotated[float, Field(ge=0)] = 0.5
        """Weight of the bonus's advantage beside that of the reward."""
        bonus_gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
        """Discount of the bonus."""
        features: int = 32
        """Outputs of the random network."""

    statistics = (*PPO.statistics, "bonus_value_loss", "predictor_loss")
    metrics = {
        "bonus_value_loss": "RND: squared error of the bonus's value",
        "predictor_loss": "RND: error of the predictor, that is the mean bonus before scaling",
    }
    hyper: Settings

    @classmethod
    def networks(cls, observation: Any, action: Any, hyper: Any) -> nn.Module:
        """The random network, which is never trained, its predictor, and the value of the bonus."""
        size = int(np.prod(observation.shape))

        def mlp(outputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))

        return nn.ModuleDict(
            {
                "random": mlp(hyper.features).requires_grad_(False),
                "predictor": mlp(hyper.features),
                "value": mlp(1),
            }
        )

    def errors(self, obs: torch.Tensor) -> torch.Tensor:
        """The predictor's error on each observation, `[B]`."""
        nets: Any = self.policy.extra
        x = obs.float()
        return (nets["predictor"](x) - nets["random"](x)).square().mean(1)

    def bonus_value(self, obs: torch.Tensor) -> torch.Tensor:
        nets: Any = self.policy.extra
        value: torch.Tensor = nets["value"](obs.float()).squeeze(1)
        return value

    def rows(self, batch: Batch) -> Rows:
        """PPO's rows, with the advantage of the bonus added and the target of its value beside them."""
        rows, valid, shape = super().rows(batch), batch.valid, batch.value.shape
        flat = torch.from_numpy(self.policy.prepare(batch.obs.reshape(-1, *batch.obs.shape[2:])))
        with torch.no_grad():
            errors, values = (f(flat).numpy().reshape(shape) for f in (self.errors, self.bonus_value))
        bonus = errors[1:] / (errors[1:][valid].std() + 1e-8)  # of the state that the action led to
        never = np.zeros_like(valid)  # the value of the bonus continues after the end of an episode
        ended = batch.terminated | batch.truncated
        advantage, target = gae(
            bonus, values, never, ended, gamma=self.hyper.bonus_gamma, gae_lambda=self.hyper.gae_lambda
        )
        chosen = advantage[valid]
        rows.advantage[...] += self.hyper.bonus_coef * (chosen - chosen.mean()) / (chosen.std() + 1e-8)
        return rows.add(bonus_target=target[valid])

    def loss(self, rows: LossRows, out: Outputs) -> Loss:
        loss, statistics = super().loss(rows, out)
        value_loss = rows.mean((self.bonus_value(rows.obs) - rows.bonus_target).square())
        predictor_loss = rows.mean(self.errors(rows.obs))
        statistics |= {"bonus_value_loss": value_loss, "predictor_loss": predictor_loss}
        return loss + self.hyper.value_coef * value_loss + predictor_loss, statistics
