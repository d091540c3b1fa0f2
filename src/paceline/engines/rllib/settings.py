"""Translate a config into the settings of an RLlib algorithm, grouped by RLlib's methods. Does not import ray.

Settings without a counterpart in RLlib are refused (`rllib_keys.py`). RLlib's settings without a counterpart here keep
their defaults and can be set in `engine.rllib`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import machine
from paceline.config import ALGORITHMS, RunConfig, UserError, rllib_keys
from paceline.models.nets import CNNS, Conv, cnn_of
from paceline.spaces import ObservationCodec

Settings = dict[str, dict[str, Any]]
"""Method of RLlib's AlgorithmConfig → its arguments."""

METHODS = ("training", "env_runners", "learners", "fault_tolerance", "reporting", "framework", "debugging")
"""Methods whose arguments `engine.rllib` may set."""
ELSEWHERE = {
    "num_env_runners": "is set by --workers",
    "num_learners": "is set by engine.learners",
    "seed": "is set by --seed",
    "dueling": "is set by dqn.dueling",
    "epsilon": "is set by dqn.epsilon_start, dqn.epsilon_end and dqn.epsilon_fraction",
    "num_atoms": "is not supported: paceline's copy of the policy has no distribution of returns",
}
"""Arguments that paceline sets itself, because more than RLlib depends on them."""
OFF_POLICY = ("dqn", "sac")
ASYNC_SECONDS = 1.0  # iterations of IMPALA; RLlib's default is 10, and a run can only stop between iterations


def hyper_of(config: RunConfig) -> Any:
    """The algorithm's settings, whose type follows from its name."""
    return config.hyper


@dataclass(frozen=True)
class Convolutions:
    """The convolutions over an image, and the shape of their output, `[C, H, W]`."""

    filters: Sequence[Conv]
    features: tuple[int, int, int]


def convolutions_of(config: RunConfig, observation: ObservationCodec) -> Convolutions | None:
    """None without images. Raises UserError for a network that RLlib cannot build."""
    model = config.model
    if not observation.is_image:
        if config.algo == "dqn" and hyper_of(config).dueling and not model.shared:
            raise UserError("dqn.dueling=true shares layers on --engine rllib: also set model.shared=true")
        return None
    if model.shared and model.activation != "relu":
        raise UserError(
            f"model.activation={model.activation} is not supported by --engine rllib with images and "
            "model.shared=true: RLlib builds shared layers as convolutions, all with relu"
        )
    filters = CNNS[cnn_of(observation.shape, model)]
    height, width = observation.shape[1:]
    for _, kernel, stride in filters:
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return Convolutions(filters, (filters[-1][0], height, width))


def algorithm_of(config: RunConfig) -> str:
    """RLlib's name of the algorithm."""
    if config.algo == "impala":
        return "IMPALA" if hyper_of(config).surrogate_clip is None else "APPO"
    return config.algo.upper()


def check(config: RunConfig) -> None:
    """Raise UserError for the first setting that RLlib does not support."""
    for refused, why in rllib_keys.REFUSED.items():
        key, _, only = refused.partition("=")
        section, _, name = key.partition(".")
        if section in ALGORITHMS and section != config.algo:
            continue
        model = config.hyper if section == config.algo else getattr(config, section)
        field = "class_" if name == "class" else name
        value = getattr(model, field)
        if value == only if only else value != type(model).model_fields[field].default:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{key}={shown} is not supported by --engine rllib: {why}")
    if not config.model.hidden:
        raise UserError(
            "model.hidden=[] is not supported by --engine rllib: its networks have at least one hidden layer"
        )
    if config.algo == "sac" and config.model.shared:
        raise UserError("model.shared=true is not supported by --algo sac: its actor and critics share no layers")
    if config.algo == "dqn" and hyper_of(config).n_step > hyper_of(config).rollout_steps:
        raise UserError(
            f"dqn.n_step={hyper_of(config).n_step} on --engine rllib: at most dqn.rollout_steps="
            f"{hyper_of(config).rollout_steps}"
        )
    learners = config.engine.learners
    rows = hyper_of(config).minibatch_size if config.algo == "ppo" else 0
    if rows % learners:
        raise UserError(f"ppo.minibatch_size={rows} is not a multiple of engine.learners={learners}")


