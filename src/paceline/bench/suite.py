"""`paceline bench suite`: the runs of a matrix one after the other, each in its own process, and their table.

What is done is read from the run directories, so a suite is continued by the command that began it. `suite.json` is the
result, and it remembers which runs failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.bench import results
from paceline.bench.plan import Cell, load_suite, plan
from paceline.config import UserError
from paceline.run.console import duration
from paceline.run.directory import RunDirectory, write_json, write_text

FAILED, STOPPED = 1, 99
POLL_SECONDS = 0.2
LINE_SECONDS = 30.0  # between two lines of progress in a log
PATIENCE_SECONDS = 600.0  # for the iteration that is under way when a signal comes
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def run_suite(
    name: str,
    *,
    algos: Sequence[str],
    seeds: int,
    games: Sequence[str] | None = None,
    total_steps: int | None = None,
    episodes: int | None = None,
    sets: Sequence[str] = (),
    out: str | None = None,
    retry: bool = False,
    dry_run: bool = False,
) -> int:
    """Make what is missing, write `suite.json` and `suite.md`, and return the exit status."""
    shown, suite = load_suite(name)
    folder = Path(out or f"runs/{shown}").expanduser()
    cells = plan(
        suite,
        out=folder,
        algos=algos,
        seeds=seeds,
        games=games,
        total_steps=total_steps,
        episodes=episodes,
        sets=sets,
    )
    before = _read(folder, shown)
    entries = {cell.name: results.read(cell, before["runs"].get(cell.name)) for cell in cells}
    for cell in cells:
        _check_same(cell)
    if dry_run:
        _describe(cells, entries, retry)
        return 0
    _make(folder)
    lock = RunDirectory(folder)
    lock.lock()
    try:
        words = ["--suite", name, "--algos", ",".join(algos), "--seeds", str(seeds)]
        words += ["--games", ",".join(games)] if games is not None else []
        words += [word for flag, value in (("--total-steps", total_steps), ("--episodes", episodes), ("--out", out))
                  if value is not None for word in (flag, str(value))]  # fmt: skip
        words += [word for item in sets for word in ("--set", item)]
        ledger = Ledger(folder, shown, suite.about, before, entries, shlex.join(["paceline", "bench", "suite", *words]))
        return _run_all(cells, ledger, retry)
    finally:
        lock.unlock()


class Ledger:
    """The entries of all runs of the folder; `suite.json` and `suite.md` follow every change."""

    def __init__(
        self,
        folder: Path,
        suite: str,
        about: str,
        before: Mapping[str, Any],
        entries: Mapping[str, dict[str, Any]],
        command: str,
    ) -> None:
        self.folder, self.suite, self.about, self.command = folder, suite, about, command
        self.commands = list(dict.fromkeys([*before["commands"], command]))
        self.entries: dict[str, dict[str, Any]] = {**before["runs"], **entries}

    def put(self, entry: dict[str, Any]) -> None:
        self.entries[entry["name"]] = entry
        self.write()

    def write(self) -> dict[str, Any]:
        result = results.collect(self.suite, self.about, self.commands, list(self.entries.values()))
        write_json(self.folder / "suite.json", result)
        write_text(self.folder / "suite.md", results.page(result))
        return result


class Interrupts:
    """A signal to the suite goes to the run under way, which saves and stops; a second one ends that run at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.until = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._number = signal.SIGINT

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received, self._number = signal.Signals(number).name, signal.Signals(number)
        self.until = time.monotonic() + PATIENCE_SECONDS
        self.forward()

    def forward(self) -> None:
        if self.process is not None:
            # A run does not know SIGHUP.
            self.process.send_signal(signal.SIGTERM if self._number == signal.SIGHUP else self._number)


def _run_all(cells: list[Cell], ledger: Ledger, retry: bool) -> int:
    screen, interrupts = Screen(len(cells)), Interrupts()
    ledger.write()
    with interrupts.installed():
        for number, cell in enumerate(cells, start=1):
            entry = ledger.entries[cell.name]
            screen.begin(number, cell.name)
            if entry["state"] == "failed" and not retry:
                screen.end(f"failed before, left alone without --retry: {entry['reason']}")
            elif entry["state"] == "done":
                screen.end(f"there already: {results.line(entry)}")
            else:
                code, problem = _make_run(cell, entry["trained"], screen, interrupts)
                entry = results.read(cell, {"state": "failed", "reason": problem} if problem else None)
                ledger.put(entry)
                if code == STOPPED or interrupts.received:
                    screen.end(f"stopped: {interrupts.received or 'by itself'}")
                    return _stopped(ledger)
                screen.end(f"failed: {problem}" if problem else results.line(entry))
            if interrupts.received:
                return _stopped(ledger)
    result = ledger.write()
    print(f"\n{results.tables(result)}")
    print(f"table      {ledger.folder / 'suite.md'}")
    failed = [cell.name for cell in cells if ledger.entries[cell.name]["state"] == "failed"]
    if failed:
        print(f"failed     {', '.join(failed)}: see {ledger.folder / 'logs'}; --retry tries them again")
    return FAILED if failed else 0


