"""Whether the hosts of a cluster reach its head on arbitrary ports, as jobs need."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading

from paceline.ssh_cluster.environment import command_prefix
from paceline.ssh_cluster.hosts_file import ClusterConfig
from paceline.ssh_cluster.remote import RemoteError, on_all, remote_hosts

SECONDS = 30.0

# Accepts connections, sends and reads nothing, and ends with its standard input.
_LISTEN = """
import json, socket, sys, threading
from paceline.launch.launcher import own_addresses
server = socket.create_server(("", 0))
print(json.dumps([own_addresses(sys.argv[1] or None), server.getsockname()[1]]), flush=True)
def answer():
    while True:
        server.accept()[0].close()
threading.Thread(target=answer, daemon=True).start()
sys.stdin.read()
"""
_CONNECT = """
import json, socket, sys
addresses, port = json.loads(sys.argv[1])
errors = []
for address in addresses:
    if not address.startswith("127."):
        try:
            socket.create_connection((address, port), timeout=3).close()
            sys.exit(0)
        except OSError as error:
            errors.append(f"{address}: {error}")
sys.exit(f"it does not reach the head ({'; '.join(errors)}): open the firewall between the hosts for all TCP "
         "ports, or name their common network with interface:")
"""


def unreachable(config: ClusterConfig, workdir: str, python: str) -> list[RemoteError]:
    """An error for each host that cannot reach the head."""
    head, *others = remote_hosts(config)
    if not others:
        return []
    prefix = command_prefix(config, workdir, python)
    listen = shlex.join([python, "-c", _LISTEN, config.interface or ""])
    with subprocess.Popen(
        head.argv(prefix + listen), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            limit = threading.Timer(SECONDS, process.kill)
            limit.start()
            line = process.stdout.readline()
            limit.cancel()
            if not line:
                errors = process.communicate(timeout=SECONDS)[1].strip().splitlines()
                return [RemoteError(head.host, errors[-1] if errors else "the test program printed nothing")]
            connect = shlex.join([python, "-c", _CONNECT, json.dumps(json.loads(line))])
            _, failed = on_all(others, lambda host: host.run(prefix + connect))
            process.communicate("", timeout=SECONDS)
        finally:
            process.kill()
    return failed