def workers_of(config: RunConfig, cores: int) -> int:
    """Number of env runners. 0: environments step in this process, RLlib's default for off-policy algorithms."""
    if config.engine.workers or config.algo in OFF_POLICY:
        return config.engine.workers
    return max(1, cores - config.engine.learners)


def remote_learners(config: RunConfig) -> int:
    """Learner processes. As in RLlib, a single learner runs in this process, except for IMPALA."""
    return config.engine.learners if config.engine.learners > 1 or config.algo == "impala" else 0


def cpus_of(config: RunConfig, workers: int) -> float:
    """CPUs that RLlib requests from Ray."""
    given, learners = config.engine.rllib, remote_learners(config)
    each = {name: given.get(f"num_cpus_per_{name}", 1) for name in ("env_runner", "learner")}
    for name, share in each.items():
        if not isinstance(share, int | float):
            raise UserError(f"engine.rllib.num_cpus_per_{name}={share}: expected a number")
    helpers = given.get("num_aggregator_actors_per_learner", 0) * max(1, learners)
    return float(workers * each["env_runner"] + learners * each["learner"] + helpers)


def settings_of(config: RunConfig, workers: int, *, seed: int, gpu: bool = False) -> Settings:
    """RLlib's settings. `gpu`: each learner gets a GPU, even if the config does not ask for one."""
    engine, env = config.engine, config.env
    envs = env.envs_per_worker
    if config.algo == "ppo" and engine.scaling == "strong" and workers:
        envs = math.ceil(envs / workers)
    settings: Settings = {
        "env_runners": {
            "num_env_runners": workers,
            "num_envs_per_env_runner": envs,
            "gym_env_vectorize_mode": "async" if env.vector == "async" else "sync",
        },
        "learners": {
            "num_learners": remote_learners(config),
            "num_gpus_per_learner": int(gpu or engine.device == "cuda"),
        },
        "fault_tolerance": {
            "restart_failed_env_runners": True,
            "max_num_env_runner_restarts": engine.max_restarts,
        },
        "reporting": {},
        "framework": {"framework": "torch"},
        "debugging": {"seed": seed, "log_level": "ERROR"},
    }
    if config.algo == "ppo":
        settings["training"] = _ppo(hyper_of(config), config, workers)
    elif config.algo == "impala":
        settings["training"] = _impala(hyper_of(config), config)
        settings["env_runners"]["rollout_fragment_length"] = hyper_of(config).rollout_steps
        settings["reporting"]["min_time_s_per_iteration"] = ASYNC_SECONDS
    elif config.algo == "dqn":
        steps = hyper_of(config).rollout_steps * envs * max(1, workers)
        settings["training"] = _dqn(hyper_of(config), config, steps, workers)
        settings["env_runners"]["rollout_fragment_length"] = hyper_of(config).rollout_steps
        settings["reporting"]["min_sample_timesteps_per_iteration"] = hyper_of(config).rounds * steps
    else:
        steps = hyper_of(config).rollout_steps * envs * max(1, workers)
        settings["training"] = _sac(hyper_of(config), config, steps, workers)
        settings["env_runners"]["rollout_fragment_length"] = hyper_of(config).rollout_steps
        settings["reporting"]["min_sample_timesteps_per_iteration"] = hyper_of(config).rounds * steps
    return settings


def rows_of(config: RunConfig, workers: int) -> int:
    """Rows of one PPO iteration."""
    rows = config.env.envs_per_worker * config.hyper.rollout_steps
    return rows * max(1, workers) if config.engine.scaling == "weak" else rows


