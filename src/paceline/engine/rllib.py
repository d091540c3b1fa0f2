"""The same job on Ray RLlib: our config, loop and files around an algorithm of its new API stack.

An iteration is one call of RLlib's `train()`. Its own state goes into our checkpoints as it pickles it, and only a
resume under this engine reads it; beside it lies a copy of the policy as ours, for everything else.
"""

from __future__ import annotations

import json
import math
import pickle
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
from paceline.engine.rllib_build import build, nodes_of
from paceline.engine.rllib_env import EPISODES, as_rllib_takes_it
from paceline.engine.rllib_policy import from_rllib, to_rllib
from paceline.env.make import make_scalar, make_vector
from paceline.env.vector import VectorEnv
from paceline.model.q import make_policy
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import EVAL_WORKER, eval_envs, play
from paceline.run.directory import plain, read_lines, replacing
from paceline.ship import Parcel, pack
from paceline.spaces import ActionCodec, ObservationCodec, space_to_json

MODULE = "default_policy"  # RLlib's name for the network of the one agent

# Ours → theirs, the first that is there.
LEARNER_METRICS: dict[str, tuple[str, ...]] = {
    "policy_loss": ("mean_pi_loss", "policy_loss"),
    "value_loss": ("mean_vf_loss", "vf_loss", "qf_loss"),
    "entropy": ("entropy",),
    "total_loss": ("total_loss",),
    "approx_kl": ("mean_kl_loss",),
    "explained_variance": ("vf_explained_var",),
    "gradient_norm": ("gradients_default_optimizer_global_norm", "gradients_policy_global_norm"),
    "q_mean": ("qf_mean",),
    "q_min": ("qf_min",),
    "q_max": ("qf_max",),
    "td_error_mean": ("td_error_mean",),
    "target_updates": ("num_target_updates",),
    "steps_trained": ("num_module_steps_trained_lifetime",),
    "learning_rate": ("default_optimizer_learning_rate", "policy_learning_rate"),
}
CLASSIC = {
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "episode_len_mean": "episode_len_mean",
    "episodes_this_iter": "num_episodes",
    "episodes_total": "num_episodes_lifetime",
    "timesteps_total": "num_env_steps_sampled_lifetime",
}
"""The names of before the new API stack, and those of today among the results of the env runners."""


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
        finally:
            env.close()  # type: ignore[no-untyped-call]
        self.policy = make_policy(config, observation, action)
        """Ours, with RLlib's weights when it is looked at."""
        self._eval_seed = int(np.random.SeedSequence(config.seed).spawn(4)[3].generate_state(1)[0])
        self._eval_env: VectorEnv | None = None
        self._results: Path | None = None
        self._algorithm: Any = None
        self._seconds: dict[str, float] = {"learn": 0.0, "sync": 0.0}
        self._steps = 0
        self._without_a_step = 0.0
        self._restarts = self._told_restarts = 0
        if cluster_address(engine):
            self.cluster = Cluster(engine, 0)
            self.cores = max(1, int(self.cluster.cpus))
            runners = rllib_settings.workers_of(config, self.cores)
        else:
            self.cores = machine.cores()
            runners = rllib_settings.workers_of(config, self.cores)
            gpus = torch.cuda.device_count()
            cpus = math.ceil(rllib_settings.cpus_of(config, runners))
            self.cluster = Cluster(engine, max(1, cpus), gpus=gpus)
        self.workers = max(1, runners)
        try:
            self._await_room(rllib_settings.cpus_of(config, runners))
            self.threads = rllib_settings.threads_of(config, runners)
            torch.set_num_threads(self.threads)
            seed = config.seed
            if resumes:  # not the episodes of the beginning again
                seed = int(np.random.SeedSequence((seed, resumes)).generate_state(1)[0]) % 2**31
            self._parcel = Parcel() if self.cluster.is_own else pack(config)
            settings = rllib_settings.settings_of(config, runners, seed=seed)
            self._algorithm = build(config, settings, self._parcel, continuous=action.is_continuous)
            self._envs = settings["env_runners"]["num_envs_per_env_runner"]
            self._runners = settings["env_runners"]["num_env_runners"]
            self.parameters = sum(a.size for name, a in _weights(self._algorithm).items() if not _is_extra(name))
            gpus = settings["learners"]["num_gpus_per_learner"]
            self.device = torch.cuda.get_device_name() if gpus and torch.cuda.is_available() else "cpu"
            self.nodes = nodes_of(self._algorithm, local=self._runners == 0)
            self.cluster.watch_over()
            self._time(self._algorithm.learner_group, "update", "learn")
            self._time(self._algorithm.env_runner_group, "sync_weights", "sync")
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
        weights = to_rllib(self.config, self.policy.state(), _weights(self._algorithm))
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
        self._algorithm.set_state(pickle.loads(saved["state"].tobytes()))
        self.optimizer_steps, self._steps = saved["optimizer_steps"], saved["env_steps"]
        if self._results is not None:
            _cut(self._results, self._algorithm.iteration)
        if self.config.algo in rllib_settings.OFF_POLICY:  # the replay buffer is empty again
            config = self._algorithm.config.copy(copy_frozen=False)
            config.num_steps_sampled_before_learning_starts += self._steps
            config.freeze()
            self._algorithm.config = config
        return False

    # -- what the loop asks ---------------------------------------------------------------------------------------

    def iterate(self, remaining: float, clock: Clock) -> Iteration:
        before, began = dict(self._seconds), time.perf_counter()
        try:
            result = self._algorithm.train()
        except self.cluster.ray.exceptions.RayError as error:
            raise TrainingError(f"RLlib gave up: {' '.join(str(error).split())[-600:]}") from error
        seconds = time.perf_counter() - began
        runners, learner = result.get("env_runners", {}), result.get("learners", {}).get(MODULE, {})
        spent = {part: self._seconds[part] - before[part] for part in before}
        self._account(clock, seconds, spent, runners, result.get("timers", {}))
        steps = int(_number(runners.get("num_env_steps_sampled_lifetime")) or self._steps)
        taken, self._steps = steps - self._steps, steps
        self._without_a_step = 0.0 if taken else self._without_a_step + seconds
        if self._without_a_step > self.config.engine.start_timeout_seconds:
            raise TrainingError(
                f"RLlib has had no step for {self._without_a_step:.0f} s (engine.start_timeout_seconds): its env "
                "runners are lost, or a sample takes longer than engine.rllib.sample_timeout_s, 60 s by default"
            )
        metrics = self._learned(learner) | self._health(result)
        found = runners.get(EPISODES)  # NaN if there is none, and of one alone not a list
        ended = found if isinstance(found, list) else [found] if isinstance(found, tuple) else []
        if self._results is not None:
            _append(self._results, result)
        episodes = [Episode(total, length) for total, length, _ in ended]
        return Iteration(taken, metrics, episodes, [own for *_, own in ended if own])

    def _account(
        self,
        clock: Clock,
        seconds: float,
        spent: dict[str, float],
        runners: Mapping[str, Any],
        timers: Mapping[str, Any],
    ) -> None:
        """Where an iteration's time went, seen from here: what is neither learning nor sending weights is waiting for
        samples, or reading and writing a replay buffer, which counts as learning. IMPALA learns elsewhere at the same
        time, so its waiting is for both, and stays `idle`."""
        for part, own in spent.items():
            clock.add(part, own)
        if self.config.algo == "impala":
            return
        env = _number(runners.get("env_step_timer")) or 0.0
        pipes = [runners.get(name, {}) for name in ("env_to_module_connector", "module_to_env_connector")]
        act = (_number(runners.get("rlmodule_inference_timer")) or 0.0) + sum(
            _number(pipe.get("connector_pipeline_timer")) or 0.0 for pipe in pipes
        )
        sampling = max(0.0, seconds - sum(spent.values()))
        replay = sum(_number(value) or 0.0 for name, value in timers.items() if name.startswith("replay_buffer"))
        if replay:
            of_replay = replay / (replay + (_number(timers.get("env_runner_sampling_timer")) or 0.0))
            clock.add("learn", of_replay * sampling)
            sampling *= 1 - of_replay
        share = env / (env + act) if env + act > 0 else 0.5
        clock.add("env", share * sampling)
        clock.add("act", (1 - share) * sampling)

    def _learned(self, learner: Mapping[str, Any]) -> dict[str, float]:
        rows, batch = (_number(learner.get(n)) for n in ("num_module_steps_trained", "module_train_batch_size_mean"))
        if not rows:
            return {}
        self.optimizer_steps += round(rows / batch) if batch else 0
        metrics: dict[str, float] = {}
        for ours, names in LEARNER_METRICS.items():
            value = next((_number(learner[name], keep=True) for name in names if name in learner), None)
            if value is not None:
                metrics[ours] = value
        if self.config.algo not in rllib_settings.OFF_POLICY:
            metrics.pop("steps_trained", None)
        lag = _number(learner.get("diff_num_grad_updates_vs_sampler_policy"))
        return metrics | ({"policy_lag_mean": lag} if lag is not None and self.config.algo == "impala" else {})

    def _health(self, result: Mapping[str, Any]) -> dict[str, float]:
        tolerance = result.get("fault_tolerance", {})
        self._restarts = int(tolerance.get("num_remote_worker_restarts", 0))
        healthy = tolerance.get("num_healthy_workers", self.workers) if self._runners else 1
        return {"workers_healthy": float(healthy), "workers_restarted": float(self._restarts)}

    def notes(self) -> list[str]:
        new, self._told_restarts = self._restarts - self._told_restarts, self._restarts
        return [f"{new} env runner(s) lost and replaced by RLlib"] if new > 0 else []

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
        self.policy.load(from_rllib(self.config, _weights(self._algorithm), own))

    def state(self) -> dict[str, Any]:
        self._copy_policy()
        action, observation = self.policy.action.space, self.policy.observation.space
        return {
            "algorithm": {"policy": self.policy.state()},
            "spaces": {"observation": space_to_json(observation), "action": space_to_json(action)},
            "squash": self._squash,
            "without_noise": self._squash,
            "rllib": {
                "state": np.frombuffer(pickle.dumps(self._algorithm.get_state()), np.uint8),
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
        return super().accounts() | {"workers_restarted": self._restarts}

    def _close_eval(self) -> None:
        if self._eval_env is not None:
            self._eval_env.close()
            self._eval_env = None

    def close(self) -> None:
        self._close_eval()
        if self._algorithm is not None and self.cluster.ray.is_initialized():
            self._algorithm.stop()
            self._algorithm = None
        self.cluster.close()


def _weights(algorithm: Any) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in algorithm.learner_group.get_weights()[MODULE].items()}


def _is_extra(name: str) -> bool:
    """Not learned: constants, and copies that the targets come from."""
    return name.endswith("_const") or name.startswith(("_old", "_target", "target"))


def _number(value: Any, *, keep: bool = False) -> float | None:
    """A finite number, or None; `keep`: also one that is not finite."""
    if isinstance(value, int | float | np.number):
        number = float(value)
        return number if keep or math.isfinite(number) else None
    return None


def _append(path: Path, result: Mapping[str, Any]) -> None:
    """RLlib's own words, with the classic names beside them."""
    runners = result.get("env_runners", {})
    row = {key: _said(value) for key, value in result.items() if key != "config"}
    row["env_runners"] = {key: _said(value) for key, value in runners.items() if key != EPISODES}
    row |= {old: row["env_runners"][new] for old, new in CLASSIC.items() if new in runners}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _said(value: Any) -> Any:
    """For JSON; of what it cannot hold, the text."""
    try:
        return plain(value)
    except TypeError:
        return str(value)


def _cut(path: Path, iteration: int) -> None:
    """Rows of after the checkpoint go, as those of the other files do."""
    if path.exists():
        rows = [row for row in read_lines(path) if row.get("training_iteration", 0) <= iteration]
        with replacing(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
