"""A user's own classes, named `module:Attribute` or `path/to/file.py:Attribute` in the settings."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.config.objects import FILE_MODULE, add_to_path, has_object, load_object
from paceline.config.values import UserError, expanded


def absolute(reference: str) -> str:
    """Make the path in a `file.py:Class` absolute, so that a run can be continued from any folder."""
    path, colon, attribute = reference.rpartition(":")
    return f"{expanded(path).resolve()}:{attribute}" if colon and path.endswith(".py") else reference


def absolute_everywhere(tree: Any) -> Any:
    """`absolute` for every text in a settings tree, for processes that start in another folder."""
    return map_texts(tree, absolute)


def map_texts(tree: Any, change: Callable[[str], str]) -> Any:
    """A settings tree with every text in it changed, keys of mappings included."""
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, Mapping):
        return {map_texts(key, change): map_texts(value, change) for key, value in tree.items()}
    return [map_texts(item, change) for item in tree] if isinstance(tree, list | tuple) else tree


moved: dict[str, str] = {}
"""References of another machine's files → the same here; `code_bundle.install` fills it."""


_being_imported: list[str] = []


def refuse_in_import() -> None:
    """A script that trains when it is imported would start itself over and over."""
    if _being_imported:
        raise UserError(
            f"train() in {_being_imported[-1]}, which is being imported: put it under if __name__ == '__main__'"
        )


def load_attribute(reference: str, key: str) -> Any:
    """The object behind `module:Attribute` or `path/to/file.py:Attribute`. `key`: the setting, for error messages."""
    if has_object(reference):
        return load_object(reference, key)
    path, _, attribute = moved.get(reference, reference).rpartition(":")
    if not path:
        raise UserError(f"{key}={reference}: expected module:Name or path/to/file.py:Name")
    module = _load_file(path, key) if path.endswith(".py") else import_module(path, key)
    try:
        return getattr(module, attribute)
    except AttributeError:
        found = ", ".join(n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)
        raise UserError(f"{key}={reference}: it has no '{attribute}'; its classes: {found or 'none'}") from None


def import_module(module: str, key: str) -> ModuleType:
    add_to_path(Path.cwd())  # a console script does not have the user's folder on its path
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise UserError(f"{key}: there is no module '{module}'; is its package installed here?") from None
        raise UserError(
            f"{key}: importing '{module}' needs the module '{error.name}', which is not installed"
        ) from None
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{key}: '{module}' cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: str, key: str) -> ModuleType:
    file = expanded(path).resolve()
    if not file.is_file():
        raise UserError(f"{key}={path}: there is no such file")
    name = f"{FILE_MODULE}{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"  # one name for each path
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    add_to_path(file.parent)  # for imports of the files beside it
    _being_imported.append(str(file))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{key}={path}{where}: cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        _being_imported.pop()
    return module
