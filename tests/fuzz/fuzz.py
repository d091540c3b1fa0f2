"""Run invocations of `grammar.py` and judge how they end.

    python tests/fuzz/fuzz.py 300          # the first 300; prints a line for each that ends badly
    python tests/fuzz/fuzz.py --only 17    # one, with all it printed

One warm process imports everything and forks a child for each invocation, with limits on its time and memory.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import re
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # a process with threads cannot be forked safely

from grammar import FILES, RUNS, Invocation, invocation  # noqa: E402

CPU_SECONDS, WALL_SECONDS = 20, 60.0  # the latter is long, as other processes may keep this one waiting
MEMORY_BYTES, FILE_BYTES = 4_000_000_000, 100_000_000
ENDINGS = (0, 1, 2, 99, 130, 143)
ZOO = Path(__file__).with_name("zoo.py")
_FRAME = re.compile(r'^  File "(.+)", line \d+, in ', re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    code: int
    """As a shell reports it: 128 + N after signal N."""
    out: str
    err: str
    left: list[str]
    """Files that were added, changed or removed."""
    seconds: float


class World:
    """The files that invocations name, and runs for them to use."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.runs = folder, folder / "world", folder / "runs"
        self.files.mkdir()
        for name, content in FILES.items():
            (self.files / name).write_bytes(content)
        self._make_runs()

    def _make_runs(self) -> None:
        for name, algo, env, *settings in (
            ("cartpole", "ppo", "CartPole-v1"),
            ("pendulum", "a2c", "Pendulum-v1"),
            ("dqn", "dqn", "CartPole-v1"),
            ("memory", "impala", "CartPole-v1", "model.memory=lstm"),
            ("masks", "ppo", "{zoo}:MasksInInfo"),
            ("team", "a2c", "{zoo}:Team"),
            ("policies", "ppo", "{zoo}:Team", "multi_agent.policies=each"),
        ):
            words = ["train", "--algo", algo, "--env", env, "--iterations", "1", "--preset", "none"]
            words += [word for setting in settings for word in ("--set", setting)]
            words += ["--out", str(self.runs), "--name", name]
            ending = self.run(Invocation(tuple(words)))
            assert ending.code == 0, ending
        for name in ("damaged", "no_checkpoint", "no_rows", "odd_config", "deep_config"):
            shutil.copytree(self.runs / "cartpole", self.runs / name, symlinks=True)
        (self.runs / "damaged" / "metrics.jsonl").write_bytes(b"\xff\n{}\n[1]\n")
        (self.runs / "damaged" / "checkpoints" / "last" / "state.json").write_bytes(b"{")
        (self.runs / "damaged" / "status.json").write_bytes(b"[]")
        shutil.rmtree(self.runs / "no_checkpoint" / "checkpoints")
        (self.runs / "no_rows" / "metrics.jsonl").unlink()
        (self.runs / "no_rows" / "summary.json").write_bytes(b"{}")
        (self.runs / "odd_config" / "config.yaml").write_bytes(FILES["bomb_in_kwargs.yaml"])
        (self.runs / "deep_config" / "config.yaml").write_bytes(FILES["deeper.yaml"])
        assert {path.name for path in self.runs.iterdir()} == set(RUNS)

    def run(self, given: Invocation) -> Ending:
        """Run it in a child process, in a folder of its own."""
        with new_folder(self.folder) as base:
            began = time.monotonic()
            (base / "here").mkdir()
            words = list(given.words)
            for name, folder in (("{world}", self.files), ("{runs}", self.runs)):
                if any(name in word for word in words):
                    shutil.copytree(folder, base / folder.name, symlinks=True)
                    words = [word.replace(name, str(base / folder.name)) for word in words]
            words = [word.replace("{zoo}", str(ZOO)) for word in words]
            before = listing(base)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _child(words, base)
            code = _wait(pid, given)
            left = changes(before, {k: v for k, v in listing(base).items() if k not in ("out", "err")})
            out, err = ((base / each).read_bytes().decode(errors="replace") for each in ("out", "err"))
            return Ending(code, out, err, left, time.monotonic() - began)


