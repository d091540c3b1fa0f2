"""What `--engine rllib` costs: the Grid'5000 job by it and by a plain RLlib script, in turns; prints a table.

    .venv/bin/python benchmarks/rllib.py [--rounds 3] [--iterations 3]

Both have one env runner, one thread and the same seed, so they take the same steps and learn the same. The script's
time is that of RLlib's `train()` calls alone, ours that of the whole training: with metrics, episodes and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from measuring import HERE, BenchError, Record, ours, peer

LIMIT_SECONDS = 900.0
SAME = ("env_steps", "optimizer_steps", "parameters")


def measure(rounds: int, iterations: int) -> list[tuple[Record, Record]]:
    job = f"--config configs/grid5000.yaml --engine rllib --workers 1 --threads 1 --iterations {iterations}"
    pairs = []
    with tempfile.TemporaryDirectory() as runs:
        for number in range(rounds):
            seed = number + 1
            by_us = ours(job, seed, LIMIT_SECONDS, Path(runs))
            by_script = peer(f"peer_rllib.py --iterations {iterations}", seed, LIMIT_SECONDS)
            for key in SAME:
                if by_us[key] != by_script[key]:
                    raise BenchError(f"not the same work: {key} is {by_us[key]} and {by_script[key]}")
            pairs.append((by_us, by_script))
            print(f"seed {seed}: {by_us['train_seconds']:.1f} s, {by_script['train_seconds']:.1f} s", file=sys.stderr)
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description="The overhead of --engine rllib.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3)
    options = parser.parse_args()
    try:
        pairs = measure(options.rounds, options.iterations)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    ratio = statistics.median(a["train_seconds"] / b["train_seconds"] for a, b in pairs)
    result = {"ratio": ratio, "pairs": [{"ours": a, "script": b} for a, b in pairs]}
    (HERE / "results" / "rllib.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"--engine rllib takes {ratio:.3f} of the time of a plain script (median of {len(pairs)} pairs)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
