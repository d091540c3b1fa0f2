"""Checkpoints: `checkpoints/step-N/` with `arrays.safetensors` and `state.json`; the links `best` and `last`.

A checkpoint appears complete or not at all, and at every moment `last` points to a complete one. Nothing is pickled
here (RLlib's state arrives as bytes that only its engine unpickles).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_from_bytes
from safetensors.numpy import save as arrays_to_bytes

from paceline.config import UserError, parse_count
from paceline.run.directory import RunDirectory, replacing

FORMAT = 1
_ARRAYS, _STATE = "arrays.safetensors", "state.json"
_STEP = re.compile(r"step-(\d+)")
_TEMPORARY = ".tmp-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The earlier ones are unchanged."""


class _Damaged(Exception):
    """Why a checkpoint cannot be loaded."""


def save(
    run: RunDirectory,
    step: int,
    arrays: dict[str, np.ndarray],
    state: dict[str, Any],
    *,
    keep: int,
    best: bool = False,
    keep_best: int = 1,
) -> Path:
    """Write `step-N`, point `last` (and `best`) to it, and delete the oldest checkpoints beyond `keep`, but not the
    `keep_best` with the best evaluations.

    `state` is anything that JSON can represent, including infinities and NaN.
    """
    folder = run.checkpoints_path
    target = folder / f"step-{step}"
    temporary = folder / f"{_TEMPORARY}{target.name}"
    content, text = _encode(arrays, state)
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        _write(temporary / _ARRAYS, content)
        _write(temporary / _STATE, text)
        _sync(temporary)
        if target.exists():
            _remove_old(folder, temporary, target)
        temporary.rename(target)
        _sync(folder)
        for link in ("last", "best") if best else ("last",):
            _link(folder, link, target.name)
        if _linked(folder, "best") == _stand_in(target):
            _link(folder, "best", target.name)
        _sync(folder)
    except OSError as error:
        with suppress(OSError):
            _sweep(folder)
        good = _linked(folder, "last")
        still = f"{folder / good} is intact" if good else "there is no earlier one"
        raise CheckpointError(f"checkpoint {target} was not saved: {error.strerror or error}; {still}") from error
    _prune(folder, step, keep, {f"step-{good}" for good in best_steps(run, keep_best)})
    return target


