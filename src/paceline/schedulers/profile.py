"""A site's profile, the settings that all jobs at a site share: the user's YAML file, or an example in `sites/`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, field_validator

from paceline.config import Section, UserError
from paceline.config.yaml_text import parse_mapping, read_text
from paceline.schedulers.job import Duration, Job

MIN_PORTS = 100
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
Model = TypeVar("Model", bound=Section)


class Profile(Section):
    """Values of `set`, `venv`, `conda`, `container` and `scratch` may contain variables such as `$USER`, which the job
    expands."""

    scheduler: str | None = None
    """Default of --on."""
    modules: list[str] = []
    """Arguments of `module` commands, in order: purge, load NAME, unload NAME."""
    venv: str | None = None
    """Folder of paceline's virtual environment; by default the one that `paceline submit` runs in."""
    conda: str | None = None
    """Prefix (a path) or name of paceline's conda environment."""
    container: str | None = None
    """Words before every command on the hosts, such as apptainer exec --nv IMAGE, podman-hpc run --rm --net=host IMAGE
    or shifter --image=IMAGE. Its python3 needs the same paceline, and Ray; `venv` and `conda` are outside of it."""
    unset: list[str] = []
    """Environment variables to remove."""
    set: dict[str, str] = {}
    """Environment variables to set."""
    scratch: str | None = None
    """Node-local folder for temporary files (TMPDIR). Keep it short: sockets are created below it."""
    interface: str | None = None
    """Network interface between the hosts, such as ib0 or hsn0."""
    ports: str | None = None
    """Ports that the hosts may use between them, such as 20000-20999, for sites with a firewall."""
    kill_delay: Duration | None = None
    """Time between SIGTERM and SIGKILL when the scheduler ends a job; by default the scheduler is asked."""
    launcher: str | None = None
    """Command that starts one process on each host, for schedulers that cannot reach the hosts."""
    lines: list[str] = []
    """Additional shell lines, which the first host runs before the command. What they export reaches all hosts."""
    defaults: dict[str, Any] = {}
    """Defaults of the job options: nodes, cores, walltime, account, queue, …"""

    @field_validator("set", mode="before")
    @classmethod
    def _texts(cls, values: Any) -> Any:
        """Numbers and booleans become text, as written in YAML."""
        if not isinstance(values, dict):
            return values
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else value
            for name, value in values.items()
        }

    @field_validator("ports")
    @classmethod
    def _port_range(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ports(value)
        return value

    @field_validator("set", "unset")
    @classmethod
    def _variables(cls, names: Any) -> Any:
        for name in names:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name of a variable")
        return names


def parse_ports(text: str) -> tuple[int, int]:
    """`20000-20999` → its first and last port; ValueError for another text or a range that is too small."""
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not low >= 1024 or high > 65535 or high - low + 1 < MIN_PORTS:
        raise ValueError(f"give a range from 1024 to 65535 of at least {MIN_PORTS} ports, such as 20000-20999")
    return low, high


def folder() -> Path:
    """Folder of the user's own profiles."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "paceline/sites"


def read_profile(name: str | None) -> Profile:
    """The profile at a path, or of a name: the user's own, else an example of the package. None: an empty one."""
    if name is None:
        return Profile()
    profile = validated(Profile, parse_mapping(_text(name), f"--profile {name}"), f"--profile {name}: ")
    validated(Job, profile.defaults, f"--profile {name}: defaults.")
    return profile


def validated(model: type[Model], tree: dict[str, Any], where: str) -> Model:
    """The model, or a UserError about the first thing wrong with it; `where` comes before the name of the field."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            raise UserError(unknown_key(where + key, key, model.model_fields)) from None
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        raise UserError(f"{where}{key}={first['input']}: {message}" if key else f"{where}{message}") from None


def unknown_key(where: str, key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, 3, 0.6)
    return f"{where}: unknown; " + (f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}")


def _text(name: str) -> str:
    path = Path(name).expanduser()
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        path = folder() / f"{name}.yaml"
        example = resources.files("paceline.schedulers").joinpath("sites", f"{name}.yaml")
        if not path.exists() and example.is_file():
            return example.read_text(encoding="utf-8")
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        examples = [entry.name for entry in resources.files("paceline.schedulers").joinpath("sites").iterdir()]
        own = [path.name for path in folder().glob("*.yaml")]
        known = ", ".join(sorted({name.removesuffix(".yaml") for name in [*examples, *own]}))
        raise UserError(f"--profile {name}: {path}: {reason}; give a path or one of {known}") from None
