"""`paceline train --seeds`: the same run with several seeds, one after the other, each in its own process.

A run is named after its seed and resumes, so the command that began the runs also continues them. What has finished is
not repeated.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.planned_run import difference
from paceline.bench.runner import FAILED, STOPPED, Interrupts, end_with_parent
from paceline.config import UserError
from paceline.config.resolve import resolve_tree
from paceline.results.run_files import FINISHED
from paceline.results.run_table import Row, render, run_rows
from paceline.run.directory import RunDirectory, base_name

BAD_INPUT = 2


def train_seeds(
    given: Mapping[str, Any], seeds: Sequence[int], words: Sequence[str], *, preset: str | None, quiet: bool
) -> int:
    """Make the runs that are missing; the exit code. `words`: those of `paceline train` that all runs have."""
    config = resolve_tree(given, preset=preset)[0]
    out, name = Path(config.out), config.name or base_name(config.algorithm_name, config.env.id)
    names = {seed: f"{name}-{seed}" for seed in seeds}
    finished = {seed for seed in seeds if _is_finished(out / names[seed], {**given, "seed": seed}, preset)}
    failed, interrupts = list[int](), Interrupts()
    with interrupts.installed():
        for at, seed in enumerate(seeds, start=1):
            state = "already finished" if seed in finished else ""
            if not quiet:
                print(f"\n[{at}/{len(seeds)}] seed {seed} {state}".rstrip(), flush=True)
            if state:
                continue
            own = ["--seed", str(seed), "--out", str(out), "--name", names[seed], "--resume", "auto"]
            code = _run([*words, *own], interrupts)
            if code == BAD_INPUT:  # the next seed would be refused, too
                return code
            if code == STOPPED or interrupts.received:
                _print_table(out, names.values())
                print(f"stopped: {interrupts.received or f'seed {seed} stopped early'}; the same command continues")
                return STOPPED
            failed += [seed] if code else []
    _print_table(out, names.values())
    if failed:
        print(f"failed     seed {', '.join(map(str, failed))}; the same command tries again")
        return FAILED
    print(f"report     {shlex.join(['paceline', 'report', *(str(out / each) for each in names.values())])}")
    return 0


def _is_finished(path: Path, given: Mapping[str, Any], preset: str | None) -> bool:
    """UserError if there is a run with other settings. One that finished and now has a larger budget goes on."""
    directory = RunDirectory(path)
    if not directory.config_path.is_file():
        return False
    saved = directory.read_config()
    other = difference(saved, given, preset, changeable=("stop", "eval", "checkpoint", "engine", "out", "name"))
    if other:
        raise UserError(f"the run {path} has {other}: choose another --name, or give the settings it was made with")
    if difference(saved, given, preset, changeable=("eval", "checkpoint", "engine", "out", "name")):
        return False
    return bool(directory.read_status().get("state") == "done")


def _run(words: Sequence[str], interrupts: Interrupts) -> int:
    """`paceline train WORDS` on this terminal, to its end."""
    process = interrupts.process = subprocess.Popen(
        [sys.executable, "-m", "paceline.commands.main", "train", *words],
        stdin=subprocess.DEVNULL,
        process_group=0,  # otherwise Ctrl-C reaches it twice: from the terminal and from us
        preexec_fn=end_with_parent(),
    )
    try:
        if interrupts.received:  # while the process was being started
            interrupts.forward()
        return process.wait()
    finally:
        interrupts.process = None


def _print_table(out: Path, names: Any) -> None:
    made = [out / name for name in names if (out / name / "config.yaml").is_file()]
    if not made:
        return
    rows = sorted(run_rows(made), key=lambda row: row["seed"])
    print(f"\n{render(rows)}{_spread(rows)}")


def _spread(rows: Sequence[Row]) -> str:
    known = [row["return_mean"] for row in rows if row["state"] == FINISHED and row["return_mean"] is not None]
    if len(known) < 2:
        return ""
    return f"\nreturn     {np.mean(known):,.2f} ± {np.std(known, ddof=1):,.2f} over {len(known)} seeds"