def _stopped(ledger: Ledger) -> int:
    ledger.write()
    print(f"table      {ledger.folder / 'suite.md'}, as far as it goes\ncontinue   {ledger.command}")
    return STOPPED


def _make_run(cell: Cell, trained: bool, screen: Screen, interrupts: Interrupts) -> tuple[int, str | None]:
    """Train unless that is done, then evaluate: exit status, and what went wrong."""
    log = cell.out / "logs" / f"{cell.name}.log"
    if not trained:
        code, said = _run(cell.train_words, log, screen, interrupts)
        if code == STOPPED or interrupts.received:
            return STOPPED, None
        if code:
            return code, _reason(code, said)
    screen.progress("evaluation")
    code, said = _run(cell.evaluate_words, log, screen, interrupts)
    if interrupts.received:
        return STOPPED, None
    if code:
        return code, f"evaluation: {_reason(code, said)}"
    return 0, None if results.read(cell, None)["state"] == "done" else "evaluation: it left no row in eval.jsonl"


def _run(words: list[str], log: Path, screen: Screen, interrupts: Interrupts) -> tuple[int, list[str]]:
    """`paceline WORDS` to its end: exit status, and the lines it printed.

    They go to a file and not through a pipe: what a run may leave behind cannot keep us waiting for the pipe's end.
    """
    with log.open("ab") as file, log.open("rb") as reader:
        reader.seek(0, os.SEEK_END)
        began = reader.tell()
        process = interrupts.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C would reach it twice: from the terminal and from us
            preexec_fn=_end_with_parent(),
        )
        try:
            if interrupts.received:  # it came while the process was being made
                interrupts.forward()
            while True:
                try:
                    code = process.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    screen.progress(_last_line(reader))
                if interrupts.received and time.monotonic() > interrupts.until:
                    process.kill()
        finally:
            interrupts.process = None
            if process.poll() is None:  # an error of our own: nobody may be reading what we print
                process.terminate()
                try:
                    process.wait(timeout=PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        reader.seek(began)
        return code, reader.read().decode(errors="replace").splitlines()


def _end_with_parent() -> Any:
    """For the child: SIGTERM when we are killed ourselves, so that no run goes on unseen. Linux alone has that."""
    libc = ctypes.CDLL(None)  # here: nothing is to be loaded between fork and exec
    return (lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)) if hasattr(libc, "prctl") else None


def _last_line(reader: Any) -> str:
    lines = [line for line in reader.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _reason(code: int, lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    ours = [line for line in said if line.startswith("paceline: ")]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    text = ours[-1].removeprefix("paceline: ").removeprefix("failed: ") if ours else said[-1] if said else ""
    return text or f"exit status {code}"


class Screen:
    """One line a run: redrawn in place on a terminal, now and then in a log."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._head = ""
        self._began = self._next = 0.0

    def begin(self, number: int, name: str) -> None:
        self._head = f"[{number}/{self._total}] {name}"
        self._began = time.monotonic()
        self._next = self._began + (0.0 if self._live else LINE_SECONDS)

    def progress(self, text: str) -> None:
        if not text or time.monotonic() < self._next:
            return
        line = f"{self._head}  {text}"
        if self._live:
            sys.stdout.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
            sys.stdout.flush()
        else:
            print(line, flush=True)
            self._next = time.monotonic() + LINE_SECONDS

    def end(self, text: str) -> None:
        clear = "\r\x1b[2K" if self._live else ""
        took = time.monotonic() - self._began
        print(f"{clear}{self._head}  {text}{f'  ({duration(took)})' if took >= 1 else ''}", flush=True)


def _describe(cells: list[Cell], entries: Mapping[str, dict[str, Any]], retry: bool) -> None:
    todo = 0
    for cell in cells:
        entry = entries[cell.name]
        skipped = entry["state"] == "done" or (entry["state"] == "failed" and not retry)
        todo += not skipped
        print(f"# {cell.name}: {entry['state']}" + (", left alone" if skipped else ""))
        for words in () if skipped else (cell.train_words, cell.evaluate_words):
            print(shlex.join(["paceline", *words]))
    print(f"# {todo} of {len(cells)} runs to make; nothing was started or written")


def _check_same(cell: Cell) -> None:
    """A run of other settings under this name would be taken for one of these."""
    run = RunDirectory(cell.path)
    other = cell.difference(run.read_config()) if run.config_path.is_file() else None
    if other:
        raise UserError(f"the run {cell.path} has {other}: choose another --out, or give the settings it was made with")


def _make(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {folder}: cannot be made ({error.strerror}); choose a folder you can write to"
        ) from None


def _read(folder: Path, suite: str) -> dict[str, Any]:
    """What an earlier call left: its commands, and its runs by name."""
    path = folder / "suite.json"
    try:
        tree = json.loads(path.read_bytes())
        found = {"commands": list(tree["commands"]), "runs": {entry["name"]: entry for entry in tree["runs"]}}
    except FileNotFoundError:
        return {"commands": [], "runs": {}}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: delete it, the runs are kept and read again") from None
    if tree.get("suite") != suite:
        raise UserError(f"--out {folder} holds the suite {tree.get('suite')!r}, not {suite!r}: choose another folder")
    return found
