"""The configuration of a run: from a file, `--set`, flags and a preset to one validated object."""

from paceline.config.algorithm_settings import AlgorithmSettings
from paceline.config.algorithms import ALGORITHMS, algorithm_class, algorithm_name, native_algorithms
from paceline.config.run import (
    DEFAULT_TOTAL_STEPS,
    CheckpointConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    ModelConfig,
    RunConfig,
    StopConfig,
)
from paceline.config.values import Positive, Seconds, Section, UserError, parse_count, parse_seconds, printable

__all__ = [
    "ALGORITHMS",
    "DEFAULT_TOTAL_STEPS",
    "AlgorithmSettings",
    "CheckpointConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "ModelConfig",
    "Positive",
    "RunConfig",
    "Seconds",
    "Section",
    "StopConfig",
    "UserError",
    "algorithm_class",
    "algorithm_name",
    "native_algorithms",
    "parse_count",
    "parse_seconds",
    "printable",
]
