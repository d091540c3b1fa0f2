"""Nobody asks for an algorithm's name: other code reads what the algorithm declares (see `algorithms/base.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import ALGORITHMS, algorithm_class

PACKAGE = Path(__file__).parents[1] / "src/paceline"
CLASSES = {algorithm_class(name).__name__ for name in ALGORITHMS}
ALLOWED = {
    *(f"{target.partition(':')[0].removeprefix('paceline.').replace('.', '/')}.py" for target in ALGORITHMS.values()),
    "config/algorithms.py",
    "config/rllib_keys.py",
}
"""An algorithm's own file, the list of algorithms, and RLlib's table of settings."""
ALLOWED_FOLDERS = ("algorithms/accelerated", "engines/rllib")
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if str(path.relative_to(PACKAGE)) not in ALLOWED and not str(path.relative_to(PACKAGE)).startswith(ALLOWED_FOLDERS)
]


def mentions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and kind of each place whose behaviour depends on which algorithm it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = (node.left, *node.comparators)
            if any(map(_has_name, parts)) and not any(_text(part).endswith("cnn") for part in parts):  # also a network
                yield node.lineno, "comparison with a name"
        elif isinstance(node, ast.Dict) and any(key is not None and _is_name(key) for key in node.keys):
            yield node.lineno, "table by name"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_list_of_names(node.value):
            yield node.lineno, "list of names"
        elif isinstance(node, ast.match_case) and any(_is_name(part) for part in ast.walk(node.pattern)):
            yield node.pattern.lineno, "match of a name"
        elif isinstance(node, ast.Attribute) and node.attr in ALGORITHMS and _text(node.value).endswith("config"):
            yield node.lineno, f"config.{node.attr}"
        elif isinstance(node, ast.Call) and _text(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            classes = {_text(part).rpartition(".")[2] for part in ast.walk(node.args[1])}
            if classes & CLASSES:
                yield node.lineno, "check for an algorithm's class"


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in ALGORITHMS


def _is_list_of_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Tuple | ast.List | ast.Set) and bool(node.elts) and all(map(_is_name, node.elts))


def _has_name(node: ast.AST) -> bool:
    return _is_name(node) or (isinstance(node, ast.Tuple | ast.List | ast.Set) and any(map(_is_name, node.elts)))


def _text(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def test_no_code_asks_for_the_name_of_an_algorithm() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {kind}"
        for path in FILES
        for line, kind in sorted(set(mentions(ast.parse(path.read_text(encoding="utf-8")))))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "config.algo == 'ppo'",
        "'dqn' != run.algo",
        "config.algo in ('ppo', 'a2c')",
        "{'ppo': 1, 'a2c': 2}.get(config.algo)",
        "OFF_POLICY = {'dqn', 'sac'}",
        "self.config.impala.batch_size",
        "isinstance(algorithm, PPO)",
        "issubclass(cls, (ppo.PPO, int))",
        "match config.algo:\n    case 'ppo' | 'a2c': pass",
    ],
)
def test_such_code_is_found(code: str) -> None:
    assert len(list(mentions(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "algo = 'ppo'",
        "config.algo == 'mine'",
        "isinstance(algorithm, OnPolicy)",
        "config.hyper.gamma",
        "tree['ppo']",
        "model.cnn == 'impala'",
    ],
)
def test_other_code_is_not(code: str) -> None:
    assert not list(mentions(ast.parse(code)))
