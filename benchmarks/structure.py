"""Measures how large and how tangled the source is.

    python benchmarks/structure.py src                      one column
    python benchmarks/structure.py /path/to/old/src src     two columns: before and after

A duplicated block is six or more consecutive lines of code, the same but for indentation, in two places; imports, blank
lines and comments do not count. The figures of an iteration come from `trace_iteration.py`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORTEST = 6
LONG_FILE = 400
TRACER = Path(__file__).with_name("trace_iteration.py")

Place = tuple[int, int]
"""Number of a file, number of a line of code in it."""


@dataclass(frozen=True)
class Source:
    """The files of one version of the package."""

    folder: Path
    files: dict[Path, str]

    @classmethod
    def read(cls, source: Path) -> Source:
        folder = source.resolve() / "paceline"
        return cls(folder, {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))})

    def lines_by_package(self) -> Counter[str]:
        """Lines of each package; modules that stand alone count as one package."""
        lines: Counter[str] = Counter()
        for path, text in self.files.items():
            parts = path.relative_to(self.folder).parts
            lines[parts[0] if len(parts) > 1 else "(single modules)"] += text.count("\n")
        return lines

    def modules_that_share_a_name(self) -> list[str]:
        return _repeated(path.stem for path in self.files if path.stem != "__init__")

    def classes_that_share_a_name(self) -> list[str]:
        trees = (ast.parse(text) for text in self.files.values())
        return _repeated(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the size and the structure of the source.")
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help="folder that holds the package")
    parser.add_argument("--blocks", action="store_true", help="also list the duplicated blocks")
    options = parser.parse_args()
    versions = [Source.read(source) for source in options.sources]
    columns = [f"`{source}`" for source in options.sources]
    _print_table(["", *columns], _rows([figures(version) for version in versions]))
    print()
    packages = [dict(version.lines_by_package()) for version in versions]
    _print_table(["lines of", *columns], sorted(_rows(packages)))
    for version in versions if options.blocks else ():
        print()
        for length, places in duplicated_blocks(version.files.values()):
            names = [f"{_name(version, file)}:{line}" for file, line in places]
            print(f"{length} lines: {', '.join(names)}")


def figures(version: Source) -> dict[str, Any]:
    sizes = [text.count("\n") for text in version.files.values()]
    blocks = duplicated_blocks(version.files.values())
    iteration = trace(version.folder.parent)
    functions = list(dict.fromkeys((callee, function) for _, callee, function in iteration["calls"]))
    modules, classes = version.modules_that_share_a_name(), version.classes_that_share_a_name()
    return {
        "modules": len(sizes),
        "lines": sum(sizes),
        "lines of the longest module": max(sizes),
        f"modules of more than {LONG_FILE} lines": sum(size > LONG_FILE for size in sizes),
        "one iteration of PPO on CartPole-v1: files": len({callee for callee, _ in functions}),
        "one iteration: functions": len(functions),
        "one iteration: changes of file, in the order in which functions are first called": sum(
            one[0] != other[0] for one, other in itertools.pairwise(functions)
        ),
        "modules imported by that run": len(iteration["modules"]),
        f"duplicated blocks of {SHORTEST} lines or more": len(blocks),
        "lines in them, beyond the first copy": sum(length * (len(places) - 1) for length, places in blocks),
        "module names that occur more than once": _list(modules),
        "class names that occur more than once": _list(classes),
    }


def trace(source: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, TRACER, source], check=True, capture_output=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def duplicated_blocks(texts: Iterable[str]) -> list[tuple[int, list[Place]]]:
    """Length and places of each block that occurs more than once, longest first; lines are those of the file."""
    files = [_lines_of_code(text) for text in texts]
    windows: dict[tuple[str, ...], list[Place]] = {}
    for number, lines in enumerate(files):
        for start in range(len(lines) - SHORTEST + 1):
            windows.setdefault(tuple(text for _, text in lines[start : start + SHORTEST]), []).append((number, start))
    found: dict[tuple[str, ...], set[Place]] = {}
    for places in windows.values():
        for k, one in enumerate(places):
            for other in places[k + 1 :]:
                if _text(files, one, -1) is not None and _text(files, one, -1) == _text(files, other, -1):
                    continue  # the block begins earlier
                block = _common(files, one, other)
                if len(block) >= SHORTEST:
                    found.setdefault(block, set()).update((one, other))
    blocks = [
        (len(block), [(file, files[file][line][0]) for file, line in sorted(places)]) for block, places in found.items()
    ]
    return sorted(blocks, key=lambda block: (-block[0], block[1]))


def _common(files: list[list[tuple[int, str]]], one: Place, other: Place) -> tuple[str, ...]:
    """The equal lines from two places on; in one file, without overlap."""
    apart = other[1] - one[1] if one[0] == other[0] else sys.maxsize
    lines: list[str] = []
    while len(lines) < apart:
        text = _text(files, one, len(lines))
        if text is None or text != _text(files, other, len(lines)):
            break
        lines.append(text)
    return tuple(lines)


def _text(files: list[list[tuple[int, str]]], place: Place, offset: int) -> str | None:
    file, line = place[0], place[1] + offset
    return files[file][line][1] if 0 <= line < len(files[file]) else None


def _lines_of_code(text: str) -> list[tuple[int, str]]:
    """Line number and text of each line, without imports, blank lines and comments."""
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(n, line) for n, line in stripped if line and not line.startswith("#") and n not in imports]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(f"{name} ×{count}" for name, count in Counter(names).items() if count > 1)


def _name(version: Source, file: int) -> str:
    return str(list(version.files)[file].relative_to(version.folder))


def _list(names: list[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "0"


def _rows(columns: list[dict[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(_shown(column.get(name)) for column in columns)] for name in names]


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    for line in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
