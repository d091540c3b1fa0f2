"""Break runs in every way and in every phase, continue them, and write down what came of it.

    python tests/faults/crash_matrix.py                     every engine x algorithm x kind x fault x phase, once
    python tests/faults/crash_matrix.py --only ray/ppo      those whose name, engine/algo/kind/fault/phase, contains it
    python tests/faults/crash_matrix.py --sample 20         that many, drawn at random
    python tests/faults/crash_matrix.py --kills 100         kill random processes of random runs, at random times
    python tests/faults/crash_matrix.py --at-once 8         eight tries at the same time, on a machine with many cores

Tries are added to benchmarks/results/faults/matrix.json (or kills.json); those of another version of paceline are
dropped. docs/generate.py makes the tables of docs/faults.md from them. It needs root and a C compiler, for a disk that
is full and a clock that jumps. The exit code is 1 if something happened that must not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from broken_run import KINDS, BrokenRun, Cell, Outcome  # noqa: E402

RESULTS = HERE.parents[1] / "benchmarks/results/faults"
ENGINES = ("local", "ray")
ALGORITHMS = ("ppo", "a2c", "a3c", "impala", "dqn", "sac", "td3")
PHASES = ("start", "iteration", "save", "evaluation", "end")
EVERYWHERE = ("SIGTERM", "SIGTERM burst", "kill driver", "disk full", "checkpoint damaged", "clock jump",
              "stop and continue")  # fmt: skip
OF_KINDS = ("SIGTERM", "kill driver")
"""The faults of kinds other than `plain`: what they save and restore differs, not how a run ends."""
RAY_ONLY = ("kill worker", "kill raylet", "kill gcs", "kill agent")


def cells() -> list[Cell]:
    plain = [
        Cell(engine, algo, "plain", fault, phase)
        for engine in ENGINES
        for algo in ALGORITHMS
        for fault in (*EVERYWHERE, *(RAY_ONLY if engine == "ray" else ()))
        for phase in PHASES
    ]
    return plain + [
        Cell(engine, algo, kind, fault, phase)
        for engine in ENGINES
        for kind, (_, _, algorithms) in KINDS.items()
        for algo in algorithms
        for fault in (*OF_KINDS, *(("kill worker",) if engine == "ray" else ()))
        for phase in PHASES
    ]


def random_kill(dice: random.Random) -> Cell:
    engine = dice.choice(ENGINES)
    fault = dice.choice(("kill driver", *RAY_ONLY)) if engine == "ray" else "kill driver"
    kind = dice.choice(("plain", *KINDS))
    algorithms = KINDS[kind][2] if kind in KINDS else ALGORITHMS
    return Cell(engine, dice.choice(algorithms), kind, fault, dice.choice(PHASES))


def attempt(cell: Cell, seed: int) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="cm-", dir="/tmp"))
    try:
        run = BrokenRun(cell, folder, random.Random(seed))
        outcome = run.attempt()
        if outcome.problems:
            for log in folder.glob("log*"), folder.glob("resumed*"):
                print(*(path.read_text(errors="replace")[-3000:] for path in log), sep="\n", file=sys.stderr)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add(path: Path, cell: Cell, seed: int, outcome: Outcome) -> None:
    """Add a try to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("commit") != commit():
        record = {"commit": commit(), "tries": []}
    record["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    record["tries"].append({**asdict(cell), "seed": seed, **asdict(outcome)})
    path.write_text(json.dumps(record, indent=1) + "\n")


def commit() -> str:
    words = ["git", "log", "-1", "--format=%h", "--", "src"]
    return subprocess.run(words, cwd=HERE.parents[1], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cells, engine/algo/kind/fault/phase")
    parser.add_argument("--sample", type=int, help="how many cells, drawn at random")
    parser.add_argument("--kills", type=int, help="how many random kills, instead of the matrix")
    parser.add_argument("--at-once", type=int, default=1, help="how many tries at the same time")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn at random")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the try in hand is ended
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    dice = random.Random(seed)
    if options.kills is not None:
        chosen, path = [random_kill(dice) for _ in range(options.kills)], options.out / "kills.json"
    else:
        chosen, path = [cell for cell in cells() if options.only in cell.name], options.out / "matrix.json"
        if options.sample is not None:
            chosen = dice.sample(chosen, min(options.sample, len(chosen)))
    failed = 0
    with ThreadPoolExecutor(options.at_once) as pool:
        try:
            tries = {pool.submit(attempt, cell, seed + n): (n, cell) for n, cell in enumerate(chosen, start=1)}
            for done in as_completed(tries):
                (number, cell), outcome = tries[done], done.result()
                add(path, cell, seed + number, outcome)
                failed += bool(outcome.problems)
                result = "; ".join(outcome.problems) or f"{outcome.status or '-'}, resumed: {outcome.resume_level}"
                about = f"{number}/{len(chosen)} {cell.name} (seed {seed + number})"
                print(f"{about}: exit {outcome.exit_code}, {result}", flush=True)
        except SystemExit:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(f"{len(chosen)} tries, {failed} with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
