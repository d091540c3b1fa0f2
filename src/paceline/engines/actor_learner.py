"""What one training process consists of: environments, policy, algorithm and collector.

The local engine has one `ActorLearner`, on Ray each worker has one. A pure learner has no environments and is given
their spaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from paceline import machine
from paceline.algorithms.actor import Actor, needs_only_weights
from paceline.config import RunConfig, UserError
from paceline.config.algorithm_settings import scheduled
from paceline.engines.evaluator import Evaluator
from paceline.envs.make import make_vector
from paceline.envs.pool import PoolVector
from paceline.envs.vector import VectorEnv
from paceline.lazy import torch
from paceline.models.acting import MlpActor
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.collector import Collector, InterleavedCollector, MemoryCollector, ReplayCollector
from paceline.team_spaces import describe_agents
from paceline.training.checkpoint_spaces import make_team, read_spaces, write_spaces
from paceline.training.memory import check_vectors

if TYPE_CHECKING:
    from paceline.models.policy import Policy

Result = TypeVar("Result")
Spaces = dict[str, Any]
COMPILE_STEPS = 5_000_000  # compiling takes a minute, which pays off in longer runs
COMPILE_SECONDS = 300.0  # the same for a run that ends by the clock
RESTART = 1_000_000  # environments of a replacement worker are seeded like those of resume number RESTART * restarts


class ActorLearner:
    def __init__(
        self,
        config: RunConfig,
        *,
        envs: int,
        worker: int = 0,
        restarts: int = 0,
        resumes: int = 0,
        cores: int = 0,
        spaces: Spaces | None = None,
        on_device: bool = True,
        in_worker: bool = False,
    ) -> None:
        """`envs`: number of environments; 0 for a learner, which needs `spaces`. `cores`: 0 for all available ones.
        `on_device`: may use a GPU. `in_worker`: this process is one of several."""
        self.config = config
        on_device = on_device and config.algorithm.learns_on_gpu and config.model.memory == "none"
        self.envs: list[VectorEnv] = []
        self.collector: Collector | None = None
        self.stepping = ""
        squash = config.model.squash
        init, act, update, evaluation = random_seeds(config.seed)
        self._evaluator = Evaluator(config, evaluation, squash=squash, in_worker=in_worker)
        if envs:
            number = resumes + RESTART * restarts
            acts_there = on_device and config.algorithm.gpu_inputs == "images"
            halves = acts_there and config.engine.device != "cpu" and torch.cuda.is_available()
            self.envs, self.stepping = make_vectors(
                config, envs, worker=worker, resumes=number, cores=cores, halves=halves, in_worker=in_worker
            )
            observation, action, team = self.envs[0].observation, self.envs[0].action, self.envs[0].team
        else:
            assert spaces is not None
            observation, action, team = read_spaces(spaces, config)
        self.spaces = write_spaces(observation, action, team)
        try:
            others = (worker, restarts) if worker or restarts else ()  # worker 0: the streams of a single process
            rows = sum(env.rows for env in self.envs)
            check_vectors(config, observation, action, rows)
            self.device = "cpu"
            self.policy: Any  # a `Policy`, several as a `TeamPolicy`, or an `MlpActor`
            self.algorithm: Any  # an `Algorithm`, several as a `TeamAlgorithm`, or an `Actor`
            if in_worker and envs and team is None and needs_only_weights(config, observation):
                self._make_actor(observation, action, act, others)  # which needs no torch
                return
            torch.set_num_threads(1)  # the QR of the initial weights depends on the number of threads
            inputs = config.algorithm.gpu_inputs
            if on_device and team is None:
                from paceline.models.gpu import find_device

                self.device = find_device(config.engine.device, observation, action, inputs)
            if team is not None:
                from paceline.engines.team import load_frozen, make_team_algorithm

                self.policy = make_team(config, team, seed=init)
                if not resumes:
                    load_frozen(config, self.policy)
            elif self.device == "cpu" or inputs == "vectors":
                self.policy = config.algorithm.make_policy(config, observation, action, seed=init)
                if self.device != "cpu":
                    self.policy.learn_on(self.device)
            else:
                from paceline.models.gpu import GpuPolicy

                self.policy = GpuPolicy(
                    observation,
                    action,
                    config.model,
                    device=self.device,
                    seed=init,
                    compiled=compiles(config),
                    extra=lambda: config.algorithm.networks(observation, action, config.hyper),
                )
            ahead = config.hyper.rows_known_ahead(max(rows, 1) * config.hyper.rollout_steps)
            self.threads = set_threads(config.engine.threads or cores, self.policy, ahead)
            update_rng = np.random.default_rng((update, *others) if others else update)
            if team is not None:
                self.algorithm = make_team_algorithm(config, self.policy, update_rng)
            else:
                self.algorithm = config.algorithm(
                    self.policy, config.hyper, rng=update_rng, normalize_reward=config.env.normalize_reward
                )
            if self.envs:
                self.collector = self._make_collector(np.random.default_rng((act, *others) if others else act))
        except BaseException:
            self.close()
            raise

    def _make_actor(self, observation: Any, action: Any, seed: int, others: tuple[int, ...]) -> None:
        """A worker that only acts, with the weights of a learner."""
        config = self.config
        self.policy = MlpActor(
            observation, action, config.model, normalize_observation=config.env.normalize_observation
        )
        threadpool_limits(1, user_api="blas")
        self.threads = 1
        self.algorithm = Actor(self.policy, config.algorithm.sharing)
        self.collector = self._make_collector(np.random.default_rng((seed, *others) if others else seed))

    def _make_collector(self, rng: np.random.Generator) -> Collector:
        hyper, env = self.config.hyper, self.config.env
        discount = None
        if env.normalize_reward:
            discount = hyper.gamma if env.reward_discount is None else env.reward_discount
        options: dict[str, Any] = {"steps": hyper.rollout_steps, "rng": rng, "discount": discount}
        options["clip_reward"] = env.clip_reward
        if self.policy.is_gpu:
            from paceline.rollout.gpu_collector import GpuCollector

            return GpuCollector(self.envs, self.policy, buffers=2 if self.config.engine.overlap else 1, **options)
        if self.policy.memory_width:
            return MemoryCollector(self.envs, self.policy, **options)
        if self.config.algorithm.sharing == "replay":
            return ReplayCollector(self.envs, self.policy, **options)
        kind = Collector if len(self.envs) == 1 else InterleavedCollector
        return kind(self.envs, self.policy, **options)

    def change(self, changes: Mapping[str, Any]) -> None:
        """See `Engine.change`."""
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if section == "env":
                for env in self.envs:
                    env.set_attribute(name, value)
            elif self.device != "cpu" and name not in scheduled(type(self.config.hyper)):
                raise UserError(f"{key} cannot change while a run trains on a GPU, which has its learning recorded")
            else:
                self.algorithm.change(name, value)

    def describe(self) -> list[str]:
        kind = "images " if self.policy.observation.is_image else ""
        masks = next((f", masked by {env.masks.where}" for env in self.envs if env.masks is not None), "")
        shape, space = self.policy.observation.net_shape, self.policy.action.space
        lines = [f"spaces     observation {kind}{shape}, action {space}{masks}"]
        if self.envs:
            lines += describe_agents(self.agents, self.envs[0].team, self.config.multi_agent.frozen)
        return lines + [f"warning    {note}" for note in self.notes()]

    @property
    def agents(self) -> tuple[Any, ...]:
        """Of each environment; empty for a single one."""
        return self.envs[0].agents if self.envs else ()

    def notes(self) -> list[str]:
        """What users should know about the environments; complete when they have been reset."""
        return list(dict.fromkeys(env.note for env in self.envs if env.note))

    @property
    def device_name(self) -> str:
        """`cpu`, or the name of the GPU."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"

    @property
    def ticks(self) -> int:
        """Grows while the process makes progress of any kind."""
        steps = self.collector.steps_taken if self.collector is not None else 0
        return steps + int(self.algorithm.optimizer_steps) + self._evaluator.steps_taken

    def collect(self, *, publish: bool = True) -> tuple[Batch, dict[str, float]]:
        """A rollout, and the seconds by part. `publish`: on a GPU, act with the current weights."""
        collector = self.collector
        assert collector is not None
        env, act = collector.env_seconds, collector.act_seconds
        if self.policy.is_gpu and publish:
            collector.publish()  # type: ignore[attr-defined]
        batch = collector.collect(self.algorithm.version)
        if self._evaluator.env_restarts:
            batch.env_restarts += self._evaluator.env_restarts
            batch.env_error = batch.env_error or self._evaluator.first_error
            self._evaluator.env_restarts = 0
        return batch, {"env": collector.env_seconds - env, "act": collector.act_seconds - act}

    def learn(
        self, batch: Batch, remaining: float, *, measured: bool = True
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from a batch. Returns the metrics, empty unless `measured`, and the seconds by part."""
        update = self.algorithm.update if measured else self.algorithm.update_quietly
        metrics, seconds = self.timed(lambda: update(batch, remaining))
        return metrics or {}, seconds

    def timed(self, work: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
        """The result of `work`, and the seconds it spent on learning and in the group."""
        began, in_group = time.perf_counter(), self.algorithm.group.seconds
        with np.errstate(all="ignore"):  # the loop checks the loss
            result = work()
        sync = self.algorithm.group.seconds - in_group
        return result, {"learn": time.perf_counter() - began - sync, "sync": sync}

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        return self._evaluator.play(self.policy, episodes, stochastic=stochastic, number=number)

    def close(self) -> None:
        self._evaluator.close()
        for env in self.envs:
            env.close()
        self.envs = []


def make_vectors(
    config: RunConfig, envs: int, *, worker: int, resumes: int, cores: int, halves: bool, in_worker: bool
) -> tuple[list[VectorEnv], str]:
    """One vector of environments, or two `halves` if they step in their own threads: a network on a GPU then acts for
    one half while the other steps. On the CPU, where both need all cores, halves made collecting 4 to 30 % slower."""

    def make(count: int, first: int) -> tuple[VectorEnv, str]:
        return make_vector(
            config.env,
            count,
            seed=config.seed,
            worker=worker,
            resumes=resumes,
            first_env=first,
            cores=cores,
            squash=config.model.squash,
            policies=config.multi_agent.policies,
            in_worker=in_worker,
        )

    whole, how = make(envs, 0)
    if not halves or not isinstance(whole, PoolVector) or envs % 2:
        return [whole], how
    whole.close()
    half = envs // 2
    return [make(half, first)[0] for first in (0, half)], f"{how}, half of them at a time"


def compiles(config: RunConfig) -> bool:
    """Whether to compile convolutions on a GPU: by default only in runs long enough to gain from it."""
    if config.engine.compile is not None:
        return config.engine.compile
    budgets = ((config.stop.total_steps, COMPILE_STEPS), (config.stop.max_time, COMPILE_SECONDS))
    given = [budget >= least for budget, least in budgets if budget is not None]
    return bool(given) and all(given)


def set_threads(wanted: int, policy: Policy, rows: int) -> int:
    """Choose the number of threads. An MLP gets at most two, one per tower: its matrix products are too small to split.

    torch and BLAS then use one thread, since theirs would wait for each other at every product.
    """
    cores = wanted or machine.cores()
    if policy.chooses_threads:
        torch.set_num_threads(1)
        threadpool_limits(1, user_api="blas")
        return policy.use_threads(cores, rows)
    if policy.fast is None:
        # A user's own network on vectors is small, too, and threads that wait for a busy core cost 20 times more.
        threads = cores if wanted or policy.observation.images else 1
        torch.set_num_threads(threads)
        if policy.memory_width:
            threadpool_limits(1, user_api="blas")  # acting is small products in numpy
        return threads
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")
    return policy.fast.use_threads(cores, rows)


def random_seeds(seed: int) -> list[int]:
    """Independent seeds for initial weights, actions, minibatches and evaluation."""
    return [int(stream.generate_state(1)[0]) for stream in np.random.SeedSequence(seed).spawn(4)]
