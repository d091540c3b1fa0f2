"""What a host tells the doctor of itself: `python -m paceline.launch.survey`.

It prints a line, then answers questions on its standard input until that ends: what time it is there, and which other
hosts it reaches. Meanwhile it listens on a port, where it says a random number to whoever comes, and hears nothing.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from paceline import machine
from paceline.launch import doctor, node
from paceline.launch.doctor import GB, Finding
from paceline.launch.supervisor import identity

MARK = "paceline-survey "  # a shell may print lines of its own before
SAME = ("paceline", "ray", "torch", "numpy", "gymnasium")
"""Distributions of which every host needs the same version."""
LONGEST_SECONDS = 150  # then it ends, whatever happens
BLIND_SECONDS = 60.0  # without standard input nobody can say that it may end: it waits to be reached
REACH_SECONDS = 3.0
QUOTA_SECONDS = 5.0
YOUNG_SECONDS = 60.0  # a folder without a process may be about to get one
_FOLDER = re.compile(r"/pl-[a-z0-9_]{8}(?![a-z0-9_])")
_SUPERVISOR = "paceline.launch.supervisor"

Facts = dict[str, Any]


def findings() -> list[Finding]:
    """What matters once there are several processes or hosts."""
    return [*_proxies(), _temporary(), _home(), *_quota(), *_leftovers()]


def facts(out: str | None, interface: str | None) -> Facts:
    """`out` is the folder of runs where this host would write them, None for the others."""
    found = [each for each in doctor.findings(out or "runs") if out is not None or each.subject != "output folder"]
    return {
        "host": platform.node(),
        "identity": identity(),
        "user": getpass.getuser(),
        "versions": {
            "python": platform.python_version(),
            **{name: doctor.installed_version(name) or "none" for name in SAME},
        },
        "cores": machine.cores(),
        "memory": machine.memory_limit_bytes(),
        "addresses": addresses(interface),
        "findings": [asdict(each) for each in [*found, *findings()]],
        "time": time.time(),
    }


def addresses(interface: str | None) -> dict[str, str]:
    """Address → interface, of those that are up and lead out of this machine."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        str(found.address): name
        for name, several in psutil.net_if_addrs().items()
        for found in several
        if found.family == socket.AF_INET
        and (name == interface if interface else name in up and not str(found.address).startswith("127."))
    }


def reach(addresses: Sequence[str], port: int, greeting: str) -> Facts:
    """The first address where the one that says this answers, and our own on the way there."""
    tried = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=REACH_SECONDS) as link:
                said = link.recv(len(greeting)).decode(errors="replace")
                if said == greeting:
                    return {"address": address, "own": link.getsockname()[0]}
                tried.append(f"{address}: somebody else answers")
        except OSError as error:
            tried.append(f"{address}: {error.strerror or error}")
    return {"error": "; ".join(tried) or "it has no address"}


# -- the checks -----------------------------------------------------------------------------------------------------


def _proxies() -> Iterator[Finding]:
    found = sorted(name for name in os.environ if name.lower() in node.PROXIES and os.environ[name])
    if found:
        fix = "unset them in the site's profile; `paceline launch` keeps them from Ray's processes"
        yield Finding("warn", "proxies", f"{', '.join(found)}: connections between hosts must not go there", fix)


def _temporary(places: Sequence[str] = ("/tmp", "/var/tmp")) -> Finding:
    """Where Ray's folder would be made, as `node.make_folder` does it."""
    given, most = os.environ.get("TMPDIR", ""), node.LONGEST_FOLDER - 12
    fit = [place for place in (given, *places) if place and len(place) <= most and os.access(place, os.W_OK | os.X_OK)]
    fix = "set a short TMPDIR on a disk of the host, or `scratch` in the site's profile"
    if not fit:
        return Finding("fail", "temporary files", f"no folder of {most} characters or less can be written to", fix)
    free = shutil.disk_usage(fit[0]).free
    if given and fit[0] != given:
        why = f"has {len(given)} characters, sockets allow {most}" if len(given) > most else "cannot be written to"
        return Finding("warn", "temporary files", f"TMPDIR={given} {why}: {fit[0]} is taken", fix)
    text = f"{fit[0]}: {doctor.size(free)} free"
    return Finding("ok", "temporary files", text) if free >= GB else Finding("warn", "temporary files", text, fix)


