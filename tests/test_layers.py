"""The guide for contributors shows the layers that import-linter holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/paceline"
OUTSIDE = {"__main__", "lazy"}
"""Modules that stand in no layer: the entry point, and lazy imports of numpy and torch."""


def layers() -> list[list[str]]:
    """From top to bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    found = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in found]


def test_contributing_has_the_layers_of_the_contract() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"^## Layers\n+```\n(.*?)^```", text, re.M | re.S)
    assert block is not None
    shown = [[name.strip() for name in layer.split(",")] for layer in block[1].replace("\n", " ").split("→")]
    assert shown == layers()[::-1]


def test_every_package_and_module_has_a_layer() -> None:
    files = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {path.stem for path in files} - {"__init__"} - OUTSIDE == {name for layer in layers() for name in layer}
