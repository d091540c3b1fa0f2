"""What the documentation shows is run, with small budgets; what it says of names is compared with the code.

The comments that steer it are explained in CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_blocks import Block, apply_diff, blocks

import paceline
from paceline import api, evaluate
from paceline.commands.main import make_parser
from paceline.config.resolve import keys, merge, read_file
from paceline.envs import check
from paceline.run.directory import RunDirectory

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
EXAMPLE_ALGORITHMS = sorted((ROOT / "examples/algorithms").glob("*.py"))
OF_OTHER_PROGRAMS = {"--logdir", "--port", "--head", "--signal", "--requeue", "--project"}
OF_OTHER_PROGRAMS |= {"--rm", "--init", "--user", "--network", "--ipc"}  # docker
OF_OTHER_PROGRAMS |= {"--no-kill", "--batch"}  # sbatch, scancel
OF_OTHER_PROGRAMS |= {"--bind-to", "--map-by", "--cc", "--cpu-bind"}  # mpirun, aprun, mpiexec
OF_OTHER_PROGRAMS |= {"--index-url", "--no-index", "--find-links"}  # pip
MARKS = {"", "not run", "file", "given", "example", "source", "needs"}
SECONDS = 60.0

Cli = Callable[..., Any]


@pytest.fixture
def checkout(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with what a reader has in theirs, where one iteration and ten episodes are enough."""
    for name in ("examples", "configs", "docs"):
        (here / name).symlink_to(ROOT / name)
    train = api.train

    def small(config: Any, *, resume: Any = None, resolved: Any = None, **options: Any) -> api.Run:
        """Ignores `resolved`, the settings with the budget that is shown."""
        tree = read_file(config) if isinstance(config, str | Path) else config
        budget = {"stop": {"iterations": 1 if resume is None else 2}}
        short = {"ppo": {"rollout_steps": 16}} if resume is None and tree.get("algo", "ppo") == "ppo" else {}
        return train(merge(merge(short, tree), budget), resume=resume, **options)

    def short(target: Any, *, episodes: int = 100, **options: Any) -> Any:
        return play(target, episodes=min(episodes, 10), **options)

    play = evaluate.evaluate
    monkeypatch.setattr(api, "train", small)
    monkeypatch.setattr(evaluate, "evaluate", short)
    monkeypatch.setattr(check, "SPEED_SECONDS", 0.05)
    tools = here / "tools"
    tools.mkdir()
    real = shlex.quote(str(Path(sys.executable).with_name("paceline")))
    script = f'#!/bin/sh\n[ "$1" = train ] && exec {real} "$@" --iterations 1\nexec {real} "$@"\n'
    (tools / "paceline").write_text(script)
    (tools / "paceline").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return here


def test_blocks_are_marked_with_words_that_mean_something() -> None:
    unknown = [block.where for page in PAGES for block in blocks(page) if block.mark not in MARKS]
    assert not unknown
    silent = [block.where for page in PAGES for block in blocks(page) if block.mark == "not run" and not block.note]
    assert not silent


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.needs(b.note) for b in blocks(page) if b.mark == "needs"])
        for page in PAGES
    ],
)
def test_a_page_works_as_shown(page: Path, checkout: Path, cli: Cli) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks(page):
        if block.mark in ("not run", "source"):
            continue
        if block.mark == "file":
            Path(block.note).write_text(block.text)
        elif block.language == "python":
            if block.mark == "given":
                exec(block.note, namespace)
            exec(compile(block.text, block.where, "exec"), namespace)
        elif block.language == "sh":
            run_shell(block, cli)
        elif block.language == "console":
            run_console(block, cli)
    runs = [path.parent for path in Path("runs").glob("*/summary.json")]
    assert not {name for run in runs for name in undescribed(RunDirectory(run))}


def run_shell(block: Block, cli: Cli) -> None:
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(re.match(r"(?!paceline\b|#|$)", line) or "$" in line for line in lines):  # more than plain commands
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, f"{block.where}: {done.stderr or done.stdout}"
        return
    for line in lines:
        words = shlex.split(line, comments=True)
        if words:
            result = cli(*words[1:])
            assert result.code == 0, f"{block.where}: {line}: {result.err or result.out}"


def run_console(block: Block, cli: Cli) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, *expected = part.splitlines()
        words = shlex.split(command)
        assert words[0] == "paceline", f"{block.where}: {command}"
        result = cli(*words[1:])
        refused = bool(expected) and expected[0].startswith("paceline: ")
        assert result.code == (2 if refused else 0), f"{block.where}: {command}: {result.err or result.out}"
        if block.mark != "example":
            pattern = "".join(re.escape(line).replace("…", "(?:.|\n)*") + "\n" for line in expected)
            assert re.fullmatch(pattern, result.err if refused else result.out), f"{block.where}: {command}: {result}"


