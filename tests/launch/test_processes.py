from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_orphans_are_found_and_ended() -> None:
    """A grandchild in a session of its own, whose parent is gone; in a process of its own, as it changes that one."""
    orphan = "import os,time\nif os.fork() == 0:\n os.setsid()\n time.sleep(60)"
    program = f"""
import subprocess, sys, time
from pathlib import Path
from paceline.launch import processes
processes.adopt_orphans()
subprocess.run([sys.executable, "-c", {orphan!r}])
found = processes.descendants(None)
left = processes.kill_all(None, 5.0)
print(len(found), left, *(process.pid for process in found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    count, left, pid = done.stdout.split()
    assert (count, left) == ("1", "0"), done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
