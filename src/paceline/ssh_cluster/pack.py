"""The code that goes to an ssh cluster with a job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.code_bundle import CodeBundle, pack_directory
from paceline.code_files import find_module
from paceline.schedulers.train_command import train_words

FLAGS = ("--env", "--algo")


def pack_job(
    cwd: Path, command: Sequence[str], packages: Sequence[str], exclude: Sequence[str], limit_mb: int
) -> CodeBundle:
    """The working directory, the packages of the hosts file, and those that COMMAND names."""
    return pack_directory(cwd, [*packages, *map(str, named_packages(command, cwd))], exclude, limit_mb)


def named_packages(command: Sequence[str], cwd: Path) -> Iterator[Path]:
    """The package of `--env package.module:Name`, where it is installed from a folder outside the working directory."""
    words = train_words(command) or []
    given = {}  # the last one counts
    for word, after in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            given[flag] = value if equals else after
    for reference in given.values():
        top = reference.partition(":")[0].partition(".")[0]
        is_module = ":" in reference and "/" not in reference and top.isidentifier()
        if is_module and not (cwd / top).exists() and not (cwd / f"{top}.py").exists():
            for path in find_module(top):
                if path.is_dir() and not path.resolve().is_relative_to(cwd.resolve()):
                    yield path.resolve()
