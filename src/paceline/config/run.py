"""The configuration of a run: one frozen, nested, validated model.

Each option has its meaning on the line under it: defaults, `paceline train --help` and `docs/configuration.md` come
from here and, for an algorithm's section, from its `Settings`. `resolve.py` makes a `RunConfig` out of a file, `--set`,
flags and a preset."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    SkipValidation,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from paceline.config.algorithm_settings import AlgorithmSettings
from paceline.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, algorithm_class, algorithm_name
from paceline.config.keys import one_line
from paceline.config.multi_agent import MultiAgentConfig
from paceline.config.values import Count, Fraction, OrAuto, Positive, Seconds, Section, UserError, expanded

if TYPE_CHECKING:
    from paceline.algorithms.base import Algorithm

DEFAULT_TOTAL_STEPS = 1_000_000
DEFAULT_ENV_RESTARTS = 5

_METRIC_RULE = re.compile(r"^\s*([\w/.-]+)\s*(>=|<=|>|<)\s*([-+0-9.eE]+)\s*$")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


Entries = list[str | dict[str, dict[str, Any]]]
"""Names of a user's classes, with arguments as `{name: {argument: value}}`."""


def _check_entries(key: str, entries: Entries) -> None:
    for entry in entries:
        if not isinstance(entry, str) and len(entry) != 1:
            raise ValueError(f"{key}={entry}: expected one name per entry: [{{name: {{argument: value}}}}, …]")


class EnvConfig(Section):
    id: str = "CartPole-v1"
    """A Gymnasium id, a Procgen game, `package.module:EnvId`, or `path/to/file.py:ClassName`."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor. Procgen: `num_levels`, `distribution_mode` and others."""
    wrappers: Entries = []
    """Wrappers to apply, in order. Each is a name in `gymnasium.wrappers`, `module:Class` or `file.py:Class`; `{name:
    {argument: value}}` passes arguments."""
    vector: Literal["auto", "sync", "async"] = "auto"
    """How environments are stepped. `sync`: in this process; `async`: in several processes; `auto`: by the
    environment's own vector version if it has one, otherwise `sync`."""
    envs_per_worker: OrAuto = 8
    """Environments per worker; with PPO or A2C and `engine.scaling=strong`, the total of all workers. 0 (or `auto`): 8,
    or, for images, a number that suits the available cores and memory."""
    processes: Annotated[Count, Field(ge=0, le=1_024)] = 0
    """Number of processes for `vector=async`, or of threads for Procgen and Atari; 0: one per available core, at most
    one per environment."""
    step_timeout_seconds: Seconds = 60.0
    """Time limit for one step or reset. If it is exceeded, `vector=async` replaces the process, and a worker on Ray is
    replaced."""
    restart_on_error: Annotated[Count, Field(ge=0)] | None = None
    """Start an environment that raises an error again, and with `vector=async` also one whose process dies or exceeds
    the time limit. Its episode is dropped from the failed step on. The run ends only if all environments fail soon
    after a fresh start, each more than this many times in a row. 0: the first error ends the run, or the worker.
    Default: 5 with `vector=async` and in workers on Ray, 0 in a single process."""
    max_episode_steps: Positive | None = None
    """Truncate episodes at this length instead of the environment's registered limit."""
    frame_stack: Positive = 1
    """Stack the last K observations."""
    channels: Literal["auto", "first", "last"] = "auto"
    """Images: whether their channels are the first or the last axis. `auto`: by the shape; where it fits both, as
    (8, 16, 16) does, the run asks for this setting."""
    action_mask: Literal["auto", "ignore"] = "auto"
    """Discrete actions: `auto` never chooses actions that the environment masks out, by `info["action_mask"]`, a method
    `action_masks()` or a key `action_mask` of its observation. `ignore`: use no masks; the key is an observation."""
    normalize_observation: bool = False
    """Subtract the running mean and divide by the running standard deviation (vector observations only)."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return, and clip them to -10…10. Reported
    returns are not scaled."""
    clip_reward: bool = False
    """Clip rewards to -1…1 for learning, as is usual for Atari. Reported returns are not clipped."""
    reward_discount: Fraction | None = None
    """Discount factor for `normalize_reward` (default: gamma)."""

    def restarts(self, *, in_worker: bool) -> int:
        """`restart_on_error`, or its default. `in_worker`: this process is one of several."""
        if self.restart_on_error is not None:
            return self.restart_on_error
        return DEFAULT_ENV_RESTARTS if in_worker or self.vector == "async" else 0

    @field_validator("id")
    @classmethod
    def _no_module_of_procgen(cls, value: str) -> str:
        """The old `procgen:` prefix would import that module, which is not needed."""
        return value.removeprefix("procgen:")

    @model_validator(mode="after")
    def _one_wrapper_each(self) -> EnvConfig:
        _check_entries("env.wrappers", self.wrappers)
        return self


