"""A job on the head of a cluster: `python -m paceline.ssh_cluster.head_job`.

The head cannot log in to the other hosts, which therefore need no keys to each other. The machine that submits the job
fetches the launcher's address and key from the head, and starts a supervisor on each host with them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.launch.launcher import Launcher, LaunchError
from paceline.launch.options import LaunchOptions
from paceline.schedulers.scheduler import Allocation, Host
from paceline.schedulers.script import EXIT_CODE, LAUNCH, SCRIPT

CONTACTS = "contacts"
"""Folder of a job: the contact for each other host until it is fetched, and why its supervisor could not start."""
IS_RUNNING = f'ps -ww -o args= -p "$(cat "$id/pid")" 2>/dev/null | grep -qF "$id/{SCRIPT}"'
"""Shell condition in the folder of jobs: whether the process of job $id is still the one that was started."""
LIST_RUNNING = (
    f'for id in *; do if [ -e "$id/pid" ] && [ ! -e "$id/{EXIT_CODE}" ] && {IS_RUNNING}; then echo "$id"; fi; done'
)
FAILED = 1

# Stands for the command that starts a supervisor: it writes the contact from its standard input to a file, and runs
# until the launcher has heard from the host, or until somebody writes why the supervisor could not start.
_HAND_OVER = """
umask 077
cat >"$1.part" && mv "$1.part" "$1"
left=$2
while [ "$left" -gt 0 ]; do
  if [ -e "$1.failed" ]; then cat "$1.failed"; exit 1; fi
  sleep 0.5
  left=$((left - 1))
done
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paceline.ssh_cluster.head_job", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the job")
    parser.add_argument("--hosts", required=True, help="JSON: name, cpus, gpus of each; the first is this one")
    parser.add_argument("--interface")
    parser.add_argument("--min-nodes", type=int)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    hosts = [Host(name, cpus, gpus) for name, cpus, gpus in json.loads(options.hosts)]
    hosts[0] = Host(platform.node(), hosts[0].cpus, hosts[0].gpus)  # the submitter's name for it may be unknown here
    contacts = options.folder / CONTACTS
    contacts.mkdir(mode=0o700, exist_ok=True)
    index = {host.name: number for number, host in enumerate(hosts)}

    def hand_over(host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return ["sh", "-c", _HAND_OVER, "sh", str(contacts / str(index[host])), str(int(2 * options.timeout))]

    settings = LaunchOptions(
        folder=options.folder / LAUNCH,
        interface=options.interface,
        min_nodes=options.min_nodes,
        timeout=options.timeout,
        dashboard=options.dashboard,
    )
    allocation = Allocation("cluster", options.folder.name, tuple(hosts))
    try:
        return Launcher(allocation, hand_over, settings).run(options.command[1:])
    except (LaunchError, UserError) as error:
        print(f"paceline: failed: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
