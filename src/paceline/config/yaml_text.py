"""YAML that users write. What would hang a reader of it or fill its memory is refused, like any other mistake."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import yaml

from paceline.config.values import UserError

MAX_BYTES = 10_000_000
MAX_FAST_BYTES = 10_000  # a text of 100,000 brackets crashes the loader written in C
MAX_DEPTH = 100
MAX_VALUES = 1_000_000
"""With every alias written out: a few hundred bytes of aliases can stand for billions of values."""


class Loader(yaml.SafeLoader):
    """Also reads 1e-3 as a number: YAML 1.1 calls it a string, and `env.kwargs` would pass it on as one."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_text(path: Path) -> str:
    """Like `Path.read_text`, with an OSError for a file that is too large or, like /dev/zero, has no end."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_BYTES // 1_000_000} MB", os.fspath(path))
    return content.decode("utf-8")


def load_yaml(text: str, *, fast: bool = False) -> Any:
    """The value; `yaml.YAMLError` if the text is not YAML, or not YAML that can be worked with. `fast`: by the loader
    written in C, which takes a tenth of the time; for files that paceline itself has written."""
    fast = fast and len(text) < MAX_FAST_BYTES
    try:
        tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else Loader)
    except RecursionError:
        raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # what PyYAML raises for a date like 2024-99-99
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None
    _measure(tree, {}, 0)
    return tree


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping in a file, empty if the file is. `where`: begins the error message."""
    try:
        tree = load_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}{line}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{where}: expected a mapping of keys, not {type(tree).__name__}")
    for key in tree:
        if not isinstance(key, str):
            raise UserError(f"{where}: the key {key!r} is not text")
    return tree


def read_mapping(path: Path, where: str) -> dict[str, Any]:
    """The mapping in the file at `path`."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise UserError(f"{where}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"{where}: expected a YAML file, not a directory") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{where}: cannot be read ({reason})") from None
    return parse_mapping(text, where)


def _measure(value: Any, measured: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """The number of values in a tree and its depth, with every alias written out. `measured`: by id, (0, 0) for those
    that `value` is part of."""
    if not isinstance(value, dict | list | set | tuple):
        return 1, 0
    known = measured.get(id(value))
    if known == (0, 0):
        raise yaml.YAMLError("an alias stands for something that it is part of")
    if known is not None:
        return known
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
    measured[id(value)] = 0, 0
    count, deepest = 1, 0
    for item in value.values() if isinstance(value, dict) else value:
        values, below = _measure(item, measured, depth + 1)
        count, deepest = count + values, max(deepest, below + 1)
    if count > MAX_VALUES:
        raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, with aliases written out")
    if deepest > MAX_DEPTH:
        raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
    measured[id(value)] = count, deepest
    return count, deepest
