"""The doctor's checks of several hosts: an agent on each, then the comparison of what they say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import UserError
from paceline.doctor.checks import Finding
from paceline.doctor.host_agent import MARK
from paceline.launch import rendezvous
from paceline.launch.environment import TO_START_PYTHON
from paceline.launch.launcher import WITHOUT_INPUT, RemoteArgv
from paceline.schedulers.scheduler import Allocation, Host
from paceline.schedulers.this_machine import is_this_machine

AGENT_SECONDS = 100.0  # torch alone may take 60, and a cold file system is slow
ANSWER_SECONDS = 15.0
POLL_SECONDS = 0.1
PINGS = 5
MAX_SKEW_SECONDS = 2.0

# Messages of ssh and Python when a host is not reached → what to do.
ADVICE = (
    (r"Permission denied", "ssh-copy-id {host}: `ssh {host} true` must work without a password prompt"),
    (r"Host key verification failed|authenticity", "run `ssh {host}` once and accept its key if it is right"),
    (r"Could not resolve|Name or service not known", "give an address, or add the name to /etc/hosts or ~/.ssh/config"),
    (r"refused|timed out|No route|unreachable", "check that it is up, that sshd runs and that no firewall blocks it"),
    (r"No module named", "install paceline for {python} there, as on this host"),
    (r"shared by all hosts", "set PACELINE_RENDEZVOUS to a folder that all hosts share"),
    (r"No such file|not found|cannot execute", "{python} must exist there too: the same path on all hosts"),
)


class NoAnswer(Exception):
    """An agent gave no answer, and why."""


class AgentConnection:
    """An agent on this or another host, through the process that runs it.

    `output`: the file that the agent writes to, where that process passes on neither input nor output (pbs_tmrsh). Then
    the agent can tell about its host, but cannot be asked.
    """

    def __init__(self, argv: Sequence[str], output: Path | None = None) -> None:
        self.has_input, self._output = output is None, output
        self._position = 0
        self._errors, self._buffer = tempfile.TemporaryFile(), b""  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if self.has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.has_input else self._errors,
            stderr=self._errors,
            start_new_session=True,
        )

    def receive(self, seconds: float) -> dict[str, Any]:
        """The agent's next message; lines of other programs are skipped."""
        limit = time.monotonic() + seconds
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                if line.startswith(MARK.encode()):
                    message: dict[str, Any] = json.loads(line[len(MARK) :])
                    return message
            elif (data := self._read(limit)) is None:
                raise NoAnswer(f"no answer within {seconds:g} s")
            elif data:
                self._buffer += data
            else:
                raise NoAnswer(self._last_error())

    def _read(self, limit: float) -> bytes | None:
        """What the agent has written meanwhile; None: nothing until the limit, empty: it has ended."""
        if self._output is None:
            assert self._process.stdout is not None
            descriptor = self._process.stdout.fileno()
            is_ready = select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))[0]
            return os.read(descriptor, 1 << 16) if is_ready else None
        while True:
            has_ended = self._process.poll() is not None
            with contextlib.suppress(FileNotFoundError), self._output.open("rb") as file:  # anew: NFS caches open files
                file.seek(self._position)
                if data := file.read():
                    self._position += len(data)
                    return data
            if has_ended:
                return b""
            if time.monotonic() > limit:
                return None
            time.sleep(POLL_SECONDS)

    def ask(self, targets: list[dict[str, Any]], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(targets).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise NoAnswer(self._last_error()) from None
        return self.receive(seconds)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=3 if self.has_input else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        self._errors.close()

    def _last_error(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its output and goes on
            self._process.wait(timeout=ANSWER_SECONDS)
        code = self._process.returncode
        ended = "it closed its output" if code is None else f"it exited with {code}"
        self._errors.seek(0)
        errors = self._errors.read()
        if self._output is not None:
            try:
                errors += self._output.read_bytes()
            except OSError:
                return f"{ended} without a word in {self._output}: is this folder shared by all hosts?"
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ended


@dataclass
class HostReport:
    host: Host
    argv: list[str]
    """Command that runs the agent."""
    output: Path | None = None
    """File that the agent writes to, where the command does not pass its output on."""
    agent: AgentConnection | None = None
    info: dict[str, Any] = field(default_factory=dict)
    """What the agent said about its host; empty if it gave no answer."""
    address: str = ""
    """The host's address on the route to the head."""
    skew: float | None = None
    """Its clock minus this machine's, in seconds."""
    round_trip: float = 0.0
    """Seconds from question to answer: `skew` is known to half of it."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.host.name

    def add(self, level: Any, subject: str, text: str, fix: str = "") -> None:
        self.findings.append(Finding(level, subject, text, fix))


def check_hosts(allocation: Allocation, remote_argv: RemoteArgv, out: str, interface: str | None) -> list[HostReport]:
    """A report on each host; the head's comes first."""
    variables = {name: os.environ[name] for name in TO_START_PYTHON if os.environ.get(name)}
    is_local = {host.name: is_this_machine(host.name) for host in allocation.hosts}
    first = next((host for host in allocation.hosts if is_local[host.name]), allocation.hosts[0])
    started: list[HostReport] = []
    answers: tempfile.TemporaryDirectory[str] | None = None
    if any(_passes_nothing_on(remote_argv(name, [], {})) for name, local in is_local.items() if not local):
        shared = rendezvous.folder(os.environ)
        try:
            shared.mkdir(mode=0o700, parents=True, exist_ok=True)
            answers = tempfile.TemporaryDirectory(prefix="doctor-", dir=shared, ignore_cleanup_errors=True)
        except OSError as error:
            text = f"{shared}: {error.strerror}; set {rendezvous.FOLDER} to a writable folder that all hosts share"
            raise UserError(text) from None

    def check(host: Host, options: Sequence[str]) -> HostReport:
        words = [sys.executable, "-P", "-m", "paceline.doctor.host_agent", *options]
        words += ["--interface", interface] if interface else []
        report = HostReport(host, words)
        if not is_local[host.name]:
            if answers is not None:
                report.output = Path(answers.name) / host.name
                words = ["sh", "-c", f"exec {shlex.join(words)} >{shlex.quote(str(report.output))} 2>&1"]
            report.argv = remote_argv(host.name, words, variables)
        started.append(report)
        _ask_agent(report)
        return report

    try:
        head = check(first, ["--out", str(Path(out).expanduser().absolute())] if is_local[first.name] else [])
        target = ["--head", json.dumps(_target(head, list(head.info["addresses"])))] if head.info else []
        others = [host for host in allocation.hosts if host is not first]
        with ThreadPoolExecutor(max_workers=64) as pool:
            reports = [head, *pool.map(lambda host: check(host, target), others)]
        _check_network(head, reports[1:])
    finally:
        for report in started:
            if report.agent is not None:
                report.agent.close()
        if answers is not None:
            answers.cleanup()
    compare(reports, interface)
    return reports


def _passes_nothing_on(argv: Sequence[str]) -> bool:
    """Whether a command connects neither input nor output of what it starts elsewhere."""
    return Path(argv[0]).name in WITHOUT_INPUT


def _ask_agent(report: HostReport) -> None:
    began = time.monotonic()
    try:
        report.agent = AgentConnection(report.argv, report.output)
        report.info = report.agent.receive(AGENT_SECONDS)
        report.findings = [Finding(**each) for each in report.info["findings"]]
        if report.agent.has_input:
            report.round_trip, report.skew = min(_ping(report.agent) for _ in range(PINGS))
    except (NoAnswer, OSError) as error:
        text = str(error)
        advice = next((fix for pattern, fix in ADVICE if re.search(pattern, text)), "run by hand: {command}")
        fix = advice.format(host=report.name, python=sys.executable, command=shlex.join(report.argv))
        report.add("fail", "answers", text, fix)
    else:
        report.findings.insert(0, Finding("ok", "answers", f"after {time.monotonic() - began:.1f} s"))


def _ping(agent: AgentConnection) -> tuple[float, float]:
    """Round trip and clock skew."""
    before = time.time()
    there = agent.ask([])["time"]
    after = time.time()
    return after - before, there - (before + after) / 2


def _target(report: HostReport, addresses: list[str]) -> dict[str, Any]:
    return {"addresses": addresses, "port": report.info["port"], "greeting": report.info["greeting"]}


def _check_network(head: HostReport, others: list[HostReport]) -> None:
    """Whether each host reaches the head, and the head reaches it at the address it came from."""
    if not head.info:
        return
    connected = []
    for report in [each for each in others if each.info]:
        reached = report.info["reached"]
        report.address = reached.get("own", "")
        if "error" in reached:
            fix = "open all ports between the hosts, or choose their network with --interface"
            report.add("fail", "network", f"it does not reach {head.name} ({reached['error']})", fix)
        else:
            head.address = head.address or reached["address"]
            connected.append(report)
    if not connected or head.agent is None:
        return
    try:
        answers = head.agent.ask([_target(report, [report.address]) for report in connected])["reached"]
    except NoAnswer as error:
        head.add("fail", "network", f"it was asked to reach the others: {error}", "try again")
        return
    for report, answer in zip(connected, answers, strict=True):
        if "error" in answer:
            fix = "open all ports between the hosts: Ray and the workers use free ones"
            report.add("fail", "network", f"{head.name} does not reach it ({answer['error']})", fix)
        else:
            report.add("ok", "network", f"it and {head.name} reach each other")


def compare(reports: list[HostReport], interface: str | None) -> None:
    """Add what no host can know alone."""
    answered = [report for report in reports if report.info]
    for index, report in enumerate(answered):
        head, info = answered[0], report.info
        same = next((each for each in answered[:index] if each.info["identity"] == info["identity"]), None)
        if same is not None:
            report.add("fail", "network", f"is the same machine as {same.name}", "list each host once")
        if interface and not info["addresses"]:
            text = f"has no interface {interface} with an address"
            report.add("fail", "network", text, "`ip -br -4 addr` lists a host's interfaces")
        for name, version in info["versions"].items():
            _compare_version(report, head, name, version)
        _compare_clock(report, head)
        if report.host.cpus > info["cores"]:
            report.findings = [each for each in report.findings if each.subject != "cores"]
            text = f"{report.host.cpus} are allocated, {info['cores']} are usable"
            report.add("warn", "cores", text, "ask for whole hosts, or lower cpus= in the hosts file")


def _compare_version(report: HostReport, head: HostReport, name: str, version: str) -> None:
    theirs = head.info["versions"][name]
    known = [each for each in report.findings if each.subject == name]
    if version != theirs:
        text = f"{version}, but {head.name} has {theirs}: all hosts need the same version"
        new = Finding("fail", name, text, "install the same version, or share one environment between all hosts")
    elif version == "none" and name == "ray":
        new = Finding("fail", name, "is not installed", "pip install 'paceline[ray]' on every host")
    elif known:
        return
    else:
        new = Finding("ok", name, version)
    report.findings = [each for each in report.findings if each not in known] + [new]


def _compare_clock(report: HostReport, head: HostReport) -> None:
    if report.skew is None or head.skew is None or report is head:
        return
    apart, precision = report.skew - head.skew, (report.round_trip + head.round_trip) / 2
    report.skew = apart
    side = "ahead of" if apart > 0 else "behind"
    text = f"{abs(apart):.3f} s {side} {head.name}, ± {max(precision, 0.001):.3f} s"
    if abs(apart) - precision > MAX_SKEW_SECONDS:
        fix = "set the clocks by NTP (`timedatectl`), or times in logs of several hosts do not match"
        report.add("warn", "clock", text, fix)
    else:
        report.add("ok", "clock", text)
