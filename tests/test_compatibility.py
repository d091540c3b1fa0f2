"""Runs of version 0.1.0 before the package was reorganised (commit b31cc85) still resume, evaluate, export and report.

`data/runs-0.1/NAME` is a run of 4 iterations by that version, `NAME-whole` the end of the same run after 6 iterations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import paceline
from paceline.run.directory import RunDirectory

OLD = Path(__file__).parent / "data" / "runs-0.1"
NAMES = ("ppo", "impala", "dqn")
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5}  # another CPU may round differently


@pytest.fixture(params=NAMES)
def old(request: pytest.FixtureRequest, here: Path) -> Path:
    return copied(request.param, here)


def copied(name: str, folder: Path) -> Path:
    run = folder / "runs" / name
    shutil.copytree(OLD / name, run, symlinks=True)
    for empty in ("logs", "videos"):  # git does not keep empty folders
        (run / empty).mkdir(exist_ok=True)
    return run


def test_an_old_run_is_resumed_exactly(old: Path, stable_rows: Callable[[Path], list[dict[str, Any]]]) -> None:
    whole = OLD / f"{old.name}-whole"
    run = paceline.train({"stop": {"iterations": 6}}, resume=old)
    assert json.loads((run / "resume.json").read_text())["level"] == "exact" and run.summary["resumed"] == 1
    expected, found = load_file(whole / "arrays.safetensors"), load_file(run / "checkpoints/last/arrays.safetensors")
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert (array.dtype, array.shape) == (found[name].dtype, found[name].shape), name
        np.testing.assert_allclose(found[name], array, err_msg=name, **CLOSE)
    rows, wanted_rows = stable_rows(run.path), stable_rows(whole)
    assert len(rows) == 6
    for row, wanted in zip(rows, wanted_rows, strict=True):
        assert row.keys() >= wanted.keys()  # metrics are added, never renamed
        for name in [name for name in wanted if wanted[name] is not None]:
            np.testing.assert_allclose(row[name], wanted[name], err_msg=name, **CLOSE)


def test_an_old_run_is_evaluated_and_exported(old: Path, cli: Callable[..., Any]) -> None:
    result = cli("evaluate", old, "--episodes", 3)
    assert result.code == 0 and result.err == "" and "3 episodes" in result.out
    assert RunDirectory(old).read_eval()[-1]["kind"] == "deterministic"
    observation = np.array([0.01, -0.02, 0.03, 0.04], np.float32)
    assert paceline.load(old).act(observation) in (0, 1)
    result = cli("export", old)
    assert result.code == 0 and result.err == "" and (old / "policy.onnx").exists()


def test_old_runs_are_reported_and_compared(here: Path, cli: Callable[..., Any]) -> None:
    for name in NAMES:
        copied(name, here)
    result = cli("report", "runs", "-o", "report.md")
    assert result.code == 0 and result.err == "", result
    assert all(name in Path("report.md").read_text() for name in NAMES)
    result = cli("compare", "runs", "--by", "algo")
    assert result.code == 0 and result.err == "" and all(name in result.out for name in NAMES)


def test_an_old_run_starts_a_new_one(old: Path) -> None:
    """With its settings, all of which still mean the same, and its weights."""
    settings = {**RunDirectory(old).read_config(), "stop": {"iterations": 1}, "name": "new"}
    run = paceline.train(settings, preset="none", init_from=old)
    saved = run.read_config()
    for key, value in settings.items():
        if isinstance(value, dict):
            assert {name: saved[key][name] for name in value} == value  # newer versions may have more
        elif key != "preset":
            assert saved[key] == value
