"""How much memory a run on images takes, and how many environments, rows and workers the machine has room for.

Numbers that the user gave, or a preset that they named, are kept: what does not fit is an error. Those of a preset that
was found by the env's id are lowered where they do not fit. `auto` follows from the cores and the memory that are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline import machine
from paceline.algo import ALGORITHMS
from paceline.config import EnvConfig, PPOConfig, RunConfig, UserError
from paceline.engine import choose, cluster_address
from paceline.env import atari, procgen
from paceline.env.make import make_scalar
from paceline.model.device import find_device
from paceline.model.nets import CnnActorCritic
from paceline.model.policy import PASS_BYTES
from paceline.spaces import ActionCodec, ObservationCodec

FACTOR = 1.25
"""The estimate was within this factor of what was measured, either way."""
MEMORY_SHARE = 0.8
"""Of the memory that is ours; the rest covers what the estimate misses."""
PROCESS_BYTES = 390_000_000  # measured: Python, torch and our code, with what stays of the first rollout
PROCGEN_BYTES = 360_000_000  # measured: the pictures of its games
RAY_BYTES = 500_000_000  # measured: the driver and Ray's own processes
ENV_BYTES = 1_000_000  # measured for Procgen; an upper bound for Atari
COPIES = 4  # of a rollout's observations: as collected, its valid rows, those in order of this pass and of the last
PARAMETER_BYTES = 16  # itself, its gradient, two moments
ENVS_PER_CORE, LEAST_ENVS, MOST_ENVS = 16, 8, 128
MINIBATCHES, LEAST_ROWS, MOST_ROWS = 4, 256, 2048


@dataclass(frozen=True)
class Images:
    """What the memory of a run depends on, beside its numbers."""

    frame_bytes: int
    row_bytes: int  # of learning, see nets.py
    parameters: int
    env_bytes: int  # of each process that has environments


@dataclass(frozen=True)
class Machine:
    cores: int
    memory_bytes: int

    @property
    def usable(self) -> float:
        return MEMORY_SHARE * self.memory_bytes


def fit(config: RunConfig, *, may_lower: bool, here: Machine | None = None) -> tuple[RunConfig, list[str]]:
    """The config with numbers for what is `auto`, lowered if it `may_lower`; and the choice in words.

    Only for environments that are known to have images, or where the user asks: another one would have to be made to
    look at it. Rollouts of a GPU are in its memory, and those of a cluster on other machines: nothing is said of them.
    """
    here = here or Machine(machine.cores(), machine.memory_limit_bytes())
    auto = config.env.envs_per_worker == 0 or (config.algo == "ppo" and config.ppo.minibatch_size == 0)
    if choose(config) == "rllib":
        return with_defaults(config) if auto else config, []
    known = procgen.game_of(config.env.id) is not None or atari.is_atari(config.env.id)
    if not auto and not known:
        return config, []
    images, on_gpu = look(config)
    if images is None:
        return with_defaults(config), []
    if on_gpu or cluster_address(config.engine):
        return with_numbers(config, here), []
    less = _less(config, here, may_lower_envs=may_lower or config.env.envs_per_worker == 0)
    first = chosen = with_numbers(config, here)
    while (needed := estimate(chosen, images, workers_of(chosen, here))) > here.usable:
        lower = next(less, None)
        if lower is None:
            raise UserError(_too_much(chosen, needed, here))
        chosen = lower
    return chosen, [_line(chosen, first, needed, here)]


def look(config: RunConfig) -> tuple[Images | None, bool]:
    """At one environment and the network for it: None if it shows no images. And whether they learn on a GPU."""
    env = make_scalar(config.env)
    observation, action = ObservationCodec(env.observation_space), ActionCodec(env.action_space)
    env.close()  # type: ignore[no-untyped-call]
    if not observation.images:
        return None, False
    device = find_device(config.engine.device, observation, action)
    learns_there = choose(config) == "local" or ALGORITHMS[config.algo].schedule != "replicas"
    on_gpu = device == "cuda" and learns_there and config.algo != "dqn"
    row_bytes, parameters = 0, 0
    if config.model.class_ is None:
        net = CnnActorCritic(observation, config.model, action.num_outputs, torch.Generator())
        row_bytes, parameters = net.row_bytes, sum(p.numel() for p in net.parameters())
    frame = int(math.prod(observation.shape)) * observation.dtype.itemsize
    games = PROCGEN_BYTES if procgen.game_of(config.env.id) is not None else 0
    return Images(frame, row_bytes, parameters, games), on_gpu


def with_defaults(config: RunConfig) -> RunConfig:
    """For vectors `auto` is what there is without it."""
    envs = config.env.envs_per_worker or EnvConfig.model_fields["envs_per_worker"].default
    rows = config.ppo.minibatch_size or PPOConfig.model_fields["minibatch_size"].default
    return _resized(config, envs, rows)


def with_numbers(config: RunConfig, here: Machine) -> RunConfig:
    """From the cores: sixteen environments for each, four minibatches of a rollout."""
    envs = config.env.envs_per_worker or min(max(ENVS_PER_CORE * here.cores, 2 * LEAST_ENVS), MOST_ENVS)
    slots = envs * config.hyper.rollout_steps
    rows = config.ppo.minibatch_size or min(max(slots // MINIBATCHES, LEAST_ROWS), MOST_ROWS)
    return _resized(config, envs, rows)


def workers_of(config: RunConfig, here: Machine) -> int:
    """As the engines choose them."""
    if choose(config) == "local":
        return 1
    replicas = ALGORITHMS[config.algo].schedule == "replicas"
    cores = max(1, here.cores if replicas else here.cores - config.engine.learners)
    most = config.env.envs_per_worker if replicas and config.engine.scaling == "strong" else cores
    return config.engine.workers or min(cores, most)


def estimate(config: RunConfig, images: Images, workers: int) -> int:
    """Bytes of all processes at the peak."""
    envs, steps = config.env.envs_per_worker, config.hyper.rollout_steps
    replicas = ALGORITHMS[config.algo].schedule == "replicas"
    batch = config.impala.batch_size if config.algo == "impala" else 0
    if choose(config) == "local":
        return _process(images, envs, envs * steps + batch, _rows(config, envs * steps)) + _replay(config, images)
    if replicas:
        each = envs if config.engine.scaling == "weak" else -(-envs // workers)
        rows = _rows(config, envs * steps)
        part = rows if each == envs else -(-rows // workers)
        return RAY_BYTES + workers * _process(images, each, each * steps, part)
    learning = envs * steps if config.algo == "a3c" else 0
    actors = workers * _process(images, envs, envs * steps, learning)
    learners = config.engine.learners
    rows = config.dqn.batch_size if config.algo == "dqn" else batch // learners
    return RAY_BYTES + actors + learners * (_process(images, 0, rows, rows) + _replay(config, images))


def _replay(config: RunConfig, images: Images) -> int:
    """Of DQN's; a file that is mapped into memory gives it up again when others need it."""
    return config.dqn.replay_size * images.frame_bytes if config.algo == "dqn" and config.dqn.replay == "ram" else 0


