"""The settings of each algorithm, a section of the configuration named after it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from paceline.config_values import Count, Fraction, OrAuto, Positive, Schedule, Section

AlgorithmName = Literal["ppo", "a2c", "a3c", "impala", "dqn", "sac"]
RLLIB_ALGORITHMS = ("ppo", "impala", "dqn", "sac")
RLLIB_ONLY = ("sac",)
"""Not of ours: `--engine rllib` runs them."""
SECTIONS: tuple[str, ...] = get_args(AlgorithmName)
ALGORITHM_NAMES: tuple[str, ...] = tuple(name for name in SECTIONS if name not in RLLIB_ONLY)


class AlgorithmConfig(Section):
    """What all algorithms here have in common."""

    rollout_steps: Positive
    """Steps of each environment between updates."""
    learning_rate: Annotated[float, Field(gt=0)]
    """Step size of the optimizer."""
    learning_rate_schedule: Schedule = "constant"
    """`linear` takes it to zero over the budget."""
    gamma: Fraction = 0.99
    """Discount per step."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.5
    """Longest gradient; longer ones are scaled down. 0 turns it off."""


class ActorCriticConfig(AlgorithmConfig):
    normalize_advantage: bool
    """Shift and scale the advantages of a rollout to mean 0, deviation 1."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the squared error of the value."""


class OnPolicyConfig(ActorCriticConfig):
    gae_lambda: Fraction
    """0 bootstraps after one step, 1 sums to the end of the rollout."""


class PPOConfig(OnPolicyConfig):
    rollout_steps: Positive = 128
    """Steps of each environment between updates."""
    epochs: Positive = 10
    """Passes over each rollout."""
    minibatch_size: OrAuto = 256
    """Most rows in one optimizer step; a rollout is cut into equal parts no larger than this. 0 (or `auto`): for images
    a quarter of a rollout, between 256 and 2048, for vectors 256."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Step size of Adam."""
    gae_lambda: Fraction = 0.95
    """0 bootstraps after one step, 1 sums to the end of the rollout."""
    normalize_advantage: bool = True
    """Shift and scale the advantages of a rollout to mean 0, deviation 1."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """How far the probability ratio may move from 1."""
    clip_schedule: Schedule = "constant"
    """`linear` takes `clip` to zero over the budget."""
    value_clip: Annotated[float, Field(gt=0)] | None = None
    """How far the value may move from the one at collection."""
    target_kl: Annotated[float, Field(gt=0)] | None = None
    """Stop the passes over a rollout when the policy has moved 1.5 times this far."""


class A2CConfig(OnPolicyConfig):
    rollout_steps: Positive = 16
    """Steps of each environment between updates."""
    learning_rate: Annotated[float, Field(gt=0)] = 7e-4
    """Step size of the optimizer."""
    gae_lambda: Fraction = 1.0
    """0 bootstraps after one step, 1 sums to the end of the rollout (n-step returns)."""
    normalize_advantage: bool = False
    """Shift and scale the advantages of a rollout to mean 0, deviation 1."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSprop as in the A3C paper, or Adam."""


class A3CConfig(A2CConfig):
    statistics: Literal["shared", "worker"] = "shared"
    """The optimizer's running statistics: one set for the gradients of all workers, or one for each worker's."""


