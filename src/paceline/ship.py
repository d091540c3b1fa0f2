"""The user's code on its way to machines that do not have it.

The driver packs what the configuration names (`env.id`, `env.wrappers`, `model.class`), a worker unpacks it:

- `path/to/file.py:Name`: the file's folder with all below it, data too;
- `module:Name`: the top package or module, and the modules beside it that it imports. What is installed is expected on
  every machine, except where its files lie outside of site-packages (an editable install): that is sent as well.

Hidden files and folders, virtual environments, run directories and large files stay at home.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.config import RunConfig, UserError

MAX_FILE_BYTES = 5 * 2**20
MAX_BYTES = 50 * 2**20
MAX_FILES = 2_000
LOCK_SECONDS = 30.0

_INSTALLED = {"site-packages", "dist-packages"}
_CACHES = {"__pycache__", "node_modules"}
_held: dict[Path, int] = {}
"""Folders that this process uses, each with a shared lock that lasts as long as the process."""


class File(NamedTuple):
    sha256: str
    content: bytes
    executable: bool


Root = tuple[str, dict[str, File]]
"""A folder of the driver, and what was taken from it by relative path."""


@dataclass(frozen=True)
class Parcel:
    roots: tuple[Root, ...] = ()
    names: tuple[tuple[str, int, str], ...] = ()
    """For each `file.py:Name` of the configuration: its root, and the name relative to it."""
    left_out: tuple[str, ...] = ()
    """Files that were too large or could not be read."""

    @functools.cached_property
    def digest(self) -> str:
        """Of the files, wherever they lie."""
        listing = [sorted((name, f.sha256, f.executable) for name, f in files.items()) for _, files in self.roots]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def pack(config: RunConfig) -> Parcel:
    """On the driver: the user's code that this configuration needs."""
    packer = _Packer()
    files: list[tuple[str, str, Path]] = []
    for option, name in _names(config):
        path, _, _ = name.rpartition(":")
        if path.endswith(".py"):
            files.append((option, name, Path(path).expanduser().resolve()))
        elif path:
            packer.add_module(option, path)
    places = {}
    for option, name, file in sorted(files, key=lambda item: len(item[2].parts)):  # a folder before those below it
        places[name] = packer.add_file(option, name, file)
    folders = sorted(packer.roots)
    return Parcel(
        tuple((str(folder), packer.roots[folder]) for folder in folders),
        tuple((name, folders.index(folder), relative) for name, (folder, relative) in places.items()),
        tuple(packer.left_out),
    )


