from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from paceline import code_bundle
from paceline.code_bundle import CodeBundle, install, pack, pack_directory, relocate, uninstall, unpack
from paceline.config import RunConfig, UserError
from paceline.config.plugins import load_attribute
from paceline.config.resolve import to_tree

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
from paceline.envs.make import make_scalar
from paceline.code_bundle import install, relocate, uninstall
from paceline.config.resolve import validate
bundle, tree = pickle.loads(Path(sys.argv[1]).read_bytes())
install(bundle)
config = validate(relocate(tree, bundle))
env = make_scalar(config.env)
print(env.reset(seed=0)[0], config.env.id, flush=True)
sys.stdin.readline()
uninstall(bundle)
"""


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own temporary folder and its own imports."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for lock in code_bundle._held.values():
        os.close(lock)
    code_bundle._held.clear()
    for name in set(sys.modules) - modules:
        if not name.startswith("paceline."):  # classes of paceline must stay the same objects
            del sys.modules[name]


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file with a module beside it, one that it imports late, and data."""
    folder = tmp_path / "code"
    write(folder / "beside.py", "START = 40\n")
    write(folder / "later.py", "MORE = 1\n")
    write(folder / "data" / "offset.txt", "2")
    write(folder / "env.py", ENV)
    return folder


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process in an empty folder that unpacks, makes the env, prints, and uninstalls after a line of input."""
    running: list[subprocess.Popen[str]] = []

    def begin(bundle: CodeBundle, config: RunConfig) -> subprocess.Popen[str]:
        sent, empty = tmp_path / "sent", tmp_path / "empty"
        sent.write_bytes(pickle.dumps((bundle, to_tree(config))))
        empty.mkdir(exist_ok=True)
        pipe: Any = subprocess.PIPE
        argv = [sys.executable, "-c", WORKER, str(sent)]
        running.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=empty))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate(timeout=60)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline() or process.stderr.read()


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate("\n", timeout=60)
    return process.returncode


def config_of(env_id: str, wrappers: list[Any] | None = None, network: str | None = None) -> RunConfig:
    model = {"class": network} if network else {}
    return RunConfig.model_validate({"env": {"id": env_id, "wrappers": wrappers or []}, "model": model})


def tree_of(env_id: str, network: str | None = None) -> dict[str, Any]:
    return to_tree(config_of(env_id, network=network))


def contents(bundle: CodeBundle) -> list[list[str]]:
    return [sorted(files) for _, files in bundle.roots]


def unpacked(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").iterdir())


def test_a_file_reaches_a_machine_that_does_not_have_it(code: Path, tmp_path: Path, worker: Any) -> None:
    config = config_of(f"{code}/env.py:Env")
    bundle = pack(to_tree(config))
    assert contents(bundle) == [["beside.py", "data/offset.txt", "env.py", "later.py"]]
    code.rename(tmp_path / "elsewhere")
    process = worker(bundle, config)
    line = first_line(process)
    assert line.startswith("43 ") and f"{tmp_path}/tmp/" in line
    (home,) = unpacked(tmp_path)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert finish(process) == 0
    assert unpacked(tmp_path) == []


def test_a_package_travels_with_the_modules_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    project = tmp_path / "project"
    for name in ("beside.py", "later.py", "data/offset.txt"):
        write(project / "for_bundle" / name, {"beside.py": "from one_aside import START\n"}.get(name, "1"))
    source = ENV.replace("from beside", "from .beside").replace(
        "import later", "from for_bundle import later_on as later"
    )
    write(project / "for_bundle" / "env.py", source)
    write(project / "for_bundle" / "later_on.py", "MORE = 0\n")
    write(project / "for_bundle" / "__init__.py", "")
    write(project / "one_aside.py", "from two_aside.deep import START\n")
    write(project / "two_aside" / "__init__.py", "")
    write(project / "two_aside" / "deep.py", "import os, numpy\nSTART = 50\ndef never(): import not_there\n")
    write(project / "unrelated.py", "")
    monkeypatch.chdir(project)
    config = config_of("for_bundle.env:Env")
    bundle = pack(to_tree(config))
    ((root, files),) = bundle.roots
    assert root == str(project)
    assert {name.split("/")[0] for name in files} == {"for_bundle", "one_aside.py", "two_aside"}
    assert "for_bundle/data/offset.txt" in files
    monkeypatch.chdir(tmp_path)
    project.rename(tmp_path / "elsewhere")
    process = worker(bundle, config)
    assert first_line(process) == "51 for_bundle.env:Env\n"
    assert finish(process) == 0


def test_an_older_copy_in_the_working_folder_does_not_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "new" / "for_bundle_twice.py", "WHICH = 'new'\n")
    monkeypatch.chdir(tmp_path / "new")
    config = config_of("for_bundle_twice:Env")
    bundle = pack(to_tree(config))
    sys.path.remove(str(tmp_path / "new"))
    write(tmp_path / "new" / "for_bundle_twice.py", "WHICH = 'edited since'\n")
    write(tmp_path / "old" / "for_bundle_twice.py", "WHICH = 'old'\n")
    monkeypatch.chdir(tmp_path / "old")
    unpack(bundle, config)
    assert load_attribute("for_bundle_twice:WHICH", "env.id") == "new"


def test_files_that_are_already_there_are_used_in_place(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code.parent)
    config = config_of("code/env.py:Env", ["code/env.py:Wrapper"])
    bundle = pack(to_tree(config))
    monkeypatch.chdir("/")
    here = unpack(bundle, config)
    assert here.env.id == f"{code}/env.py:Env" and here.env.wrappers == [f"{code}/env.py:Wrapper"]
    assert str(code) in sys.path
    assert unpacked(tmp_path) == []
    write(code / "beside.py", "START = 41\n")  # differs from the bundle now
    there = unpack(bundle, config)
    assert not there.env.id.startswith(str(code))
    assert (Path(there.env.id).parent / "beside.py").read_text() == "START = 40\n"


def test_references_are_rewritten_and_nothing_else(code: Path, tmp_path: Path) -> None:
    write(code / "deeper" / "net.py", "class Net: ...\n")
    wrappers: list[Any] = ["TimeAwareObservation", {f"{code}/env.py:Wrapper": {"times": 3}}, "math:sin"]
    config = config_of(f"{code}/env.py:Env", wrappers, f"{code}/deeper/net.py:Net")
    bundle = pack(to_tree(config))
    assert len(bundle.roots) == 1  # one folder holds the other
    code.rename(tmp_path / "elsewhere")
    new = unpack(bundle, config)
    folder = Path(new.env.id).parent
    assert new.env.wrappers == ["TimeAwareObservation", {f"{folder}/env.py:Wrapper": {"times": 3}}, "math:sin"]
    assert new.model.class_ == f"{folder}/deeper/net.py:Net" and Path(folder, "deeper/net.py").is_file()
    undo = {"env": config.env, "model": config.model}
    assert new.model_copy(update=undo) == config
    assert RunConfig.model_validate(new.model_dump(by_alias=True)) == new


def test_a_file_is_found_in_any_setting_and_a_module_where_one_is_expected(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings need not be valid: a user's algorithm, which validates them, is in the bundle."""
    monkeypatch.chdir(code)
    write(code.parent / "other" / "own.py", "class Own: ...\n")
    own, kwargs = "../other/own.py:Own", {"level": "beside:START", "net": "env.py:Env", "text": "not_there.py:Env"}
    settings = {"algo": own, "env": "CartPole-v1", "unknown": [{"deep": kwargs}]}
    bundle = pack(settings)
    assert [root for root, _ in bundle.roots] == [str(code), str(tmp_path / "other")]
    for folder in (code, tmp_path / "other"):
        folder.rename(folder.with_name(f"{folder.name}-away"))
    monkeypatch.chdir("/")
    install(bundle)
    new = relocate(settings, bundle)
    (home,) = unpacked(tmp_path)
    assert new["algo"] == f"{home}/1/own.py:Own" and new["env"] == "CartPole-v1"
    assert new["unknown"] == [{"deep": {**kwargs, "net": f"{home}/0/env.py:Env"}}]
    assert Path(new["algo"].rpartition(":")[0]).read_text() == "class Own: ...\n"
    assert load_attribute(own, "algo").__name__ == "Own"  # also by the reference of the other machine
    uninstall(bundle)
    with pytest.raises(UserError, match="no such file"):
        load_attribute(own, "algo")
    with pytest.raises(UserError, match=r"algo=no\.py:Own: there is no such file"):
        pack({"algo": "no.py:Own"})


