"""Learning from replay: rollouts go into a buffer, and each optimizer step draws its rows from there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from paceline.algorithms.base import Algorithm, Metrics, discounted_returns, scaled_rewards
from paceline.algorithms.rows import Floats
from paceline.config.algorithm_settings import AlgorithmSettings
from paceline.config.algorithms import algorithm_name
from paceline.config.values import Count, Positive
from paceline.lazy import np, torch

if TYPE_CHECKING:
    from paceline.rollout.batch import Batch
    from paceline.rollout.replay import Replay

CHUNK_BYTES = 4_000_000  # of observations drawn at once, for several optimizer steps


class OffPolicySettings(AlgorithmSettings):
    rollout_steps: Positive = 4
    """Steps of each environment per round of collecting and learning."""
    rounds: Annotated[Positive, Field(le=1_000_000)] = 32
    """Rounds of collecting and learning per iteration, that is, per row of metrics. On `ray`, an actor sends the steps
    of all rounds at once, and the learner then makes the optimizer steps of all rounds."""
    batch_size: Positive = 64
    """Rows per optimizer step."""
    replay: Literal["ram", "disk"] = "ram"
    """Where the replay buffer is: in memory, or with its observations in a memory-mapped file of the run (for
    images)."""
    learning_starts: Annotated[Count, Field(ge=0)] = 1000
    """Steps to collect before learning starts."""
    n_step: Annotated[Positive, Field(le=10_000)] = 1
    """Rewards summed before the target bootstraps."""

    largest: ClassVar[str]
    """The setting that holds the capacity of the replay buffer."""

    @property
    def capacity(self) -> int:
        """Of the replay buffer, in steps of all environments together."""
        return int(getattr(self, self.largest))

    def rows_per_step(self, slots: int) -> int:
        return self.batch_size

    def rounds_per_iteration(self) -> int:
        return self.rounds

    def replay_rows_in_memory(self) -> int:
        return self.capacity if self.replay == "ram" else 0

    def rounds_at_once(self, envs: int) -> int:
        """The rounds of an iteration, or as many of them as the replay has room for."""
        return max(1, min(self.rounds, (self.capacity // envs - 2) // self.rollout_steps))

    def for_actors(self, envs: int) -> Self:
        """The rounds of an iteration as one: actors send few and large messages."""
        return self.model_copy(update={"rollout_steps": self.rounds_at_once(envs) * self.rollout_steps, "rounds": 1})


class OffPolicy(Algorithm):
    """Subclasses write `learn`, which draws rows and makes optimizer steps."""

    hyper: Any
    policy: Any
    sharing = "replay"
    learns_on_gpu = False
    metrics: ClassVar[dict[str, str]] = {
        "q_mean": "Learning from replay: mean value of the actions drawn",
        "td_error_mean": "Learning from replay: mean size of the temporal-difference error",
        "steps_sampled": "Learning from replay: steps put into the buffer so far",
        "steps_trained": "Learning from replay: rows learned from so far, counted each time they are drawn",
        "replay_rows": "Learning from replay: steps in the buffer",
    }

    @classmethod
    def check(cls, config: Any) -> None:
        hyper, name = config.hyper, config.algorithm_name
        least = config.env.envs_per_worker * (hyper.rollout_steps + 2)
        if hyper.capacity < least:
            raise ValueError(
                f"{name}.{hyper.largest}={hyper.capacity} is too small: it must be at least env.envs_per_worker x "
                f"({name}.rollout_steps + 2) = {least}"
            )

    def setup(self) -> None:
        self.replay: Replay | None = None  # made with the first rollout, which says how wide it is
        self._folder: Path | None = None
        self._continues = False  # whether the next rollout begins where the last one ended
        self.target_updates = self.steps_sampled = self.steps_trained = 0
        self._lost = ""  # what `load` could not restore of the replay
        self._told = True

    @property
    def draws_by_priority(self) -> bool:
        """Whether rows have priorities, which `first_priorities` and `learn` set."""
        return False

    @abstractmethod
    def learn(self, replay: Replay, new_steps: int) -> None:
        """Make the optimizer steps that follow a rollout of `new_steps` valid steps."""

    @abstractmethod
    def means(self) -> Metrics:
        """The statistics of the optimizer steps of this iteration."""

    def set_scratch_dir(self, folder: Path) -> None:
        self._folder = folder

    def interrupted(self) -> None:
        self._continues = False

    def restored(self) -> dict[str, str]:
        return {"replay": self._lost or "exact"}

    def notes(self) -> list[str]:
        told, self._told = self._told, True
        return [] if told else [f"the replay is {self._lost}"]

    # -- an update --------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, remaining: float) -> Metrics:
        self.update_quietly(batch, remaining)
        assert self.replay is not None
        metrics = {
            "learning_rate": self.annealed["learning_rate"],
            "steps_sampled": self.steps_sampled,
            "steps_trained": self.steps_trained,
            "replay_rows": len(self.replay),
        }
        return metrics | self.means()

    def update_quietly(self, batch: Batch, remaining: float) -> None:
        replay = self._store(batch)
        ready = len(replay) > 0 and replay.added >= self.hyper.learning_starts
        self.anneal(remaining)
        if ready:
            self.learn(replay, batch.rows)
        self.explore(ready)
        self.version += 1

    def explore(self, ready: bool) -> None:
        """Set how the policy explores. `ready`: learning has started."""
        return

    def _store(self, batch: Batch) -> Replay:
        """Put the rollout into the replay; the normalisers see it first."""
        if self.replay is None:
            self.replay = self._make_replay(batch.reward.shape[1])
        if self._reward_moments is not None:
            self._reward_moments.update(discounted_returns(batch), self.group)
        if self.policy.moments is not None:
            self.policy.moments.update(batch.states(batch.valid), self.group)
            self.policy.normalizer_changed()
        self.replay.add(batch, continues=self._continues, priority=self.first_priorities(batch))
        self._continues = True
        self.steps_sampled += batch.rows
        return self.replay

    def first_priorities(self, batch: Batch) -> Floats | None:
        """Of new rows `[T, N]`, for prioritised replay."""
        return None

    def _make_replay(self, num_envs: int) -> Replay:
        from paceline.rollout.replay import Replay

        hyper, policy = self.hyper, self.policy
        replay = Replay(
            hyper.capacity,
            num_envs,
            policy.observation,
            policy.action,
            prioritized=self.draws_by_priority,
            on_disk=hyper.replay == "disk",
            setting=f"{algorithm_name(type(self).__name__)}.{hyper.largest}",
        )
        if hyper.replay == "disk":
            assert self._folder is not None
            replay.open(self._folder)
        return replay

    @property
    def scaled(self) -> Callable[[Floats], Floats] | None:
        """The scale of the reward normaliser, if there is one, as it is now: all rows of a draw share it."""
        moments = self._reward_moments
        return None if moments is None else lambda reward: scaled_rewards(reward, moments)

    def steps_per_draw(self) -> int:
        """Optimizer steps whose rows are drawn together, which is faster."""
        observation = self.policy.observation
        row_bytes: int = 2 * math.prod(observation.shape) * observation.dtype.itemsize
        return max(1, CHUNK_BYTES // (row_bytes * int(self.hyper.batch_size)))

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self.snapshot() | {
            "replay": None if self.replay is None else self.replay.state(),
            "replay_envs": 0 if self.replay is None else self.replay.num_envs,
        }

    def snapshot(self) -> dict[str, Any]:
        return super().state() | {
            "target": self.policy.target_parameters.numpy(),
            "continues": self._continues,
            "counts": [self.target_updates, self.steps_sampled, self.steps_trained],
        }

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.policy.target_parameters.copy_(torch.from_numpy(np.array(state["target"])))
        self.target_updates, self.steps_sampled, self.steps_trained = state["counts"]
        self._lost = ""
        if "replay_envs" not in state:
            if self.replay is None and self.steps_sampled:
                self._lost = "empty: it was lost with the process that had it"
        elif state["replay_envs"]:
            self.replay = self._make_replay(state["replay_envs"])
            self._lost = self.replay.load(state["replay"]) or ""
        self._told = not self._lost
        self._continues = state["continues"] and bool(self.replay)  # in an empty one nothing went before
