"""Trains a few small runs; takes the pictures of the report and of the dashboard that are in docs/report.md.

    python docs/make_screenshots.py

Needs chromium and chromium-driver; takes a minute or two.
"""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

IMAGES = Path(__file__).parent / "images"
COMMAND = [sys.executable, "-m", "paceline"]
STEPS, SEEDS = 60_000, 3
WIDTH, COLOURS = 1180, 200
SECONDS = 120.0
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "cartpole")
        for algo in ("ppo", "a2c"):
            for seed in range(SEEDS):
                train(folder, algo, seed, "--total-steps", str(STEPS))
        subprocess.run([*COMMAND, "report", folder, "-o", Path(place, "report.html")], check=True, timeout=SECONDS)
        browser = open_browser(Path(place, "profile"))
        try:
            browser.get(Path(place, "report.html").as_uri())
            until(browser, "return document.documentElement.classList.contains('drawn')")
            browser.execute_script("scrollTo(0, 0)")
            take(browser, "report.png", 1550)
            dashboard(browser, folder)
        finally:
            browser.quit()


def train(folder: Path, algo: str, seed: int, *more: str) -> None:
    words = ["train", "--env", "CartPole-v1", "--algo", algo, "--seed", str(seed), "--out", str(folder)]
    name = ["--name", f"{algo}-s{seed}", "--quiet", "--set", "eval.every_steps=20000"]
    subprocess.run([*COMMAND, *words, *name, *more], check=True, timeout=SECONDS, stdout=subprocess.DEVNULL)


def dashboard(browser: webdriver.Chrome, folder: Path) -> None:
    """While one more run is at work."""
    words = ["train", "--env", "CartPole-v1", "--seed", "9", "--out", str(folder), "--name", "ppo-s9", "--quiet"]
    budget = ["--max-time", "60s", "--total-steps", "10M", "--set", "eval.every_steps=20000"]
    run = subprocess.Popen([*COMMAND, *words, *budget], stdout=subprocess.DEVNULL)
    server = subprocess.Popen([*COMMAND, "dashboard", str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        time.sleep(3.0)  # it takes a moment to appear
        browser.get(server.stdout.readline().split()[1])
        until(browser, "return (document.querySelector('#returns').data || []).some((line) => line.x.length > 30)")
        browser.execute_script(
            "for (const box of document.querySelectorAll('#runs input')) if (!box.checked) box.click()"
        )
        time.sleep(4.0)
        take(browser, "dashboard.png", 1050)
    finally:
        for process in (run, server):
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=SECONDS)


def open_browser(profile: Path) -> webdriver.Chrome:
    options = Options()
    options.binary_location = shutil.which("chromium") or sys.exit(
        "no chromium: apt-get install chromium chromium-driver"
    )
    for flag in (*FLAGS, *QUIET, f"--user-data-dir={profile}", f"--window-size={WIDTH},1000"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or "chromedriver"))


def until(browser: webdriver.Chrome, script: str) -> None:
    WebDriverWait(browser, SECONDS, 0.1).until(lambda page: page.execute_script(script))


def take(browser: webdriver.Chrome, name: str, height: int) -> None:
    """Quantised: a few colours are enough, in a third of the bytes."""
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(1.0)  # the plots follow
    with Image.open(io.BytesIO(browser.get_screenshot_as_png())) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(IMAGES / name, optimize=True)
    print(IMAGES / name, f"{(IMAGES / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
