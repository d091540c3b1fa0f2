"""Our config → the settings of an RLlib algorithm, by the names of RLlib's own methods. No ray is imported here.

What has no counterpart is refused by name, see `rllib_keys.py`; what we have no word for keeps RLlib's default and can
be set in `engine.rllib`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import machine, rllib_keys
from paceline.config import RLLIB_ALGORITHMS, DQNConfig, ImpalaConfig, PPOConfig, RunConfig, SACConfig, UserError
from paceline.model.nets import CNNS, Conv, cnn_of
from paceline.spaces import ObservationCodec

Settings = dict[str, dict[str, Any]]
"""Method of RLlib's AlgorithmConfig → its arguments."""

METHODS = ("training", "env_runners", "learners", "fault_tolerance", "reporting", "framework", "debugging")
"""Those whose arguments `engine.rllib` may name."""
ELSEWHERE = {
    "num_env_runners": "is set by --workers",
    "num_learners": "is set by engine.learners",
    "seed": "is set by --seed",
    "dueling": "is set by dqn.dueling",
    "epsilon": "is set by dqn.epsilon_start, dqn.epsilon_end and dqn.epsilon_fraction",
    "num_atoms": "is not for us: our copy of the policy knows no distribution of returns",
}
"""Of these arguments, those that more depends on than RLlib."""
OFF_POLICY = ("dqn", "sac")
ASYNC_SECONDS = 1.0  # RLlib reports IMPALA every 10 s by default, and a run can only stop where it reports


@dataclass(frozen=True)
class Image:
    """The convolutions over it, and what comes out of them: `[C, H, W]`."""

    filters: Sequence[Conv]
    features: tuple[int, int, int]


def image_of(config: RunConfig, observation: ObservationCodec) -> Image | None:
    """None if the env shows no image. A UserError for a network that RLlib cannot build over what it shows."""
    model = config.model
    if not observation.is_image:
        if config.algo == "dqn" and config.dqn.dueling and not model.shared:
            raise UserError("dqn.dueling=true on --engine rllib has layers in common: set model.shared=true, too")
        return None
    if model.shared and model.activation != "relu":
        raise UserError(
            f"model.activation={model.activation} is not for --engine rllib with images and model.shared=true: layers "
            "that are shared are convolutions to RLlib, all with relu"
        )
    filters = CNNS[cnn_of(observation.shape, model)]
    height, width = observation.shape[1:]
    for _, kernel, stride in filters:
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return Image(filters, (filters[-1][0], height, width))


def algorithm_of(config: RunConfig) -> str:
    """RLlib's name for it."""
    if config.algo == "impala":
        return "IMPALA" if config.impala.surrogate_clip is None else "APPO"
    return config.algo.upper()


def check(config: RunConfig) -> None:
    """A UserError for the first setting that RLlib cannot take."""
    for refused, why in rllib_keys.REFUSED.items():
        key, _, only = refused.partition("=")
        section, _, name = key.partition(".")
        if section in RLLIB_ALGORITHMS and section != config.algo:
            continue
        model = getattr(config, section)
        field = "class_" if name == "class" else name
        value = getattr(model, field)
        if value == only if only else value != type(model).model_fields[field].default:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{key}={shown} is not for --engine rllib: {why}")
    if not config.model.hidden:
        raise UserError("model.hidden=[] is not for --engine rllib: its networks have a hidden layer at least")
    if config.algo == "sac" and config.model.shared:
        raise UserError("model.shared=true is not for sac on --engine rllib: actor and critics have nothing in common")
    if config.algo == "dqn" and config.dqn.n_step > config.dqn.rollout_steps:
        raise UserError(
            f"dqn.n_step={config.dqn.n_step} on --engine rllib: at most dqn.rollout_steps={config.dqn.rollout_steps}"
        )
    rows, learners = config.ppo.minibatch_size, config.engine.learners
    if config.algo == "ppo" and rows % learners:
        raise UserError(f"ppo.minibatch_size={rows} cannot be shared by engine.learners={learners}")