class ImpalaConfig(ActorCriticConfig):
    rollout_steps: Positive = 20
    """Steps of each environment in one rollout, which an actor sends to the learner."""
    batch_size: Positive = 512
    """Rows of one update: as many whole rollouts as reach it."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    """Step size of the optimizer."""
    optimizer: Literal["rmsprop", "adam"] = "adam"
    """Adam, or RMSprop as in the paper."""
    normalize_advantage: bool = False
    """Shift and scale the advantages of a batch to mean 0, deviation 1."""
    trace_lambda: Fraction = 1.0
    """Decay of V-trace's traces; 1 in the paper."""
    clip_rho: Annotated[float, Field(gt=0)] = 1.0
    """Largest importance weight in V-trace's temporal differences: decides which policy's values are learned."""
    clip_c: Annotated[float, Field(gt=0)] = 1.0
    """Largest importance weight in V-trace's traces: decides how fast they are learned."""
    clip_pg_rho: Annotated[float, Field(gt=0)] = 1.0
    """Largest importance weight of the policy gradient."""
    surrogate_clip: Annotated[float, Field(gt=0)] | None = None
    """PPO's clipped surrogate instead of the policy gradient (APPO): how far the probability ratio may move from 1."""
    replay_ratio: Annotated[float, Field(ge=0)] = 0.0
    """Updates on earlier batches for each one on new data."""
    replay_batches: Positive = 16
    """How many earlier batches are kept for that."""


class DQNConfig(AlgorithmConfig):
    rollout_steps: Positive = 4
    """Steps of each environment between two rounds of learning."""
    rounds: Positive = 32
    """Rounds of collecting and learning in one iteration, that is for one row of metrics. On `ray` an actor sends the
    steps of all of them at once, and the learner makes all their optimizer steps."""
    gradient_steps: Positive = 1
    """Optimizer steps of one round."""
    batch_size: Positive = 64
    """Rows of one optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step size of Adam."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 10.0
    """Longest gradient; longer ones are scaled down. 0 turns it off."""
    huber: Annotated[float, Field(gt=0)] = 1.0
    """Errors beyond this count in proportion to their size, smaller ones to its square."""
    replay_size: Positive = 100_000
    """Steps of all environments together that are kept to learn from."""
    replay: Literal["ram", "disk"] = "ram"
    """Where: in memory, or the observations in a file of the run, mapped into memory (for images)."""
    learning_starts: Annotated[Count, Field(ge=0)] = 1000
    """Steps to collect first; their actions are random with `exploration=epsilon`."""
    double: bool = True
    """Choose the action of the target by the network that learns, so that its errors do not choose themselves."""
    dueling: bool = False
    """Two outputs: the value of a state, and what each action is better than the others."""
    n_step: Positive = 1
    """Rewards summed before the target bootstraps."""
    prioritized: bool = False
    """Draw rows by the size of their last error instead of all alike."""
    priority_alpha: Fraction = 0.6
    """Power of that error; 0 is all alike."""
    priority_beta: Fraction = 0.4
    """How much of the difference importance weights make up for at first; 1 at the end of the budget."""
    exploration: Literal["epsilon", "noisy"] = "epsilon"
    """A random action now and then, or noise on the weights whose size is learned."""
    epsilon_start: Fraction = 1.0
    """Share of random actions at first."""
    epsilon_end: Fraction = 0.05
    """Share of random actions after `epsilon_fraction` of the budget."""
    epsilon_fraction: Fraction = 0.1
    """Part of the budget in which the share falls."""
    epsilon_power: Annotated[float, Field(gt=0)] = 7.0
    """On `ray`: actor i of N explores with epsilon to the power 1 + i / (N - 1) x this, as in Ape-X."""
    noisy_deviation: Annotated[float, Field(gt=0)] = 0.5
    """First deviation of the weights with `exploration=noisy`, times the root of a layer's inputs."""
    target_update_every: Positive = 500
    """Optimizer steps between updates of the target network."""
    target_tau: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far it goes to the network that learns: 1 copies it, 0.005 with `target_update_every=1` follows slowly."""


class SACConfig(Section):
    """Soft actor-critic, by RLlib."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Step size of Adam, for actor, critics and temperature."""
    gamma: Fraction = 0.99
    """Discount per step."""
    batch_size: Positive = 256
    """Rows of one update."""
    buffer_size: Positive = 1_000_000
    """Steps that are kept for learning."""
    learning_starts: Annotated[Count, Field(ge=0)] = 1500
    """Steps before the first update."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """How far the target networks follow at each update; 1 copies."""
    n_step: Positive = 1
    """Rewards that are summed before bootstrapping."""
