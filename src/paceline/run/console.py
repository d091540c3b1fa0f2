"""What a run prints: a live view on a terminal, one line per iteration elsewhere, or two lines with `--quiet`,
or nothing."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TextIO

from paceline.schedulers.mpi import OPEN_MPI_RANK

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = dict[str, Any]

_PARTS = ("env", "act", "learn", "sync", "idle", "eval", "save", "start")
FEW_EPISODES = 100
_ALWAYS = ("env", "act", "learn")
_COLOURS = dict(
    zip(_PARTS, ("green", "cyan", "magenta", "yellow", "red", "blue", "white", "bright_black"), strict=True)
)
_LOSSES = {
    "policy": "policy_loss",
    "value": "value_loss",
    "entropy": "entropy",
    "kl": "approx_kl",
    "clipped": "clip_fraction",
    "explained": "explained_variance",
    "gradient": "gradient_norm",
    "lr": "learning_rate",
}


Quiet = bool | Literal["run"]
"""True: print nothing; `run`: the run directory only."""


class Console:
    """For logs and pipes: prints one line per iteration at once. Call `start` first, `finish` last, `close` always."""

    def __init__(self, stream: TextIO, total_steps: int | None = None) -> None:
        self._stream: TextIO | None = stream
        self._total_steps = total_steps
        encoding = (stream.encoding or "utf-8").lower().replace("-", "")
        self._encoding = None if encoding == "utf8" else stream.encoding

    def start(self, lines: list[str]) -> None:
        self._print(lines)

    def note(self, text: str) -> None:
        self._print([text])

    def iteration(self, row: Row, progress: float | None, eta_seconds: float | None) -> None:
        self._print([iteration_line(row, progress, eta_seconds, self._total_steps)])

    def evaluation(self, row: Row) -> None:
        self._print([evaluation_line(row)])

    def finish(self, lines: list[str]) -> None:
        self._print(lines)

    def close(self) -> None:
        return

    def _print(self, lines: list[str]) -> None:
        if self._stream is None:
            return
        text = "".join(f"{line}\n" for line in lines)
        if self._encoding:
            text = text.replace("±", "+/-").encode(self._encoding, "replace").decode(self._encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The reader is gone (`| head`), the disk behind a redirection is full, or the stream is closed: the run
            # continues silently, and Python must not complain at exit about unflushed output.
            _discard_buffer(self._stream)
            self._stream = None


class QuietConsole(Console):
    """Prints the first and the last line only."""

    def start(self, lines: list[str]) -> None:
        self._print(lines[:1])

    def note(self, text: str) -> None:
        return

    def iteration(self, row: Row, progress: float | None, eta_seconds: float | None) -> None:
        return

    def evaluation(self, row: Row) -> None:
        return

    def finish(self, lines: list[str]) -> None:
        self._print(lines[-1:])


class LiveConsole(Console):
    """For a terminal: a few lines that are redrawn in place, with notes above them. The last view stays."""

    INTERVAL_SECONDS = 0.2
    _HISTORY = 64

    def __init__(self, stream: TextIO, total_steps: int | None = None) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        super().__init__(stream, total_steps)
        self._rich = RichConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        # No refresh thread: it would compete with the run for the interpreter.
        self._live = Live(console=self._rich, auto_refresh=False, vertical_overflow="crop")
        self._latest: tuple[Row, float | None, float | None] | None = None
        self._evaluation: str | None = None
        self._returns: list[float] = []
        self._stride, self._skipped = 1, 0
        self._next = 0.0

    def iteration(self, row: Row, progress: float | None, eta_seconds: float | None) -> None:
        self._latest = (row, progress, eta_seconds)
        if _known(row.get("return_mean")):
            self._remember(float(row["return_mean"]))
        if time.monotonic() >= self._next:
            self._draw()

    def evaluation(self, row: Row) -> None:
        self._evaluation = evaluation_line(row)
        self._draw()

    def finish(self, lines: list[str]) -> None:
        self.close()
        self._print(lines)

    def close(self) -> None:
        if self._live.is_started:
            self._draw()
            with suppress(OSError):  # the terminal is gone
                self._live.stop()

    def _print(self, lines: list[str]) -> None:
        with suppress(OSError):  # the terminal is gone; the run continues
            for line in lines:
                self._rich.print(line)

    def _remember(self, value: float) -> None:
        """Keep the whole curve in at most `_HISTORY` points: when they are full, drop every other one."""
        self._skipped += 1
        if self._skipped < self._stride and self._returns:
            return
        self._skipped = 0
        self._returns.append(value)
        if len(self._returns) >= self._HISTORY:
            self._returns = self._returns[1::2]
            self._stride *= 2

    def _draw(self) -> None:
        if self._latest is None:
            return
        self._next = time.monotonic() + self.INTERVAL_SECONDS
        with suppress(OSError):  # the terminal is gone; the run continues
            if not self._live.is_started:
                self._live.start()
                # Undo what `start` hides, so that the terminal is intact however the process ends.
                self._rich.show_cursor(True)
            self._live.update(self._view(*self._latest), refresh=True)

    def _view(self, row: Row, progress: float | None, eta_seconds: float | None) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        def line(text: str) -> Text:
            return Text(text, no_wrap=True, overflow="ellipsis")

        head = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = []
        if progress is not None:
            done = min(max(progress, 0.0), 1.0)
            cells += [ProgressBar(total=1.0, completed=done, width=30, complete_style="green"), line(f"{done:4.0%}")]
        cells.append(
            line(f"iteration {row.get('iteration', '?')} | {_steps(row, self._total_steps)}{_eta(eta_seconds)}")
        )
        head.add_row(*cells)

        reward = line(f"reward   {_spread(row, 'return')}{_each(row)}{_few(row)}  ")
        reward.append(sparkline(self._returns), style="green")
        length = row.get("length_mean")
        reward.append(f"  length {length:.0f}" if _known(length) else "  length n/a")
        speed = f"speed    {_rate(row.get('steps_per_second'))} steps/s"
        if _known(row.get("wall_seconds")):
            speed += f" | elapsed {duration(row['wall_seconds'])}"
        if _known(row.get("memory_bytes")):
            speed += f" | memory {row['memory_bytes'] / 2**20:,.0f} MiB"
        if _known(row.get("cpu_percent")):
            speed += f" | cpu {row['cpu_percent']:.0f}%"
        if row.get("env_restarts"):
            speed += f" | {row['env_restarts']:,} env restart(s)"
        lines: list[RenderableType] = [head, reward, line(speed)]

        if shares := time_split(row):
            split = line("time     ")
            for name, share in shares.items():
                split.append("█" * round(30 * share), style=_COLOURS[name])
            for name, share in shares.items():
                if name in _ALWAYS or share >= 0.01:
                    split.append(f" {name} {share:.0%}", style=_COLOURS[name])
            lines.append(split)
        losses = [f"{label} {row[name]:.3g}" for label, name in _LOSSES.items() if _known(row.get(name))]
        if losses:
            lines.append(line("losses   " + " | ".join(losses)))
        if self._evaluation:
            lines.append(line(self._evaluation))
        return Group(*lines)


class SilentConsole(QuietConsole):
    """Prints nothing."""

    def start(self, lines: list[str]) -> None:
        return

    def finish(self, lines: list[str]) -> None:
        return


def make_console(quiet: Quiet, stream: TextIO | None = None, *, total_steps: int | None = None) -> Console:
    """`total_steps`: the budget, if any, which is shown after the steps done."""
    stream = sys.stdout if stream is None else stream
    if quiet:
        return QuietConsole(stream) if quiet == "run" else SilentConsole(stream)
    return LiveConsole(stream, total_steps) if is_screen(stream) else Console(stream, total_steps)


def is_screen(stream: TextIO) -> bool:
    """Whether it is a terminal that can redraw lines. Open MPI gives its ranks a pseudo-terminal even where its own
    output is redirected."""
    has_pty = OPEN_MPI_RANK in os.environ
    return stream.isatty() and not has_pty and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def iteration_line(row: Row, progress: float | None, eta_seconds: float | None, total_steps: int | None = None) -> str:
    """`Iteration 12 reward = 143.20 ± 40.12 | length 143 | steps 12,288 / 100,000 | 52.3k steps/s | … | eta 0:03`"""
    parts = [f"Iteration {row.get('iteration', '?')} reward = {_spread(row, 'return')}{_each(row)}{_few(row)}"]
    if _known(row.get("length_mean")):
        parts.append(f"length {row['length_mean']:.0f}")
    parts.append(_steps(row, total_steps))
    if total_steps is None and progress is not None:
        parts.append(f"{min(progress, 1.0):.0%}")
    if _known(row.get("steps_per_second")):
        parts.append(f"{_rate(row['steps_per_second'])} steps/s")
    if shares := time_split(row):
        shown = (f"{name} {share:.0%}" for name, share in shares.items() if name in _ALWAYS or share >= 0.05)
        parts.append(" ".join(shown))
    if row.get("env_restarts"):
        parts.append(f"{row['env_restarts']:,} env restart(s)")
    return " | ".join(parts) + _eta(eta_seconds)


def evaluation_line(row: Row) -> str:
    steps = f" at {row['env_steps']:,} steps" if _known(row.get("env_steps")) else ""
    episodes = f" over {row['episodes']} episodes" if _known(row.get("episodes")) else ""
    return f"Evaluation{steps}: reward = {_spread(row, 'return')}{_each(row)}{episodes}"


def time_split(row: Row) -> dict[str, float]:
    """Shares of the time so far, without those that are zero."""
    seconds: dict[str, float] = {name: row.get(f"time_{name}_seconds") or 0.0 for name in _PARTS}
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items() if value > 0}


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve in one line of text; each character shows the mean of several values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) * scale)] for mean in means)


def duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _known(value: Any) -> bool:
    return value is not None and isfinite(value)


def _spread(row: Row, name: str) -> str:
    mean, std = row.get(f"{name}_mean"), row.get(f"{name}_std")
    if not _known(mean):
        return "n/a"
    return f"{mean:.2f} ± {std:.2f}" if _known(std) else f"{mean:.2f}"


def _each(row: Row) -> str:
    """With several agents: the mean for each of them."""
    mean = row.get("return_per_agent_mean")
    return f" ({mean:.2f} per agent)" if _known(mean) else ""


def _few(row: Row) -> str:
    """How many episodes the mean is from, as long as they are few: the first ones to end are the shortest."""
    count = row.get("return_episodes")
    return f" ({count} episode{'s' * (count != 1)})" if count is not None and count < FEW_EPISODES else ""


def _steps(row: Row, total: int | None) -> str:
    done = f"steps {row.get('env_steps') or 0:,}"
    done = done if total is None else f"{done} / {total:,}"
    return f"{done} ({row['agent_steps']:,} agent steps)" if row.get("agent_steps") else done


def _rate(value: Any) -> str:
    if not _known(value):
        return "n/a"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _eta(seconds: float | None) -> str:
    return f" | eta {duration(seconds)}" if seconds is not None and isfinite(seconds) else ""


def _discard_buffer(stream: TextIO) -> None:
    """Redirect a broken standard output to /dev/null, so that the rest of its buffer is discarded."""
    if stream is sys.stdout:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
