from __future__ import annotations

import io
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.run.console import (
    Console,
    LiveConsole,
    QuietConsole,
    duration,
    evaluation_line,
    iteration_line,
    make_console,
    sparkline,
)

ROW: dict[str, Any] = {
    "iteration": 12, "env_steps": 12288, "return_mean": 143.2, "return_std": 40.12, "length_mean": 143.2,
    "steps_per_second": 52_300.0, "time_env_seconds": 2.0, "time_act_seconds": 1.5, "time_learn_seconds": 6.0,
    "time_save_seconds": 0.5, "policy_loss": -0.012, "value_loss": 12.5,
}  # fmt: skip


def test_the_line_of_an_iteration() -> None:
    assert iteration_line(ROW, 0.12, 3.2, 100_000) == (
        "Iteration 12 reward = 143.20 ± 40.12 | length 143 | steps 12,288 / 100,000 | 52.3k steps/s"
        " | env 20% act 15% learn 60% save 5% | eta 0:03"
    )


def test_the_line_before_the_first_episode_ends() -> None:
    row = ROW | {"return_mean": None, "return_std": None, "length_mean": None, "steps_per_second": float("nan")}
    line = iteration_line(row, 0.5, None)
    assert line == "Iteration 12 reward = n/a | steps 12,288 | 50% | env 20% act 15% learn 60% save 5%"
    assert iteration_line({}, None, None) == "Iteration ? reward = n/a | steps 0"


def test_a_mean_of_few_episodes_says_so() -> None:
    assert "reward = 143.20 ± 40.12 (7 episodes) |" in iteration_line(ROW | {"return_episodes": 7}, None, None)
    assert "reward = 143.20 ± 40.12 (1 episode) |" in iteration_line(ROW | {"return_episodes": 1}, None, None)
    assert "episode" not in iteration_line(ROW | {"return_episodes": 100}, None, None)


def test_small_pieces() -> None:
    assert [duration(s) for s in (0, 3.4, 75, 3723, 200_000)] == ["0:00", "0:03", "1:15", "1:02:03", "2d 7:33:20"]
    assert sparkline([]) == "" and sparkline([5.0]) == "▁" and sparkline([0.0, 7.0]) == "▁█"
    assert sparkline([float(i) for i in range(48)], width=8) == "▁▂▃▄▅▆▇█"
    assert evaluation_line({"env_steps": 2000, "episodes": 20, "return_mean": 1.0, "return_std": 0.5}) == (
        "Evaluation at 2,000 steps: reward = 1.00 ± 0.50 over 20 episodes"
    )


def talk(console: Any) -> None:
    console.start(["Run directory: runs/x", "Environment: CartPole-v1"])
    console.note("a note")
    console.iteration(ROW, 0.1, 5.0)
    console.evaluation({"return_mean": 1.0, "return_std": 0.0})
    console.finish(["Done in 3 s", "Run directory: runs/x"])
    console.close()


def test_plain_and_quiet() -> None:
    plain, quiet = io.StringIO(), io.StringIO()
    for stream, is_quiet, kind in ((plain, False, Console), (quiet, "run", QuietConsole)):
        console = make_console(is_quiet, stream)
        assert type(console) is kind
        talk(console)
    assert quiet.getvalue() == "Run directory: runs/x\nRun directory: runs/x\n"
    lines = plain.getvalue().splitlines()
    assert len(lines) == 7 and lines[0] == lines[-1] == "Run directory: runs/x"
    assert lines[2] == "a note" and lines[3].startswith("Iteration 12 reward = 143.20 ± 40.12")


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"))
    console.iteration(ROW, None, None)
    console.note("größer")
    assert raw.getvalue().decode("ascii").splitlines()[0].startswith("Iteration 12 reward = 143.20 +/- 40.12 |")


TALKER = """
import sys
from paceline.run.console import make_console
c = make_console(False)
for i in range(5000):
    c.iteration({'iteration': i}, None, None)
c.finish(['end'])
c.close()
sys.stderr.write('reached the end')
"""


