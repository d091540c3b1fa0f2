"""The machines of a private cluster: a list of hosts, a YAML file with more to say, or a `cluster.yaml` of Ray's."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from paceline.config import Positive, Section, UserError
from paceline.launch.profile import checked

FORM = "one host a line: [user@]name[:port] [cpus=N] [gpus=N]; # begins a comment"
_HOST = re.compile(r"(?:(?P<user>[\w.+-]+)@)?(?P<name>\w[\w.-]*)(?::(?P<port>\d+))?")
_NAME = re.compile(r"[A-Za-z][\w-]*")

# What Ray's file may say, and which of it is left aside, with the reason that the user is told.
_RAY_USED = {
    "cluster_name", "provider", "auth", "docker", "rsync_exclude", "initialization_commands", "setup_commands",
    "head_setup_commands", "worker_setup_commands",
}  # fmt: skip
_RAY_UNUSED = {
    "head_start_ray_commands": "every job starts a Ray of its own",
    "worker_start_ray_commands": "every job starts a Ray of its own",
    "file_mounts": "the working directory is sent with every job",
    "cluster_synced_files": "the working directory is sent with every job",
    "file_mounts_sync_continuously": "the working directory is sent with every job",
    "rsync_filter": "git's own rules decide what is sent",
    "min_workers": "a job uses all hosts; submit --nodes N takes the first N",
    "max_workers": "a job uses all hosts; submit --nodes N takes the first N",
    "upscaling_speed": "nothing is scaled up or down",
    "idle_timeout_minutes": "nothing runs between jobs",
}
_RAY_PROVIDER = ("type", "head_ip", "worker_ips")
_RAY_AUTH = ("ssh_user", "ssh_private_key")
_RAY_DOCKER = ("image", "run_options", "container_name", "pull_before_run")


class Machine(BaseModel):
    """One host, and how ssh reaches it. 0: the host itself is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    target: str
    """[user@]name"""
    port: int = 0
    cpus: int = 0
    gpus: int = 0

    @property
    def name(self) -> str:
        return self.target.rpartition("@")[2]

    @property
    def label(self) -> str:
        """As the user wrote it: no other host of the file has it."""
        return f"{self.target}:{self.port}" if self.port else self.target


class Hosts(Section):
    """A private cluster; the first host is its head."""

    name: str
    hosts: tuple[Machine, ...]
    """The first is the head: COMMAND runs there."""
    key: str | None = None
    """File with the private key for ssh; by default what your ssh would use."""
    workdir: str | None = None
    """Folder of ours, the same on every host (default: ~/.paceline/NAME)."""
    shared_filesystem: bool = False
    """Whether that folder is one and the same for all hosts."""
    python: str | None = None
    """An interpreter on the hosts that has paceline and Ray; nothing is installed then."""
    container: str | None = None
    """Words put before every command: docker run … IMAGE, apptainer exec IMAGE; {workdir} is put in."""
    extras: list[str] | None = None
    """Extras of paceline to install (default: those that are installed here)."""
    install: list[str] = []
    """Further requirements for pip: the packages your environments need."""
    pip: list[str] = []
    """Further arguments for `pip install`."""
    setup: list[str] = []
    """Shell commands, run once on every host when its environment has been built, and in it."""
    exclude: list[str] = []
    """Patterns of what is not sent with a job, beside what git ignores."""
    send_mb: Positive = 100
    """The most that is sent with a job."""
    packages: list[str] = []
    """Folders here, outside of the working directory, that are sent too and can be imported."""
    interface: str | None = None
    """Network between the hosts, as eth1 or ib0."""
    dashboard: bool = True
    """Whether jobs have Ray's dashboard, on the head's 127.0.0.1."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a letter, then letters, digits, _ and -")
        return value

    @field_validator("hosts", mode="before")
    @classmethod
    def _from_lines(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"a list of hosts ({FORM})")
        found: dict[str, Machine] = {}
        for entry in value:
            machine = parse_line(entry) if isinstance(entry, str) else Machine.model_validate(entry)
            place = machine.label.rpartition("@")[2]
            if place in found:
                raise ValueError(f"{place} stands there twice; each host once")
            found[place] = machine
        if not found:
            raise ValueError(f"no host in it ({FORM})")
        return tuple(found.values())

    @field_validator("workdir")
    @classmethod
    def _from_the_root(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(~|/)[\w./@+-]*", value):
            raise ValueError("a path that begins with / or ~, of letters, digits and . _ - + @")
        return value

    @field_validator("packages", "key")
    @classmethod
    def _expanded(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [str(Path(each).expanduser()) for each in value]
        return value if value is None else str(Path(value).expanduser())

    @property
    def head(self) -> Machine:
        return self.hosts[0]


def parse_line(line: str) -> Machine:
    words = line.split()
    match = _HOST.fullmatch(words[0]) if words else None
    if match is None:
        raise ValueError(f"{line!r} is no host ({FORM})")
    values: dict[str, int] = {}
    for setting in words[1:]:
        key, _, value = setting.partition("=")
        if key not in ("cpus", "gpus") or not value.isdecimal():
            raise ValueError(f"{setting!r} is not understood ({FORM})")
        values[key] = int(value)
    user = f"{match['user']}@" if match["user"] else ""
    return Machine(target=f"{user}{match['name']}", port=int(match["port"] or 0), **values)


def read_hosts(path: Path) -> tuple[Hosts, list[str]]:
    """The cluster of a file, and what to tell the user about what was left aside."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{path}: {reason}; give a file of hosts, or the name of a cluster that is up") from None
    name = re.sub(r"[^\w-]", "-", path.name.partition(".")[0])
    if path.suffix not in (".yaml", ".yml"):
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return checked(Hosts, {"name": name, "hosts": [line for line in lines if line]}, f"{path}: "), []
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a mapping of keys is expected, with hosts: in it")
    notices: list[str] = []
    if "provider" in tree or "cluster_name" in tree:
        tree, notices = from_ray(tree, path)
    tree = {"name": name, **tree}
    _only(tree, tuple(Hosts.model_fields), path, "")  # before what is missing: it may be that
    if "hosts" not in tree:
        raise UserError(f"{path}: hosts: is missing: a list ({FORM})")
    made = checked(Hosts, tree, f"{path}: ")
    folder = path.absolute().parent  # as the file says it, wherever one stands
    return made.model_copy(update={"packages": [str(folder / each) for each in made.packages]}), notices


