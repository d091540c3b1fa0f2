"""The run directory: where everything is, and how to write it so that a reader never sees half a file."""

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
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import yaml

from paceline.config import UserError

STATES = ("running", "done", "stopped", "failed")
_FOLDERS = ("checkpoints", "tb", "logs", "videos")
_NAME = re.compile(r"[\w.+=,@-]+")
# Lustre without the flock mount option, and some FUSE file systems, know no locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}

# A forked child (an environment process) shares the lock of its parent and would hold it after the parent's death, so
# children close it. That does not release it: only an explicit unlock or the last close does.
_held: set[int] = set()


def _drop_locks_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def plain(value: Any) -> Any:
    """What strict JSON can hold: NaN and infinities become null; numpy scalars and arrays numbers and lists."""
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
    if hasattr(value, "tolist"):  # by duck type: readers of a run need not import numpy
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[TextIO]:
    """A file that takes the place of `path` when the block ends well: readers see the old text or the new one.

    `sync=False` may lose it in a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
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
    """One more row of a `.jsonl` file, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(row), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `.jsonl` file; a last line that was cut short (a crash, or a write in progress) is left out."""
    try:
        with path.open("rb") as file:
            damaged = 0
            for number, line in enumerate(file, start=1):
                if damaged:
                    raise UserError(f"{path}, line {damaged} is damaged: mend or delete that line")
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                except ValueError:
                    damaged = number  # forgiven if it is the last
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def provenance_path(self) -> Path:
        return self.path / "provenance.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def progress_path(self) -> Path:
        return self.path / "progress.csv"

    @property
    def eval_path(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tb_path(self) -> Path:
        return self.path / "tb"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    def log(self, text: str) -> None:
        """A line with the time of day: what happened to the run."""
        with (self.logs_path / "events.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    @property
    def videos_path(self) -> Path:
        return self.path / "videos"

    @classmethod
    def create(cls, out: str | Path, name: str | None, algo: str, env_id: str, *, reuse: bool = False) -> RunDirectory:
        """A new run `out/name`; on failure whatever was made on the way is removed again.

        `reuse`: take the directory of a run that ended before its first checkpoint.
        """
        folder = Path(out).expanduser()
        if name is None:
            name = f"{algo}_{_tidy(env_id)}_{datetime.now():%Y%m%d-%H%M%S}_{secrets.token_hex(2)}"
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise UserError(f"--name {name!r} is not a folder name: use letters, digits and . _ + = , @ -")
        path = folder / name
        made: list[Path] = []
        try:
            reuse = reuse and (path / "config.yaml").is_file() and not any(path.glob("checkpoints/step-*"))
            if path.is_dir() and any(path.iterdir()) and not reuse:
                raise UserError(_taken(path))
            for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
                with contextlib.suppress(FileExistsError):  # another run may be making the same parent
                    missing.mkdir()
                    made.append(missing)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way")
            for sub in _FOLDERS:
                if not (reuse and (path / sub).is_dir()):
                    (path / sub).mkdir()
                    made.append(path / sub)
        except OSError as error:
            for folder_made in reversed(made):
                with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                    folder_made.rmdir()
            if isinstance(error, FileExistsError):  # another process took the name between the check and the mkdir
                raise UserError(_taken(path)) from None
            raise UserError(
                f"cannot make the run directory {path}: {error.strerror}; choose a folder you can write to with --out"
            ) from None
        return cls(path)

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
        """`status.json`: the state of the run and whatever else is worth knowing while it lasts."""
        if state not in STATES:
            raise ValueError(f"state={state!r} is not one of {', '.join(STATES)}")
        own = {"pid": os.getpid(), "host": socket.gethostname(), "updated_at": datetime.now(UTC).isoformat()}
        # A heartbeat is not worth a wait for the disk; a final state is.
        write_json(self.status_path, {"state": state, **own, **fields}, sync=state != "running")

    def read_status(self) -> dict[str, Any]:
        return self._read_json(self.status_path)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary_path, summary)

    def read_summary(self) -> dict[str, Any]:
        """Empty as long as there is none: the run has not ended."""
        return self._read_json(self.summary_path)

    def read_provenance(self) -> dict[str, Any]:
        return self._read_json(self.provenance_path)

    def read_config(self) -> dict[str, Any]:
        try:
            # Of hundreds of runs, the loader written in C takes a second where the other takes ten.
            text = self.config_path.read_text(encoding="utf-8")
            config = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except OSError as error:
            raise UserError(f"{self.config_path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{self.config_path} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(config, dict):
            raise UserError(f"{self.config_path} is damaged: it holds no settings")
        return config

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics_path))

    def read_eval(self) -> list[dict[str, Any]]:
        return list(read_lines(self.eval_path))

    def lock(self) -> bool:
        """Claim the run for this process until `unlock` or its end. False: this file system cannot lock."""
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
        if fd in _held:  # else this is a forked child, which never had the lock
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


def _tidy(env_id: str) -> str:
    if ".py:" in env_id:  # a file: its folders say nothing
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
        with contextlib.suppress(OSError):  # gone since, or not ours to see
            found.append((config.stat().st_mtime_ns, config.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _names(runs: list[Path]) -> str:
    return ", ".join(str(path) for path in runs[:3])


def _suggest(path: Path) -> str:
    """`; did you mean …`: the runs beside `path` with a similar name, else the most recent ones."""
    runs = [run for run in _runs_in(path.parent) if run != path]
    if not runs:
        return f"; there are no runs in {path.parent}"
    close = difflib.get_close_matches(path.name, [run.name for run in runs], n=3, cutoff=0.6)
    if close:
        return f"; did you mean {_names([path.parent / name for name in close])}?"
    return f"; the most recent runs there: {_names(runs)}"
