"""What is made of the answers of several hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.launch import rounds
from paceline.launch.doctor import Finding
from paceline.launch.rounds import Silence, Talk, Visit, merged, run_doctor
from paceline.launch.scheduler import Allocation, Host
from paceline.launch.ssh import remote_argv

VERSIONS = {"python": "3.11.7", "paceline": "1", "ray": "2", "torch": "2", "numpy": "2", "gymnasium": "1"}


def visit(name: str, cpus: int = 0, **facts: Any) -> Visit:
    known = {"identity": name, "versions": VERSIONS, "cores": 4, "memory": 1 << 30, "addresses": {"10.0.0.1": "eth0"}}
    return Visit(Host(name, cpus), [], facts=known | facts)


def levels(each: Visit) -> dict[str, str]:
    return {finding.subject: finding.level for finding in each.found}


def test_other_versions_clocks_and_machines_are_seen() -> None:
    head, other = visit("a"), visit("b", cpus=8, versions=VERSIONS | {"ray": "1"})
    head.skew, head.trip, other.skew, other.trip = 0.0, 0.001, -30.0, 0.2
    rounds._compare([head, other], None)
    assert levels(other) == dict.fromkeys(VERSIONS, "ok") | {"ray": "fail", "clock": "warn", "cores": "warn"}
    assert set(levels(head).values()) == {"ok"}
    clock = next(finding for finding in other.found if finding.subject == "clock")
    assert "30.000 s behind a" in clock.text and "0.101 s" in clock.text
    slow = visit("c")
    slow.skew, slow.trip = 3.0, 4.0  # so long that the clocks may be the same
    twin = visit("d", identity="a", addresses={})
    rounds._compare([head, slow, twin], "ib0")
    assert levels(slow)["clock"] == "ok"
    texts = [finding.text for finding in twin.found if finding.level == "fail"]
    assert texts == ["is the same machine as a", "has no interface ib0 with an address"]


def test_what_hosts_have_in_common_is_said_once() -> None:
    visits = [visit(f"n{i}") for i in range(6)]
    for index, each in enumerate(visits):
        each.found = [Finding("ok", "ray", "2.60"), Finding("ok", "load", f"{index}")]
        each.found.append(
            Finding("warn", "LD_PRELOAD", "x.so", "unset") if index else Finding("ok", "LD_PRELOAD", "no")
        )
    assert merged(visits) == [
        ("", Finding("ok", "ray", "2.60")),
        ("n0, n1, n2, n3 and 2 more", Finding("ok", "load", "ok")),
        ("n0", Finding("ok", "LD_PRELOAD", "no")),
        ("n1, n2, n3, n4 and 1 more", Finding("warn", "LD_PRELOAD", "x.so", "unset")),
    ]
    assert merged(visits[:2])[1] == ("", Finding("ok", "load", "n0: 0; n1: 1"))


def test_lines_of_others_are_passed_over_and_silence_has_a_reason() -> None:
    talk = Talk([sys.executable, "-c", "print('Welcome!'); print('paceline-survey {\"a\": 1}'); input()"])
    assert talk.hear(10) == {"a": 1}
    with pytest.raises(Silence, match=r"within 0\.1 s"):
        talk.hear(0.1)
    talk.close()
    talk = Talk([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
    with pytest.raises(Silence, match="no such thing"):
        talk.hear(10)
    talk.close()


def test_a_host_that_is_not_reached_fails_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ssh"
    tool.write_text("#!/bin/sh\necho 'me@away: Permission denied (publickey).' >&2; exit 255\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    [found] = rounds.survey(Allocation("ssh", "", (Host("me@away.invalid"),)), remote_argv, "runs", None)
    assert [(each.level, each.subject) for each in found.found] == [("fail", "answers")]
    assert found.found[0].fix.startswith("ssh-copy-id me@away.invalid")
    assert "no answer" in rounds.host_table([found])


def test_hosts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        run_doctor(str(tmp_path), str(tmp_path / "hosts"))
