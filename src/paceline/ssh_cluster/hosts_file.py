"""A cluster reached by ssh, as its file describes it: a list of hosts, a YAML file with more keys, or Ray's
`cluster.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from paceline.config import Positive, Section, UserError
from paceline.config.yaml_text import parse_mapping
from paceline.schedulers.profile import unknown_key, validated
from paceline.schedulers.ssh import LINE_FORMAT, SshHost, distinct_hosts, lines_of, read_text

_NAME = re.compile(r"[A-Za-z][\w-]*")

# The keys of Ray's file that are used, by section ("" is the top), and those that are not, with the reason the user is
# told. Ray's versions 0.8 to 2.60; keys of cloud providers are no part of a file for existing machines.
_RAY_USED = {
    "": (
        *("cluster_name", "provider", "auth", "docker", "rsync_exclude", "initialization_commands", "setup_commands"),
        *("head_setup_commands", "worker_setup_commands"),
    ),
    "provider": ("type", "head_ip", "worker_ips"),
    "auth": ("ssh_user", "ssh_private_key"),
    "docker": ("image", "run_options", "use_podman"),
}
_OWN_RAY = "every job starts its own Ray"
_CODE_IS_SENT = "the working directory is sent with every job"
_ALL_HOSTS = "a job uses all hosts; submit --nodes N uses the first N"
_FIXED_SIZE = "clusters have a fixed size"
_ALIKE = "all hosts are alike"
_PROXY = "put ProxyCommand or ProxyJump into ~/.ssh/config"
_ONE_IMAGE = "all hosts use docker.image"
_RAY_UNUSED = {
    "head_start_ray_commands": _OWN_RAY,
    "worker_start_ray_commands": _OWN_RAY,
    "no_restart": _OWN_RAY,
    "file_mounts": _CODE_IS_SENT,
    "cluster_synced_files": _CODE_IS_SENT,
    "file_mounts_sync_continuously": _CODE_IS_SENT,
    "rsync_filter": "git's ignore rules decide what is sent",
    "min_workers": _ALL_HOSTS,
    "max_workers": _ALL_HOSTS,
    "initial_workers": _ALL_HOSTS,
    "upscaling_speed": _FIXED_SIZE,
    "autoscaling_mode": _FIXED_SIZE,
    "target_utilization_fraction": _FIXED_SIZE,
    "idle_timeout_minutes": "nothing runs between jobs",
    "head_node": _ALIKE,
    "worker_nodes": _ALIKE,
    "available_node_types": _ALIKE,
    "head_node_type": _ALIKE,
    "metadata": "it is for notes of your own",
    "provider.coordinator_address": "the hosts are head_ip and worker_ips",
    "provider.external_head_ip": "the hosts are head_ip and worker_ips",
    "provider.use_internal_ips": "the hosts are head_ip and worker_ips",
    "provider.cache_stopped_nodes": _FIXED_SIZE,
    "provider.disable_node_updaters": "`cluster up` builds the environment",
    "auth.ssh_public_key": "the private key suffices",
    "auth.ssh_proxy_command": _PROXY,
    "auth.ssh_proxy_use_node_id": _PROXY,
    "docker.container_name": "every command has a container of its own",
    "docker.pull": "pull the image on the hosts",
    "docker.pull_before_run": "pull the image on the hosts",
    "docker.head_image": _ONE_IMAGE,
    "docker.worker_image": _ONE_IMAGE,
    "docker.head_run_options": "all hosts use docker.run_options",
    "docker.worker_run_options": "all hosts use docker.run_options",
    "docker.disable_automatic_runtime_detection": "nothing is detected",
    "docker.disable_shm_size_detection": "nothing is detected",
}
_FROM_RAY = ("hosts",)
"""Keys of ours that a file of Ray's cannot have: its provider has them."""


