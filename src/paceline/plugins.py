"""Objects a user names: `module:Attribute` or `path/to/file.py:Attribute`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.config import UserError


def absolute(name: str) -> str:
    """With `file.py:Class` made absolute, so that the run can be continued from any folder."""
    path, sign, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{attribute}" if sign and path.endswith(".py") else name


def absolute_everywhere(value: Any) -> Any:
    """The same for every text in a tree of settings, for processes that start in another folder."""
    if isinstance(value, str):
        return absolute(value)
    if isinstance(value, list):
        return [absolute_everywhere(item) for item in value]
    if isinstance(value, dict):
        return {absolute_everywhere(key): absolute_everywhere(item) for key, item in value.items()}
    return value


def load_attribute(name: str, what: str) -> Any:
    """`module:Attribute` or `path/to/file.py:Attribute` → the object."""
    path, _, attribute = name.rpartition(":")
    if not path:
        raise UserError(f"{what}={name}: module:Name or path/to/file.py:Name is expected")
    module = _load_file(path, what) if path.endswith(".py") else import_module(path, what)
    try:
        return getattr(module, attribute)
    except AttributeError:
        found = ", ".join(n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)
        raise UserError(f"{what}={name}: there is no '{attribute}' in it; it has {found or 'no class'}") from None


def import_module(module: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a console script does not have the user's folder on its path
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise UserError(f"{what}: there is no module '{module}'; is its package installed here?") from None
        raise UserError(
            f"{what}: importing '{module}' needs the module '{error.name}', which is not installed"
        ) from None
    except Exception as error:  # the user's module may raise anything; it is their input
        raise UserError(f"{what}: '{module}' cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: str, what: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{what}={path}: there is no such file")
    name = f"paceline_user_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"  # one name for each path
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{what}={path}{where}: cannot be imported: {type(error).__name__}: {error}") from error
    return module
