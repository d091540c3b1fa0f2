"""Asynchronous advantage actor-critic (Mnih et al., 2016): A2C whose workers wait for nobody.

Each worker computes the gradient of its own rollout with the weights it has and sends it to the learner, which makes
one optimizer step with each, as it comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.algo.a2c import A2C, LOSSES
from paceline.algo.base import Metrics, discounted_returns, forecast, scaled_rewards
from paceline.algo.optimizers import OPTIMIZERS, Adam, RMSprop
from paceline.config import A3CConfig
from paceline.group import Group
from paceline.model.policy import Policy
from paceline.rollout.batch import Batch

Contribution = dict[str, NDArray[Any]]
"""`gradient`, flat, the mean over the `rows [1]` of a rollout; the `version [1]` of the weights it is for; `metrics`,
those named in METRICS; and what the normalisers need of the rollout (`RunningMoments.sums`), where there are any:
`observation` and `reward`."""
METRICS = (*LOSSES, "explained_variance", "value_mean")


class A3C(A2C):
    """On a worker `contribution`, with the weights of the learner; on the learner `apply_contribution`."""

    schedule = "gradients"
    hyper: A3CConfig

    def __init__(
        self,
        policy: Policy,
        hyper: A3CConfig,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        super().__init__(policy, hyper, rng=rng, group=group, normalize_reward=normalize_reward)
        self._optimizers = {0: self.optimizer}

    def update(self, batch: Batch, remaining: float) -> Metrics:
        return self.apply_contribution(self.contribution(batch), 0, remaining)

    def contribution(self, batch: Batch) -> Contribution:
        """Changes nothing here but the policy's gradient buffer: the normalisers are the learner's."""
        arrays: Contribution = {"version": np.asarray([self.version])}
        reward = batch.reward
        if self._reward_moments is not None:
            arrays["reward"] = self._reward_moments.sums(discounted_returns(batch))
            # As if they were merged: the very first rewards have no other scale.
            reward = scaled_rewards(batch, self._reward_moments.with_sums(arrays["reward"]))
        if self.policy.moments is not None:
            arrays["observation"] = self.policy.moments.sums(batch.obs[:-1][batch.valid])
        rows = self._estimate(batch, reward)
        metrics = self.gradients(rows, len(rows)) | forecast(rows.fields[1], rows.fields[3])
        arrays["metrics"] = np.asarray([metrics[name] for name in METRICS])
        arrays["rows"] = np.asarray([len(rows)])
        arrays["gradient"] = self.policy.gradient.cpu().numpy().copy()
        return arrays

    def apply_contribution(self, contribution: Contribution, worker: int, remaining: float) -> Metrics:
        """One optimizer step with the gradient of one worker; none if it had no rows."""
        learning_rate = self.learning_rate(remaining)
        metrics = dict(zip(METRICS, contribution["metrics"].tolist(), strict=True))
        metrics |= {"gradient_norm": 0.0, "learning_rate": learning_rate, "epochs_done": 0}
        if not contribution["rows"][0]:
            return metrics
        self.optimizer = self._optimizer_for(worker if self.hyper.statistics == "worker" else 0)
        self.policy.gradient.copy_(torch.from_numpy(np.array(contribution["gradient"])))  # Ray's cannot be written to
        metrics |= {"gradient_norm": self.apply(learning_rate), "epochs_done": 1}
        for kind, moments in self._moments().items():
            moments.merge(contribution[kind])
        self.policy.normalizer_changed()
        self.version += 1
        return metrics

    def _optimizer_for(self, worker: int) -> Adam | RMSprop:
        """They share the parameters and the gradient; each has its own statistics."""
        if worker not in self._optimizers:
            make = OPTIMIZERS[self.hyper.optimizer]
            self._optimizers[worker] = make(self.policy.parameters, self.policy.gradient)
        return self._optimizers[worker]

    def state(self) -> dict[str, Any]:
        return super().state() | {"optimizer": {str(w): own.state() for w, own in self._optimizers.items()}}

    def load(self, state: dict[str, Any]) -> None:
        for worker, own in state["optimizer"].items():
            self._optimizer_for(int(worker)).load(own)
        super().load(state | {"optimizer": state["optimizer"]["0"]})
