"""The configuration of a run: one frozen, nested, validated model.

Each option has its meaning on the line under it; the defaults, `paceline train --help` and `docs/configuration.md` are
made from here and, for the sections of the algorithms, from `config_algo.py`. How a file, `--set`, flags and presets
become one `RunConfig` is in `resolve.py`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config_algo import (
    ALGORITHM_NAMES,
    RLLIB_ALGORITHMS,
    RLLIB_ONLY,
    SECTIONS,
    A2CConfig,
    A3CConfig,
    ActorCriticConfig,
    AlgorithmConfig,
    AlgorithmName,
    DQNConfig,
    ImpalaConfig,
    OnPolicyConfig,
    PPOConfig,
    SACConfig,
)
from paceline.config_values import (
    Count,
    Fraction,
    OrAuto,
    Positive,
    Seconds,
    Section,
    UserError,
    parse_count,
    parse_seconds,
)

__all__ = [
    "ALGORITHM_NAMES",
    "DEFAULT_TOTAL_STEPS",
    "RLLIB_ALGORITHMS",
    "SECTIONS",
    "A2CConfig",
    "A3CConfig",
    "ActorCriticConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DQNConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "ImpalaConfig",
    "ModelConfig",
    "OnPolicyConfig",
    "PPOConfig",
    "Positive",
    "RunConfig",
    "SACConfig",
    "Seconds",
    "Section",
    "StopConfig",
    "UserError",
    "parse_count",
    "parse_seconds",
]
DEFAULT_TOTAL_STEPS = 1_000_000

_METRIC_RULE = re.compile(r"^\s*([\w/.-]+)\s*(>=|<=|>|<)\s*([-+0-9.eE]+)\s*$")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class EnvConfig(Section):
    id: str = "CartPole-v1"
    """A Gymnasium id, a Procgen game, `package.module:EnvId`, or `path/to/file.py:ClassName`."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor. Procgen: `num_levels`, `distribution_mode` and others."""
    wrappers: list[str | dict[str, dict[str, Any]]] = []
    """In order: a name in `gymnasium.wrappers`, `module:Class` or `file.py:Class`; `{name: {argument: value}}`."""
    vector: Literal["auto", "sync", "async"] = "auto"
    """`sync`: in this process; `async`: in several; `auto`: the env's own vector env if it has one, else `sync`."""
    envs_per_worker: OrAuto = 8
    """Environments stepped together by one worker; of PPO and A2C with `engine.scaling=strong`, by all together. 0 (or
    `auto`): for images from the cores and the memory that are ours, for vectors 8."""
    processes: Annotated[Count, Field(ge=0)] = 0
    """Processes of `vector=async`, threads of Procgen and Atari; 0 means one per core we own, at most one per
    environment."""
    step_timeout_seconds: Seconds = 60.0
    """The longest that one step or reset may take: then `vector=async` ends with an error, and a worker on Ray is
    given up and replaced."""
    max_episode_steps: Positive | None = None
    """Truncate episodes at this length instead of the registered one."""
    frame_stack: Positive = 1
    """Show the agent the last K observations."""
    normalize_observation: bool = False
    """Subtract the running mean and divide by the running deviation (vector observations only)."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return. Reported returns stay raw."""
    clip_reward: bool = False
    """Learn from rewards cut to -1…1, as is usual for Atari. Reported returns stay raw."""
    reward_discount: Fraction | None = None
    """Discount of that return; gamma if not given."""

    @field_validator("id")
    @classmethod
    def _no_module_of_procgen(cls, value: str) -> str:
        """The old spelling asks for the module `procgen` to be imported. Nobody needs to have it."""
        return value.removeprefix("procgen:")

    @model_validator(mode="after")
    def _one_wrapper_each(self) -> EnvConfig:
        for wrapper in self.wrappers:
            if not isinstance(wrapper, str) and len(wrapper) != 1:
                raise ValueError(
                    f"env.wrappers={wrapper}: one name each is expected: [{{name: {{argument: value}}}}, …]"
                )
        return self


