"""A job of a private cluster, on its head: `python -m paceline.launch.gather`.

The other hosts cannot be reached from here: a key is not needed on any of them. Whoever submits the job fetches the
address and the key of its launcher, and starts a supervisor on each host with them; these come by themselves.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.launch.cluster import Cluster, LaunchError, Options
from paceline.launch.scheduler import Allocation, Host
from paceline.launch.script import LAUNCH

MEET = "meet"
"""Folder of the job: for each other host the contact, until it is fetched, and why its supervisor could not start."""
FAILED = 1

# Hands the contact over, and stays until the launcher has heard of the host, or of why it will not come.
_COURIER = """
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
    parser = argparse.ArgumentParser(prog="paceline.launch.gather", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the job")
    parser.add_argument("--hosts", required=True, help="JSON: name, cpus, gpus of each; the first is this one")
    parser.add_argument("--interface")
    parser.add_argument("--min-nodes", type=int)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    hosts = [Host(name, cpus, gpus) for name, cpus, gpus in json.loads(options.hosts)]
    hosts[0] = Host(platform.node(), hosts[0].cpus, hosts[0].gpus)  # its name at home may be unknown here
    meet = options.folder / MEET
    meet.mkdir(mode=0o700, exist_ok=True)
    number = {host.name: index for index, host in enumerate(hosts)}

    def courier(host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return ["sh", "-c", _COURIER, "courier", str(meet / str(number[host])), str(int(2 * options.timeout))]

    settings = Options(
        folder=options.folder / LAUNCH,
        interface=options.interface,
        min_nodes=options.min_nodes,
        timeout=options.timeout,
        dashboard=options.dashboard,
    )
    allocation = Allocation("cluster", options.folder.name, tuple(hosts))
    try:
        return Cluster(allocation, courier, settings).run(options.command[1:])
    except (LaunchError, UserError) as error:
        print(f"paceline: failed: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
