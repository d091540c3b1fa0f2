import contextlib
import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline import machine


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits below are told apart from the machine's own only where that has more cores than they allow."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A made-up `/` with `/proc/self/cgroup` and files below `/sys/fs/cgroup`."""
    for path, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_nothing_but_affinity_limits_an_empty_tree(tmp_path: Path) -> None:
    facts = machine.core_counts(tmp_path)
    assert (facts.reported, facts.affinity, facts.quota, facts.scheduler, facts.usable) == (32, 16, None, None, 16)
    assert machine.cgroup_memory_bytes(tmp_path) is None
    assert machine.memory_limit_bytes(tmp_path) == psutil.virtual_memory().total
    assert machine.governor(tmp_path) is None


def test_version_2_quota_is_rounded_up(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/job/step\n", {"job/step/cpu.max": "250000 100000\n"})
    assert machine.cpu_quota(root) == 2.5
    assert machine.cores(root) == 3


def test_a_parent_may_be_tighter_than_our_own_cgroup(tmp_path: Path) -> None:
    files = {"job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000", "cpu.max": "800000 100000"}
    assert machine.cores(tree(tmp_path, "0::/job/step", files)) == 4


def test_a_quota_below_one_core_still_leaves_one(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/", {"cpu.max": "10000 100000"})
    assert machine.core_counts(root).quota == pytest.approx(0.1)
    assert machine.cores(root) == 1


def test_version_1_quota(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "4:cpu,cpuacct:/slurm/job_7\n3:memory:/slurm/job_7\n0::/\n",
        {
            "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/slurm/cpu.cfs_quota_us": "600000\n",
            "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000\n",
            "memory/slurm/job_7/memory.limit_in_bytes": f"{64 << 20}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert machine.cores(root) == 6
    assert machine.memory_limit_bytes(root) == 64 << 20


def test_a_host_path_inside_a_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = {"cpu.max": "200000 100000", "memory.max": str(128 << 20)}
    root = tree(tmp_path, "0::/docker/0123abcd\n", files)
    assert machine.cores(root) == 2
    assert machine.memory_limit_bytes(root) == 128 << 20


def test_a_path_above_the_namespace_stays_inside_the_tree(tmp_path: Path) -> None:
    outside = tmp_path / "sys/fs/cpu.max"
    root = tree(tmp_path, "0::/../elsewhere\n", {"cpu.max": "300000 100000"})
    outside.write_text("100000 100000")
    assert machine.cores(root) == 3


def test_no_memory_limit_in_either_version(tmp_path: Path) -> None:
    files = {"memory.max": "max", "memory/memory.limit_in_bytes": "9223372036854771712"}
    root = tree(tmp_path, "1:memory:/\n0::/\n", files)
    assert machine.cgroup_memory_bytes(root) is None


def test_slurm_limits_when_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "12")
    assert machine.cores(tmp_path) == 12
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert machine.cores(tmp_path) == 4
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "400")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "not a number")
    assert machine.cores(tmp_path) == 16


def test_without_affinity_the_reported_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.core_counts(tmp_path).affinity == 32


def test_this_machine_has_cores_and_memory() -> None:
    assert machine.cores() >= 1
    assert 0 < machine.memory_limit_bytes() <= psutil.virtual_memory().total
    load = machine.load_average()
    assert load is None or (len(load) == 3 and all(value >= 0 for value in load))


def test_governor(tmp_path: Path) -> None:
    path = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    path.parent.mkdir(parents=True)
    path.write_text("powersave\n")
    assert machine.governor(tmp_path) == "powersave"


def test_proportional_set_size_is_read_and_summed(tmp_path: Path) -> None:
    for pid, kilobytes in ((7, 100), (8, 23)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        text = f"00400000-7ffc000 ---p 00000000 00:00 0 [rollup]\nRss:  900 kB\nPss:  {kilobytes} kB\nPss_Dirty: 5 kB\n"
        (tmp_path / f"proc/{pid}/smaps_rollup").write_text(text)
    assert machine.memory_bytes([7, 8], tmp_path) == 123 * 1024


def test_resident_size_where_there_is_no_proportional_one(tmp_path: Path) -> None:
    resident = psutil.Process().memory_info().rss
    assert machine.memory_bytes([os.getpid()], tmp_path) == pytest.approx(resident, rel=0.1)


def test_memory_grows_with_what_we_allocate() -> None:
    before = machine.memory_bytes()
    with mmap.mmap(-1, 32 << 20) as block:  # not from the heap, which may still hold what earlier tests gave back
        block.write(b"x" * (32 << 20))
        assert machine.memory_bytes() - before > 24 << 20


def test_a_process_that_has_gone_counts_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=20)
    assert machine.memory_bytes([child.pid]) == 0


def test_children_count_while_they_live_and_after() -> None:
    before_bytes, before_seconds = machine.memory_bytes(), machine.usage().cpu_seconds
    program = (
        "import time; b = bytearray(b'x') * (48 << 20)\n"
        "while time.process_time() < 0.3: pass\n"
        "print('ready', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline().strip() == b"ready"
        assert machine.memory_bytes() - before_bytes > 40 << 20
        living = machine.usage().cpu_seconds - before_seconds
        child.stdin.close()
        child.wait(timeout=20)
    assert living > 0.25
    assert machine.usage().cpu_seconds - before_seconds >= living - 0.02


def test_threads_that_wait_for_a_core_are_counted(tmp_path: Path) -> None:
    for thread, text in ((7, "5000 2500000000 3"), (8, "1 500000000 1"), (9, "")):
        (tmp_path / f"proc/7/task/{thread}").mkdir(parents=True)
        (tmp_path / f"proc/7/task/{thread}/schedstat").write_text(text)
    assert machine.waited_seconds(7, tmp_path) == 3.0
    assert machine.waited_seconds(8, tmp_path) == 0.0


def test_a_core_that_two_processes_want() -> None:
    """Both are bound to one core, so each waits half of the time; asleep, it does not wait."""
    program = (
        "import os, time; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); end = time.monotonic() + 1.0\n"
        "while time.monotonic() < end: pass\n"
        "print('ready', flush=True); input()"
    )
    with contextlib.ExitStack() as stack:
        start = [sys.executable, "-c", program]
        children = [
            stack.enter_context(subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        for child in children:
            assert child.stdout is not None and child.stdout.readline().strip() == b"ready"
        waited = [machine.waited_seconds(child.pid) for child in children]
        time.sleep(0.3)
        assert [machine.waited_seconds(child.pid) for child in children] == pytest.approx(waited, abs=0.1)
        for child in children:
            child.communicate(b"\n", timeout=20)
    assert min(waited) > 0.2


def test_the_difference_of_two_readings() -> None:
    used = machine.Usage(100, 7.0, 2.0)
    assert used.since(machine.Usage(60, 3.0, 0.5)) == machine.Usage(100, 4.0, 1.5)
    assert used.since(machine.Usage(60, 3.0, 2.5)).waited_seconds == 0.0
    assert used.plus(machine.Usage(1, 1.0, 1.0)) == machine.Usage(101, 8.0, 3.0)


def test_cpu_seconds_measures_work_and_not_waiting() -> None:
    before = machine.usage().cpu_seconds
    time.sleep(0.1)
    assert machine.usage().cpu_seconds - before < 0.08
    end = time.process_time() + 0.1
    while time.process_time() < end:
        math.sqrt(2.0)
    assert machine.usage().cpu_seconds - before >= 0.08
