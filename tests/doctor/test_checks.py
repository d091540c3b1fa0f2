import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

from paceline import machine
from paceline.doctor import checks
from paceline.doctor.checks import Finding, findings
from paceline.doctor.diagnosis import run_doctor, symbols
from paceline.machine import CoreCounts

REPOSITORY = Path(__file__).parents[2]


def only(found: Iterable[Finding], subject: str) -> Finding:
    [finding] = [f for f in found if f.subject == subject]
    return finding


@pytest.fixture
def no_torch_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch takes seconds; the tests that aren't about it do without."""
    monkeypatch.setattr(checks, "TORCH_PROGRAM", "pass")


@pytest.fixture
def small_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is surely there, so that the exit status is up to the test."""
    monkeypatch.setattr(checks, "NEEDED", {"numpy": "1.0", "psutil": "1.0"})


def installed(folder: Path, name: str, version: str, more: str = "") -> None:
    """Make `folder` look like one that pip installed a distribution into."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")


def test_every_subject_is_there_and_every_trouble_has_a_fix(tmp_path: Path, no_torch_check: None) -> None:
    found = findings(str(tmp_path))
    subjects = {finding.subject for finding in found}
    assert {"python", "torch", "psutil", "ray", "environments", "cores", "memory", "output folder"} <= subjects
    assert all(finding.text for finding in found)
    assert all(finding.fix for finding in found if finding.level in ("warn", "fail"))
    assert list(tmp_path.iterdir()) == []  # looking changes nothing


def test_exit_status_0_and_readable_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_torch_check: None, small_needs: None
) -> None:
    assert run_doctor(str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert re.search(r"^✓ numpy +" + re.escape(metadata.version("numpy")), text, re.M)
    assert text.splitlines()[-1].endswith("0 failures")
    columns = {re.match(r"[✓!] \S.*?  +", line).end() for line in text.splitlines() if line[:1] in "✓!" and line}  # type: ignore[union-attr]
    assert len(columns) == 1  # the texts are aligned


def test_a_file_in_the_way_of_the_output_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_torch_check: None, small_needs: None
) -> None:
    taken = tmp_path / "runs"
    taken.write_text("")
    for out in (taken, taken / "below"):
        assert run_doctor(str(out)) == 1
        lines = capsys.readouterr().out.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("✗ output folder"))
        assert any("fix: " in line and "--out" in line for line in lines[at + 1 :])
        assert lines[-1].endswith("1 failure")


def test_a_folder_that_refuses_files_fails(tmp_path: Path) -> None:
    refused = Path("/proc") if sys.platform == "linux" else tmp_path  # refuses even root
    if refused == tmp_path:
        tmp_path.chmod(0o500)
    assert checks.check_output(str(refused / "runs")).level == "fail"


def test_a_folder_yet_to_be_made_is_fine(tmp_path: Path) -> None:
    assert checks.check_output(str(tmp_path / "a" / "b")).level in ("ok", "warn")
    assert not (tmp_path / "a").exists()


def test_old_python() -> None:
    assert checks.check_python((3, 10, 4)).level == "fail"
    assert checks.check_python((3, 11, 0)).level == "ok"


def test_missing_and_old_packages_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"numpy": "1.0", "psutil": "999.0", "paceline-no-such-package": "1.0"}
    monkeypatch.setattr(checks, "NEEDED", needed)
    found = list(checks.check_packages())
    assert only(found, "numpy").level == "ok"
    assert only(found, "psutil").level == "fail" and "psutil>=999.0" in only(found, "psutil").fix
    assert only(found, "paceline-no-such-package").fix == "pip install paceline"


def test_versions_compare_as_numbers() -> None:
    assert checks.version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert checks.version_numbers("2.13.0+cpu") > checks.version_numbers("2.4")
    assert checks.version_numbers("15.0.0rc1") == (15, 0, 0)


@pytest.mark.skipif(not (REPOSITORY / "pyproject.toml").exists(), reason="the tests run outside of the repository")
def test_needs_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\d.]+))?", r) for r in project["dependencies"]]
    declared = {match[1].lower(): match[2] for match in requirements if match}
    for name, least in checks.NEEDED.items():
        assert name in declared
        assert declared[name] == least, f"{name}: pyproject.toml and checks.py differ"


@pytest.mark.skipif(not (REPOSITORY / "pyproject.toml").exists(), reason="the tests run outside of the repository")
def test_every_optional_package_is_listed() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = checks.EXTRAS | checks.MORE_OF_EXTRAS
    for extra, requirements in extras.items():
        if extra not in ("all", "dev"):
            names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]
            assert names <= set(listed), extra
            assert any(extra == own for own, _ in checks.EXTRAS.values()), f"nothing tells that {extra} is installed"
    assert {extra for extra, _ in listed.values()} <= set(extras)


def test_torch_that_breaks_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = checks.check_torch()
    assert finding.level == "fail" and "libtorch_cpu.so" in finding.text


