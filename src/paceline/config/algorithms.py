"""The algorithms: which there are, and how a name becomes a class.

A built-in algorithm is named by its key below, a user's own by `file.py:Class` or `module:Class`. Both are loaded the
same way and declare the same things (see `paceline.algorithms.base.Algorithm`), so nobody else asks for a name.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.config.plugins import load_attribute
from paceline.config.values import UserError, did_you_mean

if TYPE_CHECKING:
    from paceline.algorithms.base import Algorithm

ALGORITHMS: dict[str, str] = {
    "ppo": "paceline.algorithms.ppo:PPO",
    "a2c": "paceline.algorithms.a2c:A2C",
    "a3c": "paceline.algorithms.a3c:A3C",
    "impala": "paceline.algorithms.impala:IMPALA",
    "dqn": "paceline.algorithms.dqn:DQN",
    "sac": "paceline.algorithms.sac:SAC",
    "td3": "paceline.algorithms.td3:TD3",
}
DEFAULT_ALGORITHM = "ppo"


def algorithm_name(algo: str) -> str:
    """The name of its settings section, from the text alone: `ppo`, or `my_algo` for `path/to/file.py:MyAlgo`."""
    if algo in ALGORITHMS:
        return algo
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", algo.rpartition(":")[2])
    return words.lower()


def native_algorithms() -> list[str]:
    """The built-in algorithms that run without RLlib."""
    return [name for name in ALGORITHMS if algorithm_class(name).native]


def algorithm_class(algo: str) -> type[Algorithm]:
    """Load the class. Importing a built-in one does not import torch."""
    return _builtin(algo) if algo in ALGORITHMS else _users_own(algo)


@cache
def _builtin(algo: str) -> type[Algorithm]:
    cls: type[Algorithm] = load_attribute(ALGORITHMS[algo], "algo")
    return cls


def _users_own(algo: str) -> type[Algorithm]:
    if ":" not in algo:
        known = list(ALGORITHMS)
        raise UserError(
            f"algo={algo} is not one of {', '.join(known)}{did_you_mean(algo, known)}; "
            "give your own algorithm as path/to/file.py:ClassName"
        )
    cls = load_attribute(algo, "algo")
    base: Any = load_attribute("paceline.algorithms.base:Algorithm", "algo")
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"algo={algo}: expected a subclass of paceline.algorithms.base.Algorithm, not {cls!r}")
    if not hasattr(cls, "Settings"):
        raise UserError(f"algo={algo}: {cls.__name__} has no nested class Settings")
    return cls
