"""The algorithms, by name."""

from paceline.algo.a2c import A2C
from paceline.algo.a3c import A3C
from paceline.algo.base import Algorithm
from paceline.algo.dqn import DQN
from paceline.algo.impala import Impala
from paceline.algo.ppo import PPO

ALGORITHMS: dict[str, type[Algorithm]] = {"ppo": PPO, "a2c": A2C, "a3c": A3C, "impala": Impala, "dqn": DQN}

__all__ = ["ALGORITHMS", "Algorithm"]
