"""Run directories as files, and a browser."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from paceline.bench.study import load_runs
from paceline.report.blocks import Page
from paceline.report.page import build
from paceline.resolve import merge, resolve_tree

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-dev-shm-usage",  # in a container it may be small
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Browser = webdriver.Chrome
MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    config, _ = resolve_tree({"env": {"id": "CartPole-v1"}})
    tree: dict[str, Any] = json.loads(config.model_dump_json(by_alias=True))
    return tree


@pytest.fixture(scope="session")
def make_run(settings: dict[str, Any]) -> MakeRun:
    """A run as training leaves it: 20 steps of a return that rises to its best."""

    def make(
        path: Path,
        *,
        engine: str = "ray",
        workers: int = 1,
        seed: int = 0,
        state: str = "done",
        reason: str = "",
        speed: float = 1000.0,
        best: float = 490.0,
        rows: int = 20,
        resumed: int = 0,
        env: str = "CartPole-v1",
        summary: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
    ) -> Path:
        (path / "logs").mkdir(parents=True)
        tree = {**settings, "seed": seed, "env": {**settings["env"], "id": env}}
        tree["engine"] = {**settings["engine"], "name": engine, "workers": workers}
        (path / "config.yaml").write_text(yaml.safe_dump(merge(tree, config or {}), sort_keys=False))
        written = [row(number, speed, best) for number in range(1, rows + 1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in written))
        status = {"state": state, "reason": reason, "pid": 1, "host": "elsewhere", "resumes": resumed}
        (path / "status.json").write_text(json.dumps({**status, "updated_at": "2026-01-02T03:04:05+00:00"}))
        if rows:
            total = {"status": state, "algo": "ppo", "env": env, "engine": engine, "workers": workers, "nodes": 1}
            total |= {"seed": seed, "env_steps": written[-1]["env_steps"], "resumed": resumed}
            total |= {"verdict": "learner-bound: 72 % of the time", **(summary or {})}
            (path / "summary.json").write_text(json.dumps(total))
        origin = {"paceline": "0.1.0", "argv": ["/opt/bin/paceline", "train", "--seed", str(seed)], "cores": 2}
        (path / "provenance.json").write_text(json.dumps({**origin, "packages": {"torch": "2.13.0"}}))
        return path

    return make


def row(number: int, speed: float, best: float) -> dict[str, Any]:
    steps, trained = 1000 * number, 1000 * number / speed
    split = {"start": 2.0, "env": 0.2 * trained, "act": 0.1 * trained, "learn": 0.6 * trained, "sync": 0.1 * trained}
    return {
        "iteration": number,
        "env_steps": steps,
        "wall_seconds": 2.0 + trained,
        "train_seconds": trained,
        "steps_per_second": speed,
        "iteration_steps_per_second": speed,
        "return_mean": best * (1 - math.exp(-number / 4)),
        **{f"time_{part}_seconds": seconds for part, seconds in split.items()},
    }


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun) -> Path:
    """40 runs: two engines, 1, 2 and 4 workers; 3 failed, one was stopped, one interrupted and resumed."""
    folder, made = tmp_path_factory.mktemp("forty") / "study", 0
    for engine, gain in (("ray", 0.9), ("rllib", 0.2)):
        for workers in (1, 2, 4):
            for seed in range(7 if engine == "ray" or workers == 1 else 6):
                ended: dict[str, Any] = {}
                if made in (5, 17, 33):
                    ended = {"state": "failed", "reason": "Lost: <script>alert(1)</script> & more", "rows": 8}
                elif made == 22:
                    ended = {"state": "stopped", "reason": "SIGTERM", "rows": 9}
                elif made == 11:
                    ended = {"resumed": 1}
                speed = 1000.0 * workers**gain * (1 + 0.01 * seed)
                name = f"{engine}-w{workers}-s{seed}"
                make_run(folder / name, engine=engine, workers=workers, seed=seed, speed=speed, **ended)
                made += 1
    assert made == 40
    return folder


@pytest.fixture(scope="session")
def study_page(study: Path) -> Page:
    return build([study], load_runs([study]))


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(30)
    yield browser
    browser.quit()
