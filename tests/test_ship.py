from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from paceline import ship
from paceline.config import RunConfig, UserError
from paceline.ship import Parcel, clean, pack, unpack

ENV = """
from pathlib import Path
import gymnasium
from beside import START
class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(100)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        import later
        return START + int((Path(__file__).parent / "data" / "offset.txt").read_text()) + later.MORE, {}
    def step(self, action):
        return 0, 0.0, True, False, {}
class Wrapper(gymnasium.Wrapper):
    def __init__(self, env, times=1):
        super().__init__(env)
        self.times = times
"""
WORKER = """
import pickle, sys
from pathlib import Path
from paceline.env.make import make_scalar
from paceline.ship import clean, unpack
parcel, config = pickle.loads(Path(sys.argv[1]).read_bytes())
config = unpack(parcel, config)
env = make_scalar(config.env)
print(env.reset(seed=0)[0], config.env.id, flush=True)
sys.stdin.readline()
clean(parcel)
"""


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary folders and imports of the test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for lock in ship._held.values():
        os.close(lock)
    ship._held.clear()
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file with a neighbour, a module that it imports late, and data."""
    folder = tmp_path / "code"
    write(folder / "beside.py", "START = 40\n")
    write(folder / "later.py", "MORE = 1\n")
    write(folder / "data" / "offset.txt", "2")
    write(folder / "env.py", ENV)
    return folder


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process in an empty folder that unpacks, makes the env, prints, and cleans up once it is told to."""
    running: list[subprocess.Popen[str]] = []

    def begin(parcel: Parcel, config: RunConfig) -> subprocess.Popen[str]:
        sent, empty = tmp_path / "sent", tmp_path / "empty"
        sent.write_bytes(pickle.dumps((parcel, config)))
        empty.mkdir(exist_ok=True)
        pipe: Any = subprocess.PIPE
        argv = [sys.executable, "-c", WORKER, str(sent)]
        running.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=empty))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate(timeout=60)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline() or process.stderr.read()


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate("\n", timeout=60)
    return process.returncode


def of(env_id: str, wrappers: list[Any] | None = None, network: str | None = None) -> RunConfig:
    model = {"class": network} if network else {}
    return RunConfig.model_validate({"env": {"id": env_id, "wrappers": wrappers or []}, "model": model})


def contents(parcel: Parcel) -> list[list[str]]:
    return [sorted(files) for _, files in parcel.roots]


def unpacked(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").iterdir())


def test_a_file_reaches_a_machine_that_does_not_have_it(code: Path, tmp_path: Path, worker: Any) -> None:
    config = of(f"{code}/env.py:Env")
    parcel = pack(config)
    assert contents(parcel) == [["beside.py", "data/offset.txt", "env.py", "later.py"]]
    code.rename(tmp_path / "elsewhere")
    process = worker(parcel, config)
    line = said(process)
    assert line.startswith("43 ") and f"{tmp_path}/tmp/" in line
    (home,) = unpacked(tmp_path)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert finish(process) == 0
    assert unpacked(tmp_path) == []


def test_a_package_reaches_it_too_with_the_modules_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    project = tmp_path / "project"
    for name in ("beside.py", "later.py", "data/offset.txt"):
        write(project / "for_ship" / name, {"beside.py": "from one_aside import START\n"}.get(name, "1"))
    source = ENV.replace("from beside", "from .beside").replace(
        "import later", "from for_ship import later_on as later"
    )
    write(project / "for_ship" / "env.py", source)
    write(project / "for_ship" / "later_on.py", "MORE = 0\n")
    write(project / "for_ship" / "__init__.py", "")
    write(project / "one_aside.py", "from two_aside.deep import START\n")
    write(project / "two_aside" / "__init__.py", "")
    write(project / "two_aside" / "deep.py", "import os, numpy\nSTART = 50\ndef never(): import not_there\n")
    write(project / "unrelated.py", "")
    monkeypatch.chdir(project)
    config = of("for_ship.env:Env")
    parcel = pack(config)
    ((root, files),) = parcel.roots
    assert root == str(project)
    assert {name.split("/")[0] for name in files} == {"for_ship", "one_aside.py", "two_aside"}
    assert "for_ship/data/offset.txt" in files
    monkeypatch.chdir(tmp_path)
    project.rename(tmp_path / "elsewhere")
    process = worker(parcel, config)
    assert said(process) == "51 for_ship.env:Env\n"
    assert finish(process) == 0


def test_an_older_copy_in_the_working_folder_does_not_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "new" / "for_ship_twice.py", "WHICH = 'new'\n")
    monkeypatch.chdir(tmp_path / "new")
    config = of("for_ship_twice:Env")
    parcel = pack(config)
    sys.path.remove(str(tmp_path / "new"))
    write(tmp_path / "new" / "for_ship_twice.py", "WHICH = 'edited since'\n")
    write(tmp_path / "old" / "for_ship_twice.py", "WHICH = 'old'\n")
    monkeypatch.chdir(tmp_path / "old")
    unpack(parcel, config)
    from paceline.plugins import load_attribute

    assert load_attribute("for_ship_twice:WHICH", "env.id") == "new"


