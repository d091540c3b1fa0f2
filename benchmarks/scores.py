"""Scores of suites (suites/NAME.yaml), trained and evaluated by `paceline bench suite`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from datetime import UTC, datetime

from measuring import ROOT, output_of
from ppo import Bench
from tables import Row

LIMIT_SECONDS = 3 * 3600


def dqn_control(bench: Bench) -> list[Row]:
    return _suite(bench, "dqn-control", "--algos dqn --seeds 3", "--algos dqn --seeds 1 --total-steps 3k --episodes 2")


def procgen_gpu(bench: Bench) -> list[Row]:
    games = "--algos ppo --games coinrun,starpilot,bigfish --seeds 1"
    return _suite(bench, "procgen-gpu", games, f"{games} --total-steps 100k --episodes 2")


def procgen_gpu_impala(bench: Bench) -> list[Row]:
    game = "--algos impala --games starpilot --seeds 1"
    return _suite(bench, "procgen-gpu", f"{game} --total-steps 8M", f"{game} --total-steps 100k --episodes 2")


def _suite(bench: Bench, name: str, words: str, quick_words: str) -> list[Row]:
    """The runs of a day are kept, so that an interrupted suite continues."""
    today = datetime.now(UTC).strftime("%Y%m%d")
    folder = f"runs/bench-{name}-{'quick' if bench.quick else today}"
    if bench.again and (ROOT / folder).exists():
        shutil.rmtree(ROOT / folder)
    argv = ["bench", "suite", "--suite", f"benchmarks/suites/{name}.yaml", "--retry"]
    argv += shlex.split(quick_words if bench.quick else words)
    output_of([sys.executable, "-m", "paceline", *argv, "--out", folder], LIMIT_SECONDS, show=True)
    bench.suite = json.loads((ROOT / folder / "suite.json").read_text())
    bench.suite["commands"] = [shlex.join(["paceline", *argv])]
    return []
