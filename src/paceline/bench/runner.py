"""Make the planned runs of a benchmark one after the other, each in its own process.

The state of a run is read from its directory, so the command that began a benchmark also continues it. The benchmark's
own file records which runs failed.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from paceline.bench.planned_run import PlannedRun
from paceline.config import UserError
from paceline.results.scaling_figures import QUEUED
from paceline.run.console import duration, is_screen
from paceline.run.directory import RunDirectory, write_json, write_text

Entry = dict[str, Any]
FAILED, STOPPED = 1, 99
POLL_SECONDS = 0.2
LINE_SECONDS = 30.0  # between two lines of progress in a log
PATIENCE_SECONDS = 600.0  # for the current iteration to end after a signal
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_Run = TypeVar("_Run", bound=PlannedRun)


class Benchmark(ABC, Generic[_Run]):
    """The runs of a folder and their entries; `KIND.json` and `KIND.md` are rewritten after every run."""

    kind: ClassVar[str]
    text: ModuleType
    """`tables(result)` and `page(result)` in Markdown, and `summary_line(entry)` of a finished run."""
    no_result: ClassVar[str]
    """The problem of a run whose commands succeeded and left nothing to read."""

    def __init__(self, folder: Path, title: str, about: str, runs: Sequence[_Run], words: Sequence[str]) -> None:
        self.folder, self.title, self.about, self.runs = folder, title, about, list(runs)
        self.command = shlex.join(["paceline", "bench", self.kind, *words])
        commands, self.entries = self._read_file()
        self.commands = list(dict.fromkeys([*commands, self.command]))
        for run in runs:
            self.entries[run.name] = self.read(run, self.entries.get(run.name))

    @abstractmethod
    def read(self, run: _Run, before: Entry | None) -> Entry:
        """The entry of a run: `name`, `state` (done, failed, interrupted or missing; waiting or running for a job that
        has not ended), `reason`, and its figures. `before`: its entry so far."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The content of `KIND.json`."""

    def make(self, run: _Run, entry: Entry, screen: Screen, interrupts: Interrupts) -> tuple[int, str | None]:
        """Make what is missing of a run. Return the exit status and what went wrong."""
        for step, words in run.commands.items():
            if step == "training" and entry.get("trained"):
                continue
            screen.progress(step)
            code, lines = run_words(words, run.out / "logs" / f"{run.name}.log", screen, interrupts)
            if code == STOPPED or interrupts.received:
                return STOPPED, None
            if code:
                problem = failure_reason(code, lines)
                return code, problem if step == "training" else f"{step}: {problem}"
        return 0, None if self.read(run, None)["state"] == "done" else self.no_result

    @property
    def failure_hint(self) -> str:
        """Where to find more about failed runs."""
        return f"see {self.folder / 'logs'}"

    def write(self) -> dict[str, Any]:
        result = self.result()
        write_json(self.folder / f"{self.kind}.json", result)
        write_text(self.folder / f"{self.kind}.md", self.text.page(result))
        return result

    def _read_file(self) -> tuple[list[str], dict[str, Entry]]:
        """The commands and entries of earlier calls."""
        path = self.folder / f"{self.kind}.json"
        try:
            tree = json.loads(path.read_bytes())
            commands, entries = list(tree["commands"]), {entry["name"]: entry for entry in tree["runs"]}
        except FileNotFoundError:
            return [], {}
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: delete it; the runs are kept and read again") from None
        if tree.get(self.kind) != self.title:
            raise UserError(
                f"--out {self.folder} holds the {self.kind} {tree.get(self.kind)!r}, not {self.title!r}: choose "
                "another folder"
            )
        return commands, entries


def run_benchmark(benchmark: Benchmark[_Run], *, retry: bool, dry_run: bool) -> int:
    """Make what is missing and write the tables; return the exit status."""
    for run in benchmark.runs:
        check_same(run)
    if dry_run:
        _describe(benchmark, retry)
        return 0
    make_folder(benchmark.folder)
    lock = RunDirectory(benchmark.folder)
    lock.lock()
    try:
        return _make_all(benchmark, retry)
    finally:
        lock.unlock()


def _make_all(benchmark: Benchmark[_Run], retry: bool) -> int:
    screen, interrupts = Screen(len(benchmark.runs)), Interrupts()
    benchmark.write()
    with interrupts.installed():
        for number, run in enumerate(benchmark.runs, start=1):
            screen.begin(number, run.name)
            code, text = _make_one(benchmark, run, retry, screen, interrupts)
            screen.end(text)
            if code == STOPPED or interrupts.received:
                benchmark.write()
                print(f"table      {_page_path(benchmark)} (incomplete)\ncontinue   {benchmark.command}")
                return STOPPED
    result = benchmark.write()
    states = [benchmark.entries[run.name]["state"] for run in benchmark.runs]
    queued = sum(state in QUEUED for state in states)
    if not queued:
        print(f"\n{benchmark.text.tables(result)}")
    print(f"table      {_page_path(benchmark)}" + (" (incomplete)" if queued else ""))
    failed = [run.name for run, state in zip(benchmark.runs, states, strict=True) if state == "failed"]
    if failed:
        print(f"failed     {', '.join(failed)}: {benchmark.failure_hint}; --retry tries them again")
    if queued:
        print(f"queued     {queued} of {len(states)}; when they have ended: {benchmark.command}")
    return FAILED if failed else 0


