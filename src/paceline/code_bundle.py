"""The user's code in one bundle, for machines that do not have it.

`pack` collects what a settings tree names, for Ray workers and tune trials:

- `path/to/file.py:Name`: the file's folder and everything below it, data included;
- `module:Name`: the top-level package or module, and the modules beside it that it imports. Installed packages are
  expected on every machine; an editable install, whose files lie outside site-packages, is packed;
- what was given as an object in Python and has no such name: its pickle, and the modules that this needs.

Hidden files and folders, virtual environments, run directories and large files are left out. `pack_directory` collects
a whole working directory, for ssh clusters.

A worker calls `install` before it validates its settings, since a user's algorithm may be in the bundle, and
`uninstall` at its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import json
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.code_files import CACHES, INSTALLED, find_module, imported_modules, project_files, walk
from paceline.config import RunConfig, UserError
from paceline.config.objects import PickledObject, add_to_path, adopt, pickled_objects
from paceline.config.plugins import map_texts, moved
from paceline.config.resolve import to_tree, validate

MAX_FILE_BYTES = 5 * 2**20
MAX_BYTES = 50 * 2**20
MAX_FILES = 2_000
LOCK_SECONDS = 30.0
PACKAGES = ".packages"
"""Folder in the copy of a working directory, for packages from elsewhere."""
NAMING_KEYS = ("algo", "env", "env.id", "env.wrappers", "model.class", "callbacks")
"""Settings that may be a `module:Name`. A `file.py:Name` is found in any setting."""

_held: dict[Path, int] = {}
"""Folders that this process has installed, each with a shared lock that lasts as long as the process."""


class CodeFile(NamedTuple):
    path: Path
    """Where it lies on the machine that packed it."""
    executable: bool
    content: bytes | None = None
    """None: the bundle is only archived where it was packed, so the content stays on disk."""

    def read(self) -> bytes:
        if self.content is not None:
            return self.content
        return str(self.path.readlink()).encode() if self.path.is_symlink() else self.path.read_bytes()


@dataclass(frozen=True)
class CodeBundle:
    roots: tuple[tuple[str, dict[str, CodeFile]], ...] = ()
    """Folders of the machine that packed them, each with its files by relative name."""
    references: tuple[tuple[str, int, str], ...] = ()
    """Each `file.py:Name` in the settings, the index of its root, and the reference relative to that root."""
    packages: tuple[str, ...] = ()
    """Folders below the first root that belong on Python's path."""
    left_out: tuple[str, ...] = ()
    """Files that are too large or cannot be read."""
    objects: tuple[tuple[str, PickledObject], ...] = ()
    """What was given by value, by its reference in the settings."""

    @functools.cached_property
    def digest(self) -> str:
        """Depends on the names and contents of the files, not on the folders they come from."""
        listing = [
            sorted((name, hashlib.sha256(file.read()).hexdigest(), file.executable) for name, file in files.items())
            for _, files in self.roots
        ]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    @property
    def files(self) -> dict[str, CodeFile]:
        return {name: file for _, files in self.roots for name, file in files.items()}

    @property
    def size(self) -> int:
        return sum(file.path.lstat().st_size for file in self.files.values())

    def describe(self) -> list[str]:
        """Lines for the console."""
        files = ", ".join(self.left_out)
        return [f"note       not sent to the workers, too large or unreadable: {files}"] if files else []

    def archive(self, path: Path) -> None:
        """Write a .tar.gz, on the machine that packed the bundle."""
        with tarfile.open(path, "w:gz", compresslevel=1) as tar:
            for name, file in sorted(self.files.items()):
                tar.add(file.path, name, recursive=False)


def pack(tree: Mapping[str, Any], *, files_too: bool = True) -> CodeBundle:
    """Collect the code that a settings tree names. Without `files_too`, only what was given by value: the workers are
    on this machine."""
    packer = _Packer()
    objects = pickled_objects(text for _, text in _texts(tree))
    for reference, pickled in objects.items():
        if pickled.problem:
            raise UserError(f"{reference} was given as an object, and {pickled.problem}")
    files: list[tuple[str, str, Path]] = []
    for key, text in _texts(tree) if files_too else ():
        path, _, _ = text.rpartition(":")
        if text in objects:
            for module in objects[text].modules:
                packer.add_module(key, module)
        elif path.endswith(".py"):
            file = Path(path).expanduser().resolve()
            if key in NAMING_KEYS or file.is_file():
                files.append((key, text, file))
        elif path and key in NAMING_KEYS:
            packer.add_module(key, path)
    places = {}
    for key, text, file in sorted(files, key=lambda item: len(item[2].parts)):  # a folder before those below it
        places[text] = packer.add_file(key, text, file)
    folders = sorted(packer.roots)
    return CodeBundle(
        roots=tuple((str(folder), packer.roots[folder]) for folder in folders),
        references=tuple((text, folders.index(folder), relative) for text, (folder, relative) in places.items()),
        left_out=tuple(packer.left_out),
        objects=tuple(objects.items()),
    )


