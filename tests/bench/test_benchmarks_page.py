"""docs/benchmarks.md is what its script makes of the results that are kept, and every section has a command."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.results.suite_scores import suite_result

ROOT = Path(__file__).parents[2]
SCRIPT, BENCHMARKS = ROOT / "docs/make_benchmarks.py", ROOT / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """It also makes the modules of benchmarks/ importable."""
    spec = importlib.util.spec_from_file_location("make_benchmarks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(folder: Path, part: str, **content: Any) -> None:
    path = folder / f"{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    here = {"cpu": "CPU", "cores": 2, "memory_gib": 4.0, "load_before": 0.1}
    full: dict[str, Any] = {"date": "2026-01-02 03:04 UTC", "command": f"make bench ONLY={part}", "commit": "abc"}
    full |= {"machine": here, "versions": {"ours": {"paceline": "9.9", "torch": "2"}, "peers": {}}, "failure": None}
    full |= {"repeats": 3, "quick": False, "seconds": 1.0, "gflops": None, "rows": [], "runs": {}, "tables": {}}
    path.write_text(json.dumps({**full, "suite": None, **content}))


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_is_fresh() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_part_is_a_function_and_every_section_has_its_command(script: ModuleType) -> None:
    text, targets = script.PAGE.read_text(), (ROOT / "Makefile").read_text()
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert sorted(titles) == sorted([*(one.title for one in script.SECTIONS.values()), "Suites of your own"])
    for key, one in script.SECTIONS.items():
        tree = ast.parse((BENCHMARKS / f"{one.module}.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name.replace("-", "_") for name in one.minutes} <= functions, key
        command = script.command_of(key)
        assert f"```sh\n{command}\n```" in section(text, one.title)
        assert f"\n{command.split()[1]}: setup" in targets
    bench = importlib.import_module("bench")
    words = script.command_of("published").partition("ONLY=")[2].strip("'").split()
    assert {part for table in script.TABLES for part, _ in table.here.values()} <= {*bench.chosen(words, False)}


def test_make_says_how_long_it_takes(script: ModuleType) -> None:
    said = re.findall(r"^(bench|bench-gpu):.*## .*?(\d+) minutes", (ROOT / "Makefile").read_text(), re.M)
    minutes = {"bench": script.CPU_MINUTES, "bench-gpu": script.GPU_MINUTES}
    assert dict(said) == {target: f"{took:.0f}" for target, took in minutes.items()}


def test_what_is_kept_has_all_that_the_page_needs(script: ModuleType) -> None:
    parts = {**script.minutes(False), **script.minutes(True)}
    kept = {str(path.relative_to(script.RESULTS))[:-5]: path for path in _kept(script, "json")}
    found = {name: json.loads(path.read_text()) for name, path in kept.items() if not name.startswith("faults/")}
    assert found and set(found) <= set(parts), "a file of no part is on no page"
    assert all(path.with_suffix(".json").exists() for end in ("md", "png", "svg") for path in _kept(script, end))
    text = script.PAGE.read_text()
    for part, result in found.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", result["date"]), part
        assert result["command"] and not result["quick"]
        origin = f"{result['date']} | {result['command']} |"
        own = section(text, script.SECTIONS[part.partition("/")[0]].title)
        if result["failure"]:
            assert "**not measured**" in own
            continue
        assert origin in own and result["commit"] in own
        assert {"paceline", "python", "torch"} <= set(result["versions"]["ours"]), part
        assert f"{result['machine']['cpu']}, {result['machine']['cores']} cores" in own
        assert result["rows"] or result["runs"] or result["tables"] or result["suite"] or result["text"], part
        assert result.get("text", "").partition("```\n")[2] in own
        assert all(record["command"] for records in result["runs"].values() for record in records)
        for row in result["rows"]:
            assert f"| {row['job']} | {row['measure']} |" in own


def _kept(script: ModuleType, ending: str) -> list[Path]:
    return sorted(script.RESULTS.rglob(f"*.{ending}"))


def test_nothing_kept(script: ModuleType, tmp_path: Path) -> None:
    text = script.page(tmp_path)
    assert "Not measured yet: `dqn/zoo`, `dqn/throughput`, `dqn/replay`." in section(text, "DQN")
    assert "not measured yet (`procgen/nature`)" in text and "paceline bench suite --suite classic" in text


def test_published_figures_beside_ours(script: ModuleType, tmp_path: Path) -> None:
    record = {"system": "paceline 9.9", "return_last100": 300.0, "env_steps": 1, "optimizer_steps": 1, "command": "x"}
    runs = [{**record, "seed": seed, "train_seconds": seconds} for seed, seconds in enumerate((10.0, 12.0, 15.0))]
    put(tmp_path, "ppo/grid5000", runs={"grid5000": runs})
    text = section(script.page(tmp_path), "Compared with published figures")
    assert "| 64 workers | published | 120.0 | 250 | – | – | – |" in text
    # 150 / 12; with three runs the interval of the median is their range: 150 / 15 to 150 / 10.
    ours = "| 1 worker, 2 cores | paceline 9.9, here | 12.0 (10.0–15.0) | 300 (300–300) | 12.50× (10.00–15.00) |"
    assert ours in text and "| 10.00× (8.00–12.00) | 8.33× (6.67–10.00) |" in text
    assert "`ppo/grid5000` (2026-01-02 03:04 UTC)" in text


def test_rows_failures_and_tables(script: ModuleType, tmp_path: Path) -> None:
    rows = [
        script.Row("zoo", "env steps/s", [50.0, 60.0], [10.0, 10.0], better="higher", factor=5, digits=0),
        script.Row("solve", "seconds", [1.0, float("inf"), float("inf")], [2.0, 2.0, 2.0], factor=1),
    ]
    assert [script.Row.from_dict(json.loads(json.dumps(row.as_dict()))).as_dict() for row in rows] == [
        row.as_dict() for row in rows
    ]
    put(tmp_path, "ppo/zoo", rows=[row.as_dict() for row in rows], tables={"speeds": [{"act": 1234.5, "on": True}]})
    put(tmp_path, "ppo/solve", failure="BenchError: no such thing\nmore")
    text = section(script.page(tmp_path), "PPO against the peers")
    assert "| zoo | env steps/s | 10 (10–10) | 55 (50–60) | 5.50× (5.00–6.00) | ≥ 5× | pass |" in text
    assert "| solve | seconds | 2.0 (2.0–2.0) | never (1.0–never) | 0.00× (0.00–2.00) | ≥ 1× | **FAIL** |" in text
    assert "| ppo/solve | – | – | – | – | – | **not measured**: BenchError: no such thing |" in text
    assert "Speeds:\n\n| act | on |\n| --- | --- |\n| 1,234 | yes |" in text


def test_a_suite(script: ModuleType, tmp_path: Path) -> None:
    machine = {"date": "2026-01-02", "commit": "", "cpu": "CPU", "cores": 16, "device": "H200"}
    machine |= {"versions": {"torch": "2"}}
    run: dict[str, Any] = {"name": "a-ppo-s0", "game": "a", "algo": "ppo", "seed": 0, "state": "done", "reason": None}
    run |= {"range": [0, 10], "episodes": 5, "stochastic": True, "levels": ["all"], "env_steps": 7, "machine": machine}
    run |= {"returns": {"all": 4.0}, "scores": {"all": 0.4}, "steps_per_second": 1234.0, "wall_seconds": 60.0}
    run |= {"train": "paceline train --seed 0 --name a-ppo-s0", "evaluate": "paceline evaluate runs/a-ppo-s0 --seed 0"}
    suite = suite_result("mine", "Small.", ["paceline bench suite --suite mine"], [run])
    put(tmp_path, "scores/dqn-control", suite=suite)
    (tmp_path / "scores/dqn-control.svg").write_text("<svg/>")
    (tmp_path / "scores/dqn-control.md").write_text("A note.\n")
    text = section(script.page(tmp_path), "Scores")
    assert "\n### dqn-control\n\nSmall.\n" in text and "\nA note.\n" in text
    assert "| a | ppo | 1 of 1 | 7 | 4.00 | 0.400 | 1,234 | 1:00 |" in text
    assert "2026-01-02: H200, CPU, 16 cores; torch 2." in text
    assert "paceline train --seed 0 --name a-ppo-s0\npaceline evaluate runs/a-ppo-s0 --seed 0\n" in text
    assert text.count("```sh") == text.count(script.NOT_RUN) == 3
    assert "![Curves of dqn-control](../benchmarks/results/scores/dqn-control.svg)" in text


def test_a_part_that_fails_is_a_row_and_one_that_is_done_is_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module("bench")
    monkeypatch.setattr(bench, "QUICK", tmp_path)
    options = argparse.Namespace(quick=True, again=False, repeats=2, gpu=False)
    parts = {"ppo/none-such": 0.1, "ppo/startup": 0.5}
    assert bench.run(parts, options) == 1
    out, err = capsys.readouterr()
    assert "| ppo/none-such | – | – | – | – | – | **not measured**: AttributeError: " in out
    assert "[2/2] ppo/startup: done in" in err and "| startup | `paceline --help`, s | – |" in out
    first = json.loads((tmp_path / "ppo/startup.json").read_text())
    assert first["command"] == "make bench ONLY=ppo/startup QUICK=1" and first["versions"]["ours"]["torch"]
    bench.run({"ppo/startup": 0.5}, options)
    assert "[1/1] ppo/startup: kept, measured" in capsys.readouterr().err
    for change in ({"again": True}, {"repeats": 3}, {"quick": False}):
        assert bench.kept(tmp_path / "ppo/startup.json", argparse.Namespace(**{**vars(options), **change})) is None
    for stale in ({"date": "2026-01-02 03:04 UTC"}, {"versions": {"ours": {"paceline": "0.0"}}}, {"failure": "x"}):
        (tmp_path / "old.json").write_text(json.dumps({**first, **stale}))
        assert bench.kept(tmp_path / "old.json", options) is None
    with pytest.raises(ValueError, match="nonsense: expected are agents"):
        bench.chosen(["nonsense"], False)
    assert [*bench.chosen(["dqn", "ppo/zoo"], False)] == ["ppo/zoo", "dqn/zoo", "dqn/throughput", "dqn/replay"]
