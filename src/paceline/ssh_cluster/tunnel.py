"""A shell on the head of a cluster, and its web pages here: through ssh, on 127.0.0.1 at both ends."""

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
from paceline.ray_folder import TOKEN
from paceline.schedulers.script import LAUNCH
from paceline.ssh_cluster.cluster_state import ClusterState
from paceline.ssh_cluster.environment import command_prefix
from paceline.ssh_cluster.remote import RemoteError, RemoteHost, remote_hosts

START_SECONDS = 90.0
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
# A separate connection: a tunnel in a shared one would stay open after this process.
_SEPARATE = ("ControlPath=none", "ExitOnForwardFailure=yes", "BatchMode=yes", "ConnectTimeout=10")
# The newest job whose Ray has a dashboard: its port, and the file with the token that the page asks for.
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


def attach(cluster: ClusterState) -> int:
    """A shell until the user leaves it; its exit code."""
    cluster.check_is_up()
    head, folder = remote_hosts(cluster.config)[0], cluster.workdir
    prefix = command_prefix(cluster.config, cluster.workdir, cluster.python)
    shell = f'cd {shlex.quote(folder)} && {prefix} "${{SHELL:-sh}}" -i'
    argv = ["sh", "-c", shell]
    if not head.is_local:
        argv = [*head.ssh("-t", "-o", "ConnectTimeout=10"), f"exec sh -c {shlex.quote(shell)}"]
    print(f"folder     {head.host.name}:{folder} (contains runs and jobs; Ctrl-D leaves)")
    return subprocess.run(argv).returncode


def tensorboard(cluster: ClusterState, port: int = 0) -> int:
    """TensorBoard on the head, as long as the tunnel is open."""
    cluster.check_is_up()
    head, here = remote_hosts(cluster.config)[0], _local_port(port, 6006)
    prefix = command_prefix(cluster.config, cluster.workdir, cluster.python)
    there = here if head.is_local else int(head.run(prefix + shlex.join([cluster.python, "-c", _FREE_PORT])))
    words = [cluster.python, "-m", "tensorboard.main", "--logdir", f"{cluster.workdir}/runs"]
    words += ["--host", "127.0.0.1", "--port", str(there)]
    # TensorBoard ends when the tunnel closes this script's standard input.
    script = f"{prefix}{shlex.join(words)} </dev/null & pid=$!; cat >/dev/null; kill $pid; wait $pid"
    title = f"TensorBoard of {head.host.name}:{cluster.workdir}/runs"
    return _open_tunnel(head, script, here, there, title, "TensorBoard .* at http")


def dashboard(cluster: ClusterState, port: int = 0) -> int:
    """Ray's dashboard of the newest running job."""
    head, here = remote_hosts(cluster.config)[0], _local_port(port, 8265)
    try:
        there, token, job = head.run(_DASHBOARD % (shlex.quote(cluster.workdir), LAUNCH, TOKEN)).split()
    except RemoteError as error:
        if error.code != 1:
            raise
        hint = "" if cluster.config.dashboard else " (dashboard: false in the hosts file)"
        submit = f"paceline submit --on cluster:{cluster.name}"
        raise UserError(f"no job with a dashboard runs on {cluster.name}{hint}; start one: {submit}") from None
    print(f"token      the page asks for it once: {shlex.join([*head.ssh(), 'cat', token])}")
    return _open_tunnel(head, "echo open; cat >/dev/null", here, int(there), f"Ray's dashboard of {job}", "^open")


def _local_port(wanted: int, usual: int) -> int:
    for port in (wanted,) if wanted else (usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise UserError(f"--port {wanted} is in use here: give another, or leave it out")


def _open_tunnel(head: RemoteHost, script: str, here: int, there: int, title: str, sign: str) -> int:
    """A tunnel until Ctrl-C or until the other end closes; `sign` in the script's output means that it is ready."""
    if head.is_local:
        here, argv = there, ["sh", "-c", script]
    else:
        options = [word for option in _SEPARATE for word in ("-o", option)]
        forward = f"127.0.0.1:{here}:127.0.0.1:{there}"
        argv = [*head.ssh("-T", *options, "-L", forward), shlex.join(["sh", "-c", script])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            error = _wait_for(sign, process.stdout)
            if error is not None:
                raise RemoteError(head.host, f"no {title}: {error or 'no message'}")
            print(f"{title}\nopen       http://127.0.0.1:{here}/ (Ctrl-C closes it)", flush=True)
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
    """None when the sign has come, else the last line that came instead."""
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