def test_two_folders_are_two_roots(code: Path, tmp_path: Path) -> None:
    net = write(tmp_path / "nets" / "net.py", "class Net: ...\n")
    config = config_of(f"{code}/env.py:Env", network=f"{net}:Net")
    bundle = pack(to_tree(config))
    assert [root for root, _ in bundle.roots] == [str(code), str(net.parent)]
    for folder in (code, net.parent):
        folder.rename(folder.with_name(f"{folder.name}-away"))
    new = unpack(bundle, config)
    assert Path(new.env.id.rpartition(":")[0]).is_file()
    assert Path(str(new.model.class_).rpartition(":")[0]).read_text() == "class Net: ...\n"


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "gymnasium.envs:CartPole-v1", "json:Env", "paceline.envs.probe:Faulty"]
)
def test_installed_code_is_not_packed(env_id: str) -> None:
    config = config_of(env_id, ["TimeAwareObservation"])
    bundle = pack(to_tree(config))
    assert bundle.roots == ()
    assert unpack(bundle, config) == config
    uninstall(bundle)


@pytest.mark.parametrize("module", ["not_there_at_all", ".relative", "", "__main__"])
def test_modules_that_cannot_be_found_are_reported_when_they_are_imported(module: str) -> None:
    assert pack(tree_of(f"{module}:Env")).roots == ()


