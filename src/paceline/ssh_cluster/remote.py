"""Hosts reached by ssh: running commands, sending and fetching files. They need only sh, tar and setsid."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline.config import UserError
from paceline.schedulers.ssh import OPTIONS, SshHost
from paceline.ssh_cluster.hosts_file import ClusterConfig

SECONDS = 60.0
COPY_SECONDS = 1800.0
MAX_PARALLEL = 16
KEPT_SECONDS = 30  # a connection stays open for the next command
_SSH_FAILED = 255  # ssh's own exit code
Result = TypeVar("Result")

# ssh's message → what to do.
_ADVICE = (
    ("identification has changed", "its host key has changed: find out why, then run ssh-keygen -R {name}"),
    ("host key verification failed", "log in once by hand and accept its key: {ssh}"),
    ("permission denied", "your key is not accepted there: ssh-copy-id {target} (or set key: in the hosts file)"),
    ("could not resolve", "unknown name: correct it, or add it to ~/.ssh/config"),
    ("connection refused", "no ssh server there: start it, or give its port as name:port"),
    ("timed out", "check that it is switched on and reachable from here"),
    ("no route", "check that it is switched on and reachable from here"),
)


class RemoteError(Exception):
    """A command failed on a host, or the host was not reached; the text says what to do."""

    def __init__(self, host: SshHost, text: str, code: int = _SSH_FAILED) -> None:
        super().__init__(f"{host.label}: {text}")
        self.host, self.code = host, code


class RemoteHost:
    """A host of a cluster. `localhost` is this machine, without ssh."""

    def __init__(self, host: SshHost, key: str | None = None) -> None:
        self.host, self._key = host, key

    @property
    def label(self) -> str:
        return self.host.label

    @property
    def is_local(self) -> bool:
        return self.host.name == "localhost"

    def ssh(self, *options: str) -> list[str]:
        """The ssh command up to and including the host's name."""
        port = ["-p", str(self.host.port)] if self.host.port else []
        # Without IdentitiesOnly, ssh would go on with other keys where this one is not accepted.
        key = ["-i", self._key, "-o", "IdentitiesOnly=yes"] if self._key else []
        return ["ssh", *port, *key, *options, self.host.target]

    def argv(self, script: str) -> list[str]:
        """Command that runs a shell script on the host, through a connection that is reused."""
        if self.is_local:
            return ["sh", "-c", script]
        # A connection is shared by those who name the same key: another one has to prove itself.
        own = hashlib.sha256(self._key.encode()).hexdigest()[:6] if self._key else ""
        shared = ("ControlMaster=auto", f"ControlPath={_socket_folder()}/{own}%C", f"ControlPersist={KEPT_SECONDS}")
        options = [word for option in shared for word in ("-o", option)]
        return [*self.ssh(*OPTIONS, *options), shlex.join(["sh", "-c", script])]

    def run(self, script: str, *, given: IO[bytes] | bytes | None = None, seconds: float = SECONDS) -> str:
        """The script's output; `given` is its standard input."""
        source: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        if given is not None:
            source = {"input": given} if isinstance(given, bytes) else {"stdin": given}
        try:
            done = subprocess.run(self.argv(script), capture_output=True, timeout=seconds, **source)
        except subprocess.TimeoutExpired:
            raise RemoteError(self.host, f"no answer within {seconds:g} s") from None
        except OSError as error:
            raise RemoteError(self.host, f"cannot start ssh: {error.strerror}") from None
        if done.returncode != 0:
            raise RemoteError(self.host, self._why(done), done.returncode)
        return str(done.stdout, errors="replace")

    def _why(self, done: subprocess.CompletedProcess[bytes]) -> str:
        errors = done.stderr.decode(errors="replace").strip()
        if done.returncode == _SSH_FAILED and not self.is_local:
            for sign, advice in _ADVICE:
                if sign in errors.lower():
                    words = {"name": self.host.name, "target": self.host.target, "ssh": shlex.join(self.ssh())}
                    return f"{_last_line(errors)}; {advice.format(**words)}"
        return _last_line(errors) or _last_line(done.stdout.decode(errors="replace")) or f"exit code {done.returncode}"

    def send(self, archive: Path, folder: str) -> None:
        """Unpack an archive into a folder there, which appears only when all of it has arrived."""
        place = shlex.quote(folder)
        script = (
            f'set -e; part={place}.$$; trap \'rm -rf "$part"\' EXIT; mkdir -p "$part"; tar -xzf - -C "$part"; '
            f'[ -e {place} ] || mv "$part" {place}'
        )
        with archive.open("rb") as file:
            self.run(script, given=file, seconds=COPY_SECONDS)

    def fetch(self, folder: str, names: Sequence[str], target: Path) -> None:
        """Copy files of a folder there into a folder here, without those that are gone meanwhile."""
        target.mkdir(parents=True, exist_ok=True)
        script = f"cd {shlex.quote(folder)} && tar -czf - --ignore-failed-read --null -T - 2>/dev/null || [ $? = 1 ]"
        with tempfile.TemporaryFile() as listing:
            listing.write("".join(f"{name}\0" for name in names).encode())
            listing.seek(0)
            with subprocess.Popen(self.argv(script), stdin=listing, stdout=subprocess.PIPE) as process:
                unpack = ["tar", "-xzf", "-", "-C", str(target)]
                try:
                    done = subprocess.run(unpack, stdin=process.stdout, timeout=COPY_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise RemoteError(self.host, f"copying {folder} took longer than {COPY_SECONDS:g} s") from None
        if process.returncode or done.returncode:
            raise RemoteError(self.host, f"copying {folder} failed", process.returncode or done.returncode)


def remote_hosts(config: ClusterConfig) -> list[RemoteHost]:
    if config.key and not Path(config.key).is_file():  # ssh would go on without it
        raise UserError(f"key: {config.key} does not exist; correct it in the hosts file of {config.name}")
    return [RemoteHost(host, config.key) for host in config.hosts]


def on_all(
    hosts: Iterable[RemoteHost], work: Callable[[RemoteHost], Result]
) -> tuple[dict[str, Result], list[RemoteError]]:
    """Do the work on all hosts in parallel: the results by host label, and the errors."""

    def attempt(host: RemoteHost) -> Result | RemoteError:
        try:
            return work(host)
        except RemoteError as error:
            return error

    every = list(hosts)
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        found = list(zip(every, pool.map(attempt, every), strict=True))
    good = {host.label: result for host, result in found if not isinstance(result, RemoteError)}
    return good, [result for _, result in found if isinstance(result, RemoteError)]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and set(line.strip()) != {"@"}]
    return lines[-1] if lines else ""


def _socket_folder() -> Path:
    """A private folder for ssh's control sockets; short, because names of sockets are limited."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"paceline-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not folder.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            f"{folder} is not private to you: remove it, or set TMPDIR to a folder that only you can access"
        )
    return folder
