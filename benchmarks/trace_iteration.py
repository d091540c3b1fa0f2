"""Records which functions of paceline one iteration of training calls, as JSON.

    python benchmarks/trace_iteration.py src     iteration 3 of PPO on CartPole-v1, in one process with one thread

Prints `{"modules": […], "calls": [[caller, callee, function], …]}`: the modules that the process has imported, and each
call from one function of the package to another, once, in the order in which they first happened. It works with any
version of the package: the argument is the folder that has it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(sys.argv[1]).resolve()
FOLDER = SOURCE / "paceline"
FIRST = 2  # iterations before the one recorded: the first calls allocate and warm up


def main() -> None:
    sys.path.insert(0, str(SOURCE))
    from paceline import api

    calls: dict[tuple[str, str, str], None] = {}

    def record(frame: FrameType, event: str, argument: Any) -> None:
        name, callee = frame.f_code.co_qualname, _module(frame)
        if event != "call" or callee is None or name.endswith(("comp>", "<genexpr>")):
            return
        outer = frame.f_back
        while outer is not None and (_module(outer) is None or outer.f_code.co_name.endswith(("comp>", "<genexpr>"))):
            outer = outer.f_back
        caller = _module(outer) if outer is not None else None
        if caller is not None:
            calls.setdefault((caller, callee, name))

    def after_iteration(loop: Any) -> None:
        if loop.counters.iteration == FIRST:
            sys.setprofile(record)
        elif loop.counters.iteration > FIRST:
            sys.setprofile(None)

    hook = next(name for name in ("on_iteration", "watch") if name in inspect.signature(api.train).parameters)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
        tree = {"env": "CartPole-v1", "out": out, "stop": {"iterations": FIRST + 2}, "engine": {"threads": 1}}
        api.train(tree, **{hook: after_iteration})
    modules = sorted(name for name in sys.modules if name.partition(".")[0] == "paceline")
    print(json.dumps({"modules": modules, "calls": list(calls)}))


def _module(frame: FrameType) -> str | None:
    """`algorithms.ppo`, or None for code of others."""
    path = Path(frame.f_code.co_filename)
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts) if path.is_relative_to(FOLDER) else None


if __name__ == "__main__":
    main()
