"""Hosts that are reached by ssh: commands on them, files to and from them. They need sh, tar and setsid, no more."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline.config import UserError
from paceline.launch.hosts_file import Hosts, Machine
from paceline.launch.ssh import OPTIONS

SECONDS = 60.0
COPY_SECONDS = 1800.0
AT_ONCE = 16
KEPT_SECONDS = 30  # a connection, for the next command
_LOST = 255  # ssh's own exit code
Result = TypeVar("Result")

# What ssh says → what to do about it.
_ADVICE = (
    ("identification has changed", "its host key is another one than before: find out why, then ssh-keygen -R {name}"),
    ("host key verification failed", "log in once by hand and accept its key: {ssh}"),
    ("permission denied", "your key is not known there: ssh-copy-id {target} (or name it with key: in the hosts file)"),
    ("could not resolve", "no such name: correct it, or add it to ~/.ssh/config"),
    ("connection refused", "no ssh server there: start it, or give the port as name:port"),
    ("timed out", "is it switched on, and reachable from here?"),
    ("no route", "is it switched on, and reachable from here?"),
)


class RemoteError(Exception):
    """A command on a host failed, or the host was not reached; with what to do about it."""

    def __init__(self, machine: Machine, text: str, code: int = _LOST) -> None:
        super().__init__(f"{machine.label}: {text}")
        self.machine, self.code = machine, code


class Reach:
    """One host of a cluster, as ssh reaches it. `localhost` is this machine, without ssh."""

    def __init__(self, machine: Machine, key: str | None = None) -> None:
        self.machine, self._key = machine, key

    @property
    def is_local(self) -> bool:
        return self.machine.name == "localhost"

    def ssh(self, *options: str) -> list[str]:
        """ssh and its options, as far as the host's name."""
        port = ["-p", str(self.machine.port)] if self.machine.port else []
        key = ["-i", self._key] if self._key else []
        return ["ssh", *port, *key, *options, self.machine.target]

    def argv(self, script: str) -> list[str]:
        """The command here that runs a script of the shell there. One connection serves many of them."""
        if self.is_local:
            return ["sh", "-c", script]
        shared = ("ControlMaster=auto", f"ControlPath={_sockets()}/%C", f"ControlPersist={KEPT_SECONDS}")
        options = [word for option in shared for word in ("-o", option)]
        return [*self.ssh(*OPTIONS, *options), shlex.join(["sh", "-c", script])]

    def run(self, script: str, *, given: IO[bytes] | bytes | None = None, seconds: float = SECONDS) -> str:
        """What the script prints; `given` is its standard input."""
        source: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        if given is not None:
            source = {"input": given} if isinstance(given, bytes) else {"stdin": given}
        try:
            done = subprocess.run(self.argv(script), capture_output=True, timeout=seconds, **source)
        except subprocess.TimeoutExpired:
            raise RemoteError(self.machine, f"no answer within {seconds:g} s") from None
        except OSError as error:
            raise RemoteError(self.machine, f"ssh cannot be started: {error.strerror}") from None
        if done.returncode != 0:
            raise RemoteError(self.machine, self._why(done), done.returncode)
        return str(done.stdout, errors="replace")

    def _why(self, done: subprocess.CompletedProcess[bytes]) -> str:
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode == _LOST and not self.is_local:
            for sign, advice in _ADVICE:
                if sign in said.lower():
                    words = {"name": self.machine.name, "target": self.machine.target, "ssh": shlex.join(self.ssh())}
                    return f"{_last(said)}; {advice.format(**words)}"
        return _last(said) or _last(done.stdout.decode(errors="replace")) or f"exit code {done.returncode}"

    def send(self, archive: Path, folder: str) -> None:
        """Unpacks an archive there, in a folder that appears when all of it has arrived."""
        place = shlex.quote(folder)
        script = (
            f'set -e; part={place}.$$; trap \'rm -rf "$part"\' EXIT; mkdir -p "$part"; tar -xzf - -C "$part"; '
            f'[ -e {place} ] || mv "$part" {place}'
        )
        with archive.open("rb") as file:
            self.run(script, given=file, seconds=COPY_SECONDS)

    def fetch(self, folder: str, names: Sequence[str], target: Path) -> None:
        """Files of a folder there into one here. One that has gone meanwhile is left out."""
        target.mkdir(parents=True, exist_ok=True)
        script = f"cd {shlex.quote(folder)} && tar -czf - --ignore-failed-read --null -T - 2>/dev/null || [ $? = 1 ]"
        with tempfile.TemporaryFile() as listed:
            listed.write("".join(f"{name}\0" for name in names).encode())
            listed.seek(0)
            with subprocess.Popen(self.argv(script), stdin=listed, stdout=subprocess.PIPE) as process:
                unpack = ["tar", "-xzf", "-", "-C", str(target)]
                try:
                    done = subprocess.run(unpack, stdin=process.stdout, timeout=COPY_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise RemoteError(self.machine, f"copying {folder} took longer than {COPY_SECONDS:g} s") from None
        if process.returncode or done.returncode:
            raise RemoteError(self.machine, f"copying {folder} failed", process.returncode or done.returncode)


def reaches(hosts: Hosts) -> list[Reach]:
    return [Reach(machine, hosts.key) for machine in hosts.hosts]


def everywhere(chosen: Iterable[Reach], work: Callable[[Reach], Result]) -> tuple[dict[str, Result], list[RemoteError]]:
    """On all hosts at once: what came out, by host, and what went wrong."""

    def attempt(reach: Reach) -> Result | RemoteError:
        try:
            return work(reach)
        except RemoteError as error:
            return error

    every = list(chosen)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(zip(every, pool.map(attempt, every), strict=True))
    good = {reach.machine.label: result for reach, result in found if not isinstance(result, RemoteError)}
    return good, [result for _, result in found if isinstance(result, RemoteError)]


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and set(line.strip()) != {"@"}]
    return lines[-1] if lines else ""


def _sockets() -> Path:
    """A private folder for the connections that are kept; short, as names of sockets are limited."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"paceline-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not folder.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} is not a private folder of yours: remove it, or set TMPDIR to one that is")
    return folder
