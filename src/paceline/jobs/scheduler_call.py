"""Running a scheduler's commands."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from paceline.config import UserError

CALL_SECONDS = 120.0


def run_command(argv: Sequence[str], seconds: float = CALL_SECONDS) -> subprocess.CompletedProcess[str]:
    """A scheduler's command; UserError where it cannot be started or does not answer."""
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise UserError(not_started(argv, error)) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{shlex.join(argv)}` gave no answer within {seconds:g} s: try again later") from None


def call(argv: Sequence[str]) -> str:
    """The output of a scheduler's command; UserError with all of it where the command fails."""
    done = run_command(argv)
    if done.returncode != 0:
        output = " ".join(f"{done.stderr}\n{done.stdout}".split())
        raise UserError(f"`{shlex.join(argv)}` failed with {done.returncode}: {output or 'no message'}")
    return done.stdout


def not_started(argv: Sequence[str], error: OSError) -> str:
    return f"cannot start {argv[0]} ({error.strerror}): run this on a login node, where the scheduler's commands are"