def test_what_is_in_place_is_used_in_place(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.parent)
    config = of("code/env.py:Env", ["code/env.py:Wrapper"])
    parcel = pack(config)
    monkeypatch.chdir("/")
    here = unpack(parcel, config)
    assert here.env.id == f"{code}/env.py:Env" and here.env.wrappers == [f"{code}/env.py:Wrapper"]
    assert str(code) in sys.path
    assert unpacked(tmp_path) == []
    write(code / "beside.py", "START = 41\n")  # no longer what was sent
    there = unpack(parcel, config)
    assert not there.env.id.startswith(str(code))
    assert (Path(there.env.id).parent / "beside.py").read_text() == "START = 40\n"


def test_all_names_are_rewritten_and_nothing_else(code: Path, tmp_path: Path) -> None:
    write(code / "deeper" / "net.py", "class Net: ...\n")
    wrappers: list[Any] = ["TimeAwareObservation", {f"{code}/env.py:Wrapper": {"times": 3}}, "math:sin"]
    config = of(f"{code}/env.py:Env", wrappers, f"{code}/deeper/net.py:Net")
    parcel = pack(config)
    assert len(parcel.roots) == 1  # the deeper folder is in the other
    code.rename(tmp_path / "elsewhere")
    new = unpack(parcel, config)
    folder = Path(new.env.id).parent
    assert new.env.wrappers == ["TimeAwareObservation", {f"{folder}/env.py:Wrapper": {"times": 3}}, "math:sin"]
    assert new.model.class_ == f"{folder}/deeper/net.py:Net" and Path(folder, "deeper/net.py").is_file()
    undo = {"env": config.env, "model": config.model}
    assert new.model_copy(update=undo) == config
    assert RunConfig.model_validate(new.model_dump(by_alias=True)) == new


def test_two_folders_are_two_roots(code: Path, tmp_path: Path) -> None:
    net = write(tmp_path / "nets" / "net.py", "class Net: ...\n")
    config = of(f"{code}/env.py:Env", network=f"{net}:Net")
    parcel = pack(config)
    assert [root for root, _ in parcel.roots] == [str(code), str(net.parent)]
    for folder in (code, net.parent):
        folder.rename(folder.with_name(f"{folder.name}-away"))
    new = unpack(parcel, config)
    assert Path(new.env.id.rpartition(":")[0]).is_file()
    assert Path(str(new.model.class_).rpartition(":")[0]).read_text() == "class Net: ...\n"


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "gymnasium.envs:CartPole-v1", "json:Env", "paceline.env.probe:Faulty"]
)
def test_what_every_machine_has_is_not_sent(env_id: str) -> None:
    config = of(env_id, ["TimeAwareObservation"])
    parcel = pack(config)
    assert parcel.roots == ()
    assert unpack(parcel, config) == config
    clean(parcel)


