"""The same job on Ray RLlib: paceline's config, loop and files around an algorithm of RLlib's new API stack.

An iteration is one call of RLlib's `train()`. Checkpoints hold RLlib's pickled state, which only a resume with this
engine reads, and a copy of the policy in paceline's format for everything else.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import machine
from paceline.code_bundle import pack, uninstall
from paceline.config import RunConfig, UserError
from paceline.config.resolve import to_tree
from paceline.engines.actor_learner import random_seeds
from paceline.engines.evaluator import Evaluator
from paceline.engines.ray.ray_cluster import PLACEMENT_SECONDS, RayCluster
from paceline.engines.rllib import settings as rllib_settings
from paceline.engines.rllib.build import build, configure, hosts_of, restore, state_of
from paceline.engines.rllib.modules import Modules
from paceline.engines.rllib.normalize import Statistics
from paceline.engines.rllib.train_result import (
    agent_steps,
    append,
    cut,
    env_share,
    episodes_of,
    learner_metrics,
    number,
    optimizer_steps,
)
from paceline.envs.contract import close_env
from paceline.envs.make import make_env
from paceline.rollout.batch import Episode
from paceline.training.clock import Clock
from paceline.training.engine import Engine, Iteration, Levels, TrainingError, restored
from paceline.training.placement import cluster_address

CLEAN_SECONDS = 10.0


class RllibEngine(Engine):
    name = "rllib"

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config = config
        engine = config.engine
        env = make_env(config.env)  # reports problems with it before Ray is started
        try:
            self._modules = Modules(config, env)
        finally:
            close_env(env)
        self.policy = self._modules.policy
        """A copy; `_copy_policy` gives it RLlib's current weights."""
        has_gpu = torch.cuda.is_available()
        if engine.device == "cuda" and not has_gpu and not cluster_address(engine):
            raise UserError("engine.device=cuda: this PyTorch finds no GPU; use --device auto")
        gpu = engine.device == "auto" and has_gpu and self._modules.has_images
        self._evaluator = Evaluator(config, random_seeds(config.seed)[3], squash=self._modules.squash)
        self._results: Path | None = None
        self._algorithm: Any = None
        self._statistics: Statistics | None = None
        self._seconds: dict[str, float] = {"learn": 0.0, "sync": 0.0}
        self._steps = self._agent_steps = 0
        self._restarts = self._shown_restarts = 0
        if cluster_address(engine):
            self.cluster = RayCluster(engine, 0)
            self.cores = max(1, int(self.cluster.cpus))
            runners = rllib_settings.workers_of(config, self.cores)
        else:
            self.cores = machine.cores()
            runners = rllib_settings.workers_of(config, self.cores)
            cpus = math.ceil(rllib_settings.cpus_of(config, runners))
            self.cluster = RayCluster(engine, max(1, cpus), gpus=torch.cuda.device_count())
        self.workers = max(1, runners)
        try:
            self._await_room(rllib_settings.cpus_of(config, runners))
            self.threads = rllib_settings.threads_of(config, runners)
            torch.set_num_threads(self.threads)
            seed = config.seed
            if resumes:  # do not repeat the first episodes
                seed = int(np.random.SeedSequence((seed, resumes)).generate_state(1)[0]) % 2**31
            self._code_bundle = pack(to_tree(config), files_too=not self.cluster.is_own)
            settings = rllib_settings.settings_of(config, runners, seed=seed, gpu=gpu)
            self._algorithm = build(configure(config, settings, self._modules, self._code_bundle))
            if config.multi_agent.frozen:
                self._modules.write(self._algorithm)
            self._envs = settings["env_runners"]["num_envs_per_env_runner"]
            self._runners = settings["env_runners"]["num_env_runners"]
            self.parameters = self._modules.parameters(self._algorithm)
            on_gpu = has_gpu and settings["learners"]["num_gpus_per_learner"]
            self.device = torch.cuda.get_device_name() if on_gpu else "cpu"
            self._hosts = hosts_of(self._algorithm, local=self._runners == 0)
            if config.env.normalize_observation or config.env.normalize_reward:
                self._statistics = Statistics(config, self.policy, self._algorithm, local=self._runners == 0)
            self.nodes = len(self._hosts)
            self.cluster.guard()
            self._time(self._algorithm.learner_group, "update", "learn")
            self._time(self._algorithm.env_runner_group, "sync_weights", "sync")
            if config.algo in rllib_settings.OFF_POLICY:
                for name in ("add", "sample"):
                    self._time(self._algorithm.local_replay_buffer, name, "learn")
        except BaseException:
            self.close()
            raise

    # -- starting ---------------------------------------------------------------------------------------------------

    def _await_room(self, cpus: float) -> None:
        """Wait for free CPUs, with a limit: RLlib would wait for ever."""
        if cpus > self.cluster.cpus:
            raise UserError(
                f"engine.workers={self.config.engine.workers or 'auto'}: RLlib needs {cpus:g} CPUs for its env "
                f"runners and learners, but the Ray cluster at {self.cluster.address} has {self.cluster.cpus:g}"
            )
        until = time.monotonic() + PLACEMENT_SECONDS
        while self.cluster.ray.available_resources().get("CPU", 0.0) < cpus:
            if time.monotonic() > until:
                raise TrainingError(
                    f"the Ray cluster at {self.cluster.address} did not have {cpus:g} CPUs free within "
                    f"{PLACEMENT_SECONDS:g} s; has it lost a host, or is another job using it? See `ray status`"
                )
            time.sleep(0.2)

    def _time(self, owner: Any, name: str, part: str) -> None:
        """Add the time of a method to `self._seconds`. RLlib's own timers are running means, which do not add up."""
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
        stepping = f"{count} env runner(s) on {self.cluster}" if count else "one env runner in this process"
        lines = [
            f"env        {config.env.id} x {envs * self.workers}, {envs} per env runner",
            f"spaces     observation {self.policy.observation.shape}, action {self.policy.action.space}",
            *self._modules.describe(),
            f"learner    RLlib {version('ray')}, {rllib_settings.algorithm_of(config)}, {self.parameters:,} "
            f"parameters, {self.threads} thread(s), {self.device}",
            f"workers    {stepping}",
        ]
        lines += [f"warning    {note}" for note in self._modules.notes()]
        if config.engine.rllib:
            lines.append(f"rllib      {', '.join(f'{k}={v}' for k, v in config.engine.rllib.items())}")
        return lines + self._code_bundle.describe()

    def load_policy(self, arrays: dict[str, Any]) -> None:
        self.policy.load(arrays)
        self._modules.write(self._algorithm)

    def start(self, state: dict[str, Any] | None = None) -> Levels:
        if state is None:
            return {}
        saved = state.get("rllib")
        if saved is None:
            raise UserError("this run was not started with --engine rllib: continue it with its own engine")
        if saved["version"] != version("ray"):
            raise UserError(
                f"this run was saved by RLlib {saved['version']}, but {version('ray')} is installed: its checkpoints "
                "are pickles, which need the same version; --init-from starts a new run from its weights"
            )
        restore(self._algorithm, pickle.loads(saved["state"].tobytes()))
        self.policy.load(state["algorithm"]["policy"])
        if self._statistics is not None and self._statistics.rewards is not None:
            self._statistics.rewards.load(saved["reward_moments"])
        self.optimizer_steps, self._steps = saved["optimizer_steps"], saved["env_steps"]
        self._agent_steps = saved.get("agent_steps", 0)
        if self._results is not None:
            cut(self._results, self._algorithm.iteration)
        lost: Levels = {}
        if self.config.algo in rllib_settings.OFF_POLICY:
            lost = {"replay": "empty: RLlib's buffer is not saved"}
            config = self._algorithm.config.copy(copy_frozen=False)
            config.num_steps_sampled_before_learning_starts += self._steps
            config.freeze()
            self._algorithm.config = config
        return restored(False, lost)

    # -- interface of the loop --------------------------------------------------------------------------------------

    def change(self, changes: Mapping[str, Any]) -> None:
        raise UserError(f"{next(iter(changes))} cannot change while RLlib trains: leave engine.name=rllib out")

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        before, began, limit = dict(self._seconds), time.perf_counter(), self.config.engine.start_timeout_seconds
        if self._statistics is not None:
            self._statistics.send()
        while True:  # RLlib also returns if no env runner delivered anything, which does not count as an iteration
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
                    f"RLlib has made no step for {seconds:.0f} s (engine.start_timeout_seconds): its env runners are "
                    "lost, or a sample takes longer than engine.rllib.sample_timeout_s, 60 s by default"
                    f"{self._cause()}"
                )
        if self._statistics is not None:
            self._statistics.take()
        self._account(clock, runners, seconds, {part: self._seconds[part] - before[part] for part in before})
        taken, self._steps = steps - self._steps, steps
        if self._results is not None:
            append(self._results, result)
        acted = agent_steps(runners) if self._modules.policy_of else 0
        by_agents, self._agent_steps = acted - self._agent_steps, acted
        metrics = self._modules.metrics(result.get("learners", {}), self._learner_metrics)
        return Iteration(taken, metrics | self._health(result), *episodes_of(runners), agent_steps=by_agents)

    def _account(self, clock: Clock, runners: Mapping[str, Any], seconds: float, spent: dict[str, float]) -> None:
        """Time that is neither learning (including the replay) nor sending weights is sampling. IMPALA learns in
        another process at the same time, so its waiting is for both and stays `idle`."""
        clock.add_split(spent)
        if self.config.algo != "impala":
            sampling, share = max(0.0, seconds - sum(spent.values())), env_share(runners)
            clock.add("env", share * sampling)
            clock.add("act", (1 - share) * sampling)

    def _learner_metrics(self, learner: Mapping[str, Any]) -> dict[str, float]:
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
        metrics |= learner_metrics(learner)
        if not getattr(self._algorithm.config, "use_kl_loss", False):
            metrics.pop("approx_kl", None)  # RLlib reports 0 if it is not computed
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
        new, self._shown_restarts = self._restarts - self._shown_restarts, self._restarts
        return [f"{new} env runner(s) lost and replaced by RLlib{self._cause()}"] if new > 0 else []

    def _cause(self) -> str:
        """The last error of an env runner, which RLlib does not report. Needs a private Ray, whose logs are known."""
        errors = []
        for path in self.cluster.logs.glob("worker-*.err") if self.cluster.logs is not None else ():
            _, mark, tail = path.read_text(errors="replace").rpartition("Worker exception caught during `apply()`")
            if mark and (error := re.search(r"^[A-Za-z_][\w.]*: \S.*$", tail, re.M)):  # the first of a chain
                errors.append((path.stat().st_mtime, error[0]))
        return f": {max(errors)[1][:300]}" if errors else ""

    def evaluate(self, episodes: int, *, stochastic: bool, number: int) -> list[Episode]:
        self._copy_policy()
        return self._evaluator.play(self.policy, episodes, stochastic=stochastic, number=number)

    def _copy_policy(self) -> None:
        epsilon = {"epsilon": rllib_settings.epsilon_at(self.config, self._steps)} if self.config.algo == "dqn" else {}
        self._modules.read(self._algorithm, **epsilon)

    def state(self) -> dict[str, Any]:
        self._copy_policy()
        rewards = None if self._statistics is None else self._statistics.rewards
        return {
            "algorithm": {"policy": self.policy.state()},
            "spaces": self._modules.spaces(),
            "squash": self._modules.squash,
            "without_noise": self._modules.squash,
            "rllib": {
                "state": np.frombuffer(pickle.dumps(state_of(self._algorithm)), np.uint8),
                "version": version("ray"),
                "optimizer_steps": self.optimizer_steps,
                "env_steps": self._steps,
                "agent_steps": self._agent_steps,
                "reward_moments": None if rewards is None else rewards.state(),
            },
        }

    def usage(self) -> machine.Usage:
        """Of this machine only: the use of env runners elsewhere is unknown."""
        return machine.usage()

    def stepping_usage(self, total: machine.Usage) -> None:
        return None

    def log_to(self, folder: Path) -> None:
        self._results = folder / "rllib.jsonl"

    def accounts(self) -> dict[str, Any]:
        return super().accounts() | {"hosts": self._hosts, "workers_restarted": self._restarts}

    def on_failure(self, call: Callable[[str], None]) -> None:
        self.cluster.on_failure(call)

    def failure(self) -> str | None:
        return self.cluster.failure()

    def close(self) -> None:
        self._evaluator.close()
        if self._algorithm is not None and self.cluster.ray.is_initialized() and self.failure() is None:
            if self._code_bundle.roots:  # RLlib kills its env runners, so they cannot do it at their end
                group, bundle = self._algorithm.env_runner_group, self._code_bundle
                group.foreach_env_runner(
                    lambda _: uninstall(bundle), local_env_runner=False, timeout_seconds=CLEAN_SECONDS
                )
            self._algorithm.stop()
            self._algorithm = None
        self.cluster.close()
