"""Modules that are also their main function: `paceline.evaluate(run)` beside `from paceline.evaluate import …`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return vars(self)[vars(self)["CALLED"]](*arguments, **options)


def make_callable(module: str, function: str) -> None:
    """Calling the module calls this function of it, whatever it is at that time."""
    found = sys.modules[module]
    found.__class__ = CallableModule
    vars(found)["CALLED"] = function
    found.__doc__ = f"{found.__doc__}\n\n{function}: {vars(found)[function].__doc__}"
