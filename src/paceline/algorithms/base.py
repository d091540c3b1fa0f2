"""The contract of an algorithm: what it declares, what it computes, what it shares with other processes."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.algorithms.accelerated import find_accelerator
from paceline.algorithms.optimizers import Adam, Optimizer, clip_norm_
from paceline.algorithms.returns import explained_variance
from paceline.algorithms.rows import Floats
from paceline.collective.group import Group
from paceline.config.algorithm_settings import AlgorithmSettings, scheduled
from paceline.lazy import np, torch
from paceline.models.normalizer import CLIP, RunningMoments

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from paceline.config import RunConfig
    from paceline.models.policy import Policy
    from paceline.rollout.batch import Batch
    from paceline.spaces import ActionCodec, ObservationCodec

    Weights = dict[str, NDArray[Any]]
else:
    Weights = dict[str, Any]

MAX_LOG_RATIO = 20.0
"""Log-probability ratios are cut here: the exponential of more is soon infinite."""
Metrics = dict[str, float]
Loss = tuple["Tensor", dict[str, "Tensor"]]
"""What a loss returns: what to minimise, and the statistics by name."""
Sharing = Literal["replicas", "rollouts", "gradients", "replay"]


class Algorithm(ABC):
    """Learns from batches. It sees a policy and a group, but no environment, engine or file.

    In a group of several workers each member has its own rows and all have the same weights. A row weighs `group.size /
    rows of all members`, so the mean over the members, of a gradient or a loss, is the mean over all rows.
    """

    # -- what it declares -------------------------------------------------------------------------------------------

    Settings: ClassVar[type[AlgorithmSettings]]
    """Its section of the configuration."""
    sharing: ClassVar[Sharing] = "replicas"
    """How several workers share the work. `replicas`: all collect and learn. Otherwise actors collect and send a
    learner their `rollouts`, their `gradients`, or rollouts for its `replay`."""
    statistics: ClassVar[tuple[str, ...]]
    """The metrics that `loss` returns; `total_loss`, the loss itself, is added."""
    metrics: ClassVar[dict[str, str]] = {}
    """Name → meaning of metrics that other algorithms do not have."""
    learns_on_gpu: ClassVar[bool] = True
    gpu_inputs: ClassVar[Literal["images", "vectors"]] = "images"
    """What a GPU learns from: `images`, for which it acts, too, or `vectors`, for which acting stays on the CPU."""
    can_overlap: ClassVar[bool] = False
    """Whether `begin_update` lets the next rollout be collected while a GPU learns from this one."""
    several_learners: ClassVar[bool] = False
    """Whether several learners can share a batch (`engine.learners`)."""
    has_memory: ClassVar[bool] = False
    """Whether it learns from sequences, as a policy with memory needs it (`model.memory`)."""
    acts_by_weights: ClassVar[bool] = False
    """Whether an actor acts by the policy's weights alone, as in `models/acting.py`."""
    has_value: ClassVar[bool] = True
    """Whether its policy tells the value of a state."""
    several_policies: ClassVar[bool] = False
    """Whether agents of one environment can have policies of their own (`multi_agent.policies`)."""
    native: ClassVar[bool] = True
    """False: only RLlib runs it."""
    rllib: ClassVar[str | None] = None
    """What RLlib calls it, if RLlib has it."""
    faster_learning: ClassVar[str] = ""
    """What to change when learning takes most of the time, such as `a larger ppo.minibatch_size`."""

    def __init__(
        self,
        policy: Policy,
        hyper: Any,
        *,
        rng: np.random.Generator,
        group: Group | None = None,
        normalize_reward: bool = False,
    ) -> None:
        self.policy, self.hyper, self.rng, self.group = policy, hyper, rng, group or Group()
        self.version = 0
        self.optimizer_steps = 0
        self.annealed: dict[str, Any] = {}
        """The present value of each setting that has a schedule."""
        self.anneal(1.0)
        self._reward_moments = RunningMoments(1) if normalize_reward else None
        self.optimizer = self.make_optimizer()
        self.accelerator = find_accelerator(self)
        self.setup()

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for settings that do not go together."""
        return

    @classmethod
    def networks(cls, observation: ObservationCodec, action: ActionCodec, hyper: Any) -> nn.Module | None:
        """Networks beside the policy's. They are trained, saved and sent to workers with it: `self.policy.extra`."""
        return None

    @classmethod
    def make_policy(
        cls, config: RunConfig, observation: ObservationCodec, action: ActionCodec, *, seed: int = 0
    ) -> Policy:
        """The policy on the CPU."""
        from paceline.models.policy import Policy
        from paceline.models.recurrent_policy import RecurrentPolicy

        kind = Policy if config.model.memory == "none" else RecurrentPolicy
        return kind(
            observation,
            action,
            config.model,
            seed=seed,
            normalize_observation=config.env.normalize_observation,
            extra=lambda: cls.networks(observation, action, config.hyper),
        )

    def make_optimizer(self) -> Optimizer:
        return Adam(self.policy.parameters, self.policy.gradient)

    def setup(self) -> None:
        """Make what else the algorithm needs."""
        return

    # -- what it computes -------------------------------------------------------------------------------------------

    @abstractmethod
    def loss(self, rows: Any, out: Any) -> Loss:
        """The loss of a minibatch and its statistics, in torch. Autograd does the rest."""

    @abstractmethod
    def update(self, batch: Batch, remaining: float) -> Metrics:
        """Learn from a batch. `remaining`: the part of the budget that is left, for the schedules."""

    def update_quietly(self, batch: Batch, remaining: float) -> None:
        """An update whose metrics nobody asks for."""
        self.update(batch, remaining)

    # -- what engines tell it ---------------------------------------------------------------------------------------

    def set_scratch_dir(self, folder: Path) -> None:
        """Where to put what does not fit in memory. Called before the first update."""
        return

    def interrupted(self) -> None:
        """The next rollout does not begin where the last one ended."""
        return

    def restored(self) -> dict[str, str]:
        """Parts beside weights and optimizer → how the last `load` restored them: `exact`, or a word and why."""
        return {}

    def act_as(self, actor: int, actors: int) -> None:
        """This copy collects for a learner, as number `actor` of `actors`."""
        return

    def change(self, name: str, value: Any) -> None:
        """Use another value of a setting from the next update on."""
        self.hyper = self.hyper.model_copy(update={name: value})

    def notes(self) -> list[str]:
        """What happened since the last call that a user should know."""
        return []

    # -- parts of an update -----------------------------------------------------------------------------------------

    @classmethod
    def schedules(cls, hyper: Any, remaining: float) -> Metrics:
        """The value of each setting that changes over the budget, when this share of it is left."""
        values: Metrics = {}
        settings: type[AlgorithmSettings] = type(hyper)
        for name in scheduled(settings):
            start, schedule = getattr(hyper, name), getattr(hyper, f"{name}_schedule")
            values[name] = start * remaining if schedule == "linear" else start
        return values

    def anneal(self, remaining: float) -> float:
        """Bring the scheduled settings up to date; returns the learning rate."""
        self.annealed |= self.schedules(self.hyper, remaining)
        return float(self.annealed["learning_rate"])

    def row_counts(self, rows: int) -> list[int]:
        """The number of rows of each member, by rank."""
        return [int(count) for count in self.group.gather(float(rows))]

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradient of the whole group; returns its length before clipping."""
        self.group.mean_(self.policy.gradient)
        norm = clip_norm_(self.policy.gradient, self.hyper.max_grad_norm)
        self.optimizer.step(learning_rate)
        self.optimizer_steps += 1
        return norm

    def normalize(self, advantage: Floats) -> None:
        """To mean 0 and deviation 1 over the rows of all members, in place."""
        wide = advantage.astype(np.float64)
        moments = self.group.mean_(torch.tensor([len(wide), wide.sum(), np.dot(wide, wide)], dtype=torch.float64))
        count, first, second = moments.tolist()
        if count:
            mean = first / count
            deviation = max(second / count - mean * mean, 0.0) ** 0.5
            advantage -= np.float32(mean)
            advantage /= np.float32(deviation + 1e-8)

    def rewards(self, batch: Batch) -> Floats:
        """The rewards to learn from. The reward normaliser, if there is one, sees the rollout first."""
        if self._reward_moments is None:
            return batch.reward
        self._reward_moments.update(discounted_returns(batch), self.group)
        return scaled_rewards(batch.reward, self._reward_moments)

    def inputs(self, batch: Batch, mask: NDArray[Any]) -> Any:
        """The states that `mask` selects, `[T, N]` or `[T+1, N]`, as the network takes them."""
        return self.policy.sequences(self.policy.prepare(batch.states(mask)), mask, batch.valid, batch.memory)

    def finish(self, batch: Batch, losses: Metrics, value: Floats, target: Floats) -> Metrics:
        """After learning: the observation normaliser sees the rollout, so that acting and learning agree on it.

        Returns the metrics of the whole group: `losses`, and how well `value` predicted `target`, both `[R]`.
        """
        if self.policy.moments is not None:
            self.policy.moments.update(batch.states(batch.valid), self.group)
            self.policy.normalizer_changed()
        self.version += 1
        if self.group.size == 1:
            return losses | value_metrics(value, target)
        for statistic in self.policy.running_statistics():
            self.group.mean_(statistic)
        names = sorted(losses)  # one collective: the same order everywhere
        wide, error = target.astype(np.float64), target.astype(np.float64) - value
        sums = [
            len(value),
            value.sum(dtype=np.float64),
            wide.sum(),
            np.dot(wide, wide),
            error.sum(),
            np.dot(error, error),
        ]
        vector = self.group.mean_(
            torch.tensor([*(losses[name] for name in names), *sums], dtype=torch.float64)
        ).tolist()
        metrics = dict(zip(names, vector[: len(names)], strict=True))
        count, values, *moments = vector[len(names) :]
        if not count:
            return metrics | {"explained_variance": math.nan, "value_mean": math.nan}
        first, second, error_first, error_second = (moment / count for moment in moments)
        variance, left = second - first * first, max(error_second - error_first * error_first, 0.0)
        varies = variance > 1e-12 * second  # less is rounding
        return metrics | {
            "explained_variance": 1.0 - left / variance if varies else math.nan,
            "value_mean": values / count,
        }

    # -- what other processes need ----------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Copies of all that acting and the next gradient need: parameters, buffers, normalisers, their version."""
        arrays: Weights = {"parameters": self.policy.parameters.cpu().numpy(), "version": np.asarray([self.version])}
        arrays |= {f"buffer.{name}": b.cpu().numpy() for name, b in self.policy.named_buffers()}
        for kind, moments in self._moments().items():
            arrays |= {f"{kind}.{name}": array for name, array in moments.state().items()}
        return {name: array.copy() for name, array in arrays.items()}

    def load_weights(self, weights: Weights) -> None:
        # Ray hands out read-only arrays, which torch would warn about.
        self.policy.parameters.copy_(torch.from_numpy(np.array(weights["parameters"])))
        for name, buffer in self.policy.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(weights[f"buffer.{name}"])))
        for kind, moments in self._moments().items():
            moments.load({name: weights[f"{kind}.{name}"] for name in moments.state()})
        self.policy.normalizer_changed()
        self.version = int(weights["version"][0])

    def fingerprint(self) -> int:
        """A checksum of the parameters: replicas whose numbers differ have diverged."""
        return zlib.crc32(self.policy.parameters.cpu().numpy().data)

    def _moments(self) -> dict[str, RunningMoments]:
        both = {"observation": self.policy.moments, "reward": self._reward_moments}
        return {kind: moments for kind, moments in both.items() if moments is not None}

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Arrays and JSON: all that the next update depends on."""
        return {
            "policy": self.policy.state(),
            "optimizer": self.optimizer.state(),
            "reward_moments": self._reward_moments.state() if self._reward_moments is not None else None,
            "rng": self.rng.bit_generator.state,
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
        }

    def snapshot(self) -> dict[str, Any]:
        """The same without what is too large to copy at every update: `load` then leaves that as it is."""
        return self.state()

    def load(self, state: dict[str, Any]) -> None:
        self.policy.load(state["policy"])
        self.optimizer.load(state["optimizer"])
        if self._reward_moments is not None:
            self._reward_moments.load(state["reward_moments"])
        self.rng.bit_generator.state = state["rng"]
        self.version, self.optimizer_steps = state["version"], state["optimizer_steps"]


def discounted_returns(batch: Batch) -> Floats:
    """What the reward normaliser sees, `[R, 1]`."""
    returns: Floats = batch.discounted[batch.valid][:, None]
    return returns


def scaled_rewards(reward: Floats, moments: RunningMoments) -> Floats:
    scaled: Floats = np.clip(reward * np.float32(1.0 / moments.deviation[0]), -CLIP, CLIP)
    return scaled


def value_metrics(value: Floats, target: Floats) -> Metrics:
    """How well the values of one process predicted their targets."""
    if not len(value):  # one step of environments that all reset at once is a rollout without rows
        return {"explained_variance": math.nan, "value_mean": math.nan}
    return {"explained_variance": explained_variance(value, target), "value_mean": float(value.mean())}
