"""Modules that are also their main function: `paceline.evaluate(run)` beside `from paceline.evaluate import …`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from paceline.config.wording import python_words


class CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with python_words():
            return vars(self)[vars(self)["CALLED"]](*arguments, **options)


def make_callable(module: str, function: str) -> None:
    """Calling the module calls this function of it, whatever it is at that time."""
    found = sys.modules[module]
    found.__class__ = CallableModule
    vars(found)["CALLED"] = function
    found.__doc__ = f"{found.__doc__}\n\n{function}: {vars(found)[function].__doc__}"
