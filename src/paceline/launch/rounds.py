"""`paceline doctor`: the findings of this machine, or of all hosts of an allocation or of a file, in one table."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.launch.doctor import Finding, findings, installed_version, plural, size

if TYPE_CHECKING:
    from paceline.launch.scheduler import Allocation, Host

SURVEY_SECONDS = 100.0  # torch alone is given 60, and a cold file system is slow
ANSWER_SECONDS = 15.0
PINGS = 5
SKEW_SECONDS = 2.0
NO_INPUT = ("pbs_tmrsh", "pbsdsh")
TO_BEGIN = ("PYTHONPATH", "LD_LIBRARY_PATH")

# What ssh and the like say when a host is not reached → what to do about it.
ADVICE = (
    (r"Permission denied", "ssh-copy-id {host}: `ssh {host} true` must work without a question"),
    (r"Host key verification failed|authenticity", "`ssh {host}` once by hand, and say yes if the key is right"),
    (r"Could not resolve|Name or service not known", "give an address, or name it in /etc/hosts or ~/.ssh/config"),
    (r"refused|timed out|No route|unreachable", "is it up, does sshd run there, does a firewall stand between?"),
    (r"No module named", "install paceline for {python} there, as it is here"),
    (r"No such file|not found|cannot execute", "{python} must exist there too: the same path on all hosts"),
)


class Silence(Exception):
    """A host gave no answer, and why."""


class Talk:
    """A survey on a host: a process here that is it, or leads to it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.is_blind = Path(argv[0]).name in NO_INPUT
        self._errors, self._buffer = tempfile.TemporaryFile(), b""  # noqa: SIM115 (closed with the talk)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if self.is_blind else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def hear(self, seconds: float) -> dict[str, Any]:
        """The next line of the survey's own."""
        from paceline.launch.survey import MARK

        assert self._process.stdout is not None
        limit, number = time.monotonic() + seconds, self._process.stdout.fileno()
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                if line.startswith(MARK.encode()):
                    told: dict[str, Any] = json.loads(line[len(MARK) :])
                    return told
            elif not select.select([number], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise Silence(f"no answer within {seconds:g} s")
            elif data := os.read(number, 1 << 16):
                self._buffer += data
            else:
                raise Silence(self._last_words())

    def ask(self, targets: list[dict[str, Any]], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(targets).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Silence(self._last_words()) from None
        return self.hear(seconds)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=0 if self.is_blind else 3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        self._errors.close()

    def _last_words(self) -> str:
        code = self._process.wait(timeout=ANSWER_SECONDS)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"it ended with {code}"


@dataclass
class Visit:
    """One host, and what was seen there."""

    host: Host
    argv: list[str]
    talk: Talk | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    own: str = ""
    """Its address on the way to the head."""
    skew: float | None = None
    """Of its clock against ours, in seconds."""
    trip: float = 0.0
    """To ask and be answered: the clock is known to half of it."""
    found: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.host.name


def run_doctor(out: str = "runs", hosts: str | None = None, interface: str | None = None) -> int:
    """Print the findings; 1 when something fails, else 0."""
    from paceline.launch.launch import find_allocation

    allocation, remote = find_allocation(os.environ, hosts, None)
    if allocation.rank:
        return 0  # srun and the like have started us on every host: the first looks at all of them
    if len(allocation.hosts) > 1 or hosts:
        visits = survey(allocation, remote, out, interface)
        print(host_table(visits) + "\n")
        return show(merged(visits))
    found = findings(out)
    if installed_version("psutil"):  # that it is absent was said
        from paceline.launch import survey as here

        found += here.findings()
    return show([("", finding) for finding in found])


def survey(allocation: Allocation, remote: Any, out: str, interface: str | None) -> list[Visit]:
    """All hosts at once; first the one that all others have to reach."""
    from paceline.launch import local

    variables = {name: os.environ[name] for name in TO_BEGIN if os.environ.get(name)}
    here = {host.name: local.is_here(host.name) for host in allocation.hosts}
    first = next((host for host in allocation.hosts if here[host.name]), allocation.hosts[0])

    made: list[Visit] = []

    def visit(host: Host, more: Sequence[str]) -> Visit:
        words = [sys.executable, "-P", "-m", "paceline.launch.survey", *more]
        words += ["--interface", interface] if interface else []
        made.append(each := Visit(host, words if here[host.name] else remote(host.name, words, variables)))
        _look(each)
        return each

    try:
        head = visit(first, ["--out", str(Path(out).expanduser().absolute())] if here[first.name] else [])
        where = ["--head", json.dumps(_place(head, list(head.facts["addresses"])))] if head.facts else []
        with ThreadPoolExecutor(max_workers=64) as pool:
            others = pool.map(lambda host: visit(host, where), [host for host in allocation.hosts if host is not first])
            visits = [head, *others]
        _reach_back(head, visits[1:])
    finally:
        for each in made:
            if each.talk is not None:
                each.talk.close()
    _compare(visits, interface)
    return visits


def _look(visit: Visit) -> None:
    began = time.monotonic()
    try:
        visit.talk = Talk(visit.argv)
        visit.facts = visit.talk.hear(SURVEY_SECONDS)
        visit.found = [Finding(**each) for each in visit.facts["findings"]]
        if not visit.talk.is_blind:
            visit.trip, visit.skew = min(_ping(visit.talk) for _ in range(PINGS))
    except (Silence, OSError) as error:
        text = str(error)
        advice = next((fix for pattern, fix in ADVICE if re.search(pattern, text)), "run by hand: {command}")
        fix = advice.format(host=visit.name, python=sys.executable, command=shlex.join(visit.argv))
        visit.found.append(Finding("fail", "answers", text, fix))
    else:
        visit.found.insert(0, Finding("ok", "answers", f"after {time.monotonic() - began:.1f} s"))


def _ping(talk: Talk) -> tuple[float, float]:
    before = time.time()
    there = talk.ask([])["time"]
    after = time.time()
    return after - before, there - (before + after) / 2


def _place(visit: Visit, addresses: list[str]) -> dict[str, Any]:
    return {"addresses": addresses, "port": visit.facts["port"], "greeting": visit.facts["greeting"]}


def _reach_back(head: Visit, others: list[Visit]) -> None:
    """Whether each host reaches the head, and is reached by it at the address it came from."""
    if not head.facts:
        return
    come = []
    for visit in [each for each in others if each.facts]:
        reached = visit.facts["reached"]
        visit.own = reached.get("own", "")
        if "error" in reached:
            fix = f"open all ports between the hosts, or choose their network with --interface; {head.name} was tried"
            visit.found.append(Finding("fail", "network", f"{head.name} is not reached ({reached['error']})", fix))
        else:
            head.own = head.own or reached["address"]
            come.append(visit)
    if not come or head.talk is None:
        return
    try:
        answers = head.talk.ask([_place(visit, [visit.own]) for visit in come])["reached"]
    except Silence as error:
        head.found.append(Finding("fail", "network", f"it was asked to reach the others: {error}", "try again"))
        return
    for visit, answer in zip(come, answers, strict=True):
        if "error" in answer:
            text = f"{head.name} does not reach it ({answer['error']})"
            fix = "open all ports between the hosts: Ray and the workers take free ones"
            visit.found.append(Finding("fail", "network", text, fix))
        else:
            visit.found.append(Finding("ok", "network", f"reached and reaches {head.name}"))


def _compare(visits: list[Visit], interface: str | None) -> None:
    """What no host can know alone."""
    seen = [visit for visit in visits if visit.facts]
    if not seen:
        return
    head = seen[0]
    for index, visit in enumerate(seen):
        twin = next((each for each in seen[:index] if each.facts["identity"] == visit.facts["identity"]), None)
        if twin is not None:
            visit.found.append(Finding("fail", "network", f"is the same machine as {twin.name}", "name each host once"))
        if interface and not visit.facts["addresses"]:
            text = f"has no interface {interface} with an address"
            visit.found.append(Finding("fail", "network", text, "`ip -br -4 addr` on each host shows what there is"))
        for name, version in visit.facts["versions"].items():
            _compare_version(visit, head, name, version)
        _compare_clock(visit, head)
        if visit.host.cpus > visit.facts["cores"]:
            text = f"{visit.host.cpus} are given, {visit.facts['cores']} can be used"
            fix = "ask for whole hosts, or lower cpus= in the hosts file"
            visit.found = [each for each in visit.found if each.subject != "cores"]
            visit.found.append(Finding("warn", "cores", text, fix))


def _compare_version(visit: Visit, head: Visit, name: str, version: str) -> None:
    theirs = head.facts["versions"][name]
    said = [each for each in visit.found if each.subject == name]
    if version != theirs:
        text = f"{version}, and {head.name} has {theirs}: all hosts need the same"
        made = Finding("fail", name, text, "install the same there, or share one environment between all")
    elif version == "none" and name == "ray":
        made = Finding("fail", name, "is not installed", "pip install 'paceline[ray]' on every host")
    elif said:
        return
    else:
        made = Finding("ok", name, version)
    visit.found = [each for each in visit.found if each not in said] + [made]


def _compare_clock(visit: Visit, head: Visit) -> None:
    if visit.skew is None or head.skew is None or visit is head:
        return
    apart, known = visit.skew - head.skew, (visit.trip + head.trip) / 2
    visit.skew = apart
    side = "ahead of" if apart > 0 else "behind"
    text = f"{abs(apart):.3f} s {side} {head.name}, give or take {max(known, 0.001):.3f} s"
    if abs(apart) - known > SKEW_SECONDS:
        fix = "set it by NTP (`timedatectl`): times in logs and files of several hosts do not fit together"
        visit.found.append(Finding("warn", "clock", text, fix))
    else:
        visit.found.append(Finding("ok", "clock", text))


# -- what is printed ------------------------------------------------------------------------------------------------


def host_table(visits: Iterable[Visit]) -> str:
    rows = [["host", "address", "interface", "cores", "memory", "python", "ray", "torch", "state"]]
    for visit in visits:
        worst = "fails" if any(each.level == "fail" for each in visit.found) else "ok"
        if not visit.facts:
            rows.append([visit.name, *["-"] * 7, "no answer"])
            continue
        address = visit.own or next(iter(visit.facts["addresses"]), "-")
        interface, versions = visit.facts["addresses"].get(address, "-"), visit.facts["versions"]
        sizes = [str(visit.facts["cores"]), size(visit.facts["memory"])]
        rows.append([visit.name, address, interface, *sizes, *(versions[n] for n in ("python", "ray", "torch")), worst])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def merged(visits: Sequence[Visit]) -> list[tuple[str, Finding]]:
    """By subject: what all hosts have in common once, trouble with the hosts that have it."""
    every = [(visit.name, finding) for visit in visits for finding in visit.found]
    made: list[tuple[str, Finding]] = []
    for subject in dict.fromkeys(finding.subject for _, finding in every):
        groups: dict[Finding, list[str]] = {}
        for name, finding in every:
            if finding.subject == subject:
                groups.setdefault(finding, []).append(name)
        good = {finding: names for finding, names in groups.items() if finding.level == "ok"}
        if len(groups) == 1 and len(good) == 1 and len(next(iter(good.values()))) == sum(bool(v.facts) for v in visits):
            made += [("", finding) for finding in good]
        elif 1 < len(good) <= 3:
            text = "; ".join(f"{listed(names)}: {finding.text}" for finding, names in good.items())
            made.append(("", Finding("ok", subject, text)))
        elif good:
            names = [name for several in good.values() for name in several]
            text = next(iter(good)).text if len(good) == 1 else "ok"
            made.append((listed(names), Finding("ok", subject, text)))
        made += [(listed(names), finding) for finding, names in groups.items() if finding.level != "ok"]
    return made


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def show(found: Sequence[tuple[str, Finding]]) -> int:
    marks = symbols(sys.stdout.encoding)
    column = max(len(finding.subject) for _, finding in found)
    width = max(60, min(120, shutil.get_terminal_size().columns))
    for names, finding in found:
        head = f"{marks[finding.level]} {finding.subject:<{column}}  "
        print(_hang(head, f"{names}: {finding.text}" if names else finding.text, width))
        if finding.level != "ok" and finding.fix:
            print(_hang(" " * len(head) + "fix: ", finding.fix, width))
    counts = {level: sum(finding.level == level for _, finding in found) for level in ("ok", "warn", "fail")}
    print(f"\n{counts['ok']} ok, {plural(counts['warn'], 'warning')}, {plural(counts['fail'], 'failure')}")
    return 1 if counts["fail"] else 0


def symbols(encoding: str | None) -> dict[str, str]:
    """Tick and cross, or letters on a terminal that has neither."""
    try:
        "✓✗".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"ok": "+", "warn": "!", "fail": "x"}
    return {"ok": "✓", "warn": "!", "fail": "✗"}


def _hang(head: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
