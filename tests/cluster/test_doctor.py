"""`paceline doctor` over two hosts by ssh, one of them spoiled as sites and users spoil them; and in an allocation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from sshd import start_sshd

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PACELINE = str(Path(sys.executable).with_name("paceline"))
AHEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += 90;
    return code;
}
"""
SPOILED = """
echo 'Welcome to node1. Have you read the terms of use?'
export LD_PRELOAD={library} http_proxy=http://192.0.2.1:1 TMPDIR={long} PYTHONPATH={old}
ulimit -Sn 256
"""


def spoil(hosts: Hosts, host: int, folder: Path) -> None:
    """Its shell prints a greeting and sets what gets in the way; its clock is fast; Ray is another one."""
    (folder / "ahead.c").write_text(AHEAD)
    library = folder / "libahead.so"
    build = ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "ahead.c"), "-ldl"]
    subprocess.run(build, check=True, timeout=30)
    info = folder / "old/ray-2.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.1.0\n")
    (folder / ("long" * 10)).mkdir()
    words = {"library": library, "long": folder / ("long" * 10), "old": folder / "old"}
    (folder / "bashrc").write_text(SPOILED.format(**words))
    shell = Path("~/.bashrc").expanduser()
    hosts.run(host, ["mount", "--bind", str(folder / "bashrc"), str(shell)]).check_returncode()


@pytest.mark.skipif(not Path("~/.bashrc").expanduser().exists(), reason="the shell of root reads no ~/.bashrc")
def test_a_spoiled_host_is_found_out(hosts: Hosts, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh") | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    spoil(hosts, 1, tmp_path)
    left = hosts.start(1, ["sh", "-c", "sleep 60; :", "/tmp/pl-abcd1234/raylet"])
    (tmp_path / "hosts").write_text("node0\nnode1 cpus=64\nnowhere\n")
    argv = [PACELINE, "doctor", "--hosts", str(tmp_path / "hosts"), "--out", str(tmp_path)]
    done = hosts.run(0, argv, env=env, cwd=str(tmp_path), seconds=60)
    out = done.stdout
    assert done.returncode == 1, out + done.stderr
    assert re.search(rf"^node0 +{hosts.ips[0]} +eth0 .* ok$", out, re.M), out
    assert re.search(rf"^node1 +{hosts.ips[1]} +eth0 .* 2\.1\.0 .* fails$", out, re.M), out
    assert re.search(r"^nowhere .* no answer$", out, re.M), out
    for level, subject, text in (
        ("✗", "answers", "nowhere: .*resolve"),
        ("✗", "ray", r"node1: 2\.1\.0, but node0 has"),
        ("!", "LD_PRELOAD", r"node1: .*libahead\.so"),
        ("!", "proxies", "node1: http_proxy"),
        ("!", "temporary files", r"node1: TMPDIR=.* characters"),
        ("!", "open files", "node1: at most 256"),
        ("!", "clock", "node1: (89|90).* s ahead of node0"),
        ("!", "cores", "node1: 64 are allocated"),
        ("!", "leftovers", "node1: processes of a dead paceline job"),
        ("✓", "network", "node1: it and node0 reach each other"),
        ("✓", "torch", ""),
    ):
        assert re.search(rf"^{level} {subject} +{text}", re.sub(r"\n {15,}", " ", out), re.M), f"{subject}\n{out}"
    hosts.run(1, ["pkill", "sleep"])
    left.wait(timeout=10)


def test_inside_a_job_of_pbs(hosts: Hosts, tmp_path: Path) -> None:
    """What pbs_tmrsh starts prints into the job's output and has no input, as was seen of a real one."""
    env = start_sshd(hosts, tmp_path / "ssh") | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    tool = tmp_path / "ssh/pbs_tmrsh"
    tool.write_text(f'#!/bin/sh\nhost=$1; shift 3; exec ssh -n "$host" "$1" >>{tmp_path}/job.out 2>&1\n')
    tool.chmod(0o755)
    (tmp_path / "nodes").write_text("node0\nnode1\n")
    env |= {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(tmp_path / "nodes"), "PACELINE_RENDEZVOUS": f"{tmp_path}/meet"}
    done = hosts.run(0, [PACELINE, "doctor", "--out", str(tmp_path)], env=env, cwd=str(tmp_path), seconds=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^✓ network +node1: it and node0 reach each other$", done.stdout, re.M), done.stdout
    assert re.search(rf"^node1 +{hosts.ips[1]} +eth0 .* ok$", done.stdout, re.M), done.stdout
    assert (tmp_path / "job.out").read_text() == "" and list((tmp_path / "meet").iterdir()) == []


def test_inside_an_allocation_all_its_hosts_are_looked_at(hosts: Hosts, tmp_path: Path) -> None:
    """OAR's here; its oarsh is a stand-in that is ssh, as the real one."""
    env = start_sshd(hosts, tmp_path / "ssh") | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    (tmp_path / "ssh/oarsh").write_text('#!/bin/sh\nexec ssh "$@"\n')
    (tmp_path / "ssh/oarsh").chmod(0o755)
    (tmp_path / "nodes").write_text("node0\nnode1\n")
    env |= {"OAR_JOB_ID": "7", "OAR_NODEFILE": str(tmp_path / "nodes")}
    argv = [PACELINE, "doctor", "--interface", "eth0", "--out", str(tmp_path)]
    done = hosts.run(0, argv, env=env, cwd=str(tmp_path), seconds=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^✓ network +node1: it and node0 reach each other$", done.stdout, re.M), done.stdout
    assert re.search(r"^✓ clock +node1: ", done.stdout, re.M) and "no answer" not in done.stdout
