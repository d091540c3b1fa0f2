"""A real OAR on hosts of this machine: the first has server and database and is for logging in, the others work.

OAR has one configuration, in /etc/oar, and its programs look nowhere else: it is put back at the end, and only one bed
can be up at a time. At the end of a job OAR deletes whatever its user owns in /tmp, /var/tmp and /dev/shm of the host:
the hosts have their own, the user is made for this, and its home is elsewhere.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from hosts import SECONDS, Hosts, wait_until

PROGRAMS = ("/usr/sbin/Almighty", "/usr/sbin/sshd", "/usr/bin/pg_createcluster", "/usr/bin/oarsub", "/usr/bin/oarsh")
PACKAGES = "oar-server oar-server-pgsql oar-node oar-user oar-user-pgsql postgresql openssh-server"
CONF = Path("/etc/oar/oar.conf")
CONTROLLERS = ("cpuset", "cpu", "cpuacct", "devices", "freezer")
USER, PASSWORD, CLUSTER, PORT = "pcloar", "paceline", "paceline", 5479
# What a host needs before OAR's ssh daemon: its own cgroups at the places where OAR looks, and its own /var/lib/oar.
BOOT = """
set -e
place={place} name={name}
rm -rf "$place/varliboar"
mkdir -p "$place" /dev/oar_cgroups_links /dev/cpuset /run/sshd
cp -a /var/lib/oar "$place/varliboar"
mount --bind "$place/varliboar" /var/lib/oar
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
mount -t tmpfs -o size=1m,mode=755 tmpfs /dev/oar_cgroups_links
for c in {controllers}; do
  d=/sys/fs/cgroup/$c/pcloar_$name
  mkdir -p "$d"
  if [ "$c" = cpuset ]; then cat /sys/fs/cgroup/cpuset/cpuset.cpus >"$d/cpuset.cpus"
    cat /sys/fs/cgroup/cpuset/cpuset.mems >"$d/cpuset.mems"; fi
  echo $$ >"$d/tasks"
  ln -s "$d" /dev/oar_cgroups_links/$c
