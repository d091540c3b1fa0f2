"""`paceline train` for the crash matrix: it writes down the phase it is in, and writes checkpoints slowly.

The phases, one per line of the file PACELINE_PHASES: `start` (the engine is being made), `iteration`, `save`,
`evaluation`, `end` (the last save, and closing).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.commands.main import main
from paceline.commands.train import TrainVerb

SLOW_SECONDS = 0.15  # for each file of a checkpoint
PHASES = Path(os.environ["PACELINE_PHASES"])


def announce(owner: Any, name: str, phase: Callable[[tuple[Any, ...]], str]) -> None:
    """Write down `phase(arguments)` before each call of `owner.name`."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with PHASES.open("a") as file:
            file.write(f"{phase(args)}\n")
        return original(*args, **kwargs)

    setattr(owner, name, call)


def patch() -> None:
    from paceline import api
    from paceline.run import checkpoint
    from paceline.training.loop import Loop

    announce(api, "make_engine", lambda args: "start")
    announce(Loop, "_iterate", lambda args: "iteration")
    announce(Loop, "_evaluate", lambda args: "evaluation")
    announce(Loop, "save", lambda args: "end" if len(args) > 1 else "save")  # the last one is given a status
    write = checkpoint._write

    def slow_write(path: Path, content: bytes) -> None:
        write(path, content)
        time.sleep(SLOW_SECONDS)

    checkpoint._write = slow_write


def main_with_phases() -> None:
    train = TrainVerb._train

    def patched(verb: TrainVerb) -> int:
        patch()  # here, where the command's own handlers are in place: the imports are part of its start
        return train(verb)

    TrainVerb._train = patched  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    main_with_phases()
