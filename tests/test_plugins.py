from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.config.plugins import absolute, import_module, load_attribute


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_can_import_the_files_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "a_neighbour_of_it.py", "NUMBER = 42\n")
    file = write(tmp_path / "my net.v2.py", "from a_neighbour_of_it import NUMBER\nclass Net:\n    number = NUMBER\n")
    net = load_attribute(f"{file}:Net", "model.class")
    assert net.number == 42
    assert load_attribute(f"{file}:Net", "model.class") is net  # not executed a second time


def test_files_of_similar_names_are_different_modules(tmp_path: Path) -> None:
    names = ["a/b.py", "a_b.py", "a-b.py", "a.b.py", "a/b_.py", "c/a/b.py"]
    files = [write(tmp_path / name, f"WHO = {name!r}\n") for name in names]
    assert [load_attribute(f"{file}:WHO", "model.class") for file in files] == names


def test_a_module_may_be_installed_or_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_attribute("collections:OrderedDict", "env.id").__name__ == "OrderedDict"
    write(tmp_path / "only_here_for_a_test.py", "class Thing: ...\n")
    monkeypatch.chdir(tmp_path)
    assert load_attribute("only_here_for_a_test:Thing", "env.id").__name__ == "Thing"


@pytest.mark.parametrize(
    ("text", "attribute", "named"),
    [
        ("class Net: ...\nclass Other: ...\n", "Nett", "has no 'Nett'; its classes: Net, Other"),
        ("from collections import OrderedDict\n", "Net", "its classes: none"),
        ("x = 1\nclass Net\n", "Net", r"line 2: cannot be imported: SyntaxError"),
        ("raise RuntimeError('out of order')\n", "Net", "RuntimeError: out of order"),
        ("import not_there_at_all\n", "Net", "No module named 'not_there_at_all'"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, attribute: str, named: str) -> None:
    file = write(tmp_path / "net.py", text)
    with pytest.raises(UserError, match=named) as caught:
        load_attribute(f"{file}:{attribute}", "model.class")
    assert "model.class=" in str(caught.value) and str(file) in str(caught.value)


def test_a_repaired_file_can_be_loaded(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", "raise ValueError\n")
    with pytest.raises(UserError):
        load_attribute(f"{file}:Net", "model.class")
    write(file, "class Net: ...\n")
    assert load_attribute(f"{file}:Net", "model.class").__name__ == "Net"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("nowhere/net.py:Net", "no such file"),
        ("no_such_module_xyz:Net", "no module 'no_such_module_xyz'"),
        ("collections.no_such_part:Net", "no module 'collections.no_such_part'"),
        ("collections:Nothing", "has no 'Nothing'"),
        ("Net", "model.class=Net"),
        ("net.py", "model.class=net.py"),
        (":Net", "model.class=:Net"),
        (".relative:Net", r"\.relative"),
        ("collections:", "collections"),
    ],
)
def test_bad_references_are_refused_in_one_line(name: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        load_attribute(name, "model.class")
    assert "\n" not in str(caught.value)


def test_a_module_with_a_missing_dependency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "needs_more_for_a_test.py", "import quite_absent\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="needs the module 'quite_absent'"):
        import_module("needs_more_for_a_test", "env.id")


def test_a_module_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "fails_for_a_test.py", "1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        import_module("fails_for_a_test", "env.id")


def test_only_file_references_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("nets/own.py:Net") == f"{tmp_path.resolve()}/nets/own.py:Net"
    assert absolute("~/own.py:Net") == f"{Path.home().resolve()}/own.py:Net"
    for same in ("CartPole-v1", "package.module:Env-v0", "paceline/Identity-v0", "TimeLimit"):
        assert absolute(same) == same
