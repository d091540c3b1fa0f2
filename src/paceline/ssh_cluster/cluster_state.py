"""Clusters that are up, remembered in a file each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import Field

from paceline.config import Section, UserError
from paceline.schedulers.job_record import data_folder
from paceline.ssh_cluster.hosts_file import ClusterConfig, read_hosts_file


class ClusterState(Section):
    """A cluster as `cluster up` left it, or began it."""

    config: ClusterConfig = Field(alias="hosts")
    workdir: str
    """Absolute path of the folder on every host."""
    python: str = ""
    """The interpreter on the hosts; empty as long as `up` has not succeeded."""
    digest: str = ""
    """Digest of the environment that was built; empty where the user gave one, or after `down --purge`."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_up(self) -> bool:
        return bool(self.python and (self.digest or self.config.python))

    def check_is_up(self) -> None:
        if not self.is_up:
            raise UserError(f"cluster {self.name} is down: paceline cluster up {self.name}")


def folder() -> Path:
    return data_folder("clusters")


def save(cluster: ClusterState) -> None:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder() / f"{cluster.name}.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(cluster.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def is_up(name: str) -> bool:
    with contextlib.suppress(UserError):
        return load(name).is_up
    return False


def is_file(word: str) -> bool:
    """Whether HOSTS is a file rather than the name of a cluster."""
    return "/" in word or "." in word or Path(word).is_file()


def find(word: str) -> ClusterState:
    """The cluster of a hosts file, or of this name."""
    return load(read_hosts_file(Path(word))[0].name if is_file(word) else word)


def load(name: str) -> ClusterState:
    try:
        return ClusterState.model_validate_json((folder() / f"{name}.json").read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(path.stem for path in folder().glob("*.json"))) or "none yet"
        raise UserError(f"there is no cluster {name} ({known}); create it: paceline cluster up HOSTS") from None
    except ValueError:
        raise UserError(
            f"{folder()}/{name}.json is from another version: run paceline cluster up HOSTS again"
        ) from None