def save_file(path: Path, arrays: dict[str, np.ndarray], state: dict[str, Any], extra: dict[str, bytes]) -> None:
    """Write a checkpoint as one file, with further files in it."""
    content, text = _encode(arrays, state)
    try:
        with replacing(path, binary=True) as file, zipfile.ZipFile(file, "w") as archive:
            for name, data in {_ARRAYS: content, _STATE: text, **extra}.items():
                archive.writestr(name, data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _encode(arrays: dict[str, np.ndarray], state: dict[str, Any]) -> tuple[bytes, bytes]:
    # safetensors writes memory as it is, so a transposed array would be scrambled. `ascontiguousarray` would turn a
    # scalar into a vector.
    content = arrays_to_bytes({name: np.asarray(array, order="C") for name, array in arrays.items()})
    record = {
        "format": FORMAT,
        "arrays": {"bytes": len(content), "crc32": zlib.crc32(content)},
        "state_crc32": zlib.crc32(_canonical(state)),
        "state": state,
    }
    return content, json.dumps(record, indent=1, default=_unknown).encode()


def best_steps(run: RunDirectory, count: int) -> list[int]:
    """The steps with the best evaluations during training, if more than one of them is wanted: `best` is a link."""
    if count < 2:
        return []
    try:
        rows = [row for row in run.read_eval() if row.get("kind") is None]
    except UserError:  # damaged: then only `best` is kept
        return []
    returns = {row["env_steps"]: row["return_mean"] for row in rows if row.get("return_mean") is not None}
    return sorted(returns, key=lambda step: -returns[step])[:count]


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the state of a checkpoint, verified by their checksums."""
    path = Path(path)
    try:
        return _read(path)
    except _Damaged as reason:
        advice = "" if path.is_file() else f"; {_advice(path)}"
        raise UserError(f"checkpoint {path} cannot be loaded: {reason}{advice}") from None


def load_newest(run_path: str | Path) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    """The newest checkpoint of a run that loads, its arrays and its state. UserError if none does."""
    path = _newest(Path(run_path) / "checkpoints")
    if path is None:
        raise UserError(f"{run_path} has no checkpoint that loads: start a new run with another --name")
    return path, *load(path)


def can_only_start_again(run_path: Path) -> bool:
    """Whether the only checkpoint is the one that a run begins with, and does not load."""
    if available(run_path) != [0]:
        return False
    try:
        _read(run_path / "checkpoints/step-0")
    except _Damaged:
        return True
    return False


def find(target: str | os.PathLike[str], which: str | int | None = None) -> Path:
    """The checkpoint of a run by name: `best`, `last`, a step, or None for best if there is one, else last.

    `target` may also be a checkpoint, or a file that `agent.save` has written.
    """
    path = Path(target).expanduser()
    if (path / _STATE).exists() or zipfile.is_zipfile(path):
        if which is not None:
            raise UserError(f"{path} is already a checkpoint: give its run to choose {which!r}, or leave that out")
        return path
    if path.name != "checkpoints":
        if path.parent.name == "checkpoints":
            path, which = path.parent, path.name if which is None else which
        else:
            path = RunDirectory.open(path).checkpoints_path
    steps = available(path.parent)
    if which in (None, "best", "last"):
        for link in (which,) if which else ("best", "last"):
            if name := _linked(path, str(link)):
                return path / name
            if (path / str(link) / _STATE).exists():  # a copy of a run in which folders replace the links
                return path / str(link)
        if which is None and steps:
            return path / f"step-{steps[-1]}"
    else:
        step = parse_count(str(which).removeprefix("step-"))
        if step in steps:
            return path / f"step-{step}"
    links = [link for link in ("best", "last") if _linked(path, link)]
    exist = ", ".join([*links, *map(str, steps)])
    wanted = "checkpoint" if which is None else f"checkpoint {which!r}"
    advice = f"; {_advice(path / 'last')}" if which == "last" else ""
    text = f": there are {exist}{advice}" if exist else " yet: none was saved"
    raise UserError(f"{path.parent} has no {wanted}{text}")


def available(run_path: str | Path) -> list[int]:
    """The steps with a checkpoint, in ascending order."""
    return sorted(_steps_by_name(Path(run_path) / "checkpoints").values())


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        place = zipfile.Path(path) if path.is_file() else path
        if path.is_file() and not (place / _STATE).exists():
            raise zipfile.BadZipFile
        text, content = (place / _STATE).read_bytes(), (place / _ARRAYS).read_bytes()
    except zipfile.BadZipFile:
        raise _Damaged("it is not a file that agent.save has written") from None
    except FileNotFoundError as error:
        raise _Damaged(f"{Path(error.filename).name} is missing" if path.is_dir() else "it does not exist") from None
    except OSError as error:
        raise _Damaged(error.strerror or str(error)) from None
    try:
        record = json.loads(text)
    except ValueError:
        raise _Damaged(f"{_STATE} is cut short or damaged") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise _Damaged(f"it has format {found!r}, but this version of paceline reads format {FORMAT}")
    try:
        size, crc = record["arrays"]["bytes"], record["arrays"]["crc32"]
        state_crc, state = record["state_crc32"], record["state"]
    except (KeyError, TypeError):
        raise _Damaged(f"{_STATE} is damaged") from None
    if len(content) != size:
        raise _Damaged(f"{_ARRAYS} has {len(content)} bytes instead of {size}")
    if zlib.crc32(content) != crc:
        raise _Damaged(f"{_ARRAYS} is damaged: its checksum is wrong")
    if zlib.crc32(_canonical(state)) != state_crc:
        raise _Damaged(f"{_STATE} is damaged: its checksum is wrong")
    try:
        return arrays_from_bytes(content), state
    except (SafetensorError, ValueError, KeyError) as error:
        raise _Damaged(f"{_ARRAYS} is not readable: {error}") from None


def _canonical(state: Any) -> bytes:
    """The same bytes for a state before and after a round trip through JSON."""
    return json.dumps(json.loads(json.dumps(state, default=_unknown)), sort_keys=True).encode()


def _unknown(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be saved in a checkpoint's state: {value!r}")


def _advice(path: Path) -> str:
    """Which checkpoint of the run to use instead of this one."""
    other = _newest(path.parent, without=_linked(path.parent, path.name) or path.name)
    return f"{other} loads: use that one" if other else "no other checkpoint of this run loads"


def _newest(folder: Path, without: str = "") -> Path | None:
    """The newest checkpoint that loads. A run that went back to an earlier one may have left later steps behind: those
    of its last resume count first."""
    found: list[tuple[int, int, str]] = []
    for name, step in _steps_by_name(folder).items():
        if name != without:
            with suppress(_Damaged):
                _, state = _read(folder / name)
                found.append((state.get("loop", {}).get("resumes", 0), step, name))
    return folder / max(found)[2] if found else None


def _steps_by_name(folder: Path) -> dict[str, int]:
    try:
        return {p.name: int(m[1]) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir()}
    except OSError:
        return {}


def _linked(folder: Path, link: str) -> str | None:
    """The name of the checkpoint that the link `best` or `last` points to, if it exists."""
    try:
        name = (folder / link).readlink().name
    except OSError:
        return None
    return name if (folder / name).is_dir() else None


def _link(folder: Path, link: str, name: str) -> None:
    temporary = folder / f"{_TEMPORARY}{link}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)  # relative: the run may be moved
    temporary.replace(folder / link)


def _stand_in(path: Path) -> str:
    return f"{_TEMPORARY}twin-{path.name}"


def _remove_old(folder: Path, new: Path, old: Path) -> None:
    """Remove `old`, whose name `new` will take. A directory cannot be replaced in one step, so the links point to a
    copy of `new` meanwhile."""
    copy = folder / _stand_in(old)
    try:
        shutil.copytree(new, copy, copy_function=os.link)
    except (OSError, shutil.Error):  # no hard links on this file system
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(new, copy)
    _sync(copy)
    for link in ("last", "best"):
        if _linked(folder, link) == old.name:
            _link(folder, link, copy.name)
    _discard(folder, old)


def _prune(folder: Path, step: int, keep: int, good: set[str]) -> None:
    """Delete the oldest. Steps beyond the current one count as oldest: a resumed run went back to before them."""
    steps = sorted(_steps_by_name(folder).items(), key=lambda item: (item[1] <= step, item[1]))
    kept = {_linked(folder, "best"), _linked(folder, "last"), *good}
    with suppress(OSError):  # the new checkpoint is safe, and leftovers are harmless
        for name, _ in steps[: max(0, len(steps) - keep)]:
            if name not in kept:
                _discard(folder, folder / name)
        _sweep(folder)


def _discard(folder: Path, path: Path) -> None:
    """Rename to a hidden name before deleting: a half-deleted checkpoint must not look like a complete one."""
    hidden = folder / f"{_TEMPORARY}old-{path.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove temporary files of this or of a killed process, except those that `best` or `last` points to."""
    needed = {_linked(folder, "best"), _linked(folder, "last")}
    for path in folder.glob(f"{_TEMPORARY}*"):
        if path.name in needed:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable; syncing the files does not."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
