"""Find run directories below a folder, and the files that `paceline bench` leaves beside its runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.config import UserError
from paceline.run.directory import RunDirectory

BENCH_FILES = ("suite.json", "scaling.json")
"""They name the planned runs, including those that failed before they had a directory."""
MAX_DEPTH = 5
MAX_OTHER_FOLDERS = 10_000


Runs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""Runs or folders of runs: one, or several."""


def paths_of(runs: Runs) -> list[Path]:
    return [Path(one) for one in ([runs] if isinstance(runs, str | os.PathLike) else runs)]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below `paths`, each once; UserError for a path without any."""
    found: dict[Path, Path] = {}
    for given in paths:
        path = Path(given).expanduser()
        if not _allowed(path.exists):
            RunDirectory.open(path)  # its error suggests similar names
        unreadable: list[Path] = []
        below = _all_below(path, unreadable)
        if not below and unreadable:
            raise UserError(f"{unreadable[0]} cannot be read, and there is no other run; check its permissions")
        if not below:
            raise UserError(
                f"{path}: no run in it (a run is a folder with config.yaml); give a run or a folder of runs"
            )
        for one in below:
            found.setdefault(one.resolve(), one)  # a run reached through a link is the same run
    return list(found.values())


def unreadable_folders(paths: Iterable[Path]) -> list[str]:
    """One line for each folder below `paths` that may not be read and may hold runs."""
    unreadable: list[Path] = []
    for path in paths:
        _all_below(Path(path).expanduser(), unreadable)
    return [f"{path} cannot be read, so its runs are missing" for path in dict.fromkeys(unreadable)]


def planned_entries(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """The entries of `suite.json` and `scaling.json` in these folders, by the directory of each run."""
    found: dict[Path, dict[str, Any]] = {}
    for folder in paths:
        for file in (one for name in BENCH_FILES for one in (folder / name, *folder.glob(f"*/{name}"))):
            try:
                entries = json.loads(file.read_bytes())["runs"]
                found |= {(file.parent / entry["name"]).absolute(): entry for entry in entries}
            except (OSError, ValueError, KeyError, TypeError):  # another program's file
                continue
    return found


def bench_commands(paths: Iterable[Path]) -> list[str]:
    """The `paceline bench` commands that made the runs in these folders."""
    found: list[str] = []
    for file in (path / name for path in paths for name in BENCH_FILES):
        try:
            commands = json.loads(file.read_bytes()).get("commands") or []
        except (OSError, ValueError, AttributeError):
            continue
        found += [command for command in commands if isinstance(command, str)]
    return found


def _all_below(path: Path, unreadable: list[Path]) -> list[Path]:
    """UserError where there are too many other folders, as in /proc or a home directory."""
    found: list[Path] = []
    others = 0
    for folder, is_run in _below(path, unreadable):
        found += [folder] if is_run else []
        others += not is_run
        if others > MAX_OTHER_FOLDERS:
            raise UserError(f"{path}: more than {MAX_OTHER_FOLDERS:,} folders that are no runs; give a folder of runs")
    return found


def _below(path: Path, unreadable: list[Path], depth: int = MAX_DEPTH) -> Iterator[tuple[Path, bool]]:
    """Every folder that is looked into, and whether it is a run."""
    is_run = _allowed((path / "config.yaml").is_file)
    yield path, is_run
    if not is_run and depth and _allowed(path.is_dir):
        try:
            inside = sorted(path.iterdir())
        except OSError:
            unreadable.append(path)
            return
        for one in inside:
            if not one.name.startswith(".") and _allowed(one.is_dir):
                yield from _below(one, unreadable, depth - 1)


def _allowed(test: Callable[[], bool]) -> bool:
    """False where permissions forbid the test: one closed folder must not hide the others."""
    try:
        return test()
    except OSError:
        return False
