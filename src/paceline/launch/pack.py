"""What goes with a job to a private cluster: the working directory, and packages of the user's that lie elsewhere."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import UserError
from paceline.launch.command import train_words

PACKAGES = ".packages"
"""Folder beside the working directory's own files, for what comes from elsewhere."""
_SECONDS = 60.0
_CACHES = {"__pycache__", "node_modules", "build", "dist"}
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Parcel:
    files: dict[str, Path]
    """Name there → file here."""
    packages: tuple[str, ...]
    """Folders there, within the working directory, that are to be on Python's path."""

    @property
    def size(self) -> int:
        return sum(path.lstat().st_size for path in self.files.values())

    @property
    def digest(self) -> str:
        made = hashlib.sha256()
        for name, path in sorted(self.files.items()):
            content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
            mode = os.access(path, os.X_OK)
            made.update(f"{name}\0{mode}\0{len(content)}\0".encode() + content)
        return made.hexdigest()[:16]

    def archive(self, path: Path) -> None:
        with tarfile.open(path, "w:gz", compresslevel=1) as tar:
            for name, source in sorted(self.files.items()):
                tar.add(source, name, recursive=False)


def pack(cwd: Path, command: Sequence[str], packages: Sequence[str], exclude: Sequence[str], limit_mb: int) -> Parcel:
    """The working directory's files that are code, and the packages; an error where that is too much."""
    files = {name: cwd / name for name in listed(cwd, exclude)}
    beside: dict[str, None] = {}
    for folder in dict.fromkeys([*packages, *map(str, env_packages(command, cwd))]):
        source = Path(folder)
        if not source.is_dir():
            raise UserError(f"packages: {folder}: no such folder")
        root = f"{PACKAGES}/{source.name}"
        # A folder that is itself a package is imported by its name, one that holds packages by theirs.
        beside[PACKAGES if (source / "__init__.py").exists() else _root_of(source, root)] = None
        files |= {f"{root}/{name}": source / name for name in listed(source, exclude)}
    made = Parcel(files, tuple(beside))
    if made.size > limit_mb * 1_000_000:
        largest = sorted(files.items(), key=lambda item: -item[1].lstat().st_size)[:3]
        names = ", ".join(f"{name} ({path.lstat().st_size / 1e6:.0f} MB)" for name, path in largest)
        raise UserError(
            f"{cwd}: {made.size / 1e6:.0f} MB would be sent to every host, {limit_mb} MB are allowed; the largest are "
            f"{names}: name them in .gitignore or under exclude: in the hosts file, or raise send_mb:"
        )
    return made


def listed(folder: Path, exclude: Sequence[str]) -> list[str]:
    """What git knows and does not ignore; without git all but hidden files, caches, environments and runs."""
    words = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_SECONDS)
        known = done.stdout.decode(errors="surrogateescape").split("\0") if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        known = None
    names = _walk(folder) if known is None else known
    return sorted(
        name
        for name in names
        if name and _is_file(folder / name) and not _matches(name, exclude) and not _in_run(folder, name)
    )


def env_packages(command: Sequence[str], cwd: Path) -> Iterable[Path]:
    """The package of `--env package.module:Name`, where it is installed here from a folder of the user's."""
    words = train_words(command) or []
    given = [word.partition("=")[2] or after for word, after in itertools.pairwise([*words, ""])
             if word == "--env" or word.startswith("--env=")]  # fmt: skip
    env = given[-1] if given else ""
    top = env.partition(":")[0].partition(".")[0]
    if ":" not in env or "/" in env or not top.isidentifier() or top == "paceline" or top in sys.stdlib_module_names:
        return
    if (cwd / top).exists() or (cwd / f"{top}.py").exists():
        return  # it goes with the working directory
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # the command itself will say so
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place).resolve()
        if not _INSTALLED.intersection(path.parts) and not path.is_relative_to(cwd.resolve()):
            yield path


def _root_of(source: Path, root: str) -> str:
    return f"{root}/src" if (source / "src").is_dir() else root


def _walk(folder: Path) -> Iterable[str]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _stays(Path(here, name))]
        for name in names:
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                yield Path(here, name).relative_to(folder).as_posix()


def _stays(folder: Path) -> bool:
    return (
        folder.name.startswith(".")
        or folder.name in _CACHES
        or (folder / "pyvenv.cfg").exists()
        or (folder / "conda-meta").exists()
    )


def _in_run(folder: Path, name: str) -> bool:
    return any(_is_run(folder / each) for each in Path(name).parents)


@functools.lru_cache(maxsize=1000)
def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and (folder / "config.yaml").exists()


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """As in .gitignore: a pattern without a slash is of any part of the path, one with it of the beginning."""
    parts = Path(name).parts
    for pattern in patterns:
        plain = pattern.strip("/").removeprefix("**/").removesuffix("/**")
        if "/" in plain:
            if any(fnmatch.fnmatch("/".join(parts[: at + 1]), plain) for at in range(len(parts))):
                return True
        elif any(fnmatch.fnmatch(part, plain) for part in parts):
            return True
    return False