def _process(images: Images, envs: int, slots: int, rows: int) -> int:
    """One that has `envs` environments, rollouts of `slots` steps, and learns from `rows` of them at once."""
    copies = COPIES if rows else 2
    learning = min(rows * images.row_bytes, PASS_BYTES) + PARAMETER_BYTES * images.parameters
    own = (images.env_bytes + ENV_BYTES * envs) if envs else 0
    return int(PROCESS_BYTES + own + copies * slots * images.frame_bytes + learning)


def _rows(config: RunConfig, slots: int) -> int:
    if config.algo == "impala":
        return max(config.impala.batch_size, slots)
    if config.algo == "dqn":
        return config.dqn.batch_size
    return min(config.ppo.minibatch_size, slots) if config.algo == "ppo" else slots


def _less(config: RunConfig, here: Machine, *, may_lower_envs: bool) -> Iterator[RunConfig]:
    """What takes less memory, step by step: fewer of the workers that are ours to choose, then fewer environments."""
    chosen = with_numbers(config, here)
    if config.engine.workers == 0:
        for workers in range(workers_of(chosen, here) - 1, 0, -1):
            engine = config.engine.model_copy(update={"workers": workers, "name": choose(config)})
            config = config.model_copy(update={"engine": engine})
            yield with_numbers(config, here)
    envs = chosen.env.envs_per_worker
    while may_lower_envs and envs > LEAST_ENVS:
        envs = max(LEAST_ENVS, envs // 2)
        env = config.env.model_copy(update={"envs_per_worker": envs})
        yield with_numbers(config.model_copy(update={"env": env}), here)


def _resized(config: RunConfig, envs: int, rows: int) -> RunConfig:
    ppo = config.ppo.model_copy(update={"minibatch_size": min(rows, envs * config.ppo.rollout_steps)})
    env = config.env.model_copy(update={"envs_per_worker": envs})
    return config.model_copy(update={"env": env, "ppo": ppo if config.algo == "ppo" else config.ppo})


def _too_much(config: RunConfig, needed: int, here: Machine) -> str:
    lower = ["env.envs_per_worker", f"{config.algo}.rollout_steps"]
    lower += ["dqn.replay_size"] if config.algo == "dqn" else []
    lower += ["engine.workers"] if workers_of(config, here) > 1 else []
    return (
        f"{_sizes(config)} need about {_gb(needed)}, and {_gb(here.usable)} of the {_gb(here.memory_bytes)} that are "
        f"ours can be used: lower {', '.join(lower[:-1])} or {lower[-1]}"
    )


def _line(config: RunConfig, first: RunConfig, needed: int, here: Machine) -> str:
    text = f"sizes      {_sizes(config)}: about {_gb(needed)} of {_gb(here.memory_bytes)}"
    both = [(c.env.envs_per_worker, workers_of(c, here)) for c in (config, first)]
    pairs = zip(("environments", "workers"), *both, strict=True)
    less = [f"{new} {name} instead of {old}" for name, new, old in pairs if new < old]
    return text + (f"; {' and '.join(less)}, as more would not fit" if less else "")


def _sizes(config: RunConfig) -> str:
    text = f"{config.env.envs_per_worker} environments x {config.hyper.rollout_steps} steps"
    if config.algo == "ppo":
        return f"{text}, minibatch {config.ppo.minibatch_size}"
    return f"{text}, batch {config.impala.batch_size}" if config.algo == "impala" else text


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number < 9.95e9 else f"{number / 1e9:.0f} GB"