def workers_of(config: RunConfig, cores: int) -> int:
    """Env runners. 0 steps in our own process, as RLlib does by default for what learns after every step."""
    if config.engine.workers or config.algo in OFF_POLICY:
        return config.engine.workers
    return max(1, cores - config.engine.learners)


def remote_learners(config: RunConfig) -> int:
    """As RLlib has it by default: one learner of IMPALA is a process of its own, of others it is in ours."""
    return config.engine.learners if config.engine.learners > 1 or config.algo == "impala" else 0


def cpus_of(config: RunConfig, workers: int) -> float:
    """That RLlib asks Ray for."""
    given, learners = config.engine.rllib, remote_learners(config)
    each = {name: given.get(f"num_cpus_per_{name}", 1) for name in ("env_runner", "learner")}
    for name, share in each.items():
        if not isinstance(share, int | float):
            raise UserError(f"engine.rllib.num_cpus_per_{name}={share}: a number is expected")
    helpers = given.get("num_aggregator_actors_per_learner", 0) * max(1, learners)
    return float(workers * each["env_runner"] + learners * each["learner"] + helpers)


def settings_of(config: RunConfig, workers: int, *, seed: int, gpu: bool = False) -> Settings:
    """`gpu`: the learners have one each, whether asked for or not."""
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
        settings["training"] = _ppo(config.ppo, config, workers)
    elif config.algo == "impala":
        settings["training"] = _impala(config.impala, config)
        settings["env_runners"]["rollout_fragment_length"] = config.impala.rollout_steps
        settings["reporting"]["min_time_s_per_iteration"] = ASYNC_SECONDS
    elif config.algo == "dqn":
        steps = config.dqn.rollout_steps * envs * max(1, workers)
        settings["training"] = _dqn(config.dqn, config, steps, workers)
        settings["env_runners"]["rollout_fragment_length"] = config.dqn.rollout_steps
        settings["reporting"]["min_sample_timesteps_per_iteration"] = config.dqn.rounds * steps
    else:
        settings["training"] = _sac(config.sac, engine.learners)
    return settings


def rows_of(config: RunConfig, workers: int) -> int:
    """Steps of one iteration of PPO."""
    rows = config.env.envs_per_worker * config.ppo.rollout_steps
    return rows * max(1, workers) if config.engine.scaling == "weak" else rows


def model_of(config: RunConfig, image: Image | None, *, continuous: bool) -> dict[str, Any]:
    """The network as ours is: convolutions over an image, hidden layers, then one linear layer; one deviation for each
    action."""
    model = config.model
    common: dict[str, Any] = {"fcnet_hiddens": list(model.hidden), "fcnet_activation": model.activation}
    common |= {"head_fcnet_hiddens": []}
    if image is not None:
        # RLlib has nothing between convolutions and heads. What policy and value share there is a convolution of the
        # size of the whole image; what they do not share belongs to the heads.
        filters: list[list[Any]] = [[width, kernel, stride, "valid"] for width, kernel, stride in image.filters]
        if model.shared:
            sizes = [list(image.features[1:]), *([1, 1] for _ in model.hidden[1:])]
            filters += [[width, size, 1, "valid"] for width, size in zip(model.hidden, sizes, strict=True)]
        else:
            common |= {"head_fcnet_hiddens": list(model.hidden), "head_fcnet_activation": model.activation}
        common |= {"conv_filters": filters, "conv_activation": "relu"}
    if config.algo == "sac":
        # Its critics put observation and action together in layers of their own: as wide, and with that activation.
        return common | {"fusionnet_hiddens": list(model.hidden), "fusionnet_activation": model.activation}
    if config.algo == "dqn":
        return common
    return common | {"vf_share_layers": model.shared or image is not None, "free_log_std": continuous}


def epsilon_at(config: RunConfig, steps: int) -> float:
    """Share of random actions of DQN after so many steps."""
    (_, first), (end, last) = _epsilon(config)
    return float(first + (last - first) * min(1.0, steps / end))


