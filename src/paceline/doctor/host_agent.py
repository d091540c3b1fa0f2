"""The doctor's agent on a host: `python -m paceline.doctor.host_agent`.

It prints one line about its host, then answers questions from standard input until that ends: the time there, and which
other hosts it reaches. Meanwhile it listens on a port, sends a random number to whoever connects, and reads nothing.
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

from paceline import machine, ray_folder, ray_node
from paceline.doctor import checks
from paceline.doctor.checks import GB, Finding
from paceline.launch.addresses import interface_addresses
from paceline.launch.supervisor import machine_identity

MARK = "paceline-doctor "  # a login shell may print other lines
SAME_VERSIONS = ("paceline", "ray", "torch", "numpy", "gymnasium")
"""Distributions that need the same version on every host."""
MAX_SECONDS = 150  # after which it ends in any case
NO_INPUT_SECONDS = 60.0  # without standard input nobody can tell it to end, so it waits to be reached
CONNECT_SECONDS = 3.0
QUOTA_SECONDS = 5.0
YOUNG_SECONDS = 60.0  # a folder without a process may be about to get one
_FOLDER = re.compile(r"/pl-[a-z0-9_]{8}(?![a-z0-9_])")
_SUPERVISOR = "paceline.launch.supervisor"

Message = dict[str, Any]


def findings() -> list[Finding]:
    """Findings that matter with several processes or hosts."""
    return [*check_proxies(), check_temporary_folder(), check_home(), *check_quota(), *check_leftovers()]


def describe_host(out: str | None, interface: str | None) -> Message:
    """`out`: the folder for runs, None on hosts that write none."""
    found = [each for each in checks.findings(out or "runs") if out is not None or each.subject != "output folder"]
    versions = {name: checks.installed_version(name) or "none" for name in SAME_VERSIONS}
    return {
        "host": platform.node(),
        "identity": machine_identity(),
        "user": getpass.getuser(),
        "versions": {"python": platform.python_version(), **versions},
        "cores": machine.cores(),
        "memory": machine.memory_limit_bytes(),
        "addresses": addresses(interface),
        "findings": [asdict(each) for each in [*found, *findings()]],
        "time": time.time(),
    }


def addresses(interface: str | None) -> dict[str, str]:
    """Address → interface; without a given one, all but loopback."""
    found = interface_addresses(interface)
    return {address: name for address, name in found.items() if interface or not address.startswith("127.")}


def reach(addresses: Sequence[str], port: int, greeting: str) -> Message:
    """The first address where a process sends this greeting, and this host's own address on the route there."""
    tried = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
                if connection.recv(len(greeting)).decode(errors="replace") == greeting:
                    return {"address": address, "own": connection.getsockname()[0]}
                tried.append(f"{address}: another program answers")
        except OSError as error:
            tried.append(f"{address}: {error.strerror or error}")
    return {"error": "; ".join(tried) or "it has no address"}


# -- the checks -----------------------------------------------------------------------------------------------------


def check_proxies() -> Iterator[Finding]:
    found = sorted(name for name in os.environ if name.lower() in ray_node.PROXIES and os.environ[name])
    if found:
        fix = "unset them in the site's profile; `paceline launch` removes them for Ray's processes"
        yield Finding("warn", "proxies", f"{', '.join(found)}: connections between hosts must not use a proxy", fix)


def check_temporary_folder(places: Sequence[str] = ("/tmp", "/var/tmp")) -> Finding:
    """The folder that `ray_folder.make_folder` would use."""
    given, most = os.environ.get("TMPDIR", ""), ray_folder.MAX_FOLDER_LENGTH - 12
    fit = [place for place in (given, *places) if place and len(place) <= most and os.access(place, os.W_OK | os.X_OK)]
    fix = "set a short TMPDIR on a local disk, or `scratch` in the site's profile"
    if not fit:
        return Finding("fail", "temporary files", f"no writable folder with at most {most} characters", fix)
    free = shutil.disk_usage(fit[0]).free
    if given and fit[0] != given:
        why = f"has {len(given)} characters, sockets allow {most}" if len(given) > most else "is not writable"
        return Finding("warn", "temporary files", f"TMPDIR={given} {why}: {fit[0]} is used", fix)
    text = f"{fit[0]}: {checks.size(free)} free"
    return Finding("ok", "temporary files", text) if free >= GB else Finding("warn", "temporary files", text, fix)


