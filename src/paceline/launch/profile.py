"""A site's profile, what all jobs there have in common: a YAML file of the user's, or an example in `sites/`."""

from __future__ import annotations

import difflib
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError, field_validator

from paceline.config import Section, UserError
from paceline.launch.job import Job

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
Model = TypeVar("Model", bound=Section)


class Profile(Section):
    """Values of `set`, `venv`, `conda` and `scratch` may name variables: `$USER` is put in where the job runs."""

    scheduler: str | None = None
    """What --on would say."""
    modules: list[str] = []
    """In order, what follows the word `module`: purge, load NAME, unload NAME."""
    venv: str | None = None
    """Folder of the virtual environment paceline is in; by default that of the command that submits."""
    conda: str | None = None
    """Prefix (a path) or name of the conda environment it is in."""
    unset: list[str] = []
    """Variables that must not be there."""
    set: dict[str, str] = {}
    """Variables that must."""
    scratch: str | None = None
    """Node-local folder for temporary files (TMPDIR); short, as sockets are made below it."""
    interface: str | None = None
    """Network between the hosts, as ib0 or hsn0."""
    launcher: str | None = None
    """Command that starts one process on each host, where the scheduler itself offers no way to reach them."""
    lines: list[str] = []
    """Further shell lines, run before the command."""
    defaults: dict[str, Any] = {}
    """Of each option of a job: nodes, cores, walltime, account, queue, …"""

    @field_validator("set", mode="before")
    @classmethod
    def _texts(cls, values: Any) -> Any:
        """Numbers and switches are meant as they are written."""
        if not isinstance(values, dict):
            return values
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else value
            for name, value in values.items()
        }

    @field_validator("set", "unset")
    @classmethod
    def _variables(cls, names: Any) -> Any:
        for name in names:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a variable")
        return names


def folder() -> Path:
    """Where the user's own profiles are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "paceline/sites"


def read_profile(name: str | None) -> Profile:
    """A path, or a name: of a file of the user's, else of an example in the package. None: an empty one."""
    if name is None:
        return Profile()
    text = _text(name)
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"--profile {name}{where}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"--profile {name}: a mapping of keys is expected, not {type(tree).__name__}")
    profile = checked(Profile, tree, f"--profile {name}: ")
    checked(Job, profile.defaults, f"--profile {name}: defaults.")
    return profile


def checked(model: type[Model], tree: dict[str, Any], where: str) -> Model:
    """The model, or one line about the first thing wrong with it; `where` comes before the name of a field."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, model.model_fields, 3, 0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(model.model_fields)}"
            raise UserError(f"{where}{key}: unknown; {hint}") from None
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        raise UserError(f"{where}{key}={first['input']}: {message}" if key else f"{where}{message}") from None


def _text(name: str) -> str:
    path = Path(name).expanduser()
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        path = folder() / f"{name}.yaml"
        example = resources.files("paceline.launch").joinpath("sites", f"{name}.yaml")
        if not path.exists() and example.is_file():
            return example.read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        known = ", ".join(_known()) or "none"
        raise UserError(f"--profile {name}: {path}: {reason}; give a path, or one of {known}") from None


def _known() -> list[str]:
    examples = [entry.name for entry in resources.files("paceline.launch").joinpath("sites").iterdir()]
    own = [path.name for path in folder().glob("*.yaml")]
    return sorted({name.removesuffix(".yaml") for name in [*examples, *own]})
