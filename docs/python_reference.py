"""The reference of the Python interface, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import paceline
from paceline.envs.check import check

INTERNAL = ("began", "code_bundle", "resolved")
"""Arguments for paceline's own processes."""


def python_reference() -> str:
    blocks = []
    for name in sorted(paceline.__all__, key=str.lower):
        found: Any = getattr(paceline, name)
        blocks.append(_class(name, found) if isinstance(found, type) else _function(f"paceline.{name}", _called(found)))
    blocks.append(_function("paceline.envs.check", check))
    return "\n\n".join(blocks)


def _called(found: Any) -> Callable[..., Any]:
    """The function behind a module that can be called."""
    if not isinstance(found, ModuleType):
        return found  # type: ignore[no-any-return]
    if found.__name__ == "paceline.report":
        from paceline.report.page import report

        return report
    function: Callable[..., Any] = vars(found)[vars(found)["CALLED"]]
    return function


def _class(name: str, cls: type) -> str:
    rows = []
    for member, value in vars(cls).items():
        if member.startswith("_") or not inspect.getdoc(getattr(value, "fget", value)):
            continue
        if isinstance(value, property):
            rows.append(f"| `{member}` | {_text(value.fget)} |")
        elif callable(value):
            rows.append(f"| `{member}{_signature(value)}` | {_text(value)} |")
    return (
        "\n".join([f"### `paceline.{name}`", "", _text(cls), "", "| | |", "|---|---|", *rows])
        if rows
        else (f"### `paceline.{name}`\n\n{_text(cls)}")
    )


def _function(name: str, function: Callable[..., Any]) -> str:
    return f"### `{name}`\n\n`{name.rpartition('.')[2]}{_signature(function)}`\n\n{_text(function)}"


def _signature(function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name not in ("self", *INTERNAL)
    ]
    return str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _text(documented: Any) -> str:
    """The docstring in one paragraph, without what is only for paceline's own processes."""
    text = " ".join((inspect.getdoc(documented) or "").split())
    for name in INTERNAL:
        text = re.sub(rf" `{name}`: [^`]*(`[^`]*`[^`]*?)*?\.(?= `\w+`: |$)", "", text)
    return text.replace("|", "\\|")