@contextlib.contextmanager
def new_folder(inside: Path | None) -> Iterator[Path]:
    """Not `tempfile.TemporaryDirectory`: a child would remove it at its exit."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=inside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        is_plain = path.is_file() and path.name != ".lock"  # which names the process that had it last
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns) if is_plain else (0, 0)
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _child(words: list[str], base: Path) -> None:
    """`paceline WORDS`, then the end of this process."""
    code: Any = 70
    try:
        os.setsid()
        os.chdir(base / "here")
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(base / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(HOME=str(base / "here"), TMPDIR=str(base / "here"), MPLCONFIGDIR=str(base.parent))
        tempfile.tempdir = None
        for kind, limit in (
            (resource.RLIMIT_CPU, CPU_SECONDS),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_AS, _virtual_bytes() + MEMORY_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (limit, limit))
        sys.argv = ["paceline", *words]
        from paceline.commands.main import main

        main(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(int(code or 0))


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _wait(pid: int, given: Invocation) -> int:
    """The exit code; what the child has started ends with it."""
    handle = os.pidfd_open(pid)
    try:
        if given.signal and not select.select([handle], [], [], given.after_seconds)[0]:
            os.kill(pid, given.signal)
        if not select.select([handle], [], [], WALL_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def problem(ending: Ending) -> str | None:
    """What is wrong with how a command ended."""
    lines = [line for line in ending.err.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if ending.code in (128 + signal.SIGKILL, 128 + signal.SIGXCPU):
        return "it hangs"
    if ending.code not in ENDINGS:
        return f"exit code {ending.code}: {last}"
    frames = _FRAME.findall(ending.err)
    if "Traceback" in ending.err and not (ending.code == 1 and frames and frames[-1] == str(ZOO)):
        return f"a traceback: {last}"  # that of an exception in the user's own file is theirs to see
    if "Exception ignored" in ending.err:
        return f"an exception is ignored: {last}"
    if ending.code == 1 and not (lines or ending.out.strip()):
        return "it fails without a word"
    if ending.code == 2:
        if ending.left:
            return f"files left by a refused command: {', '.join(ending.left[:3])}"
        others = [line for line in lines[:-1] if not line.startswith("paceline: warning: the env's close() failed")]
        if others or not last.startswith("paceline: "):
            return f"{len(lines)} lines instead of one: {last}"
        if len(last) > 2000 or not last.isprintable():
            return f"a line of {len(last)} characters that a terminal cannot show: {last[:200]!r}"
    return None


def run_all(numbers: Iterator[int] | range, world: World) -> int:
    """Print a line for each invocation that ends badly, and how many there were of each kind."""
    bad, codes, slowest = 0, dict.fromkeys(ENDINGS, 0), (0.0, 0)
    for number in numbers:
        given = invocation(number)
        ending = world.run(given)
        codes[ending.code] = codes.get(ending.code, 0) + 1
        slowest = max(slowest, (ending.seconds, number))
        if (wrong := problem(ending)) is not None:
            bad += 1
            print(f"--only {number}: {wrong[:300]!r}: paceline {shown(given)}", flush=True)
    print(
        f"{bad} of {sum(codes.values())} ended badly; by exit code: {codes}; the slowest, {slowest[1]}, took "
        f"{slowest[0]:.1f} s"
    )
    return bad


def shown(given: Invocation) -> str:
    text = shlex.join(given.words)
    return ascii(text if len(text) < 500 else f"{text[:500]}…")


def warm_up() -> None:
    """Import what the verbs do, so that each child need not."""
    import paceline.api
    import paceline.bench.scaling
    import paceline.bench.suite
    import paceline.doctor.diagnosis
    import paceline.engines.local
    import paceline.envs.check
    import paceline.evaluate
    import paceline.export
    import paceline.jobs.status
    import paceline.launch.launcher
    import paceline.report.compare
    import paceline.report.page
    import paceline.report.plots
    import paceline.ssh_cluster.manage
    import paceline.tune.tune_command  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    chosen = parser.parse_args()
    sys.dont_write_bytecode = True
    for name in [
        name for name in os.environ if name.startswith(("XDG_", "SLURM_", "PBS_", "OAR_", "RAY_", "PACELINE_"))
    ]:
        del os.environ[name]
    warm_up()
    with new_folder(None) as folder:
        world = World(folder)
        if chosen.only is None:
            sys.exit(1 if run_all(range(chosen.first, chosen.first + chosen.count), world) else 0)
        given = invocation(chosen.only)
        ending = world.run(given)
        print(
            f"paceline {shown(given)}\n{ending.out}\n{ending.err}\nexit code {ending.code} after {ending.seconds:.1f} s"
        )
        print(f"changed: {', '.join(ending.left) or 'nothing'}\nproblem: {problem(ending) or 'none'}")


if __name__ == "__main__":
    main()
