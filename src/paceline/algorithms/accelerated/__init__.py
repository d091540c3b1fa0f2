"""Accelerators: the gradient of a loss with respect to the network's outputs, written by hand in numpy.

A loss is written once, in torch, in its algorithm's file. For small networks autograd costs more than the arithmetic,
so the losses below also have their derivative here; the network takes it from there, by `models/numpy_mlp.py` for MLPs
and by autograd for others. A property test compares each accelerator with autograd through the loss.
`model.accelerate=false` turns them off, and an algorithm without one just runs, slower."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ACCELERATORS = {
    "paceline.algorithms.ppo.PPO": "ppo.PPOAccelerator",
    "paceline.algorithms.a2c.A2C": "a2c.A2CAccelerator",
    "paceline.algorithms.impala.IMPALA": "impala.IMPALAAccelerator",
    "paceline.algorithms.dqn.DQN": "dqn.DQNAccelerator",
    "paceline.algorithms.sac.SAC": "continuous.SACAccelerator",
    "paceline.algorithms.td3.TD3": "continuous.TD3Accelerator",
}
"""The class that defines the loss → its accelerator in this package."""


def find_accelerator(algorithm: Any) -> Any:
    """The accelerator of the algorithm's loss, or None. A subclass with a loss of its own has none."""
    if not algorithm.policy.accelerate:
        return None
    owner = next(cls for cls in type(algorithm).__mro__ if "loss" in vars(cls))
    name = ACCELERATORS.get(f"{owner.__module__}.{owner.__qualname__}")
    if name is None:
        return None
    module, _, attribute = name.partition(".")
    return getattr(import_module(f"{__name__}.{module}"), attribute)(algorithm)
