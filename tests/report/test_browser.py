"""Both pages in Chromium: the report drawn whole, the dashboard while a run trains."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from paceline.report.blocks import Page
from paceline.report.page import render_html

pytestmark = pytest.mark.needs("chromium", "chromedriver")
SECONDS = 30.0
POINTS = """const [line] = document.querySelector('#returns').data || [];
return line && line.x.length > arguments[0] && line.x.length"""
DRAWN = "return document.documentElement.classList.contains('drawn')"


def size(chrome: Chrome, width: int, *, dark: bool = False) -> None:
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def wait(chrome: Chrome, script: str, *values: Any) -> Any:
    return WebDriverWait(chrome, SECONDS, 0.05).until(lambda page: page.execute_script(script, *values))


def errors(chrome: Chrome) -> list[str]:
    return [entry["message"] for entry in chrome.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_a_report_in_a_browser(chrome: Chrome, study_page: Page, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text(render_html(study_page), encoding="utf-8")
    errors(chrome)
    opened = []
    for width, dark in ((1280, False), (390, True)):
        size(chrome, width, dark=dark)
        chrome.get(out.as_uri())
        wait(chrome, DRAWN)
        opened.append(chrome.execute_script("return performance.getEntriesByName('plot')[0].startTime"))
        missing = "return [...document.querySelectorAll('.plot')].filter((p) => !p.querySelector('.main-svg')).length"
        assert chrome.execute_script(missing) == 0
        assert chrome.execute_script("return document.documentElement.scrollWidth") <= width
        assert errors(chrome) == []
    assert min(opened) < 2000  # milliseconds; of two, as the machine may be busy
    # On a phone a row is a card, whose figures are inside the screen.
    cells = (
        "return Math.max(...[...document.querySelectorAll('.cards td')].map((td) => td.getBoundingClientRect().right))"
    )
    assert chrome.execute_script(cells) <= 390
    # Dark, by what the sheet says.
    assert chrome.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    assert chrome.execute_script("return document.title") == "study"
    # The controls draw again: single runs are more lines than their means.
    lines = "return document.querySelectorAll('#task0-curves .scatterlayer .trace').length"
    before = chrome.execute_script(lines)
    toggle = "document.querySelector('#task0-curves + .legend button').click()"
    chrome.execute_script(toggle)
    assert wait(chrome, f"{lines} < {before}")
    chrome.execute_script(toggle)
    assert wait(chrome, f"{lines} === {before}")
    chrome.execute_script("document.querySelector('[data-for=task0-curves] [data-option=members]').click()")
    assert wait(chrome, f"{lines} > {before}")
    chrome.execute_script("document.querySelector('[data-for=task0-curves] [value=wall]').click()")
    axis = "return document.querySelector('#task0-curves .xtitle').textContent"
    assert wait(chrome, f"{axis} === 'wall seconds'")


def test_the_dashboard_while_a_run_trains(
    chrome: Chrome, here: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    words = ("--env", "CartPole-v1", "--max-time", "60s", "--name", "live", "--threads", "1", "--quiet")
    run = start("train", *words, "--set", "eval.every_steps=20000", "--set", "stop.total_steps=100000000")
    (here / "runs").mkdir(exist_ok=True)
    dashboard = start("dashboard", here / "runs")
    assert dashboard.stdout is not None
    size(chrome, 1280)
    errors(chrome)
    chrome.get(dashboard.stdout.readline().split()[1])
    assert "token" not in chrome.current_url
    chrome.execute_script("window.stayed = true")
    few = int(wait(chrome, POINTS, 2))
    assert "running" in wait(chrome, "return document.querySelector('#runs tr').innerText")
    assert wait(chrome, POINTS, few + 5)
    assert chrome.execute_script("return window.stayed")
    assert wait(chrome, "return document.querySelectorAll('#split .bars .point').length > 2")
    run.send_signal(signal.SIGTERM)
    run.wait(timeout=SECONDS)
    assert run.returncode == 99
    assert wait(chrome, "return document.querySelector('#runs tr .state').innerText === 'interrupted'")
    assert chrome.execute_script("return document.documentElement.scrollWidth") <= 1280
    assert errors(chrome) == []
    size(chrome, 390)
    time.sleep(0.3)  # the plots follow the new width
    assert chrome.execute_script("return document.documentElement.scrollWidth") <= 390
    dashboard.send_signal(signal.SIGINT)
    assert dashboard.wait(timeout=SECONDS) == 0
    assert wait(chrome, "return document.querySelector('#link').className === 'lost'")


@pytest.fixture(autouse=True)
def _blank(chrome: Chrome) -> Any:
    yield
    chrome.get("about:blank")