@pytest.mark.needs("mpirun")
def test_lines_under_mpirun(tmp_path: Path) -> None:
    """Open MPI gives its processes a pseudo-terminal, wherever its own output goes."""
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "1", sys.executable, "-c", TALKER]
    with (tmp_path / "out").open("w") as out:
        subprocess.run(argv, stdout=out, stderr=out, env={**os.environ, "TERM": "xterm"}, check=True, timeout=60)
    text = (tmp_path / "out").read_text()
    assert text.count("Iteration ") == 5000 and "\x1b" not in text and "\r" not in text


@pytest.mark.parametrize("full_disk", [False, True])
def test_output_that_fails_does_not_end_the_run(full_disk: bool) -> None:
    """`| head`, or a redirection to a full disk. Unbuffered output would hide the complaint of Python at exit."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        talker = subprocess.Popen(
            [sys.executable, "-c", TALKER],
            stdout=full if full_disk else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    if talker.stdout:
        assert talker.stdout.readline().startswith("Iteration 0 ")
        talker.stdout.close()
    assert talker.stderr is not None
    assert talker.stderr.read() == "reached the end"
    talker.stderr.close()
    assert talker.wait(20) == 0


LIVE = """
import sys, time
from paceline.run.console import LiveConsole, make_console
c = make_console(False, total_steps=1000)
assert type(c) is LiveConsole
c.start(["Run directory: runs/" + "x" * 100])
for i in range(100):
    c.iteration({"iteration": i, "env_steps": 10 * i, "return_mean": float(i), "return_std": 1.0,
                 "time_env_seconds": 1.0, "time_learn_seconds": 3.0, "policy_loss": 0.5}, i / 99, 99.0 - i)
    if i == 50:
        c.note("a note in between")
        print("an environment prints")
    time.sleep(0.005)
HOW
"""


def on_a_terminal(ending: str, *, kill: bool = False) -> tuple[str, int]:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-c", LIVE.replace("HOW", ending)], stdout=slave, stderr=slave, stdin=slave, env=environment
    )
    os.close(slave)
    output, deadline = b"", time.monotonic() + 20
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                output += os.read(master, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
        if kill and b"ready to die" in output:
            child.send_signal(signal.SIGKILL)
            kill = False
    os.close(master)
    child.wait(10)
    return output.decode(), child.returncode


def test_the_live_view() -> None:
    output, status = on_a_terminal('c.finish(["done", "Run directory: runs/x"]); c.close()')
    assert status == 0, output
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "")
    assert text.startswith("Run directory: runs/" + "x" * 100 + "\n")  # not broken at the width: it gets copied
    assert text.endswith("done\nRun directory: runs/x\n")
    final = text.rpartition("100% iteration")[2]
    assert "iteration" not in final and "99 | steps 990 / 1,000 | eta 0:00" in final
    assert "reward   99.00 ± 1.00  ▁" in final and "env 25% learn 75%" in final and "policy 0.5" in final
    assert "a note in between\n" in text and "an environment prints\n" in text
    assert 2 <= text.count("reward   ") <= 12  # half a second at five a second, and not a hundred


@pytest.mark.parametrize(
    ("ending", "kill"),
    [
        ('c.finish(["done"]); c.close()', False),
        ("c.close(); c.close()", False),
        ('raise RuntimeError("boom")', False),
        ('c.note("ready to die"); time.sleep(20)', True),
    ],
)
def test_the_terminal_is_left_as_it_was(ending: str, kill: bool) -> None:
    output, _ = on_a_terminal(ending, kill=kill)
    hidden, shown = output.rfind("\x1b[?25l"), output.rfind("\x1b[?25h")
    assert shown > hidden
    assert "\x1b[?1049h" not in output
    if "boom" in ending:
        assert "RuntimeError: boom" in output


def test_an_iteration_is_cheap() -> None:
    """CPU time, the best of five, with room for a slow machine."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for console in (LiveConsole(Terminal()), Console(io.StringIO())):
        if isinstance(console, LiveConsole):
            console._next = float("inf")
        costs = []
        for _ in range(5):
            start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            for _ in range(500):
                console.iteration(ROW, 0.5, 3.0)
            costs.append((resource.getrusage(resource.RUSAGE_SELF).ru_utime - start) / 500)
        assert min(costs) < 100e-6


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    assert type(make_console(False, Terminal())) is Console
    monkeypatch.setenv("TERM", "xterm")
    assert type(make_console(False, Terminal())) is LiveConsole
