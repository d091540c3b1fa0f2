"""The same job on Ray RLlib: our config, loop and files around an algorithm of its new API stack.

An iteration is one call of RLlib's `train()`. Its own state goes into our checkpoints as it pickles it, and only a
resume under this engine reads it; beside it lies a copy of the policy as ours, for everything else.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from paceline import machine
from paceline.config import RunConfig, UserError
from paceline.engine import cluster_address, rllib_settings
from paceline.engine.base import Engine, Iteration, TrainingError
from paceline.engine.clock import Clock
from paceline.engine.ray_cluster import PLACEMENT_SECONDS, Cluster
from paceline.engine.rllib_build import build, configure, hosts_of, restore, state_of
from paceline.engine.rllib_env import as_rllib_takes_it
from paceline.engine.rllib_policy import from_rllib, to_rllib
from paceline.engine.rllib_results import (
    MODULE,
    append,
    cut,
    env_share,
    episodes_of,
    learned,
    number,
    optimizer_steps,
)
from paceline.env.make import make_scalar, make_vector
from paceline.env.vector import VectorEnv
from paceline.model.q import make_policy
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import EVAL_WORKER, eval_envs, play
from paceline.ship import Parcel, clean, pack
from paceline.spaces import ActionCodec, ObservationCodec, space_to_json

CLEAN_SECONDS = 10.0


class RllibEngine(Engine):
    name = "rllib"

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config = config
        engine = config.engine
        env = make_scalar(config.env)  # what is wrong with it shows before Ray is started
        try:
            space = as_rllib_takes_it(env).action_space
            if config.algo == "sac" and not isinstance(space, spaces.Box | spaces.Discrete):
                raise UserError(f"RLlib's SAC takes Box and Discrete actions, the env has {env.action_space}")
            self._squash = config.algo == "sac" and ActionCodec(env.action_space).is_continuous
            if self._squash and config.eval.stochastic:
                raise UserError("eval.stochastic=true is not for sac: our copy of RLlib's policy has no noise")
            observation = ObservationCodec(env.observation_space)
            action = ActionCodec(env.action_space, squash=self._squash)
            self._image = rllib_settings.image_of(config, observation)
        finally:
            env.close()  # type: ignore[no-untyped-call]
        here = torch.cuda.is_available()
        if engine.device == "cuda" and not here and not cluster_address(engine):
            raise UserError("engine.device=cuda: this PyTorch finds no GPU; use --device auto")
        gpu = engine.device == "auto" and here and self._image is not None
        self.policy = make_policy(config, observation, action)
        """Ours, with RLlib's weights when it is looked at."""
        self._eval_seed = int(np.random.SeedSequence(config.seed).spawn(4)[3].generate_state(1)[0])
        self._eval_env: VectorEnv | None = None
        self._results: Path | None = None
        self._algorithm: Any = None
        self._seconds: dict[str, float] = {"learn": 0.0, "sync": 0.0}
        self._steps = 0
        self._restarts = self._told_restarts = 0
        if cluster_address(engine):
            self.cluster = Cluster(engine, 0)
            self.cores = max(1, int(self.cluster.cpus))
            runners = rllib_settings.workers_of(config, self.cores)
        else:
            self.cores = machine.cores()
            runners = rllib_settings.workers_of(config, self.cores)
            cpus = math.ceil(rllib_settings.cpus_of(config, runners))
            self.cluster = Cluster(engine, max(1, cpus), gpus=torch.cuda.device_count())
        self.workers = max(1, runners)
        try:
            self._await_room(rllib_settings.cpus_of(config, runners))
            self.threads = rllib_settings.threads_of(config, runners)
            torch.set_num_threads(self.threads)
            seed = config.seed
            if resumes:  # not the episodes of the beginning again
                seed = int(np.random.SeedSequence((seed, resumes)).generate_state(1)[0]) % 2**31
            self._parcel = Parcel() if self.cluster.is_own else pack(config)
            settings = rllib_settings.settings_of(config, runners, seed=seed, gpu=gpu)
            network = rllib_settings.model_of(config, self._image, continuous=action.is_continuous)
            self._algorithm = build(configure(config, settings, network, self._parcel))
            self._envs = settings["env_runners"]["num_envs_per_env_runner"]
            self._runners = settings["env_runners"]["num_env_runners"]
            self.parameters = sum(a.size for name, a in _weights(self._algorithm).items() if not _is_extra(name))
            on_gpu = here and settings["learners"]["num_gpus_per_learner"]
            self.device = torch.cuda.get_device_name() if on_gpu else "cpu"
            self._hosts = hosts_of(self._algorithm, local=self._runners == 0)
            self.nodes = len(self._hosts)
            self.cluster.watch_over()
            self._time(self._algorithm.learner_group, "update", "learn")
            self._time(self._algorithm.env_runner_group, "sync_weights", "sync")
            if config.algo in rllib_settings.OFF_POLICY:
                for name in ("add", "sample"):
                    self._time(self._algorithm.local_replay_buffer, name, "learn")
        except BaseException:
            self.close()
            raise

    # -- beginning ------------------------------------------------------------------------------------------------

    def _await_room(self, cpus: float) -> None:
        """RLlib would wait for it without an end."""
        if cpus > self.cluster.cpus:
            raise UserError(
                f"engine.workers={self.config.engine.workers or 'auto'}: RLlib needs {cpus:g} CPUs for its env "
                f"runners and learners, and the Ray cluster at {self.cluster.address} has {self.cluster.cpus:g}"
            )
        until = time.monotonic() + PLACEMENT_SECONDS
        while self.cluster.ray.available_resources().get("CPU", 0.0) < cpus:
            if time.monotonic() > until:
                raise UserError(
                    f"engine.workers={self.workers}: the Ray cluster at {self.cluster.address} did not have "
                    f"{cpus:g} CPUs free within {PLACEMENT_SECONDS:g} s; is another job using it? `ray status` tells"
                )
            time.sleep(0.2)

    def _time(self, owner: Any, name: str, part: str) -> None:
        """RLlib's own timers are running means; ours add up."""
        original = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                self._seconds[part] += time.perf_counter() - began

        setattr(owner, name, timed)

    def describe(self) -> list[str]:
        config, envs, count = self.config, self._envs, self._runners
        where = "a Ray of our own" if self.cluster.is_own else f"the Ray cluster at {self.cluster.address}"
        stepping = f"{count} env runner(s) on {where}" if count else "one env runner in this process"
        lines = [
            f"env        {config.env.id} x {envs * self.workers}, {envs} an env runner",
            f"spaces     observation {self.policy.observation.shape}, action {self.policy.action.space}",
            f"learner    RLlib {version('ray')}, {rllib_settings.algorithm_of(config)}, {self.parameters:,} "
            f"parameters, {self.threads} thread(s), {self.device}",
            f"workers    {stepping}",
        ]
        if config.engine.rllib:
            lines.append(f"rllib      {', '.join(f'{k}={v}' for k, v in config.engine.rllib.items())}")
        if self._parcel.left_out:
            lines.append(f"note       too large to be sent along, and left at home: {', '.join(self._parcel.left_out)}")
        return lines

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self.policy.load(arrays)
        group = self._algorithm.learner_group
        weights = to_rllib(self.config, self._image, self.policy.state(), _weights(self._algorithm))
        group.set_weights({MODULE: weights})
        self._algorithm.env_runner_group.sync_weights(from_worker_or_learner_group=group, inference_only=True)

    def start(self, state: dict[str, Any] | None = None) -> bool:
        if state is None:
            return True
        saved = state.get("rllib")
        if saved is None:
            raise UserError("this run is not one of --engine rllib: continue it with the engine it was started with")
        if saved["version"] != version("ray"):
            raise UserError(
                f"this run was saved by RLlib {saved['version']}, and {version('ray')} is installed: its checkpoints "
                "are pickles, which only the same version reads; --init-from starts a new run from its weights"
            )
        restore(self._algorithm, pickle.loads(saved["state"].tobytes()))
        self.optimizer_steps, self._steps = saved["optimizer_steps"], saved["env_steps"]
        if self._results is not None:
            cut(self._results, self._algorithm.iteration)
        if self.config.algo in rllib_settings.OFF_POLICY:  # the replay buffer is empty again
            config = self._algorithm.config.copy(copy_frozen=False)
            config.num_steps_sampled_before_learning_starts += self._steps
            config.freeze()
            self._algorithm.config = config
        return False

    # -- what the loop asks ---------------------------------------------------------------------------------------

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        before, began, limit = dict(self._seconds), time.perf_counter(), self.config.engine.start_timeout_seconds
        while True:  # RLlib also returns when no env runner had anything for it: that is no iteration of ours
            try:
                result = self._algorithm.train()
            except self.cluster.ray.exceptions.RayError as error:
                raise TrainingError(f"RLlib gave up: {' '.join(str(error).split())[-600:]}") from error
            seconds, runners = time.perf_counter() - began, result.get("env_runners", {})
            steps = int(number(runners.get("num_env_steps_sampled_lifetime")) or self._steps)
            if steps > self._steps:
                break
            if seconds > limit:
                raise TrainingError(
                    f"RLlib has had no step for {seconds:.0f} s (engine.start_timeout_seconds): its env runners are "
                    "lost, or a sample takes longer than engine.rllib.sample_timeout_s, 60 s by default"
                    f"{self._cause()}"
                )
        self._account(clock, runners, seconds, {part: self._seconds[part] - before[part] for part in before})
        taken, self._steps = steps - self._steps, steps
        if self._results is not None:
            append(self._results, result)
        learner = result.get("learners", {}).get(MODULE, {})
        return Iteration(taken, self._learned(learner) | self._health(result), *episodes_of(runners))

    def _account(self, clock: Clock, runners: Mapping[str, Any], seconds: float, spent: dict[str, float]) -> None:
        """Where an iteration's time went, seen from here: what is neither learning, with its replay, nor sending
        weights is waiting for samples. IMPALA learns elsewhere at the same time, so its waiting is for both, and stays
        `idle`."""
        for part, own in spent.items():
            clock.add(part, own)
        if self.config.algo != "impala":
            sampling, share = max(0.0, seconds - sum(spent.values())), env_share(runners)
            clock.add("env", share * sampling)
            clock.add("act", (1 - share) * sampling)

    def _learned(self, learner: Mapping[str, Any]) -> dict[str, float]:
        algo = self.config.algo
        metrics: dict[str, float] = {}
        if algo in rllib_settings.OFF_POLICY:
            metrics["steps_sampled"] = float(self._steps)
        if algo == "dqn":
            metrics["epsilon"] = rllib_settings.epsilon_at(self.config, self._steps)
        new = optimizer_steps(learner)
        if not new:
            return metrics
        self.optimizer_steps += new
        metrics |= learned(learner)
        if not getattr(self._algorithm.config, "use_kl_loss", False):
            metrics.pop("approx_kl", None)  # 0 where it is not computed
        trained = number(learner.get("num_module_steps_trained_lifetime"))
        if trained is not None and algo in rllib_settings.OFF_POLICY:
            metrics["steps_trained"] = trained
        lag = number(learner.get("diff_num_grad_updates_vs_sampler_policy"))
        return metrics | ({"policy_lag_mean": lag} if lag is not None and algo == "impala" else {})

    def _health(self, result: Mapping[str, Any]) -> dict[str, float]:
        tolerance = result.get("fault_tolerance", {})
        self._restarts = int(tolerance.get("num_remote_worker_restarts", 0))
        healthy = tolerance.get("num_healthy_workers", self.workers) if self._runners else 1
        return {"workers_healthy": float(healthy), "workers_restarted": float(self._restarts)}

    def notes(self) -> list[str]:
        new, self._told_restarts = self._restarts - self._told_restarts, self._restarts
        return [f"{new} env runner(s) lost and replaced by RLlib{self._cause()}"] if new > 0 else []

    def _cause(self) -> str:
        """What an env runner said last before it gave up, which RLlib keeps to itself. Of a Ray of our own: another's
        logs may be anywhere."""
        said = []
        for path in self.cluster.logs.glob("worker-*.err") if self.cluster.logs is not None else ():
            _, mark, tail = path.read_text(errors="replace").rpartition("Worker exception caught during `apply()`")
            if mark and (error := re.search(r"^[A-Za-z_][\w.]*: \S.*$", tail, re.M)):  # the first of a chain
                said.append((path.stat().st_mtime, error[0]))
        return f": {max(said)[1][:300]}" if said else ""

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        self._copy_policy()
        envs = eval_envs(episodes)
        if self._eval_env is None or self._eval_env.num_envs != envs:
            self._close_eval()
            self._eval_env, _ = make_vector(self.config.env, envs, seed=self._eval_seed, squash=self._squash)
        self._eval_env.reseed(self._eval_seed, EVAL_WORKER, number)
        rng = np.random.default_rng((self._eval_seed, number)) if stochastic else None
        return play(self._eval_env, self.policy, episodes, rng=rng)

    def _copy_policy(self) -> None:
        own = self.policy.state()
        if "epsilon" in own:
            own["epsilon"] = np.asarray(rllib_settings.epsilon_at(self.config, self._steps))
        self.policy.load(from_rllib(self.config, self._image, _weights(self._algorithm), own))

    def state(self) -> dict[str, Any]:
        self._copy_policy()
        action, observation = self.policy.action.space, self.policy.observation.space
        return {
            "algorithm": {"policy": self.policy.state()},
            "spaces": {"observation": space_to_json(observation), "action": space_to_json(action)},
            "squash": self._squash,
            "without_noise": self._squash,
            "rllib": {
                "state": np.frombuffer(pickle.dumps(state_of(self._algorithm)), np.uint8),
                "version": version("ray"),
                "optimizer_steps": self.optimizer_steps,
                "env_steps": self._steps,
            },
        }

    def usage(self) -> tuple[int, float]:
        """Of this machine: what env runners elsewhere take is not known."""
        return machine.memory_bytes(), machine.cpu_seconds()

    def log_to(self, folder: Path) -> None:
        self._results = folder / "rllib.jsonl"

    def accounts(self) -> dict[str, Any]:
        return super().accounts() | {"hosts": self._hosts, "workers_restarted": self._restarts}

    def _close_eval(self) -> None:
        if self._eval_env is not None:
            self._eval_env.close()
            self._eval_env = None

    def close(self) -> None:
        self._close_eval()
        if self._algorithm is not None and self.cluster.ray.is_initialized():
            if self._parcel.roots:  # RLlib kills its env runners, so that they could not do it at their end
                group, parcel = self._algorithm.env_runner_group, self._parcel
                group.foreach_env_runner(lambda _: clean(parcel), local_env_runner=False, timeout_seconds=CLEAN_SECONDS)
            self._algorithm.stop()
            self._algorithm = None
        self.cluster.close()


def _weights(algorithm: Any) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in algorithm.learner_group.get_weights()[MODULE].items()}


def _is_extra(name: str) -> bool:
    """Not learned: constants, and copies that the targets come from."""
    return name.endswith("_const") or name.startswith(("_old", "_target", "target"))