class ModelConfig(Section):
    hidden: list[Positive] = [64, 64]
    """Widths of the hidden layers (after the convolutions, for images)."""
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Between the layers of the MLP."""
    shared: bool = False
    """One torso for policy and value, instead of one tower each."""
    cnn: Literal["auto", "nature", "impala", "small"] = "auto"
    """For images: `nature` (three convolutions), `impala` (residual, seven times the arithmetic, learns more from as
    many steps) or `small`; `auto` is `nature` from 36 pixels up, `small` below."""
    cnn_width: Annotated[float, Field(ge=0.25, le=16)] = 1.0
    """`cnn=impala`: its 16, 32 and 32 channels are multiplied by this."""
    cnn_pool: bool = False
    """`cnn=impala`: average each channel over the image instead of flattening it (Impoola). Fewer weights, and often
    better on levels not trained on."""
    class_: str | None = Field(default=None, alias="class")
    """Your own network: `file.py:Net` or `module:Net`, built as `Net(observation_shape, num_outputs, **kwargs)`."""
    kwargs: dict[str, Any] = {}
    """Passed to your own network's constructor."""
    squash: bool = False
    """Continuous actions: squash with tanh into the bounds, instead of clipping at them."""
    log_std_init: float = 0.0
    """Continuous actions: logarithm of the initial deviation, where the bounds are -1 and 1."""

    @model_validator(mode="after")
    def _own_network(self) -> ModelConfig:
        if self.kwargs and not self.class_:
            raise ValueError("model.kwargs needs model.class, the network they are for")
        for name in ("hidden", "activation", "shared", "cnn", "cnn_width", "cnn_pool") if self.class_ else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"model.{name} is of our networks, and model.class={self.class_} takes their place")
        for name in ("cnn_width", "cnn_pool") if self.cnn != "impala" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                value = str(getattr(self, name)).lower()
                raise ValueError(f"model.{name}={value} needs model.cnn=impala, not {self.cnn}")
        return self


class StopConfig(Section):
    """Whichever comes first. With none given: a million steps, or what the preset says."""

    total_steps: Positive | None = None
    """Environment steps."""
    iterations: Positive | None = None
    """Rounds of collecting and learning."""
    max_time: Seconds | None = None
    """Training time, set-up not counted: seconds, or 90s, 30m, 1h30m, 01:30:00."""
    return_mean: float | None = None
    """Mean return of the last `return_window` episodes, confirmed by evaluation."""
    return_window: Positive = 20
    """Episodes in that mean."""
    confirm_episodes: Annotated[Count, Field(ge=0)] = 20
    """Evaluation episodes that must reach `return_mean` too; 0 turns the confirmation off."""
    metric: str | None = None
    """Any logged metric against a number: `explained_variance>=0.9`, `env/utility>0.5`."""

    @model_validator(mode="after")
    def _metric_rule(self) -> StopConfig:
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
    """Evaluate at the first iteration at or past each multiple; 0 means never. `best` is chosen by it."""
    episodes: Positive = 20
    """Episodes of each evaluation."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely one."""


class CheckpointConfig(Section):
    every_iterations: Annotated[Count, Field(ge=0)] = 0
    """Save every K iterations; 0 leaves it to `every_seconds`."""
    every_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Save when this long has passed since the last; 0 turns it off. The end of a run always saves."""
    keep: Positive = 3
    """How many to keep, beside `best`."""


class EngineConfig(Section):
    name: Literal["auto", "local", "ray", "rllib"] = "auto"
    """Where it runs: `local` is one process, `ray` has workers anywhere, `rllib` is the same job by Ray RLlib; `auto`
    is `ray` for several workers or where RAY_ADDRESS names a cluster."""
    workers: OrAuto = 0
    """PPO, A2C: processes that collect and learn. A3C, IMPALA, DQN, and all of `rllib`: actors beside the learner. 0
    (or `auto`): one for `local`, one per core that is ours for `ray` and `rllib`."""
    learners: Positive = 1
    """IMPALA on `ray`, and all of `rllib`: processes that share each batch and average their gradients."""
    threads: Annotated[Count, Field(ge=0)] = 0
    """Most threads for the arithmetic of one process; 0 means its share of the cores. An MLP uses two at most."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network learns: `auto` is a CUDA GPU for images, where there is one, and else the CPU."""
    compile: bool | None = None
    """On a GPU: compile the convolutions first, which takes most of a minute; by default for 5M steps and five minutes
    or more, whichever of them is given."""
    overlap: bool = False
    """PPO on a GPU: collect the next rollout while learning from this one. The policy that acts is then one iteration
    behind the one that learns."""
    scaling: Literal["strong", "weak"] = "strong"
    """PPO, A2C: `strong` keeps the rows of an iteration and of a minibatch, and the workers share them and the
    environments. `weak` gives each worker as many: all three grow with the workers."""
    learning_rate_scaling: Literal["keep", "sqrt", "linear"] = "keep"
    """With `scaling=weak`: `keep` the learning rate, or multiply it by the number of workers or by its square root."""
    straggler_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """PPO, A2C: once this share of the workers has its rollout, the others stop theirs (at a quarter at the earliest).
    For slow or uneven environments; 0.6 is usual."""
    address: str | None = None
    """A Ray cluster, as host:port; else RAY_ADDRESS, else a Ray of our own on this machine."""
    dashboard: bool = False
    """Start Ray's dashboard too, when the Ray is our own."""
    start_timeout_seconds: Seconds = 180.0
    """The longest that the workers may take to be ready."""
    max_restarts: Annotated[Count, Field(ge=0)] = 100
    """Workers replaced in one run before it gives up."""
    rllib: dict[str, Any] = {}
    """Read by `rllib` alone, and its last word: arguments of RLlib's `training`, `env_runners`, `learners` and other
    methods, such as `{use_kl_loss: false}`."""


