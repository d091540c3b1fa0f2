"""Deep Q-learning (Mnih et al., 2015) with a replay buffer and optional improvements: double Q-learning, dueling
networks, n-step returns, prioritised replay and noisy networks.

A rollout goes into the replay; then come some optimizer steps, each with rows drawn from there. The target of a row is
the discounted sum of its next rewards and, where the episode goes on, the target network's value of the state after
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from paceline.algorithms.base import Loss, Metrics, Weights
from paceline.algorithms.off_policy import OffPolicy, OffPolicySettings
from paceline.algorithms.optimizers import Adam, Optimizer
from paceline.algorithms.recent_steps import RecentSteps
from paceline.algorithms.returns import n_step
from paceline.algorithms.rows import Floats
from paceline.config.values import Fraction, Positive
from paceline.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from paceline.config import RunConfig
    from paceline.models.policy import Policy
    from paceline.models.q import QPolicy, TargetLookup
    from paceline.rollout.batch import Batch
    from paceline.rollout.replay import Replay, Sample
    from paceline.spaces import ActionCodec, ObservationCodec

LEAST_PRIORITY = 1e-6  # an error of 0 can be drawn again
MOST_RECENT = 256  # optimizer steps that the metrics average over


@dataclass
class ReplayRows:
    """The rows of one optimizer step."""

    obs: Any  # [B, …] as the network takes them
    action: NDArray[np.int64]  # [B]
    reward: Floats  # [B], summed over n steps
    discount: Floats  # [B] of what follows; 0 after the end of an episode
    weight: Floats | None  # [B], of prioritised replay
    best: NDArray[np.int64] | None  # [B], double Q-learning: the action whose value counts
    lookup: TargetLookup
    part: slice  # of the sample

    def target(self) -> Floats:
        """`[B]`. Waits for the target network if its values are not there yet."""
        later = self.lookup.values(self.part)
        worth = later.max(axis=0) if self.best is None else later[self.best, np.arange(later.shape[1])]
        target: Floats = self.discount * worth
        target += self.reward
        return target


class DQN(OffPolicy):
    class Settings(OffPolicySettings):
        gradient_steps: Annotated[Positive, Field(le=1_000_000)] = 1
        """Optimizer steps per round."""
        learning_rate: Annotated[float, Field(gt=0)] = 1e-3
        """Learning rate of Adam."""
        max_grad_norm: Annotated[float, Field(ge=0)] = 10.0
        """Gradients with a larger norm are scaled down to this norm; 0 turns clipping off."""
        huber: Annotated[float, Field(gt=0)] = 1.0
        """Threshold of the Huber loss, which is quadratic for smaller errors and linear for larger ones."""
        replay_size: Positive = 100_000
        """Capacity of the replay buffer, in steps of all environments together."""
        double: bool = True
        """Double Q-learning: the online network chooses the target's action and the target network evaluates it, which
        reduces overestimation."""
        dueling: bool = False
        """Dueling network, with separate outputs for the value of a state and the advantage of each action."""
        prioritized: bool = False
        """Prioritised replay: sample rows by the size of their last error instead of uniformly."""
        priority_alpha: Fraction = 0.6
        """Exponent of that error in a row's priority; 0 is uniform."""
        priority_beta: Fraction = 0.4
        """Initial exponent of the importance weights, which correct for the priorities; it rises to 1 over the
        budget."""
        exploration: Literal["epsilon", "noisy"] = "epsilon"
        """`epsilon`: random actions with probability epsilon; `noisy`: noise of learned size on the weights."""
        epsilon_start: Fraction = 1.0
        """Initial probability of a random action."""
        epsilon_end: Fraction = 0.05
        """Probability of a random action after `epsilon_fraction` of the budget."""
        epsilon_fraction: Fraction = 0.1
        """Fraction of the budget over which epsilon falls."""
        epsilon_power: Annotated[float, Field(gt=0)] = 7.0
        """On `ray`: actor i of N explores with epsilon to the power 1 + i / (N - 1) x this, as in Ape-X."""
        noisy_deviation: Annotated[float, Field(gt=0)] = 0.5
        """With `exploration=noisy`: initial standard deviation of a layer's weights, times the square root of its
        inputs."""
        target_update_every: Positive = 500
        """Optimizer steps between updates of the target network."""
        target_tau: Annotated[float, Field(gt=0, le=1)] = 1.0
        """How far the target network moves towards the online network in an update: 1 copies it; 0.005 with
        `target_update_every=1` follows it slowly."""

        largest: ClassVar[str] = "replay_size"

        def rows_known_ahead(self, slots: int) -> int:
            if self.prioritized or self.exploration == "noisy":
                return self.batch_size
            return self.batch_size * min(self.gradient_steps, self.target_update_every)

        def for_actors(self, envs: int) -> Self:
            steps = self.rounds_at_once(envs) * self.gradient_steps
            return super().for_actors(envs).model_copy(update={"gradient_steps": steps})

    hyper: Settings
    policy: QPolicy
    rllib = "DQN"
    faster_learning = "fewer dqn.gradient_steps or a larger dqn.rollout_steps"
    statistics = ("q", "td_error")
    metrics: ClassVar[dict[str, str]] = {
        **OffPolicy.metrics,
        "q_min": "DQN: least value of the actions drawn from replay",
        "q_max": "DQN: greatest value of the actions drawn from replay",
        "epsilon": "DQN: probability of a random action",
        "priority_beta": "DQN: exponent of the importance weights, which correct for prioritised replay",
        "target_updates": "DQN: updates of the target network so far",
    }

    @classmethod
    def make_policy(
        cls, config: RunConfig, observation: ObservationCodec, action: ActionCodec, *, seed: int = 0
    ) -> Policy:
        from paceline.models.q import QPolicy

        return QPolicy(
            observation,
            action,
            config.model,
            config.hyper,
            seed=seed,
            normalize_observation=config.env.normalize_observation,
        )

    def make_optimizer(self) -> Optimizer:
        return Adam(self.policy.parameters, self.policy.gradient, eps=1e-8)

    def setup(self) -> None:
        super().setup()
        hyper = self.hyper
        self._exponent = 1.0  # of epsilon
        self._recent = RecentSteps(min(hyper.rounds * hyper.gradient_steps, MOST_RECENT), hyper.batch_size, hyper.huber)
        if hyper.exploration == "epsilon" and hyper.learning_starts:
            self.policy.head.epsilon = 1.0
        self._resample()

    def loss(self, rows: ReplayRows, out: Tensor) -> Loss:
        """The Huber loss of the temporal-difference errors; `out [B, K]` are the values of all actions."""
        value = out.gather(1, torch.from_numpy(rows.action)[:, None])[:, 0]
        target = torch.from_numpy(rows.target())
        losses = torch.nn.functional.huber_loss(value, target, reduction="none", delta=self.hyper.huber)
        if rows.weight is not None:
            losses = losses * torch.from_numpy(rows.weight)
        return losses.mean(), {"q": value, "td_error": value - target}

    def act_as(self, actor: int, actors: int) -> None:
        """As in Ape-X each actor has an epsilon of its own: the first that of the schedule, the last next to none."""
        self._exponent = 1 + self.hyper.epsilon_power * actor / max(1, actors - 1)

    # -- an update --------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, remaining: float) -> Metrics:
        metrics = super().update(batch, remaining)
        beta = {"priority_beta": self.annealed["priority_beta"]} if self.hyper.prioritized else {}
        return metrics | {"epsilon": self.policy.head.epsilon, "target_updates": self.target_updates} | beta

    def means(self) -> Metrics:
        return self._recent.means()

    @classmethod
    def schedules(cls, hyper: Any, remaining: float) -> Metrics:
        values = super().schedules(hyper, remaining)
        if hyper.prioritized:
            values["priority_beta"] = hyper.priority_beta + (1 - hyper.priority_beta) * (1 - remaining)
        if hyper.exploration == "epsilon":
            done = min(1.0, (1 - remaining) / hyper.epsilon_fraction) if hyper.epsilon_fraction else 1.0
            values["epsilon"] = hyper.epsilon_start + (hyper.epsilon_end - hyper.epsilon_start) * done
        return values

    @property
    def draws_by_priority(self) -> bool:
        return self.hyper.prioritized

    def first_priorities(self, batch: Batch) -> Floats | None:
        """From the values that the actor gave to its actions (`logp`) and to the states (`value`)."""
        if not self.hyper.prioritized:
            return None
        target = n_step(
            batch.reward if self.scaled is None else self.scaled(batch.reward),
            batch.value,
            batch.terminated,
            batch.truncated,
            gamma=self.hyper.gamma,
            n=self.hyper.n_step,
        )
        return self._priority(target - batch.logp)

    def _priority(self, error: Floats) -> Floats:
        priority: Floats = (np.abs(np.nan_to_num(error)) + np.float32(LEAST_PRIORITY)) ** self.hyper.priority_alpha
        return priority

    def learn(self, replay: Replay, new_steps: int) -> None:
        hyper, left = self.hyper, self.hyper.gradient_steps
        learning_rate, beta = self.annealed["learning_rate"], self.annealed.get("priority_beta", 0.0)
        while left:
            steps = min(left, self.steps_per_draw())
            sample = replay.sample(
                self.rng,
                steps * hyper.batch_size,
                n_step=hyper.n_step,
                gamma=hyper.gamma,
                beta=beta,
                scaled=self.scaled,
            )
            error = self._learn_from(sample, steps, learning_rate)
            if hyper.prioritized:
                replay.reprioritize(sample.index, self._priority(error))
            left -= steps

    def steps_per_draw(self) -> int:
        """The draw and the targets must not depend on the steps between."""
        if self.hyper.prioritized or self.policy.online.is_noisy:
            return 1
        every = self.hyper.target_update_every
        return min(every - self.optimizer_steps % every, super().steps_per_draw())

    def _learn_from(self, sample: Sample, steps: int, learning_rate: float) -> Floats:
        """Optimizer steps with a part of the rows each. Returns the error of every row, from before its step."""
        policy, hyper, size = self.policy, self.hyper, self.hyper.batch_size
        if policy.online.is_noisy:
            policy.target.resample(self.rng)
        sample.obs, sample.next_obs = policy.prepare(sample.obs), policy.prepare(sample.next_obs)
        error = np.empty(len(sample.reward), np.float32)
        with policy.target_lookup(sample.next_obs, size) as lookup:
            for begin in range(0, len(error), size):
                part = slice(begin, begin + size)
                error[part] = self._step(sample, part, lookup, learning_rate)
        if self.optimizer_steps % hyper.target_update_every == 0:
            policy.target.parameters.lerp_(policy.parameters, hyper.target_tau)
            policy.target.take_buffers(policy.online)
            self.target_updates += 1
        self._resample()  # for acting, and with the weights of the last step
        self.steps_trained += steps * size
        return error

    def _step(self, sample: Sample, part: slice, lookup: TargetLookup, learning_rate: float) -> Floats:
        """One optimizer step; returns the errors before it."""
        online = self.policy.online
        if online.is_noisy:
            online.resample(self.rng)
        best = online.values(sample.next_obs[part]).argmax(axis=0) if self.hyper.double else None
        weight = None if sample.weight is None else sample.weight[part]
        rows = ReplayRows(
            sample.obs[part],
            sample.action[part],
            sample.reward[part],
            sample.discount[part],
            weight,
            best,
            lookup,
            part,
        )
        if self.accelerator is not None:
            value, error = self.accelerator.gradients(rows)
        else:
            value, error = self._gradients(rows)
        self._recent.add(value, error, weight, self.apply(learning_rate))
        errors: Floats = error
        return errors

    def _gradients(self, rows: ReplayRows) -> tuple[Floats, Floats]:
        """The gradient of the loss into the policy's flat gradient, by autograd; returns values and errors."""
        online = self.policy.online
        online.zero_gradient()
        loss, statistics = self.loss(rows, online.forward(rows.obs))
        loss.backward()  # type: ignore[no-untyped-call]
        online.finish_gradient()
        value, error = (statistics[name].detach().numpy() for name in self.statistics)
        return value, error

    # -- exploring --------------------------------------------------------------------------------------------------

    def explore(self, ready: bool) -> None:
        if self.hyper.exploration == "epsilon":
            self.policy.head.epsilon = self.annealed["epsilon"] if ready or self.optimizer_steps else 1.0

    def _resample(self) -> None:
        if self.policy.online.is_noisy:
            self.policy.online.resample(self.rng)

    # -- what other processes need, saving --------------------------------------------------------------------------

    def weights(self) -> Weights:
        return super().weights() | {"epsilon": np.asarray([self.policy.head.epsilon])}

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.policy.head.epsilon = float(weights["epsilon"][0]) ** self._exponent
        self._resample()

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"noise": self.policy.online.noise.numpy()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.policy.online.noise.copy_(torch.from_numpy(np.array(state["noise"])))
        self.policy.online.refresh()