class ClusterConfig(Section):
    """What a hosts file says."""

    name: str
    hosts: tuple[SshHost, ...]
    """The first is the head, where COMMAND runs."""
    key: str | None = None
    """File of the private key; by default the one your ssh uses."""
    workdir: str | None = None
    """Folder for paceline's files, the same path on every host (default: ~/.paceline/NAME)."""
    shared_filesystem: bool = False
    """Whether all hosts share that folder."""
    python: str | None = None
    """An interpreter on the hosts that has paceline and Ray; nothing is installed then."""
    container: str | None = None
    """Words before every command, such as docker run … IMAGE or apptainer exec IMAGE; {workdir} is replaced."""
    extras: list[str] | None = None
    """Extras of paceline to install (default: those installed here)."""
    install: list[str] = []
    """Further requirements for pip: the packages your environments need."""
    pip: list[str] = []
    """Further arguments for `pip install`."""
    setup: list[str] = []
    """Shell commands that run once on every host, in the new environment."""
    exclude: list[str] = []
    """Patterns of files not to send, besides those that git ignores."""
    send_mb: Positive = 100
    """Maximum size of what is sent with a job."""
    packages: list[str] = []
    """Folders outside of the working directory that are sent too and can be imported."""
    interface: str | None = None
    """Network interface between the hosts, such as eth1 or ib0."""
    dashboard: bool = True
    """Whether jobs start Ray's dashboard, on the head's 127.0.0.1."""

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("use a letter, then letters, digits, _ and -")
        return value

    @field_validator("hosts", mode="before")
    @classmethod
    def _from_lines(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"give a list of hosts ({LINE_FORMAT})")
        return distinct_hosts(value)

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(~|/)[\w./@+-]*", value):
            raise ValueError("give a path that begins with / or ~, of letters, digits and . _ - + @")
        return value

    @field_validator("packages", "key")
    @classmethod
    def _expanded(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [str(Path(each).expanduser()) for each in value]
        return value if value is None else str(Path(value).expanduser())

    @property
    def head(self) -> SshHost:
        return self.hosts[0]


def read_hosts_file(path: Path) -> tuple[ClusterConfig, list[str]]:
    """The cluster of a file, and notices about keys that are not used."""
    text = read_text(path, str(path), "give a hosts file, or the name of a cluster that is up")
    name = re.sub(r"[^\w-]", "-", path.name.partition(".")[0])
    if path.suffix not in (".yaml", ".yml"):
        return validated(ClusterConfig, {"name": name, "hosts": lines_of(text)}, f"{path}: "), []
    tree = parse_mapping(text, str(path))
    notices: list[str] = []
    if "provider" in tree or "cluster_name" in tree:
        tree, notices = from_ray(tree, path)
    tree = {"name": name, **tree}
    _check_keys(tree, ClusterConfig.model_fields, f"{path}: ")  # first, as hosts: may be missing because of a typo
    if "hosts" not in tree:
        raise UserError(f"{path}: hosts: is missing; give a list ({LINE_FORMAT})")
    config = validated(ClusterConfig, tree, f"{path}: ")
    folder = path.absolute().parent  # packages are relative to the file
    return config.model_copy(update={"packages": [str(folder / each) for each in config.packages]}), notices


def from_ray(tree: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Ray's `cluster.yaml` for existing machines as keys of `ClusterConfig`, and notices about unused keys.

    The file may also have keys of `ClusterConfig`. They count where both say the same thing; lists are joined.
    """
    ours = [key for key in ClusterConfig.model_fields if key not in _FROM_RAY]
    notices = _unused(tree, "", path, ours)
    sections = {name: tree.get(name) or {} for name in ("provider", "auth", "docker")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UserError(f"{path}: {name}={section}: expected a mapping of keys")
        notices += _unused(section, name, path)
    provider, auth, docker = sections.values()
    if provider.get("type") != "local":
        raise UserError(f"{path}: provider.type={provider.get('type')}: only local is supported: existing machines")
    ips = [provider.get("head_ip"), *_list(provider, "worker_ips", path, "provider.")]
    if not all(isinstance(ip, str) and ip for ip in ips):
        raise UserError(f"{path}: provider needs head_ip and worker_ips: names or addresses")
    setup = _list(tree, "initialization_commands", path) + _list(tree, "setup_commands", path)
    for key in ("head_setup_commands", "worker_setup_commands"):
        if commands := _list(tree, key, path):
            setup += commands
            notices.append(f"{key} run on every host: {_ALIKE}")
    user = f"{auth['ssh_user']}@" if auth.get("ssh_user") else ""
    config: dict[str, Any] = {
        "name": str(tree.get("cluster_name", "")),
        "hosts": [f"{user}{ip}" for ip in ips],
        "key": auth.get("ssh_private_key") or None,
    }
    if docker.get("image"):
        program = "podman" if docker.get("use_podman") else "docker"
        run = f"{program} run --rm -i --init --network host --ipc host -v {{workdir}}:{{workdir}}"
        options = _list(docker, "run_options", path, "docker.")
        config["container"] = " ".join([run, *map(str, options), str(docker["image"])])
    config |= {key: tree[key] for key in ours if key in tree}
    config["setup"] = setup + _list(tree, "setup", path)
    config["exclude"] = _list(tree, "rsync_exclude", path) + _list(tree, "exclude", path)
    return config, notices


def _unused(tree: Mapping[str, Any], section: str, path: Path, others: Iterable[str] = ()) -> list[str]:
    """Notices about the keys of a section that have a value and are not used; UserError for an unknown one."""
    before = f"{section}." if section else ""
    inside = {key.removeprefix(before): why for key, why in _RAY_UNUSED.items() if key.startswith(before)}
    unused = {key: why for key, why in inside.items() if "." not in key}
    _check_keys(tree, (*_RAY_USED[section], *unused, *others), f"{path}: {before}")
    return [f"{before}{key} is not used: {why}" for key, why in unused.items() if tree.get(key)]


def _list(tree: Mapping[str, Any], key: str, path: Path, before: str = "") -> list[Any]:
    value = tree.get(key) or []
    if not isinstance(value, list):
        raise UserError(f"{path}: {before}{key}={value}: expected a list")
    return list(value)


def _check_keys(tree: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in tree:
        if key not in known:
            raise UserError(unknown_key(f"{where}{key}", str(key), sorted(known)))
