"""A shell on the head of a private cluster, and its web pages here: through ssh, on 127.0.0.1 at both ends."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import socket
import subprocess
import time
from typing import IO

from paceline.config import UserError
from paceline.launch.environment import inside
from paceline.launch.hosts_file import Up
from paceline.launch.node import TOKEN
from paceline.launch.remote import Reach, RemoteError, reaches
from paceline.launch.script import LAUNCH

START_SECONDS = 90.0
_FREE = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
# A connection of its own: a tunnel in a shared one would stay open after us.
_ALONE = ("-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# The newest job whose Ray has a dashboard: where it listens, and the file with the token that the page asks for.
_DASHBOARD = """
cd %s/jobs || exit 1
for id in $(ls -t); do
  [ ! -e "$id/exit_code" ] || continue
  folder=$(sed -n 's|.*Ray at [^,]*, \\(/[^"]*\\)".*|\\1|p' "$id/%s/timeline.jsonl" | head -n 1)
  log=$folder/session_latest/logs/dashboard.log
  port=$(grep -ohE 'initialized at 127[.]0[.]0[.]1:[0-9]+' "$log" 2>/dev/null | tail -n 1 | sed 's/.*://')
  if [ -n "$port" ]; then echo "$port $folder/%s $id"; exit 0; fi
done
exit 1
"""


def attach(up: Up) -> int:
    """Until the user leaves the shell; its exit code."""
    head = reaches(up.hosts)[0]
    shell = f'cd {shlex.quote(up.workdir)} && {inside(up.hosts, up.workdir, up.python)} "${{SHELL:-sh}}" -i'
    argv = (
        ["sh", "-c", shell]
        if head.is_local
        else [*head.ssh("-t", "-o", "ConnectTimeout=10"), f"exec sh -c {shlex.quote(shell)}"]
    )
    print(f"folder     {head.machine.name}:{up.workdir} (runs and jobs are in it; Ctrl-D leaves)")
    return subprocess.run(argv).returncode


def tensorboard(up: Up, port: int = 0) -> int:
    """On the head, for as long as we look at it."""
    head, here = reaches(up.hosts)[0], _port(port, 6006)
    before = inside(up.hosts, up.workdir, up.python)
    there = here if head.is_local else int(head.run(before + shlex.join([up.python, "-c", _FREE])))
    words = ["-m", "tensorboard.main", "--logdir", f"{up.workdir}/runs", "--host", "127.0.0.1", "--port", str(there)]
    # When our end closes its input, TensorBoard ends.
    script = f"{before}{shlex.join([up.python, *words])} </dev/null & pid=$!; cat >/dev/null; kill $pid; wait $pid"
    return _hold(
        head, script, here, there, f"TensorBoard of {head.machine.name}:{up.workdir}/runs", "TensorBoard .* at http"
    )


def dashboard(up: Up, port: int = 0) -> int:
    """Of the newest job that runs."""
    head, here = reaches(up.hosts)[0], _port(port, 8265)
    try:
        there, token, job = head.run(_DASHBOARD % (shlex.quote(up.workdir), LAUNCH, TOKEN)).split()
    except RemoteError as error:
        if error.code != 1:
            raise
        hint = "" if up.hosts.dashboard else " (dashboard: false in the hosts file)"
        raise UserError(
            f"no job with a dashboard runs on {up.name}{hint}: paceline submit --on cluster:{up.name}"
        ) from None
    print(f"token      the page asks for it once: {shlex.join([*head.ssh(), 'cat', token])}")
    return _hold(head, "echo open; cat >/dev/null", here, int(there), f"Ray's dashboard of {job}", "^open")


def _port(asked: int, usual: int) -> int:
    for port in (asked,) if asked else (usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise UserError(f"--port {asked} is in use here: give another, or none")


def _hold(head: Reach, script: str, here: int, there: int, what: str, sign: str) -> int:
    """The tunnel, until Ctrl-C or until the other end goes; `sign` in the script's output says that it is ready."""
    if head.is_local:
        here, argv = there, ["sh", "-c", script]
    else:
        way = ("-T", *_ALONE, "-L", f"127.0.0.1:{here}:127.0.0.1:{there}")
        argv = [*head.ssh(*way), shlex.join(["sh", "-c", script])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            said = _wait_for(sign, process.stdout)
            if said is not None:
                raise RemoteError(head.machine, f"no {what}: {said or 'it said nothing'}")
            print(f"{what}\nopen       http://127.0.0.1:{here}/ (Ctrl-C closes it)", flush=True)
            while os.read(process.stdout.fileno(), 4096):
                pass
            return 0
        except KeyboardInterrupt:
            return 0
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(sign: str, stream: IO[bytes]) -> str | None:
    """None when it came; else the last that was said instead."""
    limit, text = time.monotonic() + START_SECONDS, ""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < limit:
            if not selector.select(1.0):
                continue
            data = os.read(stream.fileno(), 4096)
            text += data.decode(errors="replace")
            if re.search(sign, text, re.M):
                return None
            if not data:
                break
    return text.strip().splitlines()[-1] if text.strip() else ""