class RunConfig(Section):
    algo: AlgorithmName = "ppo"
    """What learns."""
    preset: str | None = None
    """Settings to start from: the env's own if none is named, or `none`."""
    seed: Annotated[Count, Field(ge=0)] = 0
    """The same seed gives the same run."""
    out: str = "runs"
    """Folder of the run directories."""
    name: Annotated[str, Field(pattern=r"^[\w.+=,@-]+$")] | None = None
    """Name of the run directory; made from algorithm, env and date if not given."""
    env: EnvConfig = EnvConfig()
    model: ModelConfig = ModelConfig()
    ppo: PPOConfig = PPOConfig()
    a2c: A2CConfig = A2CConfig()
    a3c: A3CConfig = A3CConfig()
    impala: ImpalaConfig = ImpalaConfig()
    dqn: DQNConfig = DQNConfig()
    sac: SACConfig = SACConfig()
    stop: StopConfig = StopConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def hyper(self) -> AlgorithmConfig:
        """The section of the chosen algorithm."""
        section: AlgorithmConfig = getattr(self, self.algo)
        return section

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        engine = self.engine
        rllib = engine.name == "rllib"
        if self.algo in RLLIB_ONLY and not rllib:
            raise ValueError(f"algo={self.algo} is RLlib's: add --engine rllib")
        if self.algo not in RLLIB_ALGORITHMS and rllib:
            raise ValueError(
                f"algo={self.algo} is not one of RLlib's, {', '.join(RLLIB_ALGORITHMS)}: leave --engine out"
            )
        if engine.name == "local" and engine.workers > 1:
            raise ValueError(
                f"engine.workers={engine.workers}: the local engine is one process; leave engine.name to `auto`, or "
                "set env.vector=async to step environments in several"
            )
        if engine.learning_rate_scaling != "keep" and engine.scaling != "weak":
            raise ValueError(f"engine.learning_rate_scaling={engine.learning_rate_scaling} needs engine.scaling=weak")
        if engine.overlap and self.algo != "ppo":
            raise ValueError(f"engine.overlap=true is for ppo; {self.algo} on `ray` overlaps by itself")
        synchronous = self.algo in ("ppo", "a2c")
        if synchronous and not rllib and engine.device == "cuda" and (engine.name == "ray" or engine.workers > 1):
            raise ValueError(
                f"engine.device=cuda: the workers of {self.algo} on Ray learn on the CPU; use one GPU with --engine "
                "local, or impala, whose learner takes it"
            )
        if synchronous and not rllib and engine.scaling == "strong" and engine.workers > self.env.envs_per_worker > 0:
            raise ValueError(
                f"engine.workers={engine.workers} cannot share env.envs_per_worker={self.env.envs_per_worker} "
                "environments: raise that, or give each worker as many with engine.scaling=weak"
            )
        least = self.env.envs_per_worker * (self.dqn.rollout_steps + 2)
        if self.algo == "dqn" and not rllib and self.dqn.replay_size < least:
            raise ValueError(
                f"dqn.replay_size={self.dqn.replay_size} is too small: env.envs_per_worker x (dqn.rollout_steps + 2) = "
                f"{least} is the least"
            )
        if self.algo == "dqn" and not rllib and engine.device == "cuda":
            raise ValueError("engine.device=cuda: dqn learns on the CPU; ppo and impala can use a GPU")
        if engine.learners > 1 and self.algo != "impala" and not rllib:
            raise ValueError(f"engine.learners={engine.learners} is for impala; with {self.algo} set engine.workers")
        for name in ("scaling", "straggler_share") if not synchronous else ():
            if getattr(engine, name) != EngineConfig.model_fields[name].default:
                raise ValueError(f"engine.{name} is for ppo and a2c: the workers of {self.algo} wait for nobody")
        return self
