"""The run directory: the paths of its files, and atomic writing, so that readers never see half a file."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import yaml

from paceline.config import UserError, printable
from paceline.config.yaml_text import load_yaml, read_text

STATES = ("running", "done", "stopped", "failed")
_FOLDERS = ("checkpoints", "tb", "logs", "videos")
_NAME = re.compile(r"[\w.+=,@-]+")
# Lustre without the mount option flock and some FUSE file systems have no locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}

# A forked child shares its parent's lock and would keep holding it after the parent's death, so children close it.
# Closing does not release it for the parent: only an explicit unlock or the last close does.
_held: set[int] = set()


def _drop_locks_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def plain(value: Any) -> Any:
    """`value` as strict JSON can represent it: NaN and infinities become null, numpy values numbers and lists."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy, without importing it: readers of runs do not need it
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True, binary: bool = False) -> Iterator[IO[Any]]:
    """A new file that replaces `path` when the block ends without an error: readers see the old content or the new.

    With `sync=False` a power cut may lose it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") if binary else temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    with replacing(path, sync=sync) as file:
        file.write(text)


def write_json(path: Path, obj: Any, *, sync: bool = True) -> None:
    write_text(path, json.dumps(plain(obj), indent=2, allow_nan=False) + "\n", sync=sync)


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a `.jsonl` file, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(row), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `.jsonl` file, without a last line that is incomplete (after a crash, or during a write)."""
    try:
        with path.open("rb") as file:
            damaged = 0
            for number, line in enumerate(file, start=1):
                if damaged:
                    raise UserError(f"{path}, line {damaged} is damaged: repair or delete that line")
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                except ValueError:
                    damaged = number  # no error if it is the last line
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def missing_folders(path: Path) -> list[Path]:
    """`path` and the folders above it that do not exist, the uppermost first."""
    return [folder for folder in (*reversed(path.parents), path) if not folder.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that were made for nothing, the last first."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # not empty: something else uses it now
            folder.rmdir()


class RunDirectory:
    """`shown`: the path as the user gave it, if `path` is another spelling."""

    def __init__(self, path: Path, shown: Path | None = None) -> None:
        self.path, self.shown = path, shown or path
        self.config_path = path / "config.yaml"
        self.provenance_path = path / "provenance.json"
        self.status_path = path / "status.json"
        self.metrics_path = path / "metrics.jsonl"
        self.progress_path = path / "progress.csv"
        self.eval_path = path / "eval.jsonl"
        self.summary_path = path / "summary.json"
        self.checkpoints_path = path / "checkpoints"
        self.tb_path = path / "tb"
        self.logs_path = path / "logs"
        self.videos_path = path / "videos"
        self._lock: int | None = None
        self._made: list[Path] = []  # the folders that `create` made, parents first

    def log(self, text: str) -> None:
        """Add a line with the date and time to `logs/events.log`."""
        with (self.logs_path / "events.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")

    def write_env_error(self, error: str) -> str:
        """Keep the traceback of an environment that failed and was started again. Returns a line about it."""
        path = self.logs_path / "env_error.txt"
        write_text(path, f"{error}\n", sync=False)
        last = error.rpartition("\n")[2][:200]
        return (
            f"an environment failed and was started again (env.restart_on_error): {last}; the traceback of this first "
            f"failure is in logs/{path.name}, env_restarts counts all"
        )

    @classmethod
    def create(
        cls, out: str | Path, name: str | None, algo: str, env_id: str, *, reuse: bool = False, base: Path | None = None
    ) -> RunDirectory:
        """Create the run `out/name`. On failure the folders that were created are removed.

        `reuse`: accept the directory of a run that ended before its first checkpoint. `base`: what a relative `out`
        means, if an environment may have changed the current folder.
        """
        shown = Path(out).expanduser()
        folder = shown if base is None else base / shown
        if name is None:
            name = f"{base_name(algo, env_id)}_{datetime.now():%Y%m%d-%H%M%S}_{secrets.token_hex(2)}"
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise UserError(f"--name {name!r} is not a folder name: use letters, digits and . _ + = , @ -")
        path = folder / name
        made: list[Path] = []
        try:
            reuse = reuse and (path / "config.yaml").is_file() and not any(path.glob("checkpoints/step-*"))
            if path.is_dir() and any(path.iterdir()) and not reuse:
                raise UserError(_taken(path))
            for missing in missing_folders(path):
                with contextlib.suppress(FileExistsError):  # another run may be creating the same parent
                    missing.mkdir()
                    made.append(missing)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way")
            for sub in _FOLDERS:
                if not (reuse and (path / sub).is_dir()):
                    (path / sub).mkdir()
                    made.append(path / sub)
        except OSError as error:
            remove_empty(made)
            if isinstance(error, FileExistsError):  # another process took the name between the check and the mkdir
                raise UserError(_taken(path)) from None
            raise UserError(
                f"cannot make the run directory {path}: {error.strerror}; choose a folder you can write to with --out"
            ) from None
        created = cls(path, shown / name)
        created._made = made
        return created

    def discard(self) -> None:
        """Remove a run that `create` made and that came to nothing."""
        for folder in self._made:
            if folder == self.path or self.path in folder.parents:
                shutil.rmtree(folder, ignore_errors=True)
        remove_empty(self._made)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run."""
        path = Path(path).expanduser()
        try:
            if (path / "config.yaml").is_file():
                return cls(path)
            exists = path.exists()
        except OSError as error:
            raise UserError(f"the run {path} cannot be read: {error.strerror}") from None
        if not exists:
            raise UserError(f"there is no run at {path}{_suggest(path)}")
        if not path.is_dir():
            raise UserError(f"{path} is a file, not a run directory{_suggest(path)}")
        if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
            raise UserError(f"{path} is a checkpoint, not a run: the run is {path.parent.parent}")
        inside = _runs_in(path)
        if inside:
            raise UserError(f"{path} is a folder of runs, not a run: give one of them, such as {_names(inside)}")
        raise UserError(f"{path} is not a run directory: it has no config.yaml{_suggest(path)}")

    def write_status(self, *, state: str, **fields: Any) -> None:
        """Write `status.json`: the state of the run, this process, and further fields."""
        if state not in STATES:
            raise ValueError(f"state={state!r} is not one of {', '.join(STATES)}")
        own = {"pid": os.getpid(), "host": socket.gethostname(), "updated_at": datetime.now(UTC).isoformat()}
        # The reason may quote an env's error, and `paceline status` prints it.
        fields = {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}
        # Only a final state is worth waiting for the disk.
        write_json(self.status_path, {"state": state, **fields, **own}, sync=state != "running")

    def read_status(self) -> dict[str, Any]:
        return self._read_json(self.status_path)

    def write_summary(self, summary: dict[str, Any], *, sync: bool = True) -> None:
        write_json(self.summary_path, summary, sync=sync)

    def read_summary(self) -> dict[str, Any]:
        """Empty until the run has ended."""
        return self._read_json(self.summary_path)

    def read_provenance(self) -> dict[str, Any]:
        return self._read_json(self.provenance_path)

    def read_config(self) -> dict[str, Any]:
        try:
            # The loader written in C is ten times as fast, which matters for hundreds of runs.
            config = load_yaml(read_text(self.config_path), fast=True)
        except OSError as error:
            raise UserError(f"{self.config_path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{self.config_path} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(config, dict):
            raise UserError(f"{self.config_path} is damaged: it contains no settings")
        return config

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics_path))

    def read_eval(self) -> list[dict[str, Any]]:
        return list(read_lines(self.eval_path))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def lock(self) -> bool:
        """Lock the run for this process until `unlock` or its end. False: this file system has no locks."""
        if self._lock is not None:
            return True
        try:
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"the run {self.path} cannot be written to: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(fd)
            if error.errno in _NO_LOCKS:
                return False
            raise UserError(f"the run {self.path} is in use by {holder}: wait for it, or stop it first") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock = fd
        _held.add(fd)
        return True

    def unlock(self) -> None:
        if self._lock is None:
            return
        fd, self._lock = self._lock, None
        if fd in _held:  # otherwise this is a forked child, which does not own the lock
            _held.discard(fd)
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise UserError(f"{path} is damaged: it is not JSON") from None
        return value if isinstance(value, dict) else {}


def base_name(algo: str, env_id: str) -> str:
    """The beginning of the name of a run that the user does not name."""
    return f"{algo}_{_tidy(env_id)}"


def _tidy(env_id: str) -> str:
    if ".py:" in env_id:  # a file: drop its folders
        env_id = env_id.rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9.+=@-]+", "-", env_id).strip("-.")[:60] or "env"


def _taken(path: Path) -> str:
    if (path / "config.yaml").is_file():
        return f"the run {path} exists: choose another --name, or continue it with --resume {path}"
    return f"{path} exists, is not empty and is not a run: choose another --name"


def _runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, the most recent first."""
    found: list[tuple[int, Path]] = []
    for config in folder.glob("*/config.yaml"):
        with contextlib.suppress(OSError):  # deleted meanwhile, or not readable
            found.append((config.stat().st_mtime_ns, config.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _names(runs: list[Path]) -> str:
    return ", ".join(str(path) for path in runs[:3])


def _suggest(path: Path) -> str:
    """`; did you mean …`: runs in the same folder with a similar name, else the most recent ones."""
    runs = [run for run in _runs_in(path.parent) if run != path]
    if not runs:
        return f"; there are no runs in {path.parent}"
    close = difflib.get_close_matches(path.name, [run.name for run in runs], n=3, cutoff=0.6)
    if close:
        return f"; did you mean {_names([path.parent / name for name in close])}?"
    return f"; the most recent runs there: {_names(runs)}"
