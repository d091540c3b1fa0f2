"""Whether the hosts of a private cluster reach its head on ports that nobody opened for them: jobs need that."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading

from paceline.launch.environment import inside
from paceline.launch.hosts_file import Hosts
from paceline.launch.remote import Reach, RemoteError, everywhere, reaches

SECONDS = 30.0

# Says nothing and is told nothing; it ends with its input.
_LISTEN = """
import json, socket, sys, threading
from paceline.launch.cluster import own_addresses
server = socket.create_server(("", 0))
print(json.dumps([own_addresses(sys.argv[1] or None), server.getsockname()[1]]), flush=True)
def answer():
    while True:
        server.accept()[0].close()
threading.Thread(target=answer, daemon=True).start()
sys.stdin.read()
"""
_KNOCK = """
import json, socket, sys
addresses, port = json.loads(sys.argv[1])
said = []
for address in addresses:
    if not address.startswith("127."):
        try:
            socket.create_connection((address, port), timeout=3).close()
            sys.exit(0)
        except OSError as error:
            said.append(f"{address}: {error}")
sys.exit(f"the head is not reached from there ({'; '.join(said)}): open the firewall between the hosts for all TCP "
         "ports, or name their common network with interface:")
"""


def unreachable(hosts: Hosts, workdir: str, python: str) -> list[RemoteError]:
    """The hosts that cannot reach the head."""
    head, *others = reaches(hosts)
    if not others:
        return []
    before = inside(hosts, workdir, python)
    words = shlex.join([python, "-c", _LISTEN, hosts.interface or ""])
    with subprocess.Popen(
        head.argv(before + words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            limit = threading.Timer(SECONDS, process.kill)
            limit.start()
            line = process.stdout.readline()
            limit.cancel()
            if not line:
                _, said = process.communicate(timeout=SECONDS)
                return [RemoteError(head.machine, said.strip().splitlines()[-1] if said.strip() else "it said nothing")]
            knock = shlex.join([python, "-c", _KNOCK, json.dumps(json.loads(line))])

            def work(reach: Reach) -> None:
                reach.run(before + knock)

            _, failed = everywhere(others, work)
            process.communicate("", timeout=SECONDS)
        finally:
            process.kill()  # what has not ended by now; it has no effect on what has
    return failed
