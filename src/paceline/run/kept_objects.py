"""`objects.json`: what the settings of a run name and no file has, because it was given as an object in Python.

Reading it executes nothing. Whoever loads one of the objects executes its pickle.
"""

from __future__ import annotations

import base64
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config import UserError
from paceline.config.objects import PickledObject, adopt, pickled_objects
from paceline.run.directory import write_json

FILE = "objects.json"


def keep_objects(run: Path, tree: Mapping[str, Any]) -> None:
    """Write what the settings name, if anything."""
    if found := pickled_objects(_texts(tree)):
        content = {name: asdict(one) | {"pickle": _text(one.pickle)} for name, one in found.items()}
        write_json(run / FILE, content)


def read_objects(place: Path) -> bytes | None:
    """The file of a run, or of what `agent.save` has written; None: it has none."""
    path = zipfile.Path(place) / FILE if place.is_file() else place / FILE
    return path.read_bytes() if path.exists() else None


def adopt_objects(place: Path) -> None:
    """Use the objects of a run or of a saved agent, if it has any, for the names in its settings."""
    path = place / FILE
    try:
        if (text := read_objects(place)) is None:
            return
        content = json.loads(text)
        objects = {name: _object(one) for name, one in content.items()}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, KeyError):
        raise UserError(f"{path} is damaged: it is no table of pickled objects") from None
    adopt(objects)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _object(saved: dict[str, Any]) -> PickledObject:
    return PickledObject(
        base64.b64decode(saved["pickle"]),
        tuple(saved["modules"]),
        tuple(saved["folders"]),
        saved["python"],
        saved["problem"],
    )


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from tree
        for value in tree.values():
            yield from _texts(value)
    elif isinstance(tree, list):
        for item in tree:
            yield from _texts(item)