def override(settings: Settings, given: Mapping[str, Any], accepted: Mapping[str, str]) -> None:
    """`engine.rllib` into `settings`. `accepted`: each name that RLlib knows, and the method that takes it."""
    for name, value in given.items():
        if name in ELSEWHERE:
            raise UserError(f"engine.rllib.{name} {ELSEWHERE[name]}")
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"it is not an argument of {', '.join(METHODS)}"
            raise UserError(f"engine.rllib.{name}: RLlib has no such setting; {hint}")
        settings.setdefault(accepted[name], {})[name] = value


def threads_of(config: RunConfig, workers: int) -> int:
    """For the arithmetic of a learner: what the env runners leave of our cores."""
    return config.engine.threads or max(1, (machine.cores() - workers) // max(1, config.engine.learners))


def _ppo(hyper: PPOConfig, config: RunConfig, workers: int) -> dict[str, Any]:
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


def _impala(hyper: ImpalaConfig, config: RunConfig) -> dict[str, Any]:
    steps = config.stop.total_steps or 0
    training: dict[str, Any] = {
        "train_batch_size_per_learner": max(1, hyper.batch_size // config.engine.learners),
        "lr": _rate(hyper.learning_rate, hyper.learning_rate_schedule, steps, "impala"),
        "gamma": hyper.gamma,
        "entropy_coeff": hyper.entropy_coef,
        "vf_loss_coeff": 2 * hyper.value_coef,  # theirs is of half the squared error
        "grad_clip": hyper.max_grad_norm or None,
        "grad_clip_by": "global_norm",
        "vtrace_clip_rho_threshold": hyper.clip_rho,
        "vtrace_clip_pg_rho_threshold": hyper.clip_pg_rho,
    }
    if hyper.surrogate_clip is not None:
        training["clip_param"] = hyper.surrogate_clip
    return training


def _dqn(hyper: DQNConfig, config: RunConfig, steps: int, workers: int) -> dict[str, Any]:
    """`steps`: of all environments in one round."""
    budget, learners = config.stop.total_steps or 0, config.engine.learners
    if not budget and hyper.epsilon_start != hyper.epsilon_end:
        raise UserError("dqn.epsilon_fraction is of the steps for --engine rllib: give --total-steps")
    batch = max(1, hyper.batch_size // learners)
    # RLlib takes `training_intensity` over a ratio of its own, in which the process that learns counts as a worker.
    native = batch * learners / (steps / max(1, workers) * max(1, workers + 1))
    kind = "PrioritizedEpisodeReplayBuffer" if hyper.prioritized else "EpisodeReplayBuffer"
    replay: dict[str, Any] = {"type": kind, "capacity": hyper.replay_size}
    replay |= {"alpha": hyper.priority_alpha, "beta": hyper.priority_beta} if hyper.prioritized else {}
    return {
        "lr": _rate(hyper.learning_rate, hyper.learning_rate_schedule, budget, "dqn"),
        "gamma": hyper.gamma,
        "train_batch_size_per_learner": batch,
        "training_intensity": hyper.gradient_steps * native if hyper.gradient_steps > 1 else None,
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
    hyper, budget = config.dqn, config.stop.total_steps or 0
    return [[0, hyper.epsilon_start], [max(1, round(hyper.epsilon_fraction * budget)), hyper.epsilon_end]]


def _sac(hyper: SACConfig, learners: int) -> dict[str, Any]:
    return {
        "actor_lr": hyper.learning_rate,
        "critic_lr": hyper.learning_rate,
        "alpha_lr": hyper.learning_rate,
        "gamma": hyper.gamma,
        "train_batch_size_per_learner": max(1, hyper.batch_size // learners),
        "replay_buffer_config": {"capacity": hyper.buffer_size},
        "num_steps_sampled_before_learning_starts": hyper.learning_starts,
        "tau": hyper.tau,
        "n_step": hyper.n_step,
    }


def _rate(rate: float, schedule: str, steps: int, algo: str) -> Any:
    if schedule == "constant":
        return rate
    if not steps:
        raise UserError(
            f"{algo}.learning_rate_schedule=linear is in steps for --engine rllib: give --total-steps, or "
            f"{algo}.learning_rate_schedule=constant"
        )
    return [[0, rate], [steps, 0.0]]
