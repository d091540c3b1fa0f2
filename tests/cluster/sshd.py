"""A real sshd on every host, and the `ssh` that reaches them: a key of the test's own, in folders of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hosts import SECONDS, Hosts, wait_until

_SERVER = """
ListenAddress {ip}
Port 22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
AcceptEnv NOTHING
"""
_CLIENT = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
"""


def start_sshd(hosts: Hosts, folder: Path, only: list[int] | None = None) -> dict[str, str]:
    """Starts the servers; the variables under which `ssh` finds them."""
    folder.mkdir(exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("key", "host_key"):
        if not (folder / name).exists():
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, timeout=SECONDS)
    (folder / "client").write_text(_CLIENT.format(folder=folder))
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/client "$@"\n')
    ssh.chmod(0o755)
    for host in range(len(hosts.names)) if only is None else only:
        conf = folder / f"server{host}"
        conf.write_text(_SERVER.format(ip=hosts.ips[host], folder=folder))
        hosts.start(host, ["/usr/sbin/sshd", "-D", "-e", "-f", str(conf)], output=folder / f"server{host}.log")
        wait_until(lambda at=host: _answers(hosts, at), f"sshd on {hosts.names[host]}")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def _answers(hosts: Hosts, host: int) -> bool:
    words = ["bash", "-c", f"exec 3<>/dev/tcp/{hosts.ips[host]}/22"]
    return hosts.run(host, words).returncode == 0