class ModelConfig(Section):
    hidden: list[Positive] = [64, 64]
    """Widths of the hidden layers (after the convolutions, for images)."""
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Activation function between the layers of the MLP."""
    shared: bool = False
    """Policy and value share one torso, instead of having one tower each."""
    cnn: Literal["auto", "nature", "impala", "small"] = "auto"
    """For images: `nature` (three convolutions), `impala` (residual; seven times the arithmetic, learns more per step)
    or `small`; `auto` is `nature` from 36 pixels up, `small` below."""
    cnn_width: Annotated[float, Field(ge=0.25, le=16)] = 1.0
    """`cnn=impala`: factor for its 16, 32 and 32 channels."""
    cnn_pool: bool = False
    """`cnn=impala`: average each channel over the image instead of flattening it (Impoola). It has fewer weights and
    often generalises better."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """A recurrent layer between the observations (or the features of images) and the hidden layers, for environments
    that do not show everything at once: PPO, A2C, A3C and IMPALA."""
    memory_size: Annotated[Positive, Field(le=1_000_000)] = 64
    """`memory`: number of units of the recurrent layer."""
    sequence_length: Positive = 64
    """`memory`: most steps that a gradient goes back in time. Longer rollouts are cut into sequences of this length;
    an episode or a rollout that ends makes a shorter one. Minibatches consist of whole sequences."""
    class_: str | None = Field(default=None, alias="class")
    """Your own network: `file.py:Net` or `module:Net`, built as `Net(observation_shape, num_outputs, **kwargs)`."""
    kwargs: dict[str, Any] = {}
    """Passed to the constructor of your own network."""
    accelerate: bool = True
    """Use hand-written numpy code for MLPs and loss gradients where it exists. It is several times as fast for small
    networks. `false`: use only torch and autograd."""
    squash: bool = False
    """Continuous actions: squash them into their bounds with tanh, instead of clipping them."""
    log_std_init: float = 0.0
    """Continuous actions: logarithm of the initial standard deviation, for bounds of -1 and 1."""

    @model_validator(mode="after")
    def _own_network(self) -> ModelConfig:
        if self.kwargs and not self.class_:
            raise ValueError("model.kwargs needs model.class, the network that takes them")
        for name in ("hidden", "activation", "shared", "cnn", "cnn_width", "cnn_pool") if self.class_ else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"model.{name} has no effect: model.class={self.class_} replaces the built-in network")
        if self.class_ and self.memory != "none":
            raise ValueError(f"model.memory={self.memory} is for built-in networks, not for model.class={self.class_}")
        for name in ("memory_size", "sequence_length") if self.memory == "none" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"model.{name}={getattr(self, name)} needs model.memory=lstm or gru")
        for name in ("cnn_width", "cnn_pool") if self.cnn != "impala" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                value = str(getattr(self, name)).lower()
                raise ValueError(f"model.{name}={value} needs model.cnn=impala, not {self.cnn}")
        return self


class StopConfig(Section):
    """A run stops at the first limit it reaches. Without a limit, it stops at the preset's budget or after a million
    steps."""

    total_steps: Positive | None = None
    """Stop after this many environment steps (100000, 100k, 1M)."""
    iterations: Positive | None = None
    """Stop after this many iterations."""
    max_time: Seconds | None = None
    """Stop after this much training time, excluding set-up (90s, 30m, 1h30m, 01:30:00)."""
    return_mean: float | None = None
    """Stop when the mean return of the last `return_window` episodes reaches this and an evaluation confirms it."""
    return_window: Positive = 20
    """Number of training episodes that `return_mean` is averaged over."""
    confirm_episodes: Annotated[Count, Field(ge=0, le=1_000_000)] = 20
    """Evaluation episodes whose mean must also reach `return_mean`; 0 turns the confirmation off."""
    metric: str | None = None
    """Stop when a logged metric meets this condition: `explained_variance>=0.9`, `env/utility>0.5`."""
    must_reach: bool = False
    """End with exit code 1 if the budget is used up before `return_mean` or `metric` is reached."""

    @model_validator(mode="after")
    def _metric_rule(self) -> StopConfig:
        if self.must_reach and self.return_mean is None and self.metric is None:
            raise ValueError("stop.must_reach=true needs a goal: stop.return_mean or stop.metric")
        try:
            rule = self.metric_rule
        except ValueError:  # of float()
            rule = None
        if self.metric is not None and rule is None:
            raise ValueError(f"stop.metric={self.metric!r} is not NAME>=NUMBER (or <=, >, <)")
        return self

    @property
    def metric_rule(self) -> tuple[str, Callable[[float, float], bool], float] | None:
        match = _METRIC_RULE.match(self.metric or "")
        return (match[1], _COMPARE[match[2]], float(match[3])) if match else None

    @property
    def has_budget(self) -> bool:
        return any(v is not None for v in (self.total_steps, self.iterations, self.max_time))


class EvalConfig(Section):
    every_steps: Annotated[Count, Field(ge=0)] = 0
    """Evaluate every this many environment steps, at the end of an iteration; 0: never. `best` is the checkpoint with
    the best evaluation."""
    episodes: Annotated[Positive, Field(le=1_000_000)] = 20
    """Episodes per evaluation."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely one, in all evaluations of the run."""