def _home() -> Finding:
    """Records of jobs are written there, and often the environment and the runs lie there too."""
    found = replace(doctor.output("~"), subject="home folder")
    return replace(found, fix="remove what is old; `quota -s` shows the limit") if found.level != "ok" else found


def _quota() -> Iterator[Finding]:
    """`quota -q` prints only what is over its limit; file systems with tools of their own say nothing here."""
    if shutil.which("quota") is None:
        return
    try:
        done = subprocess.run(["quota", "-q"], capture_output=True, text=True, errors="replace", timeout=QUOTA_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return  # a file server that is slow is not for us to mend
    if said := " ".join(done.stdout.split()):
        yield Finding("warn", "quota", said, "remove what is old, before writing fails")


def _leftovers(places: Sequence[str] | None = None) -> Iterator[Finding]:
    """Of jobs of ours that are gone: processes without a supervisor, supervisors without a launcher, folders."""
    stale: list[psutil.Process] = []
    used = set()
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            named = set(_FOLDER.findall(words))
            used |= named
            if (_SUPERVISOR in words and _is_lost(process, words)) or (named and not _is_watched(process)):
                stale.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    if stale:
        pids = " ".join(str(process.pid) for process in stale)
        names = ", ".join(sorted({process.name() for process in stale if process.is_running()}))
        yield Finding("warn", "leftovers", f"of a job of ours that is gone: {names}", f"end them: kill -9 {pids}")
    old = time.time() - YOUNG_SECONDS
    folders = []
    for place in places or sorted({os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"}):
        for path in Path(place).glob("pl-*"):
            stat = path.lstat()
            if stat.st_uid == os.getuid() and stat.st_mtime < old and _FOLDER.fullmatch(f"/{path.name}"):
                folders += [] if f"/{path.name}" in used else [str(path)]
    if folders:
        fix = f"rm -r {' '.join(folders)}"
        yield Finding("warn", "leftovers", f"{doctor.plural(len(folders), 'folder')} of jobs that are gone", fix)


def _is_watched(process: psutil.Process) -> bool:
    """Somebody above it is none of Ray's, and would end it: a supervisor, or a training that started it."""
    above = [" ".join(each.cmdline()) for each in process.parents()]
    return any(("python" in words or "paceline" in words) and not _FOLDER.search(words) for words in above)


def _is_lost(process: psutil.Process, words: str) -> bool:
    """It has no launcher, and has looked for one longer than it was told to."""
    told = re.search(r"--seconds (\d+)", words)
    limit = (int(told[1]) if told else 0) + YOUNG_SECONDS
    if time.time() - process.create_time() < limit:
        return False
    return not any(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))


# -- the talk -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paceline.launch.survey", description=__doc__)
    parser.add_argument("--head", help="JSON: addresses, port and greeting of the host that all must reach")
    parser.add_argument("--out", help="folder of the runs, on the host that writes them")
    parser.add_argument("--interface")
    options = parser.parse_args(argv)
    signal.alarm(LONGEST_SECONDS)
    greeting, met = secrets.token_hex(16), threading.Event()
    listener = socket.create_server(("", 0))
    threading.Thread(target=_greet, args=(listener, greeting, met), daemon=True).start()
    told = facts(options.out, options.interface) | {"port": listener.getsockname()[1], "greeting": greeting}
    told["reached"] = reach(**json.loads(options.head)) if options.head else {}
    _say(told)
    asked = False
    for line in sys.stdin:
        asked = True
        _say(_answer(json.loads(line)))
    if not asked:
        met.wait(BLIND_SECONDS)
    return 0


def _answer(targets: list[Facts]) -> Facts:
    """Nothing to reach: what time it is."""
    if not targets:
        return {"time": time.time()}
    with ThreadPoolExecutor(max_workers=32) as pool:
        return {"reached": list(pool.map(lambda target: reach(**target), targets))}


def _greet(listener: socket.socket, greeting: str, met: threading.Event) -> None:
    while True:
        link, _ = listener.accept()
        with link:
            try:
                link.sendall(greeting.encode())
            except OSError:
                continue  # it did not wait
        met.set()


def _say(message: Facts) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
