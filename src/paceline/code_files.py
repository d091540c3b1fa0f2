"""Which files are a user's code: in a folder, of a module, and of the modules that it imports."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from paceline.config.objects import add_to_path

GIT_SECONDS = 60.0
CACHES = frozenset({"__pycache__", "node_modules"})
INSTALLED = frozenset({"site-packages", "dist-packages"})
BUILT = frozenset({"build", "dist"})


def walk(folder: Path, skip: Collection[str]) -> Iterator[Path]:
    """Files below `folder`, without hidden ones, byte code, virtual environments, runs and folders named in `skip`.
    Links to folders are not followed."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and _may_hold_code(Path(here, name)))
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                yield Path(here, name)


def project_files(folder: Path, exclude: Sequence[str]) -> list[str]:
    """The files of a project by relative name: those that git tracks or would track; without git, those of `walk`."""
    words = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=GIT_SECONDS)
        listed = done.stdout.decode(errors="surrogateescape").split("\0") if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        listed = None
    if listed is None:
        listed = [path.relative_to(folder).as_posix() for path in walk(folder, CACHES | BUILT)]
    runs = {parent for parent in {p for name in listed for p in Path(name).parents} if _is_run(folder / parent)}
    return sorted(
        name
        for name in listed
        if name
        and ((folder / name).is_symlink() or (folder / name).is_file())  # git also lists deleted files
        and not _is_excluded(name, exclude)
        and not runs.intersection(Path(name).parents)
    )


def find_module(top: str) -> Iterator[Path]:
    """The file or folders of a top-level module, unless every machine has it: Python's, paceline's or installed."""
    if top == "paceline" or top in sys.stdlib_module_names:
        return
    add_to_path(Path.cwd())  # as for the import
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # not a module's name; whoever imports it reports that
        return
    if spec is None:
        return
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin and spec.has_location else [])
    for path in (Path(place).absolute() for place in places):
        if path.exists() and not INSTALLED.intersection(path.resolve().parts):
            yield path


def imported_modules(source: bytes) -> set[str]:
    """The top-level modules that a source file imports by name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # data, or code for another Python
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _may_hold_code(folder: Path) -> bool:
    is_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()
    return not (folder.name.startswith(".") or is_environment or _is_run(folder))


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and (folder / "config.yaml").exists()


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """As in .gitignore: a pattern without a slash matches any part of the path, one with a slash its beginning."""
    parts = Path(name).parts
    for pattern in patterns:
        plain = pattern.strip("/").removeprefix("**/").removesuffix("/**")
        starts = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(part, plain) for part in (starts if "/" in plain else parts)):
            return True
    return False
