"""Estimate the memory of a run on images, and choose environments, minibatch rows and workers that fit.

Sizes given by the user or by a preset they named are kept; if they do not fit, that is an error. Sizes of a preset that
was found by the env's id are lowered until they fit. `auto` follows from the available cores and memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import machine
from paceline.config import EnvConfig, RunConfig, UserError
from paceline.config.resolve import fit_rollout
from paceline.config.values import shortened
from paceline.envs import atari, procgen
from paceline.envs.contract import close_env
from paceline.envs.make import make_env
from paceline.envs.masks import find_masks
from paceline.envs.multi_agent import AgentsEnv
from paceline.lazy import torch
from paceline.spaces import ActionCodec, ObservationCodec
from paceline.training.placement import choose_engine, cluster_address

FACTOR = 1.25
"""Measured memory was within this factor of the estimate, both ways."""
MEMORY_SHARE = 0.8
"""Usable share of the available memory; the rest covers errors of the estimate."""
PROCESS_BYTES = 390_000_000  # measured: Python, torch, paceline, and what remains of the first rollout
PROCGEN_BYTES = 360_000_000  # measured: the textures of its games
RAY_BYTES = 500_000_000  # measured: the driver and Ray's own processes
ENV_BYTES = 1_000_000  # measured for Procgen; an upper bound for Atari
LEAST_ROW_BYTES, LEAST_FRAME_BYTES, LEAST_ENV_BYTES = 24, 1, 200  # of any run: a lower bound
COPIES = 4  # of a rollout's observations: collected, valid rows, shuffled for this pass and for the previous one
PARAMETER_BYTES = 16  # value, gradient and two moments
ENVS_PER_CORE, LEAST_ENVS, MOST_ENVS = 16, 8, 128


@dataclass(frozen=True)
class Footprint:
    """Bytes that each part of a run on images takes."""

    frame_bytes: int
    row_bytes: int  # activations of one row while learning, see nets.py
    parameters: int
    env_bytes: int  # in each process that has environments


@dataclass(frozen=True)
class Resources:
    """Cores and memory that the run may use."""

    cores: int
    memory_bytes: int

    @property
    def usable(self) -> float:
        return MEMORY_SHARE * self.memory_bytes


def fit_to_memory(
    config: RunConfig, *, may_lower: bool, here: Resources | None = None, given: Mapping[str, Any] | None = None
) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by numbers, and lower sizes that do not fit if `may_lower`. Also returns the choice as text.
    `given`: the settings that the user has given; a rollout must be able to fill its sizes.

    Estimates are made only for environments known to have images, or if the user asks for `auto`: others would have to
    be created first. They are skipped on a GPU, which holds the rollouts, and on a cluster, whose memory is unknown.
    """
    here = here or Resources(machine.cores(), machine.memory_limit_bytes())
    if not cluster_address(config.engine):
        check_least(config, here.memory_bytes)
    auto = config.env.envs_per_worker == 0 or (config.algorithm.native and config.hyper.has_auto_size())
    if choose_engine(config) == "rllib":
        return with_defaults(config) if auto else config, []
    _check_rollout(config, (given or {}).get(config.algorithm_name) or {})
    known = procgen.game_of(config.env.id) is not None or atari.is_atari(config.env.id)
    if not auto and not known:
        return config, []
    footprint, on_gpu = measure(config)
    if footprint is None:
        return with_defaults(config), []
    if on_gpu or cluster_address(config.engine):
        return with_numbers(config, here), []
    smaller = _smaller(config, here, may_lower_envs=may_lower or config.env.envs_per_worker == 0)
    first = chosen = with_numbers(config, here)
    while (needed := estimate(chosen, footprint, workers_of(chosen, here))) > here.usable:
        lower = next(smaller, None)
        if lower is None:
            raise UserError(_too_much(chosen, needed, here))
        chosen = lower
    return chosen, [_line(chosen, first, needed, here)]


