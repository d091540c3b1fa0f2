"""The environment that a site's profile names: whether it is there, before a job is submitted that needs it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from paceline.config import UserError
from paceline.jobs.query import query
from paceline.schedulers.profile import Profile


def check_environment(profile: Profile, *, only_warn: bool = False) -> None:
    """UserError, or a warning, where `venv`, `conda` or the image of `container` does not exist."""
    problem = _problem(profile)
    if problem and only_warn:
        print(f"paceline: {problem}", file=sys.stderr)
    elif problem:
        raise UserError(problem)


def _problem(profile: Profile) -> str:
    if profile.conda and "/" not in profile.conda:
        return _unknown_conda(profile.conda)
    for key, value in (("conda", profile.conda), ("venv", profile.venv)):
        path = _expanded(value) if value else None
        if path is not None and not (path / "bin/python3").exists():
            return (
                f"{key}: {value} in the profile has no bin/python3 here: create it, or correct the path; where only "
                "the hosts have it, activate it in lines: instead"
            )
        if path is not None:
            break
    for word in shlex.split(profile.container) if profile.container else []:
        path = _expanded(word) if word.endswith((".sif", ".sqsh", ".img")) else None
        if path is not None and not path.exists():
            return f"container: {word} in the profile does not exist here: pull the image, or correct the path"
    return ""


def _expanded(text: str) -> Path | None:
    """None where only the job knows some variable in it."""
    path = Path(os.path.expandvars(text)).expanduser()
    return None if "$" in str(path) or not path.is_absolute() else path


def _unknown_conda(name: str) -> str:
    """Why conda does not know the environment; empty where it does, or is not here to ask (`module load conda`)."""
    program = os.environ.get("CONDA_EXE") or shutil.which("conda")
    answer = query([program, "env", "list", "--json"], quiet=True) if program else None
    try:
        found = [Path(each).name for each in json.loads(answer.stdout)["envs"]] if answer else [name]
    except (ValueError, KeyError, TypeError):
        return ""
    known = ", ".join(sorted({*found[1:], "base"}))
    return "" if name in (*found, "base") else f"conda: {name} in the profile is unknown to conda, which has {known}"
