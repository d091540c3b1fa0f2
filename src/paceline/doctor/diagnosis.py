"""`paceline doctor`: the findings on this machine, or on all hosts of an allocation or a file, as text."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.config import UserError
from paceline.doctor.checks import Finding, findings, installed_version, plural, size

if TYPE_CHECKING:
    from paceline.doctor.hosts import HostReport


def run_doctor(out: str = "runs", hosts: str | None = None, interface: str | None = None) -> int:
    """Print the findings; 1 if something fails, else 0."""
    if not installed_version("psutil"):  # a failure among the findings; nothing else here works without it
        return print_findings([("", finding) for finding in findings(out)])
    from paceline.doctor import host_agent
    from paceline.doctor.hosts import check_hosts
    from paceline.launch.addresses import interface_addresses
    from paceline.launch.find_allocation import find_allocation

    allocation, remote_argv = find_allocation(os.environ, hosts, None)
    if allocation.rank:
        return 0  # srun and the like run this on every host; the first one checks them all
    if len(allocation.hosts) > 1 or hosts:
        reports = check_hosts(allocation, remote_argv, out, interface)
        print(host_table(reports) + "\n")
        return print_findings(merged(reports))
    if interface and not interface_addresses(interface):
        known = ", ".join(sorted(set(interface_addresses().values())))
        raise UserError(f"--interface {interface}: this machine has no such interface with an address; it has {known}")
    return print_findings([("", finding) for finding in [*findings(out), *host_agent.findings()]])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def host_table(reports: Iterable[HostReport]) -> str:
    rows = [["host", "address", "interface", "cores", "memory", "python", "ray", "torch", "state"]]
    for report in reports:
        if not report.info:
            rows.append([report.name, *["-"] * 7, "no answer"])
            continue
        addresses, versions = report.info["addresses"], report.info["versions"]
        address = report.address or next(iter(addresses), "-")
        state = "fails" if any(each.level == "fail" for each in report.findings) else "ok"
        sizes = [str(report.info["cores"]), size(report.info["memory"])]
        row = [report.name, address, addresses.get(address, "-"), *sizes]
        rows.append([*row, *(versions[name] for name in ("python", "ray", "torch")), state])
    return table(rows)


def merged(reports: Sequence[HostReport]) -> list[tuple[str, Finding]]:
    """By subject: what all hosts have in common once, problems with the names of the hosts that have them."""
    every = [(report.name, finding) for report in reports for finding in report.findings]
    answered = sum(bool(each.info) for each in reports)
    result: list[tuple[str, Finding]] = []
    for subject in dict.fromkeys(finding.subject for _, finding in every):
        groups: dict[Finding, list[str]] = {}
        for name, finding in every:
            if finding.subject == subject:
                groups.setdefault(finding, []).append(name)
        good = {finding: names for finding, names in groups.items() if finding.level == "ok"}
        if (
            len(groups) == 1
            and (only := next(iter(groups))).level in ("ok", "absent")
            and len(groups[only]) == answered
        ):
            result.append(("", only))
            continue
        if 1 < len(good) <= 3:
            text = "; ".join(f"{listed(names)}: {finding.text}" for finding, names in good.items())
            result.append(("", Finding("ok", subject, text)))
        elif good:
            names = [name for several in good.values() for name in several]
            text = next(iter(good)).text if len(good) == 1 else "ok"
            result.append((listed(names), Finding("ok", subject, text)))
        result += [(listed(names), finding) for finding, names in groups.items() if finding.level != "ok"]
    return result


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def print_findings(found: Sequence[tuple[str, Finding]]) -> int:
    marks = symbols(sys.stdout.encoding)
    column = max(len(finding.subject) for _, finding in found)
    width = max(60, min(120, shutil.get_terminal_size().columns))
    for names, finding in found:
        head = f"{marks[finding.level]} {finding.subject:<{column}}  "
        print(_wrapped(head, f"{names}: {finding.text}" if names else finding.text, width))
        if finding.level in ("warn", "fail") and finding.fix:
            print(_wrapped(" " * len(head) + "fix: ", finding.fix, width))
    counts = Counter(finding.level for _, finding in found)
    absent = f"{counts['absent']} optional absent, " if counts["absent"] else ""
    print(f"\n{counts['ok']} ok, {absent}{plural(counts['warn'], 'warning')}, {plural(counts['fail'], 'failure')}")
    return 1 if counts["fail"] else 0


def symbols(encoding: str | None) -> dict[str, str]:
    """Tick and cross, or ASCII on a terminal that lacks them."""
    try:
        "✓✗".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"ok": "+", "absent": "-", "warn": "!", "fail": "x"}
    return {"ok": "✓", "absent": "-", "warn": "!", "fail": "✗"}


def _wrapped(head: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