def test_torch_that_crashes_and_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert "SIGILL" in checks.check_torch().text
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    finding = checks.check_torch(seconds=0.5)
    assert finding.level == "fail" and "0.5 s" in finding.text


def test_absent_extras_are_no_failure_and_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "paceline", "0.0.1", "Provides-Extra: atari\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "EXTRAS", {"paceline-no-such-package": ("atari", "games"), "numpy": ("x", "sums")})
    monkeypatch.setattr(checks, "MORE_OF_EXTRAS", {})
    found = list(checks.check_extras())
    assert [f.level for f in found] == ["absent", "ok"]
    assert found[0].text == "not installed; for games: pip install 'paceline[atari]'"
    assert checks.pip_argument("mujoco", "mujoco") == "mujoco"  # not an extra of this paceline
    assert metadata.version("numpy") in found[1].text


def test_old_gym_warns_unless_envpool_brought_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where nothing is installed yet
    assert list(checks.check_old_gym()) == []
    installed(tmp_path, "gym", "0.26.2")
    importlib.invalidate_caches()
    [finding] = checks.check_old_gym()
    assert finding.level == "warn" and "0.26.2" in finding.text
    installed(tmp_path, "envpool", "1.0.1")
    importlib.invalidate_caches()
    assert list(checks.check_old_gym()) == []
    assert "procgen" in checks.check_families().text


def test_a_library_that_envpool_lacks_comes_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ENVPOOL_LIBRARIES", ("libc.so.6",))
    assert only(checks.check_extras(), "envpool").level == "ok"
    monkeypatch.setattr(machine, "ENVPOOL_LIBRARIES", ("libc.so.6", "libnowhere.so.1"))
    finding = only(checks.check_extras(), "envpool")
    assert finding.level == "warn" and "missing: libnowhere.so.1" in finding.text and "libgl1" in finding.fix


def test_cores_that_are_not_ours_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = checks.check_cores(CoreCounts(reported=64, physical=32, affinity=64, quota=3.5, scheduler=None, usable=4))
    assert finding.level == "warn"
    assert "4 of 64" in finding.text and "quota 3.5" in finding.text and "affinity" not in finding.text
    assert checks.check_cores(CoreCounts(8, 4, 8, None, None, 8)).level == "ok"
    assert "--bind-to" not in checks.check_cores(CoreCounts(8, 4, 1, None, None, 1)).fix
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "--bind-to none" in checks.check_cores(CoreCounts(8, 4, 1, None, None, 1)).fix


def test_memory() -> None:
    assert checks.check_memory(16 << 30, None).text == "16.0 GB"
    assert "cgroup" in checks.check_memory(8 << 30, 8 << 30).text
    assert checks.check_memory(512 << 20, 512 << 20).level == "warn"


def test_thread_variables_above_the_cores_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in checks.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert list(checks.check_threads(2)) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "64,2")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert [f.subject for f in checks.check_threads(2)] == ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]


def test_load_and_governor() -> None:
    assert only(checks.check_load(2, (5.0, 1.0, 1.0)), "load").level == "warn"
    assert only(checks.check_load(2, (1.0, 9.0, 9.0)), "load").level == "ok"
    assert list(checks.check_load(2, None)) == []
    assert only(checks.check_governor("powersave"), "cpu governor").level == "warn"
    assert only(checks.check_governor("performance"), "cpu governor").level == "ok"
    assert list(checks.check_governor(None)) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no ulimit there")
def test_few_open_files_warn() -> None:
    levels = "[f.level for f in checks.check_limits() if f.subject == 'open files']"
    program = f"from paceline.doctor import checks; print({levels})"
    source = str(Path(checks.__file__).parents[2])
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 256; exec "$0" -c "$1"', sys.executable, program],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == "['warn']", done.stderr


def test_preload_and_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/opt/site/libprofile.so")
    assert checks.check_preload().level == "warn"
    monkeypatch.delenv("LD_PRELOAD")
    assert checks.check_preload().level == "ok"
    monkeypatch.setenv("DISPLAY", ":0")
    assert "available" in checks.check_display().text
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    if sys.platform == "linux":
        assert "SDL_VIDEODRIVER" in checks.check_display().text
        assert checks.check_display().level == "absent"  # not a tick: nothing can be shown


def test_shared_memory(tmp_path: Path) -> None:
    assert "free of" in checks.check_shared_memory(tmp_path).text
    missing = checks.check_shared_memory(tmp_path / "shm")
    assert missing.level == ("warn" if sys.platform == "linux" else "ok")


def test_letters_where_the_terminal_has_no_tick() -> None:
    assert symbols("ascii") == {"ok": "+", "absent": "-", "warn": "!", "fail": "x"}
    assert symbols("utf-8")["fail"] == "✗"


def test_doctor_imports_no_heavy_library() -> None:
    loaded = "{'torch', 'ray', 'rich'} & set(sys.modules)"
    program = f"import sys, paceline.doctor.checks as checks; checks.check_families(); print({loaded})"
    environ = {**os.environ, "PYTHONPATH": str(Path(checks.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "set()", done.stderr
