from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.schedulers.ssh import SshHost
from paceline.ssh_cluster.remote import RemoteHost


@pytest.mark.needs("ssh")
def test_a_connection_is_shared_only_with_the_same_key(tmp_path: Path) -> None:
    """As ssh itself understands the options: where the shared connection's socket is, and that no other key helps."""

    def options(key: Path | None) -> dict[str, str]:
        argv = RemoteHost(SshHost(target="ann@node0", port=2222), key and str(key)).argv("true")
        shown = subprocess.check_output([argv[0], "-G", *argv[1:]], text=True, timeout=10)
        return {name: value for name, _, value in (line.partition(" ") for line in shown.splitlines())}

    keys = [tmp_path / "one", tmp_path / "two"]
    for key in keys:
        key.touch()
    plain, one, two = (options(key) for key in (None, *keys))
    assert len({each["controlpath"] for each in (plain, one, two)}) == 3
    assert options(keys[0])["controlpath"] == one["controlpath"]
    assert len(one["controlpath"]) + 20 < 108, "names of sockets are limited"
    assert one["identitiesonly"] == "yes" and one["identityfile"] == str(keys[0])
