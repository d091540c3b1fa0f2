"""The algorithms, by name."""

from paceline.algo.a2c import A2C
from paceline.algo.base import Algorithm
from paceline.algo.ppo import PPO

ALGORITHMS = {"ppo": PPO, "a2c": A2C}

__all__ = ["ALGORITHMS", "Algorithm"]