done
mount --bind /sys/fs/cgroup/cpuset/pcloar_$name /dev/cpuset
exec unshare --cgroup /usr/sbin/sshd -D -e -f /etc/oar/sshd_config -o PidFile=none
"""


def missing() -> str:
    absent = [program for program in PROGRAMS if not Path(program).exists()]
    return f"not found: {', '.join(absent)} (Debian: apt-get install {PACKAGES})" if absent else ""


class OarBed:
    """Hosts that work, with two cores each. The user's `home` and the environment `venv` are seen by all."""

    def __init__(self, count: int = 2) -> None:
        if lacking := missing():
            raise RuntimeError(lacking)
        self.hosts = Hosts(count + 1)
        self.names = self.hosts.names[1:]
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-oar-", dir="/srv"))
        self.home, self.venv = self.folder / "home", self.folder / "venv"
        self._before: bytes | None = None

    def __enter__(self) -> Self:
        self.folder.chmod(0o755)
        try:
            self._make_user()
            make_venv(self.venv)
            self._configure()
            self.hosts.__enter__()
            self._start_database()
            for number in range(1, len(self.names) + 1):
                self._start_sshd(number)
            self.hosts.start(0, ["/usr/sbin/Almighty"], output=self.folder / "almighty.log")
            address = f"</dev/tcp/{self.hosts.names[0]}/6666"
            wait_until(lambda: self.hosts.run(0, ["bash", "-c", address]).returncode == 0, "OAR's server answers")
            for name in self.names:
                for core in range(2):
                    self._said("oarnodesetting", "-a", "-h", name, "-p", f"cpuset={core}")
            wait_until(
                lambda: self._said("oarnodes", "-s").count("Alive") == 2 * len(self.names), "the hosts are alive"
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._quiet("pg_ctlcluster", "15", CLUSTER, "stop", "-m", "immediate")
        self.hosts.close()
        self._quiet("pg_dropcluster", "15", CLUSTER)
        for name in self.names:
            _remove_cgroups(name)
        if self._before is not None:
            CONF.write_bytes(self._before)  # in place: its owner and mode stay
        self._quiet("userdel", USER)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, line: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command line of the user's, where one logs in."""
        words = f"export PATH={self.venv}/bin:$PATH; cd {self.home}; {line}"
        return self.hosts.run(0, ["su", "-", USER, "-c", words], seconds=seconds)

    def said(self, line: str) -> str:
        done = self.run(line)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def reboot(self, number: int) -> None:
        """Starts a host that was killed; OAR may use it again."""
        name = self.hosts.names[number]
        _remove_cgroups(name)
        self.hosts.boot(number)
        self._start_sshd(number)
        listens = f"</dev/tcp/{name}/6667"
        wait_until(lambda: self.hosts.run(0, ["bash", "-c", listens]).returncode == 0, "the host answers")
        self._said("oarnodesetting", "-s", "Alive", "-h", name)

    def _start_sshd(self, number: int) -> None:
        name = self.hosts.names[number]
        text = BOOT.format(place=self.folder / name, name=name, controllers=" ".join(CONTROLLERS))
        self.hosts.start(number, ["bash", "-c", text], output=self.folder / f"{name}.log")

    def _said(self, *words: str) -> str:
        done = self.hosts.run(0, words)
        if done.returncode != 0:
            raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def _quiet(self, *words: str) -> None:
        subprocess.run(words, capture_output=True, timeout=SECONDS)

    def _make_user(self) -> None:
        self.home.mkdir()
        self._quiet("userdel", USER)
        subprocess.run(["useradd", "-d", str(self.home), "-s", "/bin/bash", USER], check=True, timeout=SECONDS)
        user = pwd.getpwnam(USER)
        os.chown(self.home, user.pw_uid, user.pw_gid)

    def _configure(self) -> None:
        self._before = CONF.read_bytes()
        text = self._before.decode()
        for name, value in {
            "DB_PORT": PORT,
            "DB_BASE_PASSWD": PASSWORD,
            "DB_BASE_PASSWD_RO": PASSWORD,
            "SERVER_HOSTNAME": self.hosts.names[0],
            "SCHEDULER_MIN_TIME_BETWEEN_2_CALLS": 0,
        }.items():
            text = re.sub(rf"^#?{name}=.*$", f'{name}="{value}"', text, flags=re.M)
        CONF.write_text(text)

    def _start_database(self) -> None:
        self._quiet("pg_dropcluster", "--stop", "15", CLUSTER)
        subprocess.run(
            ["pg_createcluster", "15", CLUSTER, "-p", str(PORT)], check=True, capture_output=True, timeout=SECONDS
        )
        self._said("pg_ctlcluster", "15", CLUSTER, "start")
        self._said("su", "postgres", "-c", f"psql -q -p {PORT} -c \"ALTER USER postgres PASSWORD '{PASSWORD}'\"")
        create = ["oar-database", "--create", "--db-admin-user=postgres", f"--db-admin-pass={PASSWORD}", "-y"]
        self._said(*create)


def _remove_cgroups(name: str) -> None:
    for controller in CONTROLLERS:
        top = Path(f"/sys/fs/cgroup/{controller}/pcloar_{name}")
        for path in sorted(top.rglob("*"), reverse=True) if top.exists() else []:
            if path.is_dir():
                path.rmdir()
        if top.exists():
            top.rmdir()


def make_venv(path: Path) -> None:
    """An environment that another user may run, with the packages of this one: ours may link into a private home."""
    python = next(each for each in (Path(sys.base_prefix) / "bin/python3", Path("/usr/bin/python3")) if _is_open(each))
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(path)], check=True, timeout=SECONDS)
    ours = next((Path(sys.prefix) / "lib").glob("python3*/site-packages"))
    (site,) = (path / "lib").glob("python3*/site-packages")
    assert site.parent.name == ours.parent.name, f"{python} is another Python than that of {sys.prefix}"
    (site / "theirs.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
    command = path / "bin/paceline"
    command.write_text(f'#!/bin/sh\nexec {path}/bin/python -m paceline "$@"\n')
    command.chmod(0o755)


def _is_open(path: Path) -> bool:
    """Whether everybody may run it, wherever it is a link to."""
    real = path.resolve()
    return real.exists() and all(parent.stat().st_mode & 0o001 for parent in (real, *real.parents))