def model_of(config: RunConfig, convolutions: Convolutions | None, *, continuous: bool) -> dict[str, Any]:
    """The arguments of RLlib's model that give paceline's network: convolutions over an image, hidden layers, one
    linear layer, and one deviation for each action."""
    model = config.model
    common: dict[str, Any] = {"fcnet_hiddens": list(model.hidden), "fcnet_activation": model.activation}
    common |= {"head_fcnet_hiddens": []}
    if convolutions is not None:
        # RLlib has no layers between convolutions and heads. Shared ones become convolutions of the size of the whole
        # image, others become part of the heads.
        filters: list[list[Any]] = [[width, kernel, stride, "valid"] for width, kernel, stride in convolutions.filters]
        if model.shared:
            sizes = [list(convolutions.features[1:]), *([1, 1] for _ in model.hidden[1:])]
            filters += [[width, size, 1, "valid"] for width, size in zip(model.hidden, sizes, strict=True)]
        else:
            common |= {"head_fcnet_hiddens": list(model.hidden), "head_fcnet_activation": model.activation}
        common |= {"conv_filters": filters, "conv_activation": "relu"}
    if config.algo == "sac":
        # Its critics join observation and action in extra layers: same widths and activation.
        return common | {"fusionnet_hiddens": list(model.hidden), "fusionnet_activation": model.activation}
    if config.algo == "dqn":
        return common
    return common | {"vf_share_layers": model.shared or convolutions is not None, "free_log_std": continuous}


def epsilon_at(config: RunConfig, steps: int) -> float:
    """DQN's share of random actions after `steps`."""
    (_, first), (end, last) = _epsilon(config)
    return float(first + (last - first) * min(1.0, steps / end))


def override(settings: Settings, given: Mapping[str, Any], accepted: Mapping[str, str]) -> None:
    """Put `engine.rllib` into `settings`. `accepted`: every argument that RLlib knows → the method that takes it."""
    for name, value in given.items():
        if name in ELSEWHERE:
            raise UserError(f"engine.rllib.{name} {ELSEWHERE[name]}")
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"it is not an argument of {', '.join(METHODS)}"
            raise UserError(f"engine.rllib.{name}: RLlib has no such setting; {hint}")
        settings.setdefault(accepted[name], {})[name] = value


