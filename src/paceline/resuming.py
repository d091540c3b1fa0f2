"""Which run to continue, with which settings and from which checkpoint."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.config import ALGORITHMS, RunConfig, UserError
from paceline.config.resolve import merge, portable, tidy, to_tree, validate, without_auto
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory, write_json
from paceline.run.kept_objects import adopt_objects
from paceline.run.state_tree import unpack
from paceline.training.engine import EXACT, Levels
from paceline.training.loop import Loop

UNSAVED = ("out", "name", "preset")  # not saved: where the run is, and where its settings came from
RESUMABLE = ("stop", "eval", "checkpoint", "engine", "callbacks")  # may change when a run is resumed


def load_state(directory: RunDirectory, which: str, may_fall_back: bool) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A checkpoint of a run: its path, its content, and the state of engine and loop."""
    try:
        path = checkpoint.find(directory.path, which)
        arrays, content = checkpoint.load(path)
    except UserError as error:
        if not may_fall_back:
            raise
        path, arrays, content = checkpoint.load_newest(directory.path)
        text = f"{error}; continuing from {path}"
        directory.log(text)
        print(f"paceline: warning: {text}", file=sys.stderr)
    return path, content, unpack(arrays, {key: content[key] for key in ("engine", "loop")})


def resumed_line(loop: Loop, levels: Levels) -> str:
    """The level of the environments, and of all other parts that are not exact."""
    others = [f"{part} {level}" for part, level in levels.items() if part != "environments" and level != EXACT]
    parts = [f"environments {levels['environments']}", *others]
    return f"resumed    at {loop.counters.env_steps:,} steps, {'; '.join(parts)}"


def record_resume(directory: RunDirectory, loop: Loop, checkpoint_name: str, levels: Levels) -> None:
    """Add a resume to `resume.json`."""
    path = directory.path / "resume.json"
    words = {part: level.partition(":")[0] for part, level in levels.items()}
    level = words["environments"] if set(words.values()) == {EXACT} or words["environments"] != EXACT else "partial"
    try:
        history = json.loads(path.read_text())["history"]
    except (OSError, ValueError, KeyError, TypeError):  # the first one, or written by an earlier version
        history = []
    entry = {
        "resume": loop.resumes,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": checkpoint_name,
        "env_steps": loop.counters.env_steps,
        "level": level,
        "parts": levels,
    }
    write_json(path, {"resumes": loop.resumes, "level": level, "history": [*history, entry]})


def run_to_resume(given: Any, resume: str | Path) -> tuple[RunDirectory, str] | None:
    """The run to continue and the name of its checkpoint; None for `auto` if there is none yet."""
    if str(resume) != "auto":
        path = Path(resume)
        if path.parent.name == "checkpoints":
            return RunDirectory.open(path.parent.parent), path.name
        return RunDirectory.open(resume), "last"
    where = given
    if not isinstance(given, RunConfig):
        where = validate({key: value for key, value in given.items() if key in ("out", "name")})
    if where.name is None:
        raise UserError("--resume auto needs --name: the run to continue if it exists, or to start if it does not")
    path = Path(where.out).expanduser() / where.name
    if not path.exists():
        return None
    directory = RunDirectory.open(path)
    if checkpoint.can_only_start_again(path):
        with directory.locked():
            kept = path.rename(path.with_name(f"{path.name}-damaged-{secrets.token_hex(2)}"))
        print(f"paceline: warning: the first checkpoint of {path} does not load, and it has no other; the run starts "
              f"again, and what there was is in {kept}", file=sys.stderr)  # fmt: skip
        return None
    return (directory, "last") if checkpoint.available(path) else None  # it ended before its first checkpoint


def changed_config(directory: RunDirectory, given: Mapping[str, Any]) -> RunConfig:
    """The settings of a run with the changes in `given`, of which only `RESUMABLE` sections are allowed."""
    adopt_objects(directory.path)
    saved = validate(directory.read_config())
    _check_place(directory, saved, given)
    changes = tidy(without_auto({key: value for key, value in given.items() if key not in UNSAVED}))
    for key in ("algo", *ALGORITHMS):
        if changes.get(key, saved.algo) != saved.algo and key != saved.algo:
            name, value = (key, changes[key]) if key == "algo" else _leaf(key, changes[key])
            raise UserError(_unchangeable(name, value, saved.algo if key == "algo" else "none", directory))
    changed = validate(merge(to_tree(saved), changes))
    config = portable(changed)
    if "rllib" in {saved.engine.name, config.engine.name} and saved.engine.name != config.engine.name:
        raise UserError(
            f"engine.name={config.engine.name} differs from the run {directory.path}, which has {saved.engine.name}: "
            "only RLlib reads RLlib's checkpoints (--init-from starts a new run from its weights)"
        )
    before, after = _fixed(saved), _fixed(config)
    if before != after:
        key, was, new = _first_difference(before, after)
        raise UserError(_unchangeable(key, new, was, directory))
    return config


def _check_place(directory: RunDirectory, saved: RunConfig, given: Mapping[str, Any]) -> None:
    """Refuse another name, folder or preset: a run that is continued stays where it is, with the settings it has."""
    where = directory.path.absolute()
    for key, actual in (("name", where.name), ("out", str(where.parent.resolve())), ("preset", saved.preset)):
        value = given.get(key)
        there = str(Path(str(value)).expanduser().resolve()) if key == "out" else value
        if value is not None and there != actual and value != getattr(saved, key):
            raise UserError(f"--{key} {value}: --resume continues the run {directory.path} as it is; leave out --{key}")


def _unchangeable(key: str, new: Any, was: Any, directory: RunDirectory) -> str:
    return (
        f"{key}={new} differs from the run {directory.path}, which has {was}; --resume continues it as it was, and "
        f"only {', '.join(RESUMABLE)} can be changed (--init-from starts a new run from its weights)"
    )


def _leaf(key: str, value: Any) -> tuple[str, Any]:
    """The first setting of a section, by its dotted key."""
    if isinstance(value, Mapping) and value:
        name, inner = next(iter(value.items()))
        return _leaf(f"{key}.{name}", inner)
    return key, value


def _fixed(config: RunConfig) -> dict[str, Any]:
    """The settings that must not change when a run is resumed."""
    tree = config.model_dump(by_alias=True, mode="json")
    return {key: value for key, value in tree.items() if key not in (*RESUMABLE, *UNSAVED)}


def _first_difference(before: Any, after: Any) -> tuple[str, Any, Any]:
    """The dotted key of the first value that differs, and the two values."""
    key = next(key for key in after if before.get(key) != after[key])
    if isinstance(before.get(key), dict) and isinstance(after[key], dict) and before[key].keys() == after[key].keys():
        rest, was, new = _first_difference(before[key], after[key])
        return f"{key}.{rest}", was, new
    return key, before.get(key), after[key]
