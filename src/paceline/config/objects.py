"""Classes, functions and specs given as objects in Python: the reference that stands for each in the settings.

Other processes import what is at the top of a module or of an imported file. Everything else travels by value: what is
defined in a script, a notebook cell or a function, a `functools.partial`, an `EnvSpec`. It is pickled, sent to workers
in the code bundle, and kept in the run's `objects.json`.
"""

from __future__ import annotations

import functools
import pickletools
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import FunctionType
from typing import Any

from paceline.config.values import UserError

FILE_MODULE = "paceline_user_"
"""Beginning of the names of modules that were loaded from a `path/to/file.py`."""
EVERYWHERE = frozenset({"gymnasium", "paceline", "ale_py"})
"""Packages whose environment ids every process knows."""


@dataclass(frozen=True)
class PickledObject:
    pickle: bytes = b""
    modules: tuple[str, ...] = ()
    """Top-level modules that it needs and Python does not come with."""
    folders: tuple[str, ...] = ()
    """Where those of them lie that are not installed."""
    python: str = ""
    problem: str = ""
    """Why it cannot be pickled, if so."""

    def load(self) -> Any:
        if self.problem:
            raise UserError(self.problem)
        import cloudpickle

        for folder in self.folders:
            add_to_path(Path(folder))
        try:
            return cloudpickle.loads(self.pickle)
        except Exception as error:  # a module is missing, or the bytes are from another Python
            here = platform.python_version()
            other = "" if here == self.python else f" (this is Python {here}, it is from {self.python})"
            raise UserError(f"it cannot be loaded here: {type(error).__name__}: {error}{other}") from error


_given: dict[str, Any] = {}
"""The objects of this process, by reference."""
_pickled: dict[str, PickledObject] = {}
"""Those that travel by value."""


def is_object(given: Any) -> bool:
    """Whether it stands for itself, and not for a name or a setting."""
    return isinstance(given, type | FunctionType | functools.partial) or _is_spec(given) or callable(given)


def name_of(given: Any, key: str) -> str:
    """The reference by which this and other processes load an object. `key`: the setting, for error messages."""
    module, _, path = _place(given)
    if _is_importable(given):
        file = getattr(sys.modules[module], "__file__", None)
        reference = f"{Path(str(file)).resolve()}:{path}" if module.startswith(FILE_MODULE) else f"{module}:{path}"
        _pickled.pop(reference, None)
    else:
        reference = _reference(given)
        _pickled[reference] = _pickle(given, key)
    _given[reference] = given
    return reference


def env_name(given: Any) -> tuple[str, dict[str, Any]]:
    """`env.id` of an object or of an id in Gymnasium's registry, and further settings of `env`."""
    if isinstance(given, str):
        spec = _registry().get(given)
        if spec is not None and not _is_known_everywhere(spec):
            _given[given], _pickled[given] = spec, _pickle(spec, "env")
        return given, {}
    if not _is_spec(given):
        return name_of(given, "env"), {}
    known = _registry().get(given.id)
    if known is None or replace(given, kwargs=known.kwargs, max_episode_steps=known.max_episode_steps) != known:
        return name_of(given, "env"), {}
    settings: dict[str, Any] = {}
    if kwargs := {name: value for name, value in given.kwargs.items() if name != "render_mode"}:
        settings["kwargs"] = kwargs
    if given.max_episode_steps != known.max_episode_steps:
        settings["max_episode_steps"] = given.max_episode_steps
    return env_name(given.id)[0], settings


def refuse_made(given: Any) -> None:
    """An environment that is made already cannot be copied, and many are needed."""
    if hasattr(given, "reset") and hasattr(given, "step") and not isinstance(given, type):
        hint = "its spec (env.spec), " if getattr(given, "spec", None) is not None else ""
        raise UserError(
            f"env={type(given).__name__} is one environment, but a run makes several: give {hint}its class or a "
            "function that makes it"
        )


def has_object(reference: str) -> bool:
    return reference in _given or reference in _pickled


def load_object(reference: str, key: str) -> Any:
    if reference not in _given:
        try:
            _given[reference] = _pickled[reference].load()
        except UserError as error:
            raise UserError(f"{key}={reference} was given as an object, and {error}") from error
    return _given[reference]


def pickled_objects(references: Iterable[str] | None = None) -> dict[str, PickledObject]:
    """What travels by value, of these references or at all."""
    wanted = _pickled if references is None else references
    return {reference: _pickled[reference] for reference in wanted if reference in _pickled}


def adopt(objects: Mapping[str, PickledObject]) -> None:
    """Use these for their references from now on."""
    for reference, pickled in objects.items():
        if _pickled.get(reference) != pickled:
            _given.pop(reference, None)
            _pickled[reference] = pickled


def add_to_path(folder: Path) -> None:
    """Put a folder first on Python's path, unless it is on it already."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _is_spec(given: Any) -> bool:
    registration = sys.modules.get("gymnasium.envs.registration")
    return registration is not None and isinstance(given, registration.EnvSpec)


def _registry() -> dict[str, Any]:
    """Without importing Gymnasium: only who has imported it can have registered something."""
    return getattr(sys.modules.get("gymnasium"), "registry", {})


def _is_known_everywhere(spec: Any) -> bool:
    if not isinstance(spec.entry_point, str):
        return False
    top = spec.entry_point.partition(":")[0].partition(".")[0]
    plugins = {point.module.partition(".")[0] for point in entry_points(group="gymnasium.envs")}
    return top in EVERYWHERE | plugins


def _place(given: Any) -> tuple[str, str, str]:
    """Module, the functions and classes around it, and name."""
    if isinstance(given, functools.partial):
        return _place(given.func)
    named = given if hasattr(given, "__qualname__") else type(given)
    outer, _, name = str(named.__qualname__).replace("<lambda>", "lambda").rpartition(".")
    return named.__module__, outer.replace(".<locals>", ""), name


def _is_importable(given: Any) -> bool:
    """Whether other processes find it by its name. A script is not imported: that would run it again."""
    if not isinstance(given, type | FunctionType) or given.__module__ == "__main__":
        return False
    return getattr(sys.modules.get(given.__module__), given.__qualname__, None) is given


def _reference(given: Any) -> str:
    if _is_spec(given):
        return f"spec:{given.id}" if given.id in _registry() else str(given.id)
    module, outer, name = _place(given)
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and not outer and file is not None:
        return f"{Path(file).resolve()}:{name}"
    return f"{module}.{outer}:{name}" if outer else f"{module}:{name}"


def _pickle(given: Any, key: str) -> PickledObject:
    import cloudpickle

    python = platform.python_version()
    try:
        content = cloudpickle.dumps(given)
    except Exception as error:  # of anything that it refers to
        name = _reference(given).rpartition(":")[2]
        return PickledObject(
            python=python, problem=f"it cannot leave its process: {key}={name}: {type(error).__name__}: {error}"
        )
    texts = {text for _, text, _ in pickletools.genops(content) if isinstance(text, str) and text in sys.modules}
    tops = {text.partition(".")[0] for text in texts} - {"__main__", "paceline"} - sys.stdlib_module_names
    return PickledObject(content, tuple(sorted(tops)), tuple(sorted(_folders(tops))), python)


def _folders(modules: Iterable[str]) -> set[str]:
    """Of modules that are not installed packages."""
    found = set()
    for module in (sys.modules.get(name) for name in modules):
        places = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None)]
        for path in (Path(place).resolve() for place in places if place is not None):
            if not {"site-packages", "dist-packages"}.intersection(path.parts):
                found.add(str(path.parent))
    return found