def test_an_editable_install_is_packed_and_an_installed_package_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    site = tmp_path / "lib" / "site-packages"
    write(site / "for_bundle_installed" / "__init__.py", "")
    monkeypatch.syspath_prepend(str(site))
    assert pack(tree_of("for_bundle_installed:Env")).roots == ()

    # An editable install may bring its own finder, which maps the package to a folder of another name.
    start = write(
        tmp_path / "checkout" / "src" / "__init__.py", ENV.replace("from beside import", "from .beside import")
    )
    write(start.parent / "beside.py", "START = 7\n")
    write(start.parent / "data" / "offset.txt", "0")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name != "for_bundle_editable":
                return None
            return spec_from_file_location(name, start, submodule_search_locations=[str(start.parent)])

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    write(tmp_path / "checkout" / "later.py", "MORE = 0\n")  # beside the package; the env imports it
    config = config_of("for_bundle_editable:Env")
    bundle = pack(to_tree(config))
    assert "for_bundle_editable/beside.py" in contents(bundle)[0] and "later.py" in contents(bundle)[0]
    process = worker(bundle, config)
    assert first_line(process) == "7 for_bundle_editable:Env\n"
    assert finish(process) == 0


def test_files_that_are_not_code_are_left_out(code: Path) -> None:
    before = pack(tree_of(f"{code}/env.py:Env"))
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
    after = pack(tree_of(f"{code}/env.py:Env"))
    assert contents(after) == contents(before) and after.digest == before.digest
    assert after.left_out == ()
    large = write(code / "large.bin", bytes(code_bundle.MAX_FILE_BYTES + 1))
    assert pack(tree_of(f"{code}/env.py:Env")).left_out == (str(large),)
    write(large, bytes(code_bundle.MAX_FILE_BYTES))
    assert "large.bin" in contents(pack(tree_of(f"{code}/env.py:Env")))[0]


def test_too_large_a_folder_is_refused_in_one_line(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_bundle, "MAX_FILES", 4)
    pack(tree_of(f"{code}/env.py:Env"))
    monkeypatch.setattr(code_bundle, "MAX_FILES", 3)
    with pytest.raises(UserError, match=r"^env\.id: .*/code holds more than 3 files, .* share, or install") as caught:
        pack(tree_of(f"{code}/env.py:Env"))
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    for number in range(11):
        write(code / f"{number}.bin", bytes(code_bundle.MAX_FILE_BYTES))
    with pytest.raises(UserError, match=r"code holds more than 50 MB") as caught:
        pack(tree_of(f"{code}/env.py:Env"))
    assert "\n" not in str(caught.value)


def test_a_missing_or_too_large_file_is_refused(code: Path) -> None:
    with pytest.raises(UserError, match=r"model\.class=.*/no\.py:Net: there is no such file"):
        pack(tree_of("CartPole-v1", network=f"{code}/no.py:Net"))
    write(code / "huge.py", b"#" * (code_bundle.MAX_FILE_BYTES + 1))
    with pytest.raises(UserError, match=r"env\.id=.*huge\.py:Env: .* larger than 5 MB"):
        pack(tree_of(f"{code}/huge.py:Env"))


def test_the_digest_depends_on_the_content_and_not_on_the_folder(code: Path, tmp_path: Path) -> None:
    first = pack(tree_of(f"{code}/env.py:Env"))
    code.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert pack(tree_of(f"{moved}/env.py:Env")).digest == first.digest
    (moved / "later.py").chmod(0o755)
    assert pack(tree_of(f"{moved}/env.py:Env")).digest != first.digest
    (moved / "later.py").chmod(0o644)
    write(moved / "data" / "offset.txt", "3")
    assert pack(tree_of(f"{moved}/env.py:Env")).digest != first.digest
    assert pickle.loads(pickle.dumps(first)) == first


def test_an_executable_file_stays_executable(code: Path, tmp_path: Path) -> None:
    write(code / "simulator", "#!/bin/sh\necho 5\n").chmod(0o755)
    config = config_of(f"{code}/env.py:Env")
    bundle = pack(to_tree(config))
    code.rename(tmp_path / "elsewhere")
    folder = Path(unpack(bundle, config).env.id).parent
    assert subprocess.run([folder / "simulator"], capture_output=True, timeout=30, check=True).stdout == b"5\n"
    assert stat.S_IMODE((folder / "env.py").stat().st_mode) == 0o600


