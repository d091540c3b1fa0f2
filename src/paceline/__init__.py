"""paceline: train deep-RL agents with one command, from a laptop to a cluster.

import paceline
run = paceline.train({"env": "CartPole-v1"})
agent = paceline.load(run)
action = agent.act(observation)
"""

from __future__ import annotations

from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Agent", "Callback", "Run", "UserError", "compare", "envs", "evaluate", "load", "plot", "report", "train"]

if TYPE_CHECKING:
    from paceline import envs
    from paceline.agent import Agent
    from paceline.api import load, train
    from paceline.config import UserError
    from paceline.evaluate import evaluate
    from paceline.report.compare import compare_runs as compare
    from paceline.report.page import report
    from paceline.report.plots import plot
    from paceline.trained_run import Run
    from paceline.training.callbacks import Callback

_PLACES = {
    "Agent": "paceline.agent:Agent",
    "Callback": "paceline.training.callbacks:Callback",
    "Run": "paceline.trained_run:Run",
    "UserError": "paceline.config:UserError",
    "compare": "paceline.report.compare:compare_runs",
    "envs": "paceline.envs",
    "evaluate": "paceline.evaluate",
    "load": "paceline.api:load",
    "plot": "paceline.report.plots:plot",
    "report": "paceline.report",
    "train": "paceline.api:train",
}
"""Three of them are modules that can be called: the names of their functions are those of the modules, too."""


def __getattr__(name: str) -> Any:
    """Import on first use: `paceline --help` and readers of runs do not need torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("paceline")
    if name in _PLACES:
        module, _, attribute = _PLACES[name].partition(":")
        found = import_module(module)
        if not attribute:
            return found
        return getattr(found, attribute) if attribute[0].isupper() else _in_python(module, attribute)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


@cache
def _in_python(module: str, attribute: str) -> Any:
    """A function whose errors speak of keys, where those of the command line have flags."""
    from paceline.config.wording import python_words

    @wraps(getattr(import_module(module), attribute))
    def function(*arguments: Any, **options: Any) -> Any:
        with python_words():
            return getattr(import_module(module), attribute)(*arguments, **options)

    return function


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]