def unpack(parcel: Parcel, config: RunConfig) -> RunConfig:
    """On a worker: the configuration with names that can be loaded here. Where all files are in place they are used;
    otherwise they are written into a private folder, which `clean` removes."""
    if not parcel.roots:
        return config
    folders = [Path(folder) for folder, _ in parcel.roots]
    if not all(_is_in_place(folder, files) for folder, (_, files) in zip(folders, parcel.roots, strict=True)):
        home = _hold(_home(parcel))
        folders = [home / str(number) for number in range(len(parcel.roots))]
        for folder, (_, files) in zip(folders, parcel.roots, strict=True):
            _write(folder, files)
    # Loading a module puts the working folder first if it is missing; an older copy in it must not win.
    for folder in (Path.cwd(), *folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return _renamed(config, {name: str(folders[root] / relative) for name, root, relative in parcel.names})


def clean(parcel: Parcel) -> None:
    """Remove the folder of `unpack`, unless another process on this machine still uses it. For the end: what is
    imported stays, what is imported later is not found. Processes forked from this one count as users."""
    home = _home(parcel)
    if home in _held:
        os.close(_held.pop(home))
    sys.path[:] = [entry for entry in sys.path if home not in Path(entry).parents]
    try:
        lock = os.open(home / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # nothing there, or nothing of ours
        return
    try:
        if _take(lock, fcntl.LOCK_EX, home):
            # Out of the way first: who comes now makes a new one, instead of writing into what is being removed.
            gone = home.with_name(f"{home.name}.{os.getpid()}.gone")
            home.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    finally:
        os.close(lock)


class _Packer:
    def __init__(self) -> None:
        self.roots: dict[Path, dict[str, File]] = {}
        self.left_out: list[str] = []
        self.seen = 0
        self.bytes = 0

    def add_file(self, option: str, name: str, file: Path) -> tuple[Path, str]:
        """The root of `file.py:Name`, and the name relative to it."""
        if not file.is_file():
            raise UserError(f"{option}={name}: there is no such file")
        for root, files in self.roots.items():
            if file.is_relative_to(root) and str(file.relative_to(root)) in files and file.parent != root:
                break
        else:
            root = file.parent
            self._take_all(option, root, root, Path())
        relative = str(file.relative_to(root))
        if relative not in self.roots[root]:
            raise UserError(
                f"{option}={name}: the file cannot be sent to the workers: it is larger than "
                f"{MAX_FILE_BYTES // 2**20} MB or cannot be read; put its data into a file of its own"
            )
        return root, f"{relative}:{name.rpartition(':')[2]}"

    def add_module(self, option: str, module: str) -> None:
        for top, path in _locate(module.partition(".")[0]):
            root = path.parent
            self._take_package(option, root, path, top)
            self._follow_imports(option, root, top)

    def _follow_imports(self, option: str, root: Path, top: str) -> None:
        """The modules beside `top` that it imports, and those that they import."""
        known, todo = {top, "paceline"}, [top]
        while todo:
            name = todo.pop()
            own = [f.content for path, f in self.roots[root].items() if path.startswith((f"{name}/", f"{name}."))]
            for imported in {found for content in own for found in _imports(content)} - known:
                known.add(imported)
                for path in (root / f"{imported}.py", root / imported):
                    if path.is_file() or (path / "__init__.py").is_file():
                        self._take_package(option, root, path, imported)
                        todo.append(imported)
                        break

    def _take_package(self, option: str, root: Path, path: Path, top: str) -> None:
        """Under the name that it is imported by, which with an editable install need not be that of its folder."""
        if path.is_dir():
            self._take_all(option, root, path, Path(top))
        else:
            self._take(option, root, path, f"{top}{''.join(path.suffixes)}")

    def _take_all(self, option: str, root: Path, top: Path, under: Path) -> None:
        for folder, inner, names in os.walk(top):  # links to folders are not followed
            inner[:] = sorted(name for name in inner if not _stays(Path(folder, name)))
            for name in sorted(names):
                if not name.startswith(".") and not name.endswith(".pyc"):
                    path = Path(folder, name)
                    self._take(option, root, path, str(under / path.relative_to(top)))

    def _take(self, option: str, root: Path, path: Path, relative: str) -> None:
        files = self.roots.setdefault(root, {})
        if relative in files:
            return
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return
            self.seen += 1
            content = path.read_bytes() if status.st_size <= MAX_FILE_BYTES else None
        except OSError:  # a dangling link, or not ours to read
            content = None
        if content is None:
            self.left_out.append(str(path))
        else:
            self.bytes += len(content)
            files[relative] = File(hashlib.sha256(content).hexdigest(), content, bool(status.st_mode & stat.S_IXUSR))
        if self.seen > MAX_FILES or self.bytes > MAX_BYTES:
            much = f"{MAX_FILES:,} files" if self.seen > MAX_FILES else f"{MAX_BYTES // 2**20} MB"
            raise UserError(
                f"{option}: {root} holds more than {much}, too much to send to the workers; move the code into a "
                "folder of its own and its data into one that all machines share, or install it as a package"
            )


def _names(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "env.id", config.env.id
    for wrapper in config.env.wrappers:
        yield "env.wrappers", wrapper if isinstance(wrapper, str) else next(iter(wrapper))
    if config.model.class_:
        yield "model.class", config.model.class_


def _renamed(config: RunConfig, new: dict[str, str]) -> RunConfig:
    wrappers = [
        new.get(item, item) if isinstance(item, str) else {new.get(name, name): kw for name, kw in item.items()}
        for item in config.env.wrappers
    ]
    env = config.env.model_copy(update={"id": new.get(config.env.id, config.env.id), "wrappers": wrappers})
    own = config.model.class_
    model = config.model.model_copy(update={"class_": new.get(own, own) if own else None})
    return config.model_copy(update={"env": env, "model": model})


def _locate(top: str) -> Iterator[tuple[str, Path]]:
    """Where a top-level module that has to be sent lies: its file or, for a package, its folder (or folders)."""
    if top == "paceline" or top in sys.stdlib_module_names:
        return
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as when it is loaded
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a name that cannot be one: loading it says so
        return
    if spec is None:
        return
    places = spec.submodule_search_locations
    if places is None:
        places = [spec.origin] if spec.origin and spec.has_location else []
    for place in places:
        path = Path(place).absolute()
        if path.exists() and not _INSTALLED.intersection(path.resolve().parts):
            yield top, path


def _imports(content: bytes) -> set[str]:
    """Top-level modules that a source file imports by name."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # data, or for another Python
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _stays(folder: Path) -> bool:
    """Whether a folder is not part of the code: hidden, a cache, a virtual environment or a run directory."""
    return (
        folder.name.startswith(".")
        or folder.name in _CACHES | _INSTALLED
        or (folder / "pyvenv.cfg").exists()
        or (folder / "conda-meta").exists()
        or ((folder / "config.yaml").exists() and (folder / "metrics.jsonl").exists())
    )


def _is_in_place(folder: Path, files: dict[str, File]) -> bool:
    return all(_is_same(folder / relative, file) for relative, file in files.items())


def _is_same(path: Path, file: File) -> bool:
    try:
        status = path.stat()
        return (
            status.st_size == len(file.content)
            and bool(status.st_mode & stat.S_IXUSR) == file.executable
            and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
        )
    except OSError:
        return False


def _write(folder: Path, files: dict[str, File]) -> None:
    """Each file under another name first: several processes may do this at once, and one may be killed."""
    for relative, file in files.items():
        target = folder / relative
        if _is_same(target, file):
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", dir=target.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.content)
        Path(name).chmod(0o700 if file.executable else 0o600)
        Path(name).replace(target)


def _home(parcel: Parcel) -> Path:
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{parcel.digest[:32]}"


def _hold(home: Path) -> Path:
    """Make the folder if need be, and keep it from being removed while this process lives."""
    if home in _held:
        if _take(_held[home], fcntl.LOCK_SH, home):
            return home
        os.close(_held.pop(home))  # something swept the temporary folder
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):  # another process removed it between two lines
            with contextlib.suppress(FileExistsError):
                home.mkdir(mode=0o700)
            status = home.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise UserError(f"{home} is not a private folder of yours: remove it, or set TMPDIR to one that is")
            lock = os.open(home / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            if _take(lock, fcntl.LOCK_SH, home):
                _held[home] = lock
                return home
            os.close(lock)
        time.sleep(0.01)
    raise TimeoutError(f"{home} has been locked for {LOCK_SECONDS:.0f} s; remove it if nothing runs")


def _take(lock: int, kind: int, home: Path) -> bool:
    """Whether the lock was free and is still the folder's."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), (home / "lock").stat())
    except (BlockingIOError, FileNotFoundError):
        return False
