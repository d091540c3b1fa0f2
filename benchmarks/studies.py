"""Scaling benchmarks by `paceline bench scaling`, as a user makes them."""

from __future__ import annotations

import re
import shlex
import sys

from measuring import output_of
from ppo import Bench
from tables import Row

LIMIT_SECONDS = 3600


def grid5000(bench: Bench) -> list[Row]:
    return _scaling(bench, "--config configs/grid5000.yaml --engines ray,rllib --workers 1,2", "--iterations 1")


def waiting(bench: Bench) -> list[Row]:
    words = (
        "--envs paceline/FixedCost-v0 --engines ray --workers 1,2,4 --scaling strong,weak --preset none "
        "--set 'env.kwargs={cost_seconds: 0.002}' --set env.envs_per_worker=4 --set ppo.rollout_steps=64 "
        "--set ppo.epochs=4"
    )
    return _scaling(bench, words, "--total-steps 512", "--total-steps 2560")


def _scaling(bench: Bench, words: str, quick_budget: str, budget: str = "") -> list[Row]:
    out = bench.runs_directory / "study"
    chosen = f"{words} --seeds {bench.repeats} {quick_budget if bench.quick else budget}"
    argv = ["bench", "scaling", *shlex.split(chosen)]
    output_of([sys.executable, "-m", "paceline", *argv, "--out", str(out)], LIMIT_SECONDS, show=True)
    bench.text = findings((out / "scaling.md").read_text(), shlex.join(["paceline", *argv]))
    return []


def findings(page: str, command: str) -> str:
    """The page of a scaling benchmark without its title and list of runs, with smaller headings."""
    body = page.partition("```\n\n")[2].partition("\n## Every run")[0].strip()
    return f"```sh\n{command}\n```\n\n" + re.sub(r"^## ", "#### ", body, flags=re.MULTILINE)