def check_home() -> Finding:
    """Job records are written to the home folder, often the environment and the runs too."""
    found = replace(checks.check_output("~"), subject="home folder")
    return replace(found, fix="remove old files; `quota -s` shows the limit") if found.level != "ok" else found


def check_quota() -> Iterator[Finding]:
    """`quota -q` prints only exceeded limits; it knows nothing of file systems with tools of their own."""
    if shutil.which("quota") is None:
        return
    try:
        done = subprocess.run(["quota", "-q"], capture_output=True, text=True, errors="replace", timeout=QUOTA_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return
    if text := " ".join(done.stdout.split()):
        yield Finding("warn", "quota", text, "remove old files before writing fails")


def check_leftovers(places: Sequence[str] | None = None) -> Iterator[Finding]:
    """Processes without a supervisor, supervisors without a launcher, and folders that dead jobs have left."""
    stale: list[psutil.Process] = []
    used = set()
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            named = set(_FOLDER.findall(words))
            used |= named
            if (_SUPERVISOR in words and _has_no_launcher(process, words)) or (named and not _is_watched(process)):
                stale.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    if stale:
        pids = " ".join(str(process.pid) for process in stale)
        names = ", ".join(sorted({process.name() for process in stale if process.is_running()}))
        yield Finding("warn", "leftovers", f"processes of a dead paceline job: {names}", f"kill -9 {pids}")
    old = time.time() - YOUNG_SECONDS
    folders = []
    for place in places or sorted({os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"}):
        for path in Path(place).glob("pl-*"):
            stat = path.lstat()
            if stat.st_uid == os.getuid() and stat.st_mtime < old and _FOLDER.fullmatch(f"/{path.name}"):
                folders += [] if f"/{path.name}" in used else [str(path)]
    if folders:
        fix = f"rm -r {' '.join(folders)}"
        yield Finding("warn", "leftovers", f"{checks.plural(len(folders), 'folder')} of dead jobs", fix)


def _is_watched(process: psutil.Process) -> bool:
    """Whether an ancestor outside of Ray will end it: a supervisor, or the training that started it."""
    ancestors = [" ".join(each.cmdline()) for each in process.parents()]
    return any(("python" in words or "paceline" in words) and not _FOLDER.search(words) for words in ancestors)


def _has_no_launcher(process: psutil.Process, words: str) -> bool:
    """Whether it has no connection, although its time to find the launcher is over."""
    given = re.search(r"--seconds (\d+)", words)
    limit = (int(given[1]) if given else 0) + YOUNG_SECONDS
    if time.time() - process.create_time() < limit:
        return False
    return not any(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))


# -- questions and answers ------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paceline.doctor.host_agent", description=__doc__)
    parser.add_argument("--head", help="JSON: addresses, port and greeting of the host that all must reach")
    parser.add_argument("--out", help="folder for runs, on the host that writes them")
    parser.add_argument("--interface")
    options = parser.parse_args(argv)
    signal.alarm(MAX_SECONDS)
    greeting, reached = secrets.token_hex(16), threading.Event()
    listener = socket.create_server(("", 0))
    threading.Thread(target=greet, args=(listener, greeting, reached), daemon=True).start()
    about = {"port": listener.getsockname()[1], "greeting": greeting}
    about |= describe_host(options.out, options.interface)
    about["reached"] = reach(**json.loads(options.head)) if options.head else {}
    _send(about)
    was_asked = False
    for line in sys.stdin:
        was_asked = True
        _send(_answer(json.loads(line)))
    if not was_asked:
        reached.wait(NO_INPUT_SECONDS)
    return 0


def _answer(targets: list[Message]) -> Message:
    """Which targets this host reaches; without targets, the time."""
    if not targets:
        return {"time": time.time()}
    with ThreadPoolExecutor(max_workers=32) as pool:
        return {"reached": list(pool.map(lambda target: reach(**target), targets))}


def greet(listener: socket.socket, greeting: str, reached: threading.Event) -> None:
    """Send the greeting to whoever connects."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.sendall(greeting.encode())
            except OSError:
                continue
        reached.set()


def _send(message: Message) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
