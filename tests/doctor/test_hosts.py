"""What is made of the answers of several hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.doctor.checks import Finding
from paceline.doctor.diagnosis import host_table, merged, run_doctor
from paceline.doctor.hosts import AgentConnection, HostReport, NoAnswer, check_hosts, compare
from paceline.schedulers import SCHEDULERS
from paceline.schedulers.scheduler import Allocation, Host
from paceline.schedulers.ssh import remote_argv

VERSIONS = {"python": "3.11.7", "paceline": "1", "ray": "2", "torch": "2", "numpy": "2", "gymnasium": "1"}


def report(name: str, cpus: int = 0, **info: Any) -> HostReport:
    known = {"identity": name, "versions": VERSIONS, "cores": 4, "memory": 1 << 30, "addresses": {"10.0.0.1": "eth0"}}
    return HostReport(Host(name, cpus), [], info=known | info)


def levels(each: HostReport) -> dict[str, str]:
    return {finding.subject: finding.level for finding in each.findings}


def test_other_versions_clocks_and_machines_are_seen() -> None:
    head, other = report("a"), report("b", cpus=8, versions=VERSIONS | {"ray": "1"})
    head.skew, head.round_trip, other.skew, other.round_trip = 0.0, 0.001, -30.0, 0.2
    compare([head, other], None)
    assert levels(other) == dict.fromkeys(VERSIONS, "ok") | {"ray": "fail", "clock": "warn", "cores": "warn"}
    assert set(levels(head).values()) == {"ok"}
    clock = next(finding for finding in other.findings if finding.subject == "clock")
    assert "30.000 s behind a" in clock.text and "0.101 s" in clock.text
    slow = report("c")
    slow.skew, slow.round_trip = 3.0, 4.0  # so long that the clocks may be the same
    twin = report("d", identity="a", addresses={})
    compare([head, slow, twin], "ib0")
    assert levels(slow)["clock"] == "ok"
    texts = [finding.text for finding in twin.findings if finding.level == "fail"]
    assert texts == ["is the same machine as a", "has no interface ib0 with an address"]


def test_what_hosts_have_in_common_is_said_once() -> None:
    reports = [report(f"n{i}") for i in range(6)]
    for index, each in enumerate(reports):
        each.findings = [Finding("ok", "ray", "2.60"), Finding("ok", "load", f"{index}")]
        each.findings.append(
            Finding("warn", "LD_PRELOAD", "x.so", "unset") if index else Finding("ok", "LD_PRELOAD", "no")
        )
    assert merged(reports) == [
        ("", Finding("ok", "ray", "2.60")),
        ("n0, n1, n2, n3 and 2 more", Finding("ok", "load", "ok")),
        ("n0", Finding("ok", "LD_PRELOAD", "no")),
        ("n1, n2, n3, n4 and 1 more", Finding("warn", "LD_PRELOAD", "x.so", "unset")),
    ]
    assert merged(reports[:2])[1] == ("", Finding("ok", "load", "n0: 0; n1: 1"))


def test_lines_of_others_are_passed_over_and_silence_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = AgentConnection([sys.executable, "-c", "print('Welcome!'); print('paceline-doctor {\"a\": 1}'); input()"])
    assert agent.receive(10) == {"a": 1}
    with pytest.raises(NoAnswer, match=r"within 0\.1 s"):
        agent.receive(0.1)
    agent.close()
    agent = AgentConnection([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
    with pytest.raises(NoAnswer, match="no such thing"):
        agent.receive(10)
    agent.close()
    monkeypatch.setattr("paceline.doctor.hosts.ANSWER_SECONDS", 0.1)
    agent = AgentConnection([sys.executable, "-c", "import os, time; os.close(1); time.sleep(30)"])
    with pytest.raises(NoAnswer, match="closed its output"):
        agent.receive(10)
    agent.close()


def test_a_host_that_is_not_reached_fails_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ssh"
    tool.write_text("#!/bin/sh\necho 'me@away: Permission denied (publickey).' >&2; exit 255\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    [away] = check_hosts(Allocation("ssh", "", (Host("me@away.invalid"),)), remote_argv, "runs", None)
    assert [(each.level, each.subject) for each in away.findings] == [("fail", "answers")]
    assert away.findings[0].fix.startswith("ssh-copy-id me@away.invalid")
    assert "no answer" in host_table([away])


# A stand-in for an agent, which answers at once.
ABOUT = {
    "identity": "me", "versions": VERSIONS, "cores": 4, "memory": 1 << 30, "addresses": {"10.0.0.9": "eth0"},
    "findings": [], "port": 1, "greeting": "hi", "reached": {"address": "10.0.0.9", "own": "10.0.0.8"}, "time": 0,
}  # fmt: skip
LATER = {"time": 0, "reached": [{"address": "10.0.0.8", "own": "10.0.0.9"}]}
AGENT = f"""#!/bin/sh
echo Welcome
echo 'paceline-doctor {json.dumps(ABOUT)}'
while read -r line; do echo 'paceline-doctor {json.dumps(LATER)}'; done
"""


def test_a_transport_that_passes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As pbs_tmrsh: what a program prints on another host goes to the job's output, wherever that is."""
    for name, text in (
        ("python", AGENT),
        ("pbs_tmrsh", f'#!/bin/sh\nshift\nexec "$@" </dev/null >>{tmp_path}/job.out 2>&1\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PACELINE_RENDEZVOUS", str(tmp_path / "shared"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    hosts = (Host("localhost"), Host("far.invalid"))
    _, far = check_hosts(Allocation("pbs", "7", hosts), SCHEDULERS["pbs"].remote_argv, "runs", None)
    assert levels(far)["answers"] == "ok", far.findings
    assert far.info["versions"] == VERSIONS and levels(far)["ray"] == "ok"
    assert (tmp_path / "job.out").read_text() == "" and capfd.readouterr().out == ""
    assert list((tmp_path / "shared").iterdir()) == []
    (tmp_path / "pbs_tmrsh").write_text("#!/bin/sh\nexit 2\n")  # as where the folder is not there
    _, far = check_hosts(Allocation("pbs", "7", hosts), SCHEDULERS["pbs"].remote_argv, "runs", None)
    [failure] = [each for each in far.findings if each.level == "fail"]
    assert "exited with 2" in failure.text and "PACELINE_RENDEZVOUS" in failure.fix


def test_an_interface_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.doctor.checks.TORCH_PROGRAM", "pass")
    with pytest.raises(UserError, match=r"^--interface zzz9: this machine has no such interface .*; it has .*\blo\b"):
        run_doctor(str(tmp_path), interface="zzz9")


def test_what_is_not_installed_has_no_tick() -> None:
    absent = Finding("absent", "envpool", "not installed; for Procgen games: pip install x")
    reports = [report("a"), report("b")]
    for each in reports:
        each.findings = [absent]
    assert merged(reports) == [("", absent)]
    reports[0].findings = [Finding("ok", "envpool", "1.0.1 (Procgen games)")]
    assert merged(reports) == [("a", reports[0].findings[0]), ("b", absent)]


def test_hosts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        run_doctor(str(tmp_path), str(tmp_path / "hosts"))
