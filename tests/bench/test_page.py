"""docs/benchmarks.md is what its script makes of the results that are kept."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline
from paceline.bench import results
from paceline.run.directory import append_line

SCRIPT = Path(__file__).parents[2] / "docs/make_benchmarks.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_benchmarks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_kept(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text("{}")
    text = script.page(tmp_path)
    assert "None are kept yet" in text and "paceline bench suite --suite classic" in text


def test_a_suite(script: ModuleType, tmp_path: Path) -> None:
    machine = {
        "date": "2026-01-02",
        "commit": "",
        "cpu": "CPU",
        "cores": 16,
        "device": "H200",
        "versions": {"torch": "2"},
    }
    run: dict[str, Any] = {"name": "a-ppo-s0", "game": "a", "algo": "ppo", "seed": 0, "state": "done", "reason": None}
    run |= {"range": [0, 10], "episodes": 5, "stochastic": True, "levels": ["all"], "env_steps": 7, "machine": machine}
    run |= {"returns": {"all": 4.0}, "scores": {"all": 0.4}, "steps_per_second": 1234.0, "wall_seconds": 60.0}
    run |= {"train": "paceline train --seed 0 --out /home/me/x --name a-ppo-s0"}
    run |= {"evaluate": "paceline evaluate /home/me/x/a-ppo-s0 --seed 0"}
    command = "paceline bench suite --suite mine --out /home/me/x"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/suite.json").write_text(json.dumps(results.collect("mine", "Small.", [command], [run])))
    (tmp_path / "tiny/curves.svg").write_text("<svg/>")
    text = script.page(tmp_path)
    assert "None are kept yet" not in text and "\n## tiny\n\nSmall.\n" in text
    assert "| a | ppo | 1 of 1 | 7 | 4.00 | 0.400 | 1,234 | 1:00 |" in text
    assert "2026-01-02: H200, CPU, 16 cores; torch 2." in text
    assert "paceline bench suite --suite mine\n" in text and "/home" not in text
    assert "paceline train --seed 0 --name a-ppo-s0\npaceline evaluate runs/a-ppo-s0 --seed 0\n" in text
    section = text.partition("## tiny")[2]
    assert section.count("```sh") == section.count("<!-- not run: hours of training -->\n```sh") == 2
    assert "![Curves of tiny](../benchmarks/results/tiny/curves.svg)" in text


def test_single_runs(script: ModuleType, here: Path) -> None:
    run = paceline.train({"env": "CartPole-v1", "stop": {"iterations": 1}, "seed": 3, "out": "kept/cart", "name": "x"})
    origin = json.loads(run.provenance_path.read_text())
    origin["argv"] = ["/opt/bin/paceline", "train", "--seed", "3", "--out", "/scratch/me"]
    run.provenance_path.write_text(json.dumps(origin))
    row = {"kind": "stochastic", "return_mean": 12.5, "return_std": 2.0}
    append_line(run.eval_path, {**row, "levels": "train"})
    append_line(run.eval_path, {**row, "levels": "test", "return_mean": 9.0})
    text = script.page(Path("kept"))
    summary = run.read_summary()
    assert "\n## cart\n" in text and "paceline train --seed 3\n```" in text and "/opt" not in text
    assert f"| x | CartPole-v1 | ppo | 3 | {summary['env_steps']:,} | " in text
    assert "| 12.50 ± 2.00 | 9.00 ± 2.00 |" in text
    assert f"{origin['cores']} cores; paceline {origin['paceline']}, python {origin['python']}, torch " in text
