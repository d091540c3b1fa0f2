"""The command as a user runs it: in this process (`cli`) or in one of its own (`command`), and what a run left."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main

COMMAND = Path(sys.executable).with_name("paceline")
SECONDS = 60.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background begins with it ignored
ONE_BY_ONE = {"test_ray", "test_rllib", "test_sweep", "test_docs", "test_collective", "test_launch", "test_supervisor",
              "test_node", "test_examples"}  # fmt: skip
"""Files whose tests start Ray, or look for what is left on the machine: not at the same time."""
LOOP_VOLATILE = {"time", "cpu_seconds", "peak_memory_bytes", "resumes"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 2 --dist loadfile`: a file goes to one process, and all of `ONE_BY_ONE` to the same."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return "machine" if path.stem in ONE_BY_ONE and "cluster" not in path.parts else str(path)

    return ByFile(config, log)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # users' files put their folders on it
    return tmp_path


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`paceline ARGUMENTS` in this process: exit code, standard output and error, warnings in the latter."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        with warnings.catch_warnings(record=True) as caught, pytest.raises(SystemExit) as ended:
            warnings.simplefilter("default")
            for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
                warnings.simplefilter("ignore", hidden)  # as Python does
            main([str(word) for word in arguments])
        out, err = capfd.readouterr()
        said = "".join(f"{warning.category.__name__}: {warning.message}\n" for warning in caught)
        return Result(int(ended.value.code or 0), out, err + said)

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`paceline ARGUMENTS` in a process of its own, ended with the test at the latest."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        words = [str(COMMAND), *(str(word) for word in arguments)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        processes.append(subprocess.Popen(words, **options))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=SECONDS)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def command(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Result]:
    """The same, waited for."""

    def run(*arguments: object, **options: Any) -> Result:
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=SECONDS)
        return Result(process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def stable_rows() -> Callable[[Path], list[dict[str, Any]]]:
    """The rows of `metrics.jsonl` without what differs between two equal runs."""
    from paceline.run.directory import RunDirectory
    from paceline.run.metrics import METRICS

    def read(run: Path) -> list[dict[str, Any]]:
        rows = RunDirectory(run).read_metrics()
        return [{k: v for k, v in row.items() if k not in METRICS or not METRICS[k].volatile} for row in rows]

    return read


@pytest.fixture(scope="session")
def content() -> Callable[..., dict[str, Any]]:
    """All that a checkpoint holds, arrays as (dtype, shape, bytes), without the times."""
    from paceline.run import checkpoint

    def read(run: Path, which: str = "last") -> dict[str, Any]:
        arrays, tree = checkpoint.load(checkpoint.find(run, which))
        held: dict[str, Any] = {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}
        held["engine"] = tree["engine"]
        held["loop"] = {key: value for key, value in tree["loop"].items() if key not in LOOP_VOLATILE}
        return held

    return read