def test_four_processes_share_a_folder_and_the_last_one_removes_it(code: Path, tmp_path: Path, worker: Any) -> None:
    for number in range(60):
        write(code / "more" / f"{number}.bin", os.urandom(20_000))
    config = config_of(f"{code}/env.py:Env")
    bundle = pack(to_tree(config))
    code.rename(tmp_path / "elsewhere")
    processes = [worker(bundle, config) for _ in range(4)]
    assert [first_line(process).split()[0] for process in processes] == ["43"] * 4
    (home,) = unpacked(tmp_path)
    assert not [path for path in home.rglob(".*") if path.is_file()]  # nothing half-written is left
    for left in (3, 2, 1, 0):
        assert home.exists(), f"removed under {left + 1} users"
        process = processes[left]
        if left == 2:
            process.kill()  # a killed process holds no lock
            process.communicate(timeout=60)
        else:
            assert finish(process) == 0
    assert unpacked(tmp_path) == []


def test_removed_or_damaged_files_are_written_again(code: Path, tmp_path: Path) -> None:
    config = config_of(f"{code}/env.py:Env")
    bundle = pack(to_tree(config))
    code.rename(tmp_path / "elsewhere")
    folder = Path(unpack(bundle, config).env.id).parent
    write(folder / "beside.py", "START =")
    (folder / "data" / "offset.txt").unlink()
    unpack(bundle, config)
    assert (folder / "beside.py").read_text() == "START = 40\n" and (folder / "data" / "offset.txt").read_text() == "2"
    (home,) = unpacked(tmp_path)
    home.rename(tmp_path / "swept")
    unpack(bundle, config)
    assert (folder / "env.py").is_file() and stat.S_IMODE(home.stat().st_mode) == 0o700
    uninstall(bundle)
    assert unpacked(tmp_path) == [] and not [entry for entry in sys.path if entry.startswith(str(home))]
    uninstall(bundle)


def test_a_folder_that_others_can_write_is_refused(code: Path, tmp_path: Path) -> None:
    config = config_of(f"{code}/env.py:Env")
    bundle = pack(to_tree(config))
    code.rename(tmp_path / "elsewhere")
    home = code_bundle._home(bundle)
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(UserError, match=r"is not private to you: remove it, or set TMPDIR"):
        unpack(bundle, config)
    home.rmdir()
    (tmp_path / "trap").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "trap", target_is_directory=True)
    with pytest.raises(UserError, match="is not private to you"):
        unpack(bundle, config)
    assert not list((tmp_path / "trap").iterdir())


def test_waiting_for_a_lock_has_a_limit(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    config = config_of(f"{code}/env.py:Env")
    bundle = pack(to_tree(config))
    code.rename(tmp_path / "elsewhere")
    home = code_bundle._home(bundle)
    home.mkdir(mode=0o700)
    monkeypatch.setattr(code_bundle, "LOCK_SECONDS", 0.1)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="has been locked"):
            unpack(bundle, config)
    unpack(bundle, config)


def test_the_digest_of_a_directory_depends_on_its_content(tmp_path: Path) -> None:
    write(tmp_path / "work" / "a.py", "a")
    first = pack_directory(tmp_path / "work", [], [], 1).digest
    assert pack_directory(tmp_path / "work", [], [], 1).digest == first
    (tmp_path / "work/a.py").write_text("edited")
    second = pack_directory(tmp_path / "work", [], [], 1)
    assert second.digest != first
    second.archive(tmp_path / "x.tar.gz")
    with tarfile.open(tmp_path / "x.tar.gz") as tar:
        assert tar.getnames() == ["a.py"]


def test_a_directory_travels_with_packages_from_elsewhere(tmp_path: Path) -> None:
    for name in ("work/a.py", "mine/__init__.py", "mine/env.py", "other/src/thing/__init__.py"):
        write(tmp_path / name, name)
    made = pack_directory(tmp_path / "work", [str(tmp_path / "mine"), str(tmp_path / "other")], [], 1)
    assert sorted(made.files) == [
        ".packages/mine/__init__.py",
        ".packages/mine/env.py",
        ".packages/other/src/thing/__init__.py",
        "a.py",
    ]
    assert made.packages == (".packages", ".packages/other/src")
    with pytest.raises(UserError, match=r"nothing: no such folder"):
        pack_directory(tmp_path / "work", [str(tmp_path / "nothing")], [], 1)


def test_too_large_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "huge.bin").write_bytes(b"x" * 1_500_000)
    with pytest.raises(UserError, match=r"2 MB would be sent .* 1 MB are allowed.*huge.bin"):
        pack_directory(tmp_path, [], [], 1)