def pack_directory(cwd: Path, packages: Sequence[str], exclude: Sequence[str], limit_mb: int) -> CodeBundle:
    """Collect a working directory, and folders of packages from elsewhere."""
    found = {name: cwd / name for name in project_files(cwd, exclude)}
    on_path: dict[str, None] = {}
    for folder in dict.fromkeys(packages):
        source = Path(folder)
        if not source.is_dir():
            raise UserError(f"packages: {folder}: no such folder")
        place = f"{PACKAGES}/{source.name}"
        found |= {f"{place}/{name}": source / name for name in project_files(source, exclude)}
        if (source / "__init__.py").exists():
            place = PACKAGES  # the folder is a package itself, and imported by its own name
        elif (source / "src").is_dir():
            place = f"{place}/src"
        on_path[place] = None
    files = {name: CodeFile(path, os.access(path, os.X_OK)) for name, path in found.items()}
    bundle = CodeBundle(((str(cwd), files),), packages=tuple(on_path))
    if bundle.size > limit_mb * 1_000_000:
        sizes = sorted(((path.lstat().st_size, name) for name, path in found.items()), reverse=True)[:3]
        raise UserError(
            f"{cwd}: {bundle.size / 1e6:.0f} MB would be sent to every host, but only {limit_mb} MB are allowed; the "
            f"largest files are {', '.join(f'{name} ({size / 1e6:.0f} MB)' for size, name in sizes)}: list them in "
            ".gitignore or under exclude: in the hosts file, or raise send_mb:"
        )
    return bundle


def install(bundle: CodeBundle) -> None:
    """Make the code importable, also by the references in the settings. Files that this machine has in the same place
    are used there; otherwise all of them are written to a private temporary folder."""
    adopt(dict(bundle.objects))
    if not bundle.roots:
        return
    if not all(_is_same(Path(root, name), file) for root, files in bundle.roots for name, file in files.items()):
        home = _hold(_home(bundle))
        for number, (_, files) in enumerate(bundle.roots):
            _write(home / str(number), files)
    # The working folder goes in first, behind the bundle: an older copy of the code there must not win.
    for folder in (Path.cwd(), *_folders(bundle)):
        add_to_path(folder)
    moved.update(_new_references(bundle))
    importlib.invalidate_caches()


def relocate(tree: Any, bundle: CodeBundle) -> Any:
    """The settings tree with every `file.py:Name` of the bundle pointing to where `install` found or put the file, for
    processes that this one starts."""
    new = _new_references(bundle)
    return map_texts(tree, lambda text: new.get(text, text))


def unpack(bundle: CodeBundle, config: RunConfig) -> RunConfig:
    """`install` and `relocate` for settings that are validated already."""
    install(bundle)
    return validate(relocate(to_tree(config), bundle)) if bundle.references else config


