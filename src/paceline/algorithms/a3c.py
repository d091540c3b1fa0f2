"""Asynchronous advantage actor-critic (Mnih et al., 2016): A2C whose workers do not wait for each other.

Each worker computes the gradient of its own rollout with the weights it has and sends it to the learner, which makes
one optimizer step with each as it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from paceline.algorithms.a2c import A2C
from paceline.algorithms.base import Metrics, discounted_returns, scaled_rewards, value_metrics
from paceline.algorithms.optimizers import Optimizer
from paceline.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.rollout.batch import Batch

    Contribution = dict[str, NDArray[Any]]

METRICS = (*A2C.statistics, "explained_variance", "value_mean")


class A3C(A2C):
    """A worker calls `contribution` with the learner's weights; the learner calls `apply_contribution`."""

    class Settings(A2C.Settings):
        statistics: Literal["shared", "worker"] = "shared"
        """The optimizer's running statistics: one set shared by all workers, or one set per worker."""

    hyper: Settings
    several_policies = False
    sharing = "gradients"
    faster_learning = "a larger a3c.rollout_steps"

    def setup(self) -> None:
        self._optimizers = {0: self.optimizer}

    def update(self, batch: Batch, remaining: float) -> Metrics:
        return self.apply_contribution(self.contribution(batch), 0, remaining)

    def contribution(self, batch: Batch) -> Contribution:
        """What a worker sends: `gradient`, flat, the mean over the `rows [1]` of its rollout; the `version [1]` of the
        weights; `metrics`, those in METRICS; and what the normalisers need, where there are any: `observation`,
        `reward`; and `running`, the statistics of batch normalisation in a user's network.

        Changes only the policy's gradient buffer and those: the normalisers belong to the learner."""
        arrays: Contribution = {"version": np.asarray([self.version])}
        reward = batch.reward
        if self._reward_moments is not None:
            arrays["reward"] = self._reward_moments.sums(discounted_returns(batch))
            # As if they were merged: the very first rewards have no other scale.
            reward = scaled_rewards(batch.reward, self._reward_moments.with_sums(arrays["reward"]))
        if self.policy.moments is not None:
            arrays["observation"] = self.policy.moments.sums(batch.obs[:-1][batch.valid])
        rows = self.estimate(batch, reward)
        metrics = self.gradients(rows, len(rows)) | value_metrics(rows.value, rows.target)
        arrays["metrics"] = np.asarray([metrics[name] for name in METRICS])
        arrays["rows"] = np.asarray([len(rows)])
        arrays["gradient"] = self.policy.gradient.cpu().numpy().copy()
        if running := self.policy.running_statistics():
            arrays["running"] = torch.cat(running).cpu().numpy()
        return arrays

    def apply_contribution(self, contribution: Contribution, worker: int, remaining: float) -> Metrics:
        """One optimizer step with the gradient of one worker; none if it had no rows."""
        learning_rate = self.anneal(remaining)
        metrics = dict(zip(METRICS, contribution["metrics"].tolist(), strict=True))
        metrics |= {"gradient_norm": 0.0, "learning_rate": learning_rate, "epochs_done": 0}
        if not contribution["rows"][0]:
            return metrics
        self.optimizer = self._optimizer_for(worker if self.hyper.statistics == "worker" else 0)
        # Ray's arrays are read-only, hence the copy.
        self.policy.gradient.copy_(torch.from_numpy(np.array(contribution["gradient"])))
        metrics |= {"gradient_norm": self.apply(learning_rate), "epochs_done": 1}
        for kind, moments in self._moments().items():
            moments.merge(contribution[kind])
        if running := self.policy.running_statistics():
            new = torch.from_numpy(np.array(contribution["running"])).to(self.policy.device)
            for own, given in zip(running, torch.split(new, [len(own) for own in running]), strict=True):
                own.copy_(given)
        self.policy.normalizer_changed()
        self.version += 1
        return metrics

    def _optimizer_for(self, worker: int) -> Optimizer:
        """They share the parameters and the gradient; each has its own statistics."""
        if worker not in self._optimizers:
            self._optimizers[worker] = self.make_optimizer()
        return self._optimizers[worker]

    def state(self) -> dict[str, Any]:
        return super().state() | {"optimizer": {str(w): own.state() for w, own in self._optimizers.items()}}

    def load(self, state: dict[str, Any]) -> None:
        for worker, own in state["optimizer"].items():
            self._optimizer_for(int(worker)).load(own)
        super().load(state | {"optimizer": state["optimizer"]["0"]})