def from_ray(tree: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Ray's own file for machines that are there already, in our words."""
    _only(tree, (*_RAY_USED, *_RAY_UNUSED), path, "")
    provider, auth, docker = (_part(tree, name, path) for name in ("provider", "auth", "docker"))
    _only(provider, _RAY_PROVIDER, path, "provider.")
    _only(auth, _RAY_AUTH, path, "auth.")
    _only(docker, _RAY_DOCKER, path, "docker.")
    if provider.get("type") != "local":
        given = provider.get("type")
        raise UserError(f"{path}: provider.type={given}: only local, machines that are there already")
    ips = [provider.get("head_ip"), *(provider.get("worker_ips") or [])]
    if not all(isinstance(ip, str) and ip for ip in ips):
        raise UserError(f"{path}: provider needs head_ip and worker_ips, a name or address each")
    user = f"{auth['ssh_user']}@" if auth.get("ssh_user") else ""
    for role in ("head", "worker"):
        if tree.get(f"{role}_setup_commands"):
            raise UserError(f"{path}: {role}_setup_commands: all hosts are set up alike; put them into setup_commands")
    made: dict[str, Any] = {
        "name": str(tree.get("cluster_name", "")),
        "hosts": [f"{user}{ip}" for ip in ips],
        "setup": [*(tree.get("initialization_commands") or []), *(tree.get("setup_commands") or [])],
        "exclude": list(tree.get("rsync_exclude") or []),
    }
    if auth.get("ssh_private_key"):
        made["key"] = auth["ssh_private_key"]
    if docker.get("image"):
        options = " ".join(docker.get("run_options") or [])
        run = "docker run --rm -i --init --network host --ipc host -v {workdir}:{workdir}"
        made["container"] = f"{run} {options} {docker['image']}"
    notices = [f"{key} is not used: {why}" for key, why in _RAY_UNUSED.items() if tree.get(key)]
    return made, notices


def _part(tree: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    value = tree.get(name) or {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {name}={value}: a mapping of keys is expected")
    return value


def _only(tree: Mapping[str, Any], known: tuple[str, ...], path: Path, where: str) -> None:
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 3, 0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"
            raise UserError(f"{path}: {where}{key}: unknown; {hint}")


class Up(Section):
    """A cluster as `cluster up` left it: what it was asked for, and what it found."""

    hosts: Hosts
    workdir: str
    """The folder, from the root, on every host."""
    python: str
    """The interpreter there."""
    digest: str = ""
    """Of the environment that was built; empty where the user gave one, or where it was taken away again."""

    @property
    def name(self) -> str:
        return self.hosts.name


def folder() -> Path:
    """Where clusters that are up are remembered."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "paceline/clusters"


def save(up: Up) -> None:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder() / f"{up.name}.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(up.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def is_file(word: str) -> bool:
    """Whether HOSTS is meant as a file, and not as the name of a cluster."""
    return "/" in word or "." in word or Path(word).is_file()


def find(word: str) -> Up:
    """The cluster of a hosts file, or of that name."""
    return load(read_hosts(Path(word))[0].name if is_file(word) else word)


def load(name: str) -> Up:
    try:
        return Up.model_validate_json((folder() / f"{name}.json").read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(path.stem for path in folder().glob("*.json"))) or "none yet"
        raise UserError(f"there is no cluster {name} ({known}); make one: paceline cluster up HOSTS") from None
    except ValueError:
        raise UserError(f"{folder()}/{name}.json is of another version: paceline cluster up HOSTS again") from None