class CheckpointConfig(Section):
    every_iterations: Annotated[Count, Field(ge=0)] = 0
    """Save every this many iterations; 0: only `every_seconds` applies."""
    every_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Save when this many seconds have passed since the last checkpoint; 0 turns it off. A run always saves at its
    end."""
    keep: Positive = 3
    """Number of checkpoints to keep besides `best`."""
    keep_best: Positive = 1
    """Number of checkpoints with the best evaluations to keep; `best` is the first of them."""


class EngineConfig(Section):
    name: Literal["auto", "local", "ray", "rllib"] = "auto"
    """`local`: one process; `ray`: workers on any number of machines; `rllib`: the same training on Ray RLlib; `auto`:
    `ray` with several workers or if RAY_ADDRESS is set, otherwise `local`."""
    workers: Annotated[OrAuto, Field(le=100_000)] = 0
    """Number of workers. With PPO and A2C they collect and learn; with A3C, IMPALA, DQN, and always on `rllib`, they
    are actors that send data to a learner. 0 (or `auto`): one for `local`, one per available core for `ray` and
    `rllib`."""
    learners: Annotated[Positive, Field(le=1_000)] = 1
    """Number of learners, which share each batch and average their gradients: for IMPALA on `ray`, and for every
    algorithm on `rllib`."""
    threads: Annotated[Count, Field(ge=0, le=1_024)] = 0
    """Maximum number of compute threads per process; 0: its share of the cores. An MLP uses at most two."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network learns. `auto`: on a CUDA GPU for images, if there is one, otherwise on the CPU."""
    compile: bool | None = None
    """On a GPU: compile the convolutions first, which takes most of a minute. Default: only for budgets of at least 5M
    steps or five minutes."""
    overlap: bool = False
    """PPO on a GPU: collect the next rollout while learning from this one. The policy that acts is then one iteration
    behind the one that learns."""
    scaling: Literal["strong", "weak"] = "strong"
    """PPO, A2C: with `strong`, the workers divide the environments, the rows of an iteration and the minibatches among
    themselves, and workers beyond the number of environments shorten the rollouts; with `weak`, each worker has that
    many, so all three grow with the number of workers."""
    learning_rate_scaling: Literal["keep", "sqrt", "linear"] = "keep"
    """With `scaling=weak`: `keep` the learning rate, or multiply it by the number of workers (`linear`) or its square
    root."""
    straggler_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """PPO, A2C: once this share of the workers has finished its rollout, the others end theirs early, but not before a
    quarter of it is done. For slow or uneven environments; 0.6 is a common value."""
    address: str | None = None
    """Address of the Ray cluster, as host:port (default: RAY_ADDRESS; without either, paceline starts Ray on this
    machine)."""
    dashboard: bool = False
    """Also start Ray's dashboard, if paceline starts Ray."""
    start_timeout_seconds: Seconds = 180.0
    """Seconds to wait for the workers to be ready."""
    max_restarts: Annotated[Count, Field(ge=0)] = 100
    """How many lost workers are replaced before the run gives up."""
    rllib: dict[str, Any] = {}
    """Arguments of RLlib's `training`, `env_runners`, `learners` and other methods, such as `{use_kl_loss: false}`.
    Only for `rllib`; they override all other settings."""


