"""The two pictures of docs/concepts.md, made from the code as Mermaid text; `docs/generate.py` writes them.

`packages`: the layers of pyproject.toml, from top to bottom, and the imports between them. `iteration`: the calls that
one iteration of training makes, recorded while it runs (`benchmarks/trace_iteration.py`).
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
TRACER = ROOT / "benchmarks/trace_iteration.py"

SHOWN = ("training", "engines", "rollout", "envs", "models", "algorithms", "run")
"""The packages of the iteration, from left to right."""
DETAILS = {"training.clock", "training.stopping", "rollout.batch", "models.heads", "algorithms.rows"}
"""Modules whose calls would hide the others."""


def packages() -> str:
    """Packages as boxes; single modules of one layer share a box. An arrow is an import that no other path implies."""
    boxes = _boxes(layers())
    order = [*boxes]
    graph = grimp.build_graph("paceline", exclude_type_checking_imports=True)
    imports: dict[str, set[str]] = {box: set() for box in boxes}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, other = (_box(name, boxes) for name in (module, imported))
            if one and other and order.index(one) < order.index(other):  # the other direction is a broken contract
                imports[one].add(other)
    lines = ["flowchart TB"]
    lines += [f'    {box}["{"<br/>".join(names)}"]' for box, names in boxes.items()]
    for box in boxes:
        through = {far for near in imports[box] for far in _reachable(near, imports)}
        lines += [f"    {box} --> {other}" for other in boxes if other in imports[box] - through]
    return _mermaid(lines)


def layers() -> list[list[str]]:
    """The layers that import-linter holds, from top to bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    found = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in found]


def meaning(name: str) -> str:
    """The first sentence of the docstring of a package or module."""
    path = ROOT / "src/paceline" / name
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9`])\. ", text)[0].rstrip(".")


def iteration() -> str:
    """A sequence of the calls from one module to another."""
    done = subprocess.run([sys.executable, TRACER, ROOT / "src"], check=True, capture_output=True)
    calls = [tuple(call) for call in json.loads(done.stdout)["calls"]]
    lines = ["sequenceDiagram"] + [f"    participant {name}" for name in SHOWN]
    messages: dict[str, None] = {}
    for caller, callee, function in calls:
        one, other = caller.partition(".")[0], callee.partition(".")[0]
        public = not any(part.startswith(("_", "<")) for part in function.split("."))
        if caller != callee and public and {one, other} <= {*SHOWN} and not {caller, callee} & DETAILS:
            messages.setdefault(f"    {one}->>{other}: {function}")
    return _mermaid([*lines, *messages])


def _boxes(found: list[list[str]]) -> dict[str, list[str]]:
    """Name of a box → what it holds."""
    boxes: dict[str, list[str]] = {}
    for layer in found:
        single = [name for name in layer if not (ROOT / "src/paceline" / name).is_dir()]
        boxes |= {name: [name] for name in layer if name not in single}
        boxes |= {single[0]: single} if single else {}
    return boxes


def _box(module: str, boxes: dict[str, list[str]]) -> str | None:
    part = module.split(".")[1] if "." in module else ""
    return next((box for box, names in boxes.items() if part in names), None)


def _reachable(box: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [*imports[box]]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += imports[one]
    return found


def _mermaid(lines: list[str]) -> str:
    return "\n".join(["```mermaid", *lines, "```"])


if __name__ == "__main__":
    print(packages(), iteration(), sep="\n\n")