@pytest.mark.parametrize("module", ["not_there_at_all", ".relative", "", "__main__"])
def test_names_that_cannot_be_found_are_left_to_who_loads_them(module: str) -> None:
    assert pack(of(f"{module}:Env")).roots == ()


def test_an_editable_install_is_sent_and_an_installed_package_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    site = tmp_path / "lib" / "site-packages"
    write(site / "for_ship_installed" / "__init__.py", "")
    monkeypatch.syspath_prepend(str(site))
    assert pack(of("for_ship_installed:Env")).roots == ()

    # An editable install may map the package to a folder of another name, by a finder of its own.
    start = write(
        tmp_path / "checkout" / "src" / "__init__.py", ENV.replace("from beside import", "from .beside import")
    )
    write(start.parent / "beside.py", "START = 7\n")
    write(start.parent / "data" / "offset.txt", "0")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name != "for_ship_editable":
                return None
            return spec_from_file_location(name, start, submodule_search_locations=[str(start.parent)])

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    write(tmp_path / "checkout" / "later.py", "MORE = 0\n")  # beside the package, as it is imported
    config = of("for_ship_editable:Env")
    parcel = pack(config)
    assert "for_ship_editable/beside.py" in contents(parcel)[0] and "later.py" in contents(parcel)[0]
    process = worker(parcel, config)
    assert said(process) == "7 for_ship_editable:Env\n"
    assert finish(process) == 0


def test_what_is_not_code_stays_at_home(code: Path) -> None:
    before = pack(of(f"{code}/env.py:Env"))
    write(code / ".env", "PASSWORD=1")
    write(code / ".git" / "config", "")
    write(code / "__pycache__" / "env.cpython-311.pyc", b"")
    write(code / "old.pyc", b"")
    write(code / "venv" / "pyvenv.cfg", "")
    write(code / "venv" / "lib" / "thing.py", "")
    write(code / "runs" / "first" / "config.yaml", "")
    write(code / "runs" / "first" / "metrics.jsonl", "")
    write(code / "runs" / "first" / "checkpoints" / "last" / "weights", "")
    (code / "up").symlink_to(code.parent, target_is_directory=True)
    os.mkfifo(code / "pipe")
    after = pack(of(f"{code}/env.py:Env"))
    assert contents(after) == contents(before) and after.digest == before.digest
    assert after.left_out == ()
    large = write(code / "large.bin", bytes(ship.MAX_FILE_BYTES + 1))
    assert pack(of(f"{code}/env.py:Env")).left_out == (str(large),)
    write(large, bytes(ship.MAX_FILE_BYTES))
    assert "large.bin" in contents(pack(of(f"{code}/env.py:Env")))[0]


