"""Measure every figure of docs/benchmarks.md, part by part, and write the page. `make bench` runs it.

Each part runs in its own process and writes a file in results/. Parts that were measured today with this version are
kept, so the same command continues an interrupted one. Exit status: 0 if all bars were met, 1 if one was missed or a
part could not be measured, 2 for a faulty set-up, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import HERE, OURS, PEERS_PYTHON, ROOT, BenchError, origin, output_of, shown
from paceline.run.console import duration
from paceline.run.directory import write_json
from ppo import Bench, say
from sections import RESULTS, SECTIONS, Result, minutes, result_path
from tables import Row, bars_table

QUICK = HERE / "quick"
REPEATS = {False: 3, True: 2}  # unless asked otherwise; True: quick
LIMIT_FACTOR = 5  # a part that takes this many times its usual minutes is stopped


def function_of(part: str) -> Callable[[Bench], list[Row]]:
    section, _, name = part.partition("/")
    work: Callable[[Bench], list[Row]] = getattr(
        importlib.import_module(SECTIONS[section].module), name.replace("-", "_")
    )
    return work


def command_of(part: str, gpu: bool, repeats: int, quick: bool) -> str:
    more = f"{f' REPEATS={repeats}' if repeats != REPEATS[quick] else ''}{' QUICK=1' if quick else ''}"
    return f"make {'bench-gpu' if gpu else 'bench'} ONLY={part}{more}"


def measure(part: str, repeats: int, quick: bool, again: bool) -> Result:
    """Measure a part in this process; a failure is part of the result."""
    began, failure, rows = time.perf_counter(), None, []
    gpu = SECTIONS[part.partition("/")[0]].gpu
    found: Result = {**origin(command_of(part, gpu, repeats, quick), gpu), "repeats": repeats, "quick": quick}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as runs:
        bench = Bench(repeats, quick, again, Path(runs))
        try:
            rows = [row.as_dict() for row in function_of(part)(bench)]
        except Exception as error:  # the other parts are still measured
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
    return {
        **found,
        "seconds": time.perf_counter() - began,
        "failure": failure,
        "gflops": vars(bench).get("gflops"),
        "rows": rows,
        "runs": bench.records,
        "tables": bench.tables,
        "suite": bench.suite,
        "text": bench.text,
    }


def measured_apart(part: str, about_minutes: float, options: argparse.Namespace) -> Result:
    """Measure a part in its own process, so that its threads, hooks and memory do not affect the others."""
    words = ["--measure", part, "--repeats", str(options.repeats)]
    words += [flag for flag in ("--quick", "--again") if getattr(options, flag[2:])]
    argv = [sys.executable, str(HERE / "bench.py"), *words]
    limit_seconds = 60 + LIMIT_FACTOR * 60 * about_minutes
    try:
        found: Result = json.loads(output_of(argv, limit_seconds, show=True).splitlines()[-1])
    except (BenchError, ValueError, IndexError) as error:
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        command = command_of(part, options.gpu, options.repeats, options.quick)
        found = {"date": date, "command": command, "failure": f"{type(error).__name__}: {error}"}
    return found


def kept(path: Path, options: argparse.Namespace) -> Result | None:
    """The earlier result, if it is of today and of this version."""
    if options.again or not path.exists():
        return None
    found: Result = json.loads(path.read_text())
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    fresh = not found["failure"] and found["date"].startswith(today)
    same = fresh and found["versions"]["ours"]["paceline"] == version("paceline")
    return found if same and (found["repeats"], found["quick"]) == (options.repeats, options.quick) else None


def chosen(only: list[str], gpu: bool) -> dict[str, float]:
    """The chosen parts with their minutes; a section stands for all its parts. ValueError for an unknown one."""
    names = {part: {part, part.partition("/")[0]} for part in minutes(gpu)}
    known = sorted(set[str]().union(*names.values()))
    if unknown := [word for word in only if word not in known]:
        raise ValueError(f"{', '.join(unknown)}: expected are {', '.join(known)}")
    return {part: took for part, took in minutes(gpu).items() if not only or names[part] & set(only)}


def run(parts: dict[str, float], options: argparse.Namespace) -> int:
    folder = QUICK if options.quick else RESULTS
    found: dict[str, Result] = {}
    for place, (part, took) in enumerate(parts.items(), 1):
        path, left = result_path(part, folder), sum(list(parts.values())[place - 1 :])
        head = f"[{place}/{len(parts)}] {part}"
        if (before := kept(path, options)) is not None:
            say(f"{head}: kept, measured {before['date']}")
            found[part] = before
            continue
        say(f"{head}: about {took:g} min, {left:g} min to the end" if not options.quick else head)
        found[part] = measured_apart(part, took, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found[part])
        failure = found[part]["failure"]
        say(f"{head}: not measured: {failure}" if failure else f"{head}: done in {duration(found[part]['seconds'])}")
    rows = [Row.from_dict(row) for result in found.values() for row in result.get("rows", [])]
    failures = {part: result["failure"] for part, result in found.items() if result["failure"]}
    print(bars_table(rows, failures))
    if not options.quick:
        print(output_of([sys.executable, str(ROOT / "docs/make_benchmarks.py")], 60), end="")
    print(f"\nWritten to {shown([str(folder)])}{'' if options.quick else ' and docs/benchmarks.md'}.")
    return int(bool(failures) or not all(row.passed for row in rows))


def show(gpu: bool) -> None:
    for part, took in minutes(gpu).items():
        path = result_path(part)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        state = f"not measured: {found['failure'].splitlines()[0]}" if found.get("failure") else "measured"
        print(f"{part:24} {took:4g} min  {state + ' ' + found['date'] if found else 'not measured'}")


def main() -> int:
    total = {gpu: sum(minutes(gpu).values()) for gpu in (False, True)}
    parser = argparse.ArgumentParser(
        description=f"Measure the figures of docs/benchmarks.md: about {total[False]:.0f} minutes on two cores, which "
        f"nothing else should use. --gpu measures what needs a GPU, about {total[True]:.0f} minutes."
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="sections or parts (see --list)")
    parser.add_argument("--list", action="store_true", help="the parts, how long they take, when they were measured")
    parser.add_argument("--again", action="store_true", help="also parts that were measured today with this version")
    parser.add_argument("--repeats", type=int, help="pairs of runs per job, at least 2 (default: 3, with --quick 2)")
    parser.add_argument(
        "--quick", action="store_true", help=f"short runs to test the benchmarks; writes to {QUICK.name}/"
    )
    parser.add_argument("--gpu", action="store_true", help="only the parts that need a GPU")
    parser.add_argument("--measure", metavar="PART", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = options.repeats or REPEATS[options.quick]
    if options.measure:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its child processes are ended too
        print(json.dumps(measure(options.measure, options.repeats, options.quick, options.again), allow_nan=False))
        return 0
    if options.list:
        show(options.gpu)
        return 0
    try:
        parts = chosen(options.only, options.gpu)
    except ValueError as error:
        parser.error(str(error))
    if options.repeats < 2:
        parser.error("--repeats: at least 2, since one pair does not show the noise")
    check_setup(parser, options.gpu)
    try:
        return run(parts, options)
    except KeyboardInterrupt:
        say("stopped; the same command continues")
        return 130


def check_setup(parser: argparse.ArgumentParser, gpu: bool) -> None:
    if gpu:
        import torch

        if not torch.cuda.is_available():
            parser.error("--gpu: torch finds no GPU on this machine")
        return
    for path, target in ((OURS, "setup"), (PEERS_PYTHON, "bench-setup")):
        if not path.exists():
            parser.error(f"{shown([str(path)])} is missing; run `make {target}` first")


if __name__ == "__main__":
    sys.exit(main())