def uninstall(bundle: CodeBundle) -> None:
    """Remove what `install` wrote, unless another process of this machine uses it. Call it last: modules imported so
    far stay, others can no longer be imported. Processes forked from this one count as users."""
    home = _home(bundle)
    if home in _held:
        os.close(_held.pop(home))
    sys.path[:] = [entry for entry in sys.path if home not in Path(entry).parents]
    for text, _, _ in bundle.references:
        moved.pop(text, None)
    try:
        lock = os.open(home / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # no such folder, or not this user's
        return
    try:
        if _lock(lock, fcntl.LOCK_EX, home):
            # Rename first: a process that installs now makes a new folder instead of writing into a vanishing one.
            gone = home.with_name(f"{home.name}.{os.getpid()}.gone")
            home.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    finally:
        os.close(lock)


class _Packer:
    def __init__(self) -> None:
        self.roots: dict[Path, dict[str, CodeFile]] = {}
        self.left_out: list[str] = []
        self._count = 0
        self._bytes = 0

    def add_file(self, key: str, reference: str, file: Path) -> tuple[Path, str]:
        """Returns the root of a `file.py:Name`, and the reference relative to it."""
        if not file.is_file():
            raise UserError(f"{key}={reference}: there is no such file")
        for root, files in self.roots.items():
            if file.is_relative_to(root) and str(file.relative_to(root)) in files and file.parent != root:
                break
        else:
            root = file.parent
            self._add_folder(key, root, root, Path())
        relative = str(file.relative_to(root))
        if relative not in self.roots[root]:
            raise UserError(
                f"{key}={reference}: the file cannot be sent to the workers: it is larger than "
                f"{MAX_FILE_BYTES // 2**20} MB or cannot be read; move its data to a separate file"
            )
        return root, f"{relative}:{reference.rpartition(':')[2]}"

    def add_module(self, key: str, module: str) -> None:
        """The top-level package or module, the modules beside it that it imports, those that they import, and so on."""
        top = module.partition(".")[0]
        for place in find_module(top):
            root = place.parent
            known, todo = {top, "paceline"}, [(top, place)]
            while todo:
                name, path = todo.pop()
                self._add_module(key, root, name, path)
                own = [file.read() for at, file in self.roots[root].items() if at.startswith((f"{name}/", f"{name}."))]
                for imported in {found for content in own for found in imported_modules(content)} - known:
                    known.add(imported)
                    if (file := root / f"{imported}.py").is_file():
                        todo.append((imported, file))
                    elif (root / imported / "__init__.py").is_file():
                        todo.append((imported, root / imported))

    def _add_module(self, key: str, root: Path, name: str, path: Path) -> None:
        """Under the name that it is imported by, which in an editable install may differ from that of its folder."""
        if path.is_dir():
            self._add_folder(key, root, path, Path(name))
        else:
            self._add(key, root, path, f"{name}{''.join(path.suffixes)}")

    def _add_folder(self, key: str, root: Path, folder: Path, under: Path) -> None:
        for path in walk(folder, CACHES | INSTALLED):
            self._add(key, root, path, str(under / path.relative_to(folder)))

    def _add(self, key: str, root: Path, path: Path, relative: str) -> None:
        files = self.roots.setdefault(root, {})
        if relative in files:
            return
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return
            self._count += 1
            content = path.read_bytes() if status.st_size <= MAX_FILE_BYTES else None
        except OSError:  # a dangling link, or no permission
            content = None
        if content is None:
            self.left_out.append(str(path))
        else:
            self._bytes += len(content)
            files[relative] = CodeFile(path, bool(status.st_mode & stat.S_IXUSR), content)
        if self._count > MAX_FILES or self._bytes > MAX_BYTES:
            limit = f"{MAX_FILES:,} files" if self._count > MAX_FILES else f"{MAX_BYTES // 2**20} MB"
            raise UserError(
                f"{key}: {root} holds more than {limit}, too much to send to the workers; move the code into a folder "
                "of its own and its data into one that all machines share, or install it as a package"
            )


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a settings tree, with its dotted key. A mapping's keys count too: wrappers are written so."""
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield key, str(name)
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, Sequence) and not isinstance(tree, bytes):
        for item in tree:
            yield from _texts(item, key)


def _is_same(path: Path, file: CodeFile) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IXUSR) == file.executable and path.read_bytes() == file.read()
    except OSError:
        return False


def _write(folder: Path, files: dict[str, CodeFile]) -> None:
    """Each file under a temporary name first: several processes may write at once, and one may be killed."""
    for relative, file in files.items():
        target = folder / relative
        if _is_same(target, file):
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", dir=target.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.read())
        Path(name).chmod(0o700 if file.executable else 0o600)
        Path(name).replace(target)


def _home(bundle: CodeBundle) -> Path:
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{bundle.digest[:32]}"


def _folders(bundle: CodeBundle) -> list[Path]:
    """Where this process finds the roots."""
    if (home := _home(bundle)) in _held:
        return [home / str(number) for number in range(len(bundle.roots))]
    return [Path(root) for root, _ in bundle.roots]


def _new_references(bundle: CodeBundle) -> dict[str, str]:
    folders = _folders(bundle)
    return {text: str(folders[root] / relative) for text, root, relative in bundle.references}


def _hold(home: Path) -> Path:
    """Make the folder if it does not exist, and keep others from removing it while this process lives."""
    if home in _held:
        if _lock(_held[home], fcntl.LOCK_SH, home):
            return home
        os.close(_held.pop(home))  # something emptied the temporary folder
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):  # another process removed it between two lines
            with contextlib.suppress(FileExistsError):
                home.mkdir(mode=0o700)
            status = home.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise UserError(
                    f"{home} is not private to you: remove it, or set TMPDIR to a folder that only you can access"
                )
            lock = os.open(home / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            if _lock(lock, fcntl.LOCK_SH, home):
                _held[home] = lock
                return home
            os.close(lock)
        time.sleep(0.01)
    raise TimeoutError(f"{home} has been locked for {LOCK_SECONDS:.0f} s; remove it if nothing runs")


def _lock(lock: int, kind: int, home: Path) -> bool:
    """Whether the lock was free and is still that of the folder."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), (home / "lock").stat())
    except (BlockingIOError, FileNotFoundError):
        return False