def test_too_much_is_refused_in_one_line(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "MAX_FILES", 4)
    pack(of(f"{code}/env.py:Env"))
    monkeypatch.setattr(ship, "MAX_FILES", 3)
    with pytest.raises(UserError, match=r"^env\.id: .*/code holds more than 3 files, .* share, or install") as caught:
        pack(of(f"{code}/env.py:Env"))
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    for number in range(11):
        write(code / f"{number}.bin", bytes(ship.MAX_FILE_BYTES))
    with pytest.raises(UserError, match=r"code holds more than 50 MB") as caught:
        pack(of(f"{code}/env.py:Env"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_too_large(code: Path) -> None:
    with pytest.raises(UserError, match=r"model\.class=.*/no\.py:Net: there is no such file"):
        pack(of("CartPole-v1", network=f"{code}/no.py:Net"))
    write(code / "huge.py", b"#" * (ship.MAX_FILE_BYTES + 1))
    with pytest.raises(UserError, match=r"env\.id=.*huge\.py:Env: .* larger than 5 MB"):
        pack(of(f"{code}/huge.py:Env"))


def test_the_digest_follows_the_content_and_not_the_place(code: Path, tmp_path: Path) -> None:
    first = pack(of(f"{code}/env.py:Env"))
    code.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert pack(of(f"{moved}/env.py:Env")).digest == first.digest
    (moved / "later.py").chmod(0o755)
    assert pack(of(f"{moved}/env.py:Env")).digest != first.digest
    (moved / "later.py").chmod(0o644)
    write(moved / "data" / "offset.txt", "3")
    assert pack(of(f"{moved}/env.py:Env")).digest != first.digest
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_program_stays_a_program(code: Path, tmp_path: Path) -> None:
    write(code / "simulator", "#!/bin/sh\necho 5\n").chmod(0o755)
    config = of(f"{code}/env.py:Env")
    parcel = pack(config)
    code.rename(tmp_path / "elsewhere")
    folder = Path(unpack(parcel, config).env.id).parent
    assert subprocess.run([folder / "simulator"], capture_output=True, timeout=30, check=True).stdout == b"5\n"
    assert stat.S_IMODE((folder / "env.py").stat().st_mode) == 0o600


def test_four_at_once_and_the_last_one_cleans(code: Path, tmp_path: Path, worker: Any) -> None:
    for number in range(60):
        write(code / "more" / f"{number}.bin", os.urandom(20_000))
    config = of(f"{code}/env.py:Env")
    parcel = pack(config)
    code.rename(tmp_path / "elsewhere")
    processes = [worker(parcel, config) for _ in range(4)]
    assert [said(process).split()[0] for process in processes] == ["43"] * 4
    (home,) = unpacked(tmp_path)
    assert not [path for path in home.rglob(".*") if path.is_file()]  # nothing half-written is left
    for left in (3, 2, 1, 0):
        assert home.exists(), f"removed under {left + 1} users"
        process = processes[left]
        if left == 2:
            process.kill()  # a killed one does not hold it
            process.communicate(timeout=60)
        else:
            assert finish(process) == 0
    assert unpacked(tmp_path) == []


def test_what_was_swept_or_damaged_is_written_again(code: Path, tmp_path: Path) -> None:
    config = of(f"{code}/env.py:Env")
    parcel = pack(config)
    code.rename(tmp_path / "elsewhere")
    folder = Path(unpack(parcel, config).env.id).parent
    write(folder / "beside.py", "START =")
    (folder / "data" / "offset.txt").unlink()
    unpack(parcel, config)
    assert (folder / "beside.py").read_text() == "START = 40\n" and (folder / "data" / "offset.txt").read_text() == "2"
    (home,) = unpacked(tmp_path)
    home.rename(tmp_path / "swept")
    unpack(parcel, config)
    assert (folder / "env.py").is_file() and stat.S_IMODE(home.stat().st_mode) == 0o700
    clean(parcel)
    assert unpacked(tmp_path) == [] and not [entry for entry in sys.path if entry.startswith(str(home))]
    clean(parcel)


def test_a_folder_of_somebody_else_is_refused(code: Path, tmp_path: Path) -> None:
    config = of(f"{code}/env.py:Env")
    parcel = pack(config)
    code.rename(tmp_path / "elsewhere")
    home = ship._home(parcel)
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(UserError, match=r"not a private folder of yours: remove it, or set TMPDIR"):
        unpack(parcel, config)
    home.rmdir()
    (tmp_path / "trap").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "trap", target_is_directory=True)
    with pytest.raises(UserError, match="not a private folder"):
        unpack(parcel, config)
    assert not list((tmp_path / "trap").iterdir())


def test_a_lock_that_stays_taken_is_not_waited_for_for_ever(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    config = of(f"{code}/env.py:Env")
    parcel = pack(config)
    code.rename(tmp_path / "elsewhere")
    home = ship._home(parcel)
    home.mkdir(mode=0o700)
    monkeypatch.setattr(ship, "LOCK_SECONDS", 0.1)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="has been locked"):
            unpack(parcel, config)
    unpack(parcel, config)