class RunConfig(Section):
    algo: str = DEFAULT_ALGORITHM
    """The algorithm: ppo, a2c, a3c, impala, dqn, sac, td3 (with `--engine rllib`: ppo, impala, dqn, sac), or your own
    as `path/to/file.py:ClassName`."""
    preset: str | None = None
    """Settings to start from (default: the environment's preset, if it has one); `none` turns presets off."""
    seed: Annotated[Count, Field(ge=0)] = 0
    """Seed of all random number generators."""
    out: str = "runs"
    """Folder for the run directories."""
    name: Annotated[str, Field(pattern=r"^[\w.+=,@-]+$")] | None = None
    """Name of the run directory (default: made from algorithm, env and date)."""
    env: EnvConfig = EnvConfig()
    multi_agent: MultiAgentConfig = MultiAgentConfig()
    model: ModelConfig = ModelConfig()
    hyper: SerializeAsAny[SkipValidation[AlgorithmSettings]]
    """The algorithm's settings. In files and on the command line this section has the algorithm's name."""
    stop: StopConfig = StopConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()
    callbacks: Entries = []
    """Your own callbacks, called while the run trains: `file.py:Class` or `module:Class`; `{name: {argument: value}}`
    passes arguments."""

    @field_validator("out")
    @classmethod
    def _known_home(cls, value: str) -> str:
        expanded(value)
        return value

    @property
    def algorithm(self) -> type[Algorithm]:
        return algorithm_class(self.algo)

    @property
    def algorithm_name(self) -> str:
        """The name of the algorithm and of its section."""
        return algorithm_name(self.algo)

    @model_validator(mode="before")
    @classmethod
    def _algorithm_section(cls, tree: Any) -> Any:
        """The section named after the algorithm becomes `hyper`."""
        if not isinstance(tree, Mapping) or "hyper" in tree:
            return tree
        algo = tree.get("algo", DEFAULT_ALGORITHM)
        if not isinstance(algo, str):
            return {**tree, "hyper": None}
        name, own = algorithm_name(algo), dict(tree)
        if name in cls.model_fields:
            raise UserError(
                f"algo={algo}: '{name}' is already a section of the configuration; give the class another name"
            )
        section = own.pop(name, {})
        for other in ALGORITHMS:
            if own.get(other):
                key = f"{other}.{next(iter(own[other]))}" if isinstance(own[other], dict) else other
                raise UserError(f"{key} is a setting of --algo {other}, but this run uses --algo {algo}")
            own.pop(other, None)
        try:
            return own | {"hyper": algorithm_class(algo).Settings.model_validate(section)}
        except ValidationError as error:
            raise UserError(one_line(error, name, algo)) from None

    @model_serializer(mode="wrap")
    def _with_section(self, dump: Any) -> dict[str, Any]:
        """`hyper` under the name of its section."""
        return {self.algorithm_name if key == "hyper" else key: value for key, value in dump(self).items()}

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        engine, algorithm = self.engine, self.algorithm
        _check_entries("callbacks", self.callbacks)
        rllib = engine.name == "rllib"
        if not algorithm.native and not rllib:
            raise ValueError(f"algo={self.algo} is available only in RLlib: add --engine rllib")
        if algorithm.rllib is None and rllib:
            known = [name for name in ALGORITHMS if algorithm_class(name).rllib is not None]
            raise ValueError(
                f"algo={self.algo} is not available on --engine rllib, which has {', '.join(known)}: leave --engine out"
            )
        if engine.name == "local" and engine.workers > 1:
            raise ValueError(
                f"engine.workers={engine.workers}: the local engine has one process; leave engine.name at `auto`, or "
                "set env.vector=async to step environments in several processes"
            )
        if engine.learning_rate_scaling != "keep" and engine.scaling != "weak":
            raise ValueError(f"engine.learning_rate_scaling={engine.learning_rate_scaling} needs engine.scaling=weak")
        if engine.overlap and not algorithm.can_overlap:
            able = _which(lambda one: one.can_overlap)
            raise ValueError(f"engine.overlap=true is for {able}; {self.algo} on `ray` overlaps by itself")
        if self.multi_agent.policies != "shared":
            self.multi_agent.check(self, _which(lambda one: one.several_policies))
        if rllib:
            return self
        if self.model.memory != "none" and not algorithm.has_memory:
            able = _which(lambda one: one.native and one.has_memory)
            raise ValueError(f"model.memory={self.model.memory} is not for --algo {self.algo}: use {able}")
        if self.model.memory != "none" and engine.device == "cuda":
            raise ValueError(f"engine.device=cuda: a network with model.memory={self.model.memory} learns on the CPU")
        replicas = algorithm.sharing == "replicas"
        if replicas and engine.device == "cuda" and (engine.name == "ray" or engine.workers > 1):
            raise ValueError(
                f"engine.device=cuda: the workers of {self.algo} on Ray learn on the CPU; use one GPU with --engine "
                "local, or impala, whose learner can use it"
            )
        if engine.device == "cuda" and not algorithm.learns_on_gpu:
            able = _which(lambda one: one.native and one.learns_on_gpu)
            raise ValueError(f"engine.device=cuda: {self.algo} learns on the CPU; {able} can use a GPU")
        if engine.learners > 1 and not algorithm.several_learners:
            able = _which(lambda one: one.several_learners)
            raise ValueError(f"engine.learners={engine.learners} is for {able}; with {self.algo} set engine.workers")
        for name in ("scaling", "straggler_share") if not replicas else ():
            if getattr(engine, name) != EngineConfig.model_fields[name].default:
                able = _which(lambda one: one.native and one.sharing == "replicas")
                raise ValueError(f"engine.{name} is for {able}: the workers of {self.algo} do not wait for each other")
        algorithm.check(self)
        return self


def _which(has: Callable[[type[Algorithm]], bool]) -> str:
    """The built-in algorithms of some kind, in words."""
    names = [name for name in ALGORITHMS if has(algorithm_class(name))]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
