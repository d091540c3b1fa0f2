"""Train for a long time, and write down what grows: memory, open files, threads, processes, and files on the disk.

    python tests/faults/soak.py --minutes 120

Half of the time goes to one process, half to two workers. The result is benchmarks/results/faults/soak.json, from which
docs/generate.py makes a table of docs/faults.md. The exit code is 1 if a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from crash_matrix import RESULTS, commit  # noqa: E402

WARM_UP_SHARE = 0.2  # of the time: memory is still being allocated
SAMPLES = 200
COMMAND = (
    "train --env CartPole-v1 --name x --threads 1 --set checkpoint.every_seconds=10 --set eval.every_steps=100000 "
    "--set eval.episodes=5 --total-steps 100000M"
)
WAYS = {"one process": "--engine local", "two workers": "--engine ray --workers 2"}


def sample(process: psutil.Process, folder: Path) -> dict[str, float]:
    members = [process, *process.children(recursive=True)]
    values = dict.fromkeys(("memory_bytes", "open_files", "threads"), 0.0)
    for member in members:
        with suppress(psutil.Error), member.oneshot():
            values["memory_bytes"] += member.memory_full_info().uss
            values["open_files"] += member.num_fds()
            values["threads"] += member.num_threads()
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    sizes = [_size(path) for path in paths]
    rows = sum(
        _size(path) for path in paths if path.name in ("metrics.jsonl", "progress.csv") or "tfevents" in path.name
    )
    return {
        **values,
        "processes": len(members),
        "files": len(paths),
        "metrics_bytes": rows,
        "other_bytes": sum(sizes) - rows,
    }


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def soak(words: str, minutes: float) -> dict[str, Any]:
    """Train this long; the samples after the warm-up as (first, last) of each value, and the run's own figures."""
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as place:
        folder = Path(place)
        command = [sys.executable, "-m", "paceline", *COMMAND.split(), *words.split(), "--max-time", f"{minutes:g}m"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"TMPDIR": place})
        try:
            samples = _watch(process, folder, minutes)
            code = process.wait(120)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            raise SystemExit(f"{' '.join(command)} ended with {code}:\n{(folder / 'log').read_text()[-2000:]}")
        time.sleep(3)  # for the guard of a Ray that did not end by itself
        summary = json.loads((folder / "runs/x/summary.json").read_text())
        left = [path.name for path in folder.glob("pl-*")]
    tenth = max(1, len(samples) // 10)
    figures = {
        name: [sum(part[name] for part in parts) / tenth for parts in (samples[:tenth], samples[-tenth:])]
        for name in samples[0]
    }
    keys = ("env_steps", "iterations", "train_seconds", "peak_memory_bytes")
    return {"command": f"paceline {COMMAND} {words}", "samples": len(samples), "figures": figures, "left": left} | {
        key: summary[key] for key in keys
    }


def _watch(process: subprocess.Popen[bytes], folder: Path, minutes: float) -> list[dict[str, float]]:
    began, samples = time.monotonic(), []
    while process.poll() is None and time.monotonic() - began < 60 * minutes + 120:
        with suppress(subprocess.TimeoutExpired):
            process.wait(60 * minutes / SAMPLES)
            break
        share = (time.monotonic() - began) / (60 * minutes)
        if WARM_UP_SHARE < share < 1:
            with suppress(psutil.Error):
                samples.append(sample(psutil.Process(process.pid), folder))
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="of both runs together")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    runs = {way: soak(words, options.minutes / len(WAYS)) for way, words in WAYS.items()}
    result = {
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "minutes": options.minutes,
        "runs": runs,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if any(run["left"] for run in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
