"""A real SLURM on hosts of this machine: the first has the controller and is where one logs in, the others work.

Everything it writes is below one folder; it ends with the hosts. Its munge is its own too.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hosts import SECONDS, Hosts, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacct", "mariadbd", "mariadb-install-db")
# 22.05 finds no cgroup plugin by itself where there is no systemd.
CGROUP = "CgroupPlugin=cgroup/v1\n"
# A job that is queued again begins when its old credentials have expired: after 2 minutes, were it not said otherwise.
CONF = """
ClusterName=paceline
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
{accounting}
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
KillWait=10
SlurmdTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE OverTimeLimit=0 GraceTime=40 State=UP
PartitionName=urgent Nodes={names} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=short Nodes={names} MaxTime=30 State=UP
"""
NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
# squeue forgets an ended job after seconds, so that only accounting knows it. The password is munge's socket.
ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={controller}
AccountingStoragePass={folder}/munge/socket
MinJobAge=2"""
DATABASE_PORT = 3306
DATABASE_CONF = """
DbdHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={port}
StorageUser=root
"""


def missing(accounting: bool = False) -> str:
    wanted, packages = PROGRAMS, "slurm-wlm munge"
    if accounting:
        wanted, packages = (*PROGRAMS, *ACCOUNTING_PROGRAMS), f"{packages} slurmdbd mariadb-server"
    absent = [program for program in wanted if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"not found: {', '.join(absent)} (Debian: apt-get install {packages})" if absent else ""


class SlurmBed:
    """`count` hosts that work, with `cpus` each, the last with a GPU of paper; all hosts see `folder`. With
    `accounting`, it has a database of its own, and sacct answers."""

    def __init__(self, folder: Path, count: int = 2, cpus: int = 2, *, accounting: bool = False) -> None:
        if lacking := missing(accounting):
            raise RuntimeError(lacking)
        self.folder, self.cpus, self._accounting = folder / "slurm", cpus, accounting
        self.home = folder / "home"
        self.hosts = Hosts(count + 1, shared=[folder])
        self.names = self.hosts.names[1:]
        self._munge: subprocess.Popen[bytes] | None = None
        self.env = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}:/usr/sbin",
        }

    def __enter__(self) -> Self:
        for path in (self.folder, self.folder / "state", self.folder / "munge", self.home):
            path.mkdir(parents=True)
        self.folder.chmod(0o755)
        try:
            self._start_munge()
            self.hosts.__enter__()
            nodes = [
                f"NodeName={name} NodeAddr={ip} CPUs={self.cpus} RealMemory=4000 State=UNKNOWN"
                for name, ip in list(zip(self.hosts.names, self.hosts.ips, strict=True))[1:]
            ]
            nodes[-1] += " Gres=gpu:1"
            (self.folder / "gres.conf").write_text(f"NodeName={self.names[-1]} Name=gpu File=/dev/null\n")
            (self.folder / "slurm.conf").write_text(
                CONF.format(
                    controller=self.hosts.names[0],
                    address=self.hosts.ips[0],
                    folder=self.folder,
                    nodes="\n".join(nodes),
                    names=",".join(self.names),
                    accounting=(ACCOUNTING if self._accounting else NO_ACCOUNTING).format(
                        controller=self.hosts.names[0], folder=self.folder
                    ),
                )
            )
            (self.folder / "cgroup.conf").write_text(CGROUP)
            if self._accounting:
                self._start_accounting()
            self.hosts.start(0, ["slurmctld", "-D"], env=self.env, output=self.folder / "controller.out")
            for number, name in enumerate(self.names, start=1):
                (self.folder / f"spool.{name}").mkdir()
                self._start_slurmd(number)
            wait_until(self._is_idle, "all hosts of SLURM are idle", 30)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.hosts.close()
        if self._munge is not None:
            self._munge.terminate()
            self._munge.wait(timeout=SECONDS)

    def reboot(self, number: int) -> None:
        """Starts a host that was killed."""
        self.hosts.boot(number)
        self._start_slurmd(number)

    def _start_accounting(self) -> None:
        data, output = self.folder / "database", self.folder / "database.out"
        made = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
        self.hosts.run(0, [*made, "--auth-root-authentication-method=normal"], env=self.env).check_returncode()
        serve = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={data}/socket"]
        serve += ["--bind-address=127.0.0.1", f"--port={DATABASE_PORT}", "--innodb-buffer-pool-size=16M"]
        self.hosts.start(0, serve, env=self.env, output=output)
        wait_until((data / "socket").exists, "the database answers", 60)
        conf = self.folder / "slurmdbd.conf"
        text = DATABASE_CONF.format(controller=self.hosts.names[0], folder=self.folder, port=DATABASE_PORT)
        conf.write_text(text)
        conf.chmod(0o600)
        self.hosts.start(0, ["slurmdbd", "-D"], env=self.env, output=self.folder / "slurmdbd.out")
        wait_until(lambda: self.run(["sacctmgr", "list", "cluster"]).returncode == 0, "accounting answers", 60)

    def _start_slurmd(self, number: int) -> None:
        name = self.hosts.names[number]
        self.hosts.start(number, ["slurmd", "-D", "-N", name], env=self.env, output=self.folder / f"{name}.out")

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, seconds: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """A command where one logs in."""
        return self.hosts.run(0, argv, env={**self.env, **(env or {})}, cwd=str(self.home), seconds=seconds)

    def said(self, *argv: str) -> str:
        done = self.run(argv)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def _is_idle(self) -> bool:
        done = self.run(["sinfo", "--noheader", "--partition=debug", "--format=%T %D"])
        return done.stdout.split() == ["idle", str(len(self.names))]

    def _start_munge(self) -> None:
        place = self.folder / "munge"
        place.chmod(0o755)
        key = place / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = [f"--{name}-file={place}/{name}" for name in ("key", "pid", "log", "seed")]
        # --force: the test's folder is below /tmp, which others may write to.
        argv = ["munged", "--foreground", "--force", f"--socket={place}/socket", *files]
        with (place / "out").open("wb") as out:
            self._munge = subprocess.Popen(argv, env={**os.environ, **self.env}, stdout=out, stderr=out)
        wait_until((place / "socket").exists, "munge answers", 10)
