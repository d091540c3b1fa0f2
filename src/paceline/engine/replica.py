"""The parts of one process: environments, policy, algorithm and collector, side by side.

The local engine is one of these; on Ray each worker has one. A learner has no environments of its own, and takes
the spaces from somebody who has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from paceline import machine
from paceline.algo import ALGORITHMS, Algorithm
from paceline.config import RunConfig
from paceline.env.make import make_vector
from paceline.env.pool import PoolVector
from paceline.env.vector import VectorEnv
from paceline.model.device import DevicePolicy, find_device
from paceline.model.policy import Policy
from paceline.model.q import QPolicy, make_policy
from paceline.rollout.batch import Batch, Episode
from paceline.rollout.collector import Collector, ReplayCollector
from paceline.rollout.device import DeviceCollector
from paceline.rollout.episodes import EVAL_WORKER, eval_envs, play
from paceline.rollout.turns import TurnsCollector
from paceline.spaces import ActionCodec, ObservationCodec, space_from_json, space_to_json

Spaces = dict[str, Any]
COMPILE_STEPS = 5_000_000  # from here on a minute of compiling pays
COMPILE_SECONDS = 300.0  # the same for a run that ends by the clock
RESTART = 1_000_000  # the environments of a worker's replacement are seeded as those of a resume with such a number


class Replica:
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
    ) -> None:
        """`envs`: environments of its own; 0 needs `spaces`. `cores`: those to share out, 0 for all that are ours.
        `on_device`: may use a GPU."""
        self.config = config
        self.envs: list[VectorEnv] = []
        self._eval_env: VectorEnv | None = None
        self.collector: Collector | None = None
        self.stepping = ""
        self.evaluation_steps = 0
        squash = config.model.squash
        if envs:
            number = resumes + RESTART * restarts
            halves = on_device and config.algo != "dqn" and config.engine.device != "cpu" and torch.cuda.is_available()
            self.envs, self.stepping = make_vectors(
                config, envs, worker=worker, resumes=number, cores=cores, halves=halves
            )
            observation, action = self.envs[0].observation, self.envs[0].action
        else:
            assert spaces is not None
            observation = ObservationCodec(space_from_json(spaces["observation"]))
            action = ActionCodec(space_from_json(spaces["action"]), squash=squash)
        self.spaces = {"observation": space_to_json(observation.space), "action": space_to_json(action.space)}
        try:
            init, act, update, self._eval_seed = (int(s.generate_state(1)[0]) for s in _streams(config.seed))
            others = (worker, restarts) if worker or restarts else ()  # the first worker's streams are a lone one's
            torch.set_num_threads(1)  # the first weights come from a QR, which several threads compute otherwise
            on_device = on_device and config.algo != "dqn"
            self.device = find_device(config.engine.device if on_device else "cpu", observation, action)
            if self.device == "cpu":
                self.policy = make_policy(config, observation, action, seed=init)
            else:
                self.policy = DevicePolicy(
                    observation, action, config.model, device=self.device, seed=init, compiled=compiles(config)
                )
            self.threads = set_threads(config.engine.threads or cores, self.policy, _rows_at_once(config, envs))
            self.algorithm: Algorithm = ALGORITHMS[config.algo](
                self.policy,
                config.hyper,
                rng=np.random.default_rng((update, *others) if others else update),
                normalize_reward=config.env.normalize_reward,
            )
            if self.envs:
                self.collector = self._make_collector(np.random.default_rng((act, *others) if others else act))
        except BaseException:
            self.close()
            raise

    def _make_collector(self, rng: np.random.Generator) -> Collector:
        hyper = self.config.hyper
        env = self.config.env
        discount = None
        if env.normalize_reward:
            discount = hyper.gamma if env.reward_discount is None else env.reward_discount
        options: dict[str, Any] = {"steps": hyper.rollout_steps, "rng": rng, "discount": discount}
        options["clip_reward"] = env.clip_reward
        if isinstance(self.policy, DevicePolicy):
            return DeviceCollector(self.envs, self.policy, buffers=2 if self.config.engine.overlap else 1, **options)
        if isinstance(self.policy, QPolicy):
            return ReplayCollector(self.envs, self.policy, **options)
        kind = Collector if len(self.envs) == 1 else TurnsCollector
        return kind(self.envs, self.policy, **options)

    def describe(self) -> list[str]:
        kind = "images " if self.policy.observation.is_image else ""
        return [f"spaces     observation {kind}{self.policy.observation.shape}, action {self.policy.action.space}"]

    @property
    def device_name(self) -> str:
        """`cpu`, or what the GPU is called."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"

    @property
    def ticks(self) -> int:
        """Grows as long as work goes on, whatever it is."""
        steps = self.collector.steps_taken if self.collector is not None else 0
        return steps + self.algorithm.optimizer_steps + self.evaluation_steps

    def collect(self, *, publish: bool = True) -> tuple[Batch, dict[str, float]]:
        """A rollout, and the seconds it took by part. `publish`: on a GPU, with the weights as they are now."""
        collector = self.collector
        assert collector is not None
        env, act = collector.env_seconds, collector.act_seconds
        if isinstance(collector, DeviceCollector) and publish:
            collector.publish()
        batch = collector.collect(self.algorithm.version)
        return batch, {"env": collector.env_seconds - env, "act": collector.act_seconds - act}

    def learn(
        self, batch: Batch, remaining: float, *, measured: bool = True
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from a batch: the metrics, none if it is not `measured`, and the seconds it took by part."""

        def work() -> dict[str, float]:
            if measured:
                return self.algorithm.update(batch, remaining)
            self.algorithm.absorb(batch, remaining)
            return {}

        return self.timed(work)

    def timed(self, work: Callable[[], dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
        began, in_group = time.perf_counter(), self.algorithm.group.seconds
        with np.errstate(all="ignore"):  # the loop looks at the loss and says what to do
            metrics = work()
        sync = self.algorithm.group.seconds - in_group
        return metrics, {"learn": time.perf_counter() - began - sync, "sync": sync}

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        envs = eval_envs(episodes)
        if self._eval_env is None or self._eval_env.num_envs != envs:
            self._close_eval()
            self._eval_env, _ = make_vector(
                self.config.env, envs, seed=self._eval_seed, squash=self.config.model.squash
            )
        self._eval_env.reseed(self._eval_seed, EVAL_WORKER, number)
        rng = np.random.default_rng((self._eval_seed, number)) if stochastic else None
        return play(self._eval_env, self.policy, episodes, rng=rng, on_step=self._count_evaluation)

    def _count_evaluation(self) -> None:
        self.evaluation_steps += 1

    def close(self) -> None:
        self._close_eval()
        for env in self.envs:
            env.close()
        self.envs = []

    def _close_eval(self) -> None:
        if self._eval_env is not None:
            self._eval_env.close()
            self._eval_env = None


def make_vectors(
    config: RunConfig, envs: int, *, worker: int, resumes: int, cores: int, halves: bool
) -> tuple[list[VectorEnv], str]:
    """One vector of environments. Or two `halves`, where they step in threads of their own: then the network on a GPU
    acts for one half while the other steps. On the CPU both want all cores, and acting twice for half as many is
    slower, by 4 to 30 % of collecting."""

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
        )

    whole, how = make(envs, 0)
    if not halves or not isinstance(whole, PoolVector) or envs % 2:
        return [whole], how
    whole.close()
    half = envs // 2
    return [make(half, first)[0] for first in (0, half)], f"{how}, half of them at a time"


def compiles(config: RunConfig) -> bool:
    """Whether convolutions are compiled on a GPU: where nothing is said, if the run is long enough to gain by it."""
    if config.engine.compile is not None:
        return config.engine.compile
    budgets = ((config.stop.total_steps, COMPILE_STEPS), (config.stop.max_time, COMPILE_SECONDS))
    given = [budget >= least for budget, least in budgets if budget is not None]
    return bool(given) and all(given)


def set_threads(wanted: int, policy: Policy, rows: int) -> int:
    """Share our cores out. An MLP gets two at most: its matrix products are too small to be split, its towers are not.

    Torch and BLAS then have one thread each: theirs would wait for each other at every product.
    """
    cores = wanted or machine.cores()
    if isinstance(policy, QPolicy) and policy.online.fast is not None:
        torch.set_num_threads(1)
        threadpool_limits(1, user_api="blas")
        return policy.use_threads(cores, rows)
    if policy.fast is None:
        # A user's own network over a vector is as small: threads that wait for a core others use cost 20 times more.
        threads = cores if wanted or policy.observation.images else 1
        torch.set_num_threads(threads)
        return threads
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")
    policy.fast.threads = min(cores, 2) if policy.fast.pays_in_two_threads(rows) else 1
    return policy.fast.threads


def _rows_at_once(config: RunConfig, envs: int) -> int:
    """Rows that learning knows of beforehand: those of several minibatches where it draws them together."""
    dqn = config.dqn
    if config.algo == "dqn" and not dqn.prioritized and dqn.exploration != "noisy":
        return dqn.batch_size * min(dqn.gradient_steps, dqn.target_update_every)
    return minibatch_rows(config, envs)


def minibatch_rows(config: RunConfig, envs: int) -> int:
    if config.algo in ("impala", "dqn"):
        return config.impala.batch_size if config.algo == "impala" else config.dqn.batch_size
    slots = max(envs, 1) * config.hyper.rollout_steps
    return min(slots, config.ppo.minibatch_size) if config.algo == "ppo" else slots


def _streams(seed: int) -> list[np.random.SeedSequence]:
    """Independent streams for initialisation, actions, minibatches and evaluation."""
    return np.random.SeedSequence(seed).spawn(4)