def _check_rollout(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Refuse sizes that a rollout of the user's own env does not fill, whose agents are only known when it is made."""
    envs, hyper = config.env.envs_per_worker, config.hyper
    if given and envs and ":" in config.env.id and hyper.fitted(envs * hyper.rollout_steps) is not hyper:
        env = make_env(config.env)
        close_env(env)
        fit_rollout(config, given, len(env.agents) if isinstance(env, AgentsEnv) else 1)


def check_least(config: RunConfig, memory_bytes: int) -> None:
    """UserError if the sizes in the settings cannot fit, however small an observation is."""
    towers = 1 if config.model.shared else 2
    weights = 0 if config.model.class_ else sum(map(math.prod, itertools.pairwise([1, *config.model.hidden])))
    needed = {"model.hidden": PARAMETER_BYTES * towers * weights, "env.envs_per_worker": 0}
    if config.model.memory != "none":
        needed["model.memory_size"] = PARAMETER_BYTES * 3 * config.model.memory_size**2
    if config.algorithm.native:
        envs, hyper, section = config.env.envs_per_worker, config.hyper, config.algorithm_name
        slots, row = max(1, envs) * hyper.rollout_steps, LEAST_ROW_BYTES + LEAST_FRAME_BYTES * config.env.frame_stack
        needed |= {"env.envs_per_worker": LEAST_ENV_BYTES * envs, f"{section}.rollout_steps": row * slots}
        largest = f"{section}.{hyper.largest or 'batch_size'}"
        needed[f"{section}.batch_size"] = row * hyper.rows_per_step(slots)
        needed[largest] = max(needed.get(largest, 0), row * hyper.replay_rows_in_memory())
    key = max(needed, key=lambda name: needed[name])
    if needed[key] > memory_bytes:
        gigabytes = f"{needed[key] / 1e9:.3g} GB"
        raise UserError(f"{key} needs at least {gigabytes} of memory, and there are {_gb(memory_bytes)}: lower it")


@contextlib.contextmanager
def fitting_in_memory(config: RunConfig) -> Iterator[None]:
    """UserError where environments, network or rollout are too large for this machine."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        section, largest = config.algorithm_name, getattr(config.hyper, "largest", None)
        lower = ["model.hidden", "env.envs_per_worker", f"{section}.rollout_steps"]
        lower += [f"{section}.{largest}"] if largest else []
        reason = shortened(" ".join(str(error).split())) or "no reason given"
        raise UserError(f"out of memory ({reason}): lower {', '.join(lower[:-1])} or {lower[-1]}") from error


def measure(config: RunConfig) -> tuple[Footprint | None, bool]:
    """What an env and its network take, or None if it has no images; and whether the network learns on a GPU."""
    env = make_env(config.env)
    if isinstance(env, AgentsEnv):  # its agents may have several spaces
        close_env(env)
        return None, False
    action = ActionCodec(env.action_space)
    masks = find_masks(env, action) if config.env.action_mask == "auto" else None
    observation = ObservationCodec(env.observation_space, config.env.channels, action.nvec if masks else ())
    close_env(env)
    if not observation.images:
        return None, False
    from paceline.models.gpu import find_device
    from paceline.models.nets import CnnActorCritic

    device = find_device(config.engine.device, observation, action)
    learns_there = choose_engine(config) == "local" or config.algorithm.sharing != "replicas"
    learns_there = learns_there and config.algorithm.learns_on_gpu and config.model.memory == "none"
    on_gpu = device == "cuda" and learns_there
    row_bytes, parameters = 0, 0
    if config.model.class_ is None:
        torch.set_num_threads(1)  # more make the QR of the first weights a hundred times slower on a loaded machine
        net = CnnActorCritic(observation, config.model, action.num_outputs, torch.Generator())
        row_bytes, parameters = net.row_bytes, sum(p.numel() for p in net.parameters())
    frame = int(math.prod(observation.shape)) * observation.dtype.itemsize
    games = PROCGEN_BYTES if procgen.game_of(config.env.id) is not None else 0
    return Footprint(frame, row_bytes, parameters, games), on_gpu


def check_vectors(config: RunConfig, observation: ObservationCodec, action: ActionCodec, envs: int) -> None:
    """Refuse observations so wide that the rollouts and the network cannot fit, before they are allocated."""
    model = config.model
    if observation.images or model.class_ is not None:
        return
    towers = 1 if model.shared else 2
    widths = [observation.size, *model.hidden]
    parameters = towers * sum(a * b for a, b in itertools.pairwise(widths)) + widths[-1] * (action.num_outputs + 1)
    rollouts = 2 * 4 * envs * config.hyper.rollout_steps * observation.size  # collected, and their valid rows
    needed, usable = PARAMETER_BYTES * parameters + rollouts, Resources(1, machine.memory_limit_bytes()).usable
    if needed > usable:
        raise UserError(
            f"observations of {observation.size:,} numbers with model.hidden={model.hidden}, {envs} environments and "
            f"rollouts of {config.hyper.rollout_steps} steps need about {_gb(needed)}, more than the usable "
            f"{_gb(usable)}: lower model.hidden, env.envs_per_worker or {config.algorithm_name}.rollout_steps, or let "
            "the env return less"
        )


def with_defaults(config: RunConfig) -> RunConfig:
    """Resolve `auto` for environments without images: the defaults."""
    envs = config.env.envs_per_worker or EnvConfig.model_fields["envs_per_worker"].default
    return _resized(config, envs, None)


def with_numbers(config: RunConfig, here: Resources) -> RunConfig:
    """Resolve `auto` for images from the number of cores."""
    envs = config.env.envs_per_worker or min(max(ENVS_PER_CORE * here.cores, 2 * LEAST_ENVS), MOST_ENVS)
    return _resized(config, envs, envs * config.hyper.rollout_steps)


def workers_of(config: RunConfig, here: Resources) -> int:
    """The number of workers that the engine will choose."""
    if choose_engine(config) == "local":
        return 1
    replicas = config.algorithm.sharing == "replicas"
    return config.engine.workers or max(1, here.cores if replicas else here.cores - config.engine.learners)


def estimate(config: RunConfig, footprint: Footprint, workers: int) -> int:
    """Peak bytes of all processes."""
    envs, steps = config.env.envs_per_worker, config.hyper.rollout_steps
    replicas = config.algorithm.sharing == "replicas"
    hyper, slots = config.hyper, envs * steps
    batch = slots * hyper.rollouts_per_update(slots) if hyper.rollouts_per_update(slots) > 1 else 0
    rows = hyper.rows_per_step(slots)
    if choose_engine(config) == "local":
        return _process(footprint, envs, slots + batch, rows) + _replay(config, footprint)
    if replicas:
        each = envs if config.engine.scaling == "weak" else -(-envs // workers)
        part = rows if each == envs else -(-rows // workers)
        return RAY_BYTES + workers * _process(footprint, each, each * steps, part)
    learning = slots if config.algorithm.sharing == "gradients" else 0
    actors = workers * _process(footprint, envs, slots, learning)
    learners = config.engine.learners
    rows = 0 if learning else rows // learners
    return RAY_BYTES + actors + learners * (_process(footprint, 0, rows, rows) + _replay(config, footprint))


def _replay(config: RunConfig, footprint: Footprint) -> int:
    """Bytes of the replay in RAM. A memory-mapped one counts as 0: the system can take its pages back."""
    return config.hyper.replay_rows_in_memory() * footprint.frame_bytes


def _process(footprint: Footprint, envs: int, slots: int, rows: int) -> int:
    """Bytes of a process with `envs` environments and rollouts of `slots` steps that learns from `rows` at a time."""
    from paceline.models.nets import PASS_BYTES

    copies = COPIES if rows else 2
    learning = min(rows * footprint.row_bytes, PASS_BYTES) + PARAMETER_BYTES * footprint.parameters
    env_bytes = (footprint.env_bytes + ENV_BYTES * envs) if envs else 0
    return int(PROCESS_BYTES + env_bytes + copies * slots * footprint.frame_bytes + learning)


def _smaller(config: RunConfig, here: Resources, *, may_lower_envs: bool) -> Iterator[RunConfig]:
    """Configs that take less and less memory: fewer workers if the user left them open, then fewer environments."""
    chosen = with_numbers(config, here)
    if config.engine.workers == 0:
        for workers in range(workers_of(chosen, here) - 1, 0, -1):
            engine = config.engine.model_copy(update={"workers": workers, "name": choose_engine(config)})
            config = config.model_copy(update={"engine": engine})
            yield with_numbers(config, here)
    envs = chosen.env.envs_per_worker
    while may_lower_envs and envs > LEAST_ENVS:
        envs = max(LEAST_ENVS, envs // 2)
        env = config.env.model_copy(update={"envs_per_worker": envs})
        yield with_numbers(config.model_copy(update={"env": env}), here)


def _resized(config: RunConfig, envs: int, slots: int | None) -> RunConfig:
    """`slots`: size of a rollout of images, None for vectors."""
    hyper = config.hyper
    if config.algorithm.native:
        hyper = hyper.with_auto_size(slots).fitted(envs * hyper.rollout_steps)
    env = config.env.model_copy(update={"envs_per_worker": envs})
    return config.model_copy(update={"env": env, "hyper": hyper})


def _too_much(config: RunConfig, needed: int, here: Resources) -> str:
    section = config.algorithm_name
    lower = ["env.envs_per_worker", f"{section}.rollout_steps"]
    lower += [f"{section}.replay_size"] if config.algorithm.sharing == "replay" else []
    lower += ["engine.workers"] if workers_of(config, here) > 1 else []
    return (
        f"{_sizes(config)} need about {_gb(needed)}, more than the usable {_gb(here.usable)} of "
        f"{_gb(here.memory_bytes)}: lower {', '.join(lower[:-1])} or {lower[-1]}"
    )


def _line(config: RunConfig, first: RunConfig, needed: int, here: Resources) -> str:
    text = f"sizes      {_sizes(config)}: about {_gb(needed)} of {_gb(here.memory_bytes)}"
    both = [(c.env.envs_per_worker, workers_of(c, here)) for c in (config, first)]
    pairs = zip(("environments", "workers"), *both, strict=True)
    fewer = [f"{new} {name} instead of {old}" for name, new, old in pairs if new < old]
    return text + (f"; {' and '.join(fewer)}, as more would not fit" if fewer else "")


def _sizes(config: RunConfig) -> str:
    text = f"{config.env.envs_per_worker} environments x {config.hyper.rollout_steps} steps"
    sizes = config.hyper.sizes_text()
    return f"{text}, {sizes}" if sizes else text


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number < 9.95e9 else f"{number / 1e9:.0f} GB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or a GPU ran out of memory. torch raises a plain RuntimeError for the former."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def out_of_memory(config: RunConfig, iteration: int, run: Path, error: BaseException) -> str:
    """What to tell the user of a run that ended like this."""
    section, largest = config.algorithm_name, config.hyper.largest
    keys = ["env.envs_per_worker", f"{section}.rollout_steps", *([f"{section}.{largest}"] if largest else [])]
    return (
        f"out of memory at iteration {iteration}: lower {', '.join(keys[:-1])} or {keys[-1]}. The last checkpoint is "
        f"complete: start a new run from its weights with --init-from {run}, or --resume it on a machine with more "
        f"memory ({' '.join(str(error).split())[:160]})"
    )