def _make_one(
    benchmark: Benchmark[_Run], run: _Run, retry: bool, screen: Screen, interrupts: Interrupts
) -> tuple[int, str]:
    """Make a run unless it is done, queued, or failed before. Return the exit status and a line for the screen."""
    entry = benchmark.entries[run.name]
    if entry["state"] == "failed" and not retry:
        return FAILED, f"failed before, skipped without --retry: {entry['reason']}"
    if entry["state"] == "done":
        return 0, f"already done: {benchmark.text.summary_line(entry)}"
    if entry["state"] in QUEUED:
        return 0, str(entry["reason"])
    code, problem = benchmark.make(run, entry, screen, interrupts)
    entry = benchmark.read(run, {"state": "failed", "reason": problem} if problem else None)
    benchmark.entries[run.name] = entry
    benchmark.write()
    if code == STOPPED or interrupts.received:
        return STOPPED, f"stopped: {interrupts.received or 'by itself'}"
    if problem:
        return code or FAILED, f"failed: {problem}"
    return 0, str(entry["reason"]) if entry["state"] in QUEUED else benchmark.text.summary_line(entry)


def _page_path(benchmark: Benchmark[_Run]) -> Path:
    return benchmark.folder / f"{benchmark.kind}.md"


def _describe(benchmark: Benchmark[_Run], retry: bool) -> None:
    """Print the commands of `--dry-run`."""
    missing = 0
    for run in benchmark.runs:
        state = benchmark.entries[run.name]["state"]
        skipped = state in ("done", *QUEUED) or (state == "failed" and not retry)
        missing += not skipped
        print(f"# {run.name}: {state}" + (", skipped" if skipped else ""))
        for words in () if skipped else run.commands.values():
            print(shlex.join(["paceline", *words]))
    print(f"# {missing} of {len(benchmark.runs)} runs to make; nothing was started or written")


def check_same(run: PlannedRun) -> None:
    """UserError if the run's directory holds a run with other settings, which would be taken for this one."""
    directory = RunDirectory(run.path)
    other = run.difference(directory.read_config()) if directory.config_path.is_file() else None
    if other:
        raise UserError(f"the run {run.path} has {other}: choose another --out, or give the settings it was made with")


def make_folder(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {folder}: cannot be created ({error.strerror}); choose a folder you can write to"
        ) from None


class Interrupts:
    """Passes a signal to the current run, which saves and stops. A second signal ends that run at once."""

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
            # A run does not handle SIGHUP.
            self.process.send_signal(signal.SIGTERM if self._number == signal.SIGHUP else self._number)


def run_words(words: list[str], log: Path, screen: Screen, interrupts: Interrupts) -> tuple[int, list[str]]:
    """Run `paceline WORDS` to its end. Return its exit status and the lines it printed.

    The output goes to a file instead of a pipe: a process that the run leaves behind cannot keep us waiting.
    """
    with log.open("ab") as file, log.open("rb") as reader:
        reader.seek(0, os.SEEK_END)
        began = reader.tell()
        process = interrupts.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.commands.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # otherwise Ctrl-C reaches it twice: from the terminal and from us
            preexec_fn=end_with_parent(),
        )
        try:
            if interrupts.received:  # while the process was being started
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
            if process.poll() is None:  # an error of ours, such as a closed standard output
                process.terminate()
                try:
                    process.wait(timeout=PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        reader.seek(began)
        return code, reader.read().decode(errors="replace").splitlines()


def end_with_parent() -> Callable[[], object] | None:
    """For the child: SIGTERM when we are killed, so that no run goes on unnoticed. Linux only."""
    libc = ctypes.CDLL(None)  # nothing may be loaded between fork and exec
    return (lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)) if hasattr(libc, "prctl") else None


def _last_line(reader: Any) -> str:
    lines = [line for line in reader.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def failure_reason(code: int, lines: list[str]) -> str:
    """Why a command failed: its last error line, else its last line."""
    printed = [line.strip() for line in lines if line.strip()]
    errors = [line for line in printed if line.startswith("paceline: ")]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    text = errors[-1].removeprefix("paceline: ").removeprefix("failed: ") if errors else printed[-1] if printed else ""
    return text or f"exit status {code}"


class Screen:
    """One line per run: redrawn in place on a terminal, printed now and then in a log."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live = is_screen(sys.stdout)
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
