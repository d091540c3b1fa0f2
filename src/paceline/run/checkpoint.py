"""Checkpoints: `checkpoints/step-N/` with `arrays.safetensors` and `state.json`; `best` and `last` point at them.

A checkpoint appears whole or not at all, and at every instant `last` points at one that is whole. Nothing is
pickled here (RLlib's state comes as bytes, which its engine alone unpickles).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_from_bytes
from safetensors.numpy import save as arrays_to_bytes

from paceline.config import UserError, parse_count
from paceline.run.directory import RunDirectory

FORMAT = 1
_ARRAYS, _STATE = "arrays.safetensors", "state.json"
_STEP = re.compile(r"step-(\d+)")
_TEMPORARY = ".tmp-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The earlier ones are as they were."""


class _Damaged(Exception):
    """Why a checkpoint cannot be loaded."""


def save(
    run: RunDirectory, step: int, arrays: dict[str, np.ndarray], state: dict[str, Any], *, keep: int, best: bool = False
) -> Path:
    """Write `step-N`, point `last` (and `best`) at it, and drop the oldest beyond `keep`.

    `state` is anything that JSON can hold; infinities and NaN come back as they are.
    """
    folder = run.checkpoints_path
    target = folder / f"step-{step}"
    temporary = folder / f"{_TEMPORARY}{target.name}"
    # safetensors writes memory as it lies: a transposed array would come back scrambled. Not `ascontiguousarray`,
    # which makes a vector of a scalar.
    content = arrays_to_bytes({name: np.asarray(array, order="C") for name, array in arrays.items()})
    record = {
        "format": FORMAT,
        "arrays": {"bytes": len(content), "crc32": zlib.crc32(content)},
        "state_crc32": zlib.crc32(_canonical(state)),
        "state": state,
    }
    text = json.dumps(record, indent=1, default=_unknown).encode()
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        _write(temporary / _ARRAYS, content)
        _write(temporary / _STATE, text)
        _sync(temporary)
        if target.exists():
            _step_aside(folder, temporary, target)
        temporary.rename(target)
        _sync(folder)
        for link in ("last", "best") if best else ("last",):
            _point(folder, link, target.name)
        if _pointed(folder, "best") == _twin(target):
            _point(folder, "best", target.name)
        _sync(folder)
    except OSError as error:
        with suppress(OSError):
            _sweep(folder)
        good = _pointed(folder, "last")
        still = f"{folder / good} is still good" if good else "there is no earlier one"
        raise CheckpointError(f"checkpoint {target} was not saved: {error.strerror or error}; {still}") from error
    _prune(folder, step, keep)
    return target


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the state of a checkpoint, checked against the sums written with them."""
    path = Path(path)
    try:
        return _read(path)
    except _Damaged as reason:
        other = _another(path)
        hint = f"; {other} loads: use that one" if other else "; no other checkpoint of this run loads"
        raise UserError(f"checkpoint {path} cannot be loaded: {reason}{hint}") from None


def find(target: str | Path, which: str | int | None = None) -> Path:
    """The checkpoint meant by a run (or a checkpoint) and `best`, `last`, a step, or None: best if any, else last."""
    path = Path(target).expanduser()
    if (path / _STATE).exists():
        if which is not None:
            raise UserError(f"{path} is one checkpoint already: give its run to choose {which!r}, or leave that out")
        return path
    if path.name != "checkpoints":
        if path.parent.name == "checkpoints":
            path, which = path.parent, path.name if which is None else which
        else:
            path = RunDirectory.open(path).checkpoints_path
    steps = available(path.parent)
    if which in (None, "best", "last"):
        for link in (which,) if which else ("best", "last"):
            if name := _pointed(path, str(link)):
                return path / name
            if (path / str(link) / _STATE).exists():  # a run that was copied with what its links point at
                return path / str(link)
        if which is None and steps:
            return path / f"step-{steps[-1]}"
    else:
        step = parse_count(str(which).removeprefix("step-"))
        if step in steps:
            return path / f"step-{step}"
    links = [link for link in ("best", "last") if _pointed(path, link)]
    exist = ", ".join([*links, *map(str, steps)])
    wanted = "checkpoint" if which is None else f"checkpoint {which!r}"
    raise UserError(f"{path.parent} has no {wanted}" + (f": there are {exist}" if exist else " yet: none was saved"))


def available(run_path: str | Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(_steps_by_name(Path(run_path) / "checkpoints").values())


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        text, content = (path / _STATE).read_bytes(), (path / _ARRAYS).read_bytes()
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
        raise _Damaged(f"it has format {found!r} and this version of paceline reads format {FORMAT}")
    try:
        size, crc, state_crc, state = (*_sums(record), record["state"])
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


def _sums(record: dict[str, Any]) -> tuple[int, int, int]:
    return record["arrays"]["bytes"], record["arrays"]["crc32"], record["state_crc32"]


def _canonical(state: Any) -> bytes:
    """The same bytes for a state and for what JSON makes of it."""
    return json.dumps(json.loads(json.dumps(state, default=_unknown)), sort_keys=True).encode()


def _unknown(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be saved in a checkpoint's state: {value!r}")


def _another(path: Path) -> Path | None:
    """The newest other checkpoint beside `path` that loads."""
    folder = path.parent
    name = _pointed(folder, path.name) or path.name
    for other, _ in sorted(_steps_by_name(folder).items(), key=lambda item: -item[1]):
        if other != name:
            with suppress(_Damaged):
                _read(folder / other)
                return folder / other
    return None


def _steps_by_name(folder: Path) -> dict[str, int]:
    try:
        return {p.name: int(m[1]) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir()}
    except OSError:
        return {}


def _pointed(folder: Path, link: str) -> str | None:
    """The name that `best` or `last` points at, if it is there."""
    try:
        name = (folder / link).readlink().name
    except OSError:
        return None
    return name if (folder / name).is_dir() else None


def _point(folder: Path, link: str, name: str) -> None:
    temporary = folder / f"{_TEMPORARY}{link}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)  # relative: the run may be moved
    temporary.replace(folder / link)


def _twin(path: Path) -> str:
    return f"{_TEMPORARY}twin-{path.name}"


def _step_aside(folder: Path, new: Path, old: Path) -> None:
    """Make room for `new` where `old` is, while what points at `old` points at a twin of `new`: a directory cannot
    be replaced in one step."""
    twin = folder / _twin(old)
    try:
        shutil.copytree(new, twin, copy_function=os.link)
    except (OSError, shutil.Error):  # no hard links on this file system
        shutil.rmtree(twin, ignore_errors=True)
        shutil.copytree(new, twin)
    _sync(twin)
    for link in ("last", "best"):
        if _pointed(folder, link) == old.name:
            _point(folder, link, twin.name)
    _discard(folder, old)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Drop the oldest. Steps beyond the present one are older still: a resumed run has gone back before them."""
    steps = sorted(_steps_by_name(folder).items(), key=lambda item: (item[1] <= step, item[1]))
    spared = {_pointed(folder, "best"), _pointed(folder, "last")}
    with suppress(OSError):  # the new checkpoint is safe: a leftover does no harm
        for name, _ in steps[: max(0, len(steps) - keep)]:
            if name not in spared:
                _discard(folder, folder / name)
        _sweep(folder)


def _discard(folder: Path, path: Path) -> None:
    """Under a hidden name first: a half deleted checkpoint must not look like one."""
    hidden = folder / f"{_TEMPORARY}old-{path.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what this save, or one that was killed, left behind; not what `best` or `last` still needs."""
    needed = {_pointed(folder, "best"), _pointed(folder, "last")}
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
    """Make the names in a folder durable, not only the contents."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
