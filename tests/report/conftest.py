"""A folder of 40 runs, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from paceline.report.blocks import Page
from paceline.report.page import build
from paceline.results.runs import load_runs

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
WriteRun = Callable[..., Path]


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory, write_run: WriteRun) -> Path:
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
                write_run(folder / name, engine=engine, workers=workers, seed=seed, speed=speed, **ended)
                made += 1
    assert made == 40
    return folder


@pytest.fixture(scope="session")
def study_page(study: Path) -> Page:
    return build([study], load_runs([study]))


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, options = shutil.which("chromedriver"), Options()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(30)
    yield browser
    browser.quit()
