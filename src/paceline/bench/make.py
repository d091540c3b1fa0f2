"""Planned runs one after the other, each in its own process, with a line each; what is done is left alone.

What a run came to is read from its directory, so a study is continued by the command that began it. Its file remembers
which runs failed.
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
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from paceline.bench.cell import PlannedRun
from paceline.config import UserError
from paceline.run.console import duration
from paceline.run.directory import RunDirectory, write_json, write_text

Entry = dict[str, Any]
FAILED, STOPPED = 1, 99
QUEUED = ("waiting", "running")
"""States of a run whose job is not over."""
POLL_SECONDS = 0.2
LINE_SECONDS = 30.0  # between two lines of progress in a log
PATIENCE_SECONDS = 600.0  # for the iteration that is under way when a signal comes
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_Run = TypeVar("_Run", bound=PlannedRun)


class Ledger(ABC, Generic[_Run]):
    """The entries of all runs of a folder; `KIND.json` and `KIND.md` follow every change."""

    kind: str

    def __init__(self, folder: Path, title: str, about: str, cells: Sequence[_Run], words: Sequence[str]) -> None:
        self.folder, self.title, self.about, self.cells = folder, title, about, list(cells)
        self.command = shlex.join(["paceline", "bench", self.kind, *words])
        before = self._before()
        self.commands = list(dict.fromkeys([*before["commands"], self.command]))
        self.entries: dict[str, Entry] = dict(before["runs"])
        for cell in cells:
            self.entries[cell.name] = self.read(cell, before["runs"].get(cell.name))

    @abstractmethod
    def read(self, cell: _Run, before: Entry | None) -> Entry:
        """What there is of a run: `name`, `state` (done, failed, interrupted or missing; of a job that is not over
        waiting or running), `reason`, and its figures."""

    @abstractmethod
    def make(self, cell: _Run, entry: Entry, screen: Screen, interrupts: Interrupts) -> tuple[int, str | None]:
        """Make what is missing of a run: exit status, and what went wrong."""

    @abstractmethod
    def commands_of(self, cell: _Run) -> list[list[str]]:
        """What a run is made by."""

    @abstractmethod
    def line(self, entry: Entry) -> str:
        """A finished run in a few words."""

    @abstractmethod
    def collect(self) -> dict[str, Any]:
        """All of `KIND.json`."""

    @abstractmethod
    def page(self, result: dict[str, Any]) -> str: ...

    @abstractmethod
    def tables(self, result: dict[str, Any]) -> str: ...

    def write(self) -> dict[str, Any]:
        result = self.collect()
        write_json(self.folder / f"{self.kind}.json", result)
        write_text(self.folder / f"{self.kind}.md", self.page(result))
        return result

    @property
    def where_failed(self) -> str:
        """Where to look for more."""
        return f"see {self.folder / 'logs'}"

    def finish(self, result: dict[str, Any]) -> None:
        """After the last run: what is written besides."""

    def _before(self) -> dict[str, Any]:
        """What an earlier call left: its commands, and its runs by name."""
        path = self.folder / f"{self.kind}.json"
        try:
            tree = json.loads(path.read_bytes())
            found = {"commands": list(tree["commands"]), "runs": {entry["name"]: entry for entry in tree["runs"]}}
        except FileNotFoundError:
            return {"commands": [], "runs": {}}
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: delete it, the runs are kept and read again") from None
        if tree.get(self.kind) != self.title:
            raise UserError(
                f"--out {self.folder} holds the {self.kind} {tree.get(self.kind)!r}, not {self.title!r}: choose "
                "another folder"
            )
        return found


def drive(ledger: Ledger[_Run], *, retry: bool, dry_run: bool) -> int:
    """Make what is missing and write the tables; the exit status."""
    for cell in ledger.cells:
        check_same(cell)
    if dry_run:
        _describe(ledger, retry)
        return 0
    make_folder(ledger.folder)
    lock = RunDirectory(ledger.folder)
    lock.lock()
    try:
        return _drive(ledger, retry)
    finally:
        lock.unlock()


def _drive(ledger: Ledger[_Run], retry: bool) -> int:
    screen, interrupts = Screen(len(ledger.cells)), Interrupts()
    ledger.write()
    with interrupts.installed():
        for number, cell in enumerate(ledger.cells, start=1):
            entry = ledger.entries[cell.name]
            screen.begin(number, cell.name)
            if entry["state"] == "failed" and not retry:
                screen.end(f"failed before, left alone without --retry: {entry['reason']}")
            elif entry["state"] == "done":
                screen.end(f"there already: {ledger.line(entry)}")
            elif entry["state"] in QUEUED:
                screen.end(entry["reason"])
            else:
                code, problem = ledger.make(cell, entry, screen, interrupts)
                entry = ledger.read(cell, {"state": "failed", "reason": problem} if problem else None)
                ledger.entries[cell.name] = entry
                ledger.write()
                if code == STOPPED or interrupts.received:
                    screen.end(f"stopped: {interrupts.received or 'by itself'}")
                    return _stopped(ledger)
                if problem:
                    screen.end(f"failed: {problem}")
                else:
                    screen.end(entry["reason"] if entry["state"] in QUEUED else ledger.line(entry))
            if interrupts.received:
                return _stopped(ledger)
    result = ledger.write()
    states = [ledger.entries[cell.name]["state"] for cell in ledger.cells]
    queued = sum(state in QUEUED for state in states)
    if not queued:
        print(f"\n{ledger.tables(result)}")
    ledger.finish(result)
    print(f"table      {ledger.folder / f'{ledger.kind}.md'}" + (", as far as it goes" if queued else ""))
    failed = [cell.name for cell, state in zip(ledger.cells, states, strict=True) if state == "failed"]
    if failed:
        print(f"failed     {', '.join(failed)}: {ledger.where_failed}; --retry tries them again")
    if queued:
        print(f"queued     {queued} of {len(states)}; when they have ended: {ledger.command}")
        return STOPPED
    return FAILED if failed else 0


def _stopped(ledger: Ledger[_Run]) -> int:
    ledger.write()
    print(f"table      {ledger.folder / f'{ledger.kind}.md'}, as far as it goes\ncontinue   {ledger.command}")
    return STOPPED


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


def run_words(words: list[str], log: Path, screen: Screen, interrupts: Interrupts) -> tuple[int, list[str]]:
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


def reason(code: int, lines: list[str]) -> str:
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


def _describe(ledger: Ledger[_Run], retry: bool) -> None:
    todo = 0
    for cell in ledger.cells:
        state = ledger.entries[cell.name]["state"]
        skipped = state in ("done", *QUEUED) or (state == "failed" and not retry)
        todo += not skipped
        print(f"# {cell.name}: {state}" + (", left alone" if skipped else ""))
        for words in () if skipped else ledger.commands_of(cell):
            print(shlex.join(["paceline", *words]))
    print(f"# {todo} of {len(ledger.cells)} runs to make; nothing was started or written")


def check_same(cell: PlannedRun) -> None:
    """A run of other settings under this name would be taken for one of these."""
    run = RunDirectory(cell.path)
    other = cell.difference(run.read_config()) if run.config_path.is_file() else None
    if other:
        raise UserError(f"the run {cell.path} has {other}: choose another --out, or give the settings it was made with")


def make_folder(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {folder}: cannot be made ({error.strerror}); choose a folder you can write to"
        ) from None