def threads_of(config: RunConfig, workers: int) -> int:
    """Threads of a learner: the cores that env runners leave free."""
    return config.engine.threads or max(1, (machine.cores() - workers) // max(1, config.engine.learners))


def _ppo(hyper: Any, config: RunConfig, workers: int) -> dict[str, Any]:
    rows, learners = rows_of(config, workers), config.engine.learners
    factor = {"keep": 1.0, "linear": workers, "sqrt": math.sqrt(workers)}[config.engine.learning_rate_scaling]
    steps = config.stop.total_steps or (config.stop.iterations or 0) * rows
    return {
        "train_batch_size_per_learner": rows // learners,
        "minibatch_size": min(hyper.minibatch_size, rows) // learners,
        "num_epochs": hyper.epochs,
        "lr": _rate(hyper.learning_rate * factor, hyper.learning_rate_schedule, steps, "ppo"),
        "gamma": hyper.gamma,
        "lambda_": hyper.gae_lambda,
        "clip_param": hyper.clip,
        "entropy_coeff": hyper.entropy_coef,
        "vf_loss_coeff": hyper.value_coef,
        "grad_clip": hyper.max_grad_norm or None,
        "grad_clip_by": "global_norm",
    }


def _impala(hyper: Any, config: RunConfig) -> dict[str, Any]:
    steps = config.stop.total_steps or 0
    training: dict[str, Any] = {
        "train_batch_size_per_learner": max(1, hyper.batch_size // config.engine.learners),
        "lr": _rate(hyper.learning_rate, hyper.learning_rate_schedule, steps, "impala"),
        "gamma": hyper.gamma,
        "entropy_coeff": hyper.entropy_coef,
        "vf_loss_coeff": 2 * hyper.value_coef,  # RLlib halves the squared error
        "grad_clip": hyper.max_grad_norm or None,
        "grad_clip_by": "global_norm",
        "vtrace_clip_rho_threshold": hyper.clip_rho,
        "vtrace_clip_pg_rho_threshold": hyper.clip_pg_rho,
    }
    if hyper.surrogate_clip is not None:
        training["clip_param"] = hyper.surrogate_clip
    return training


def _dqn(hyper: Any, config: RunConfig, steps: int, workers: int) -> dict[str, Any]:
    """`steps`: of all environments in one round."""
    budget, learners = config.stop.total_steps or 0, config.engine.learners
    if not budget and hyper.epsilon_start != hyper.epsilon_end:
        raise UserError("dqn.epsilon_fraction needs a number of steps on --engine rllib: give --total-steps")
    batch = max(1, hyper.batch_size // learners)
    kind = "PrioritizedEpisodeReplayBuffer" if hyper.prioritized else "EpisodeReplayBuffer"
    replay: dict[str, Any] = {"type": kind, "capacity": hyper.replay_size}
    replay |= {"alpha": hyper.priority_alpha, "beta": hyper.priority_beta} if hyper.prioritized else {}
    return {
        "lr": _rate(hyper.learning_rate, hyper.learning_rate_schedule, budget, "dqn"),
        "gamma": hyper.gamma,
        "train_batch_size_per_learner": batch,
        "training_intensity": _intensity(hyper.gradient_steps, batch * learners, steps, workers),
        "grad_clip": hyper.max_grad_norm or None,
        "grad_clip_by": "global_norm",
        "replay_buffer_config": replay,
        "num_steps_sampled_before_learning_starts": hyper.learning_starts,
        "double_q": hyper.double,
        "dueling": hyper.dueling,
        "n_step": hyper.n_step,
        "epsilon": _epsilon(config),
        "target_network_update_freq": max(1, round(hyper.target_update_every * steps / hyper.gradient_steps)),
        "tau": hyper.target_tau,
    }


def _epsilon(config: RunConfig) -> list[list[float]]:
    hyper, budget = hyper_of(config), config.stop.total_steps or 0
    return [[0, hyper.epsilon_start], [max(1, round(hyper.epsilon_fraction * budget)), hyper.epsilon_end]]


def _sac(hyper: Any, config: RunConfig, steps: int, workers: int) -> dict[str, Any]:
    """`steps`: of all environments in one round."""
    learners = config.engine.learners
    batch = max(1, hyper.batch_size // learners)
    rate = _rate(hyper.learning_rate, hyper.learning_rate_schedule, config.stop.total_steps or 0, "sac")
    return {
        "actor_lr": rate,
        "critic_lr": rate,
        "alpha_lr": rate,
        "gamma": hyper.gamma,
        "train_batch_size_per_learner": batch,
        "training_intensity": _intensity(hyper.updates_per_step * steps, batch * learners, steps, workers),
        "grad_clip": hyper.max_grad_norm or None,
        "grad_clip_by": "global_norm",
        "replay_buffer_config": {"capacity": hyper.buffer_size},
        "num_steps_sampled_before_learning_starts": hyper.learning_starts,
        "tau": hyper.tau,
        "n_step": hyper.n_step,
        "initial_alpha": hyper.temperature_start,
        "target_entropy": hyper.target_entropy,
    }


def _intensity(updates: float, rows: int, steps: int, workers: int) -> float | None:
    """RLlib's `training_intensity` for this many updates of `rows` rows per round of `steps` steps. It replaces RLlib's
    own ratio, which counts the process that learns as a worker."""
    own = rows / (steps / max(1, workers) * max(1, workers + 1))
    return updates * own if updates != 1 else None


def _rate(rate: float, schedule: str, steps: int, algo: str) -> Any:
    if schedule == "constant":
        return rate
    if not steps:
        raise UserError(
            f"{algo}.learning_rate_schedule=linear needs a number of steps on --engine rllib: give --total-steps, or "
            f"{algo}.learning_rate_schedule=constant"
        )
    return [[0, rate], [steps, 0.0]]