def commands_in(path: Path) -> list[str]:
    """Those in the docstring of an example, or in the first comment of a settings file."""
    text = path.read_text(encoding="utf-8")
    head = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text
    return re.findall(r"^#?\s*(paceline .*)$", head, re.M) + re.findall(r"^#.*:\s+(paceline .*)$", head, re.M)


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.py")), *EXAMPLE_ALGORITHMS],
    ids=lambda path: path.name,
)
def test_an_example_runs_by_the_command_in_it(
    path: Path, checkout: Path, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = commands_in(path)
    for command in commands:
        few = ["--iterations", "1"] if "--engine" in command else []  # that of other engines: that it begins
        result = cli(*shlex.split(command)[1:], *few)
        assert result.code == 0, f"{command}: {result.err}"
    if "__main__" in path.read_text():
        runpy.run_path(str(path), run_name="__main__")
        assert "return" in capfd.readouterr().out
    else:
        assert commands


def test_the_readme_has_the_code_of_the_docstring() -> None:
    code = [line for line in (paceline.__doc__ or "").splitlines()[1:] if line]
    shown = [block.text.split("\n") for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert any([line for line in lines if line] == code for lines in shown)


def test_the_page_on_extending_has_all_of_an_example() -> None:
    shown = [block.text for block in blocks(ROOT / "docs/extending.md") if block.language == "python"]
    assert (ROOT / "examples/algorithms/reinforce.py").read_text() in shown


def test_names_that_the_concepts_list_are_in_the_code() -> None:
    text = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\S+\.py)` \|", text, re.M)
    assert len(rows) > 10
    for name, path in rows:
        code = (ROOT / "src/paceline" / path).read_text()
        assert re.search(rf"^ *(class|def) {name}\b", code, re.M), f"{path} has no {name}"


def test_a_diff_without_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "list.py"
    path.write_text("a = 1\nb = 2\nc = 3\n")
    apply_diff(path, " a = 1\n+new = 0\n@@\n-c = 3\n+c = 4\n", "page.md:1")
    assert path.read_text() == "a = 1\nnew = 0\nb = 2\nc = 4\n"
    for stale in ("-c = 3\n", "-\n"):  # not there, or more than once
        with pytest.raises(ValueError, match=r"page.md:1: list.py has these lines \d times, not once"):
            apply_diff(path, stale, "page.md:1")


def test_generated_tables_are_fresh() -> None:
    script = [sys.executable, str(ROOT / "docs/generate.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name}: {target}"


def ours(page: Path) -> str:
    """The text of a page; of tables that stand for what was done before the right side alone, which is ours."""
    text = page.read_text(encoding="utf-8")
    if page.stem == "migrating" or page.parent.name == "clusters":
        text = "\n".join(line.split(" | ", 1)[-1] for line in text.splitlines())
    return text


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_settings_and_flags_that_are_named_exist(page: Path) -> None:
    known = {key for key, *_ in keys()} | {"eval.jsonl"}  # a file
    sections = {key.partition(".")[0] for key in known if "." in key}
    spans = re.findall(r"`([^`\n]+)`", ours(page))
    named = {m for span in spans for m in re.findall(r"(?<![\w./])([a-z0-9]+\.[a-z_]+)(?![\w./(])", span)}
    assert {name for name in named if name.partition(".")[0] in sections} <= known
    flags = {word for span in spans for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}
    assert flags - OF_OTHER_PROGRAMS <= all_flags()


def all_flags() -> set[str]:
    def flags_of(parser: argparse.ArgumentParser) -> set[str]:
        known = {option for own in parser._actions for option in own.option_strings}
        for action in parser._actions:
            for verb in action.choices.values() if isinstance(action.choices, dict) else ():
                known |= flags_of(verb)
        return known

    return flags_of(make_parser())


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in [*PAGES, ROOT / "CONTRIBUTING.md"] for name in
             re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)}  # fmt: skip
    assert {"train", "test", "bench"} <= {name for pair in named for name in pair if name} <= targets


def test_every_file_and_key_of_a_run_is_described(checkout: Path, cli: Cli) -> None:
    text = (ROOT / "docs/files.md").read_text(encoding="utf-8")
    run = paceline.train({"env": "CartPole-v1", "name": "one", "eval": {"every_steps": 1}})
    assert cli("train", "--resume", run.path).code == 0
    assert cli("evaluate", run.path, "--episodes", 2).code == 0
    tree = text.partition("```\n")[2].partition("```")[0]
    assert not [path.name for path in run.path.iterdir() if path.name[0] != "." and path.name not in tree]
    assert len(names_in(run)) > 70
    assert not undescribed(run)


def names_in(run: RunDirectory) -> set[str]:
    records = [run.read_summary(), run.read_status(), read_file(run.provenance_path)]
    rows = [*run.read_metrics(), *run.read_eval()]
    return {name for record in (*records, *rows) for name in record if not name.startswith(("env/", "callback/"))}


def undescribed(run: RunDirectory) -> list[str]:
    text = (ROOT / "docs/files.md").read_text(encoding="utf-8")
    assert "`policy/NAME/METRIC`" in text
    names = {name.split("/")[2] if name.startswith("policy/") else name for name in names_in(run)}
    return sorted(name for name in names if f"`{name}`" not in text)
