"""Jobs on an ssh cluster, for `jobs`, `logs`, `cancel` and `status`, which ask its head."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.scheduler import JobStatus
from paceline.schedulers.script import CANCELLED, EXIT_CODE, LAUNCH, OUTPUT, STARTS
from paceline.ssh_cluster.cluster_state import ClusterState, load
from paceline.ssh_cluster.head_job import IS_RUNNING
from paceline.ssh_cluster.remote import RemoteError, RemoteHost, remote_hosts
from paceline.ssh_cluster.start_job import PREFIX

RUN = "run"
"""Copy of the small files of a run directory, in the job's folder here."""
_TAIL_BYTES = 1 << 16
_SECONDS = 60.0


class ClusterJobs:
    """The jobs of one cluster, with those methods of a `Scheduler` that the readers of jobs call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._asked: tuple[str, ...] = ()

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        self._asked = tuple(ids)
        script = f"""
cd {{workdir}}/jobs || exit 1
for id in {shlex.join(ids)}; do
  if [ -e "$id/{EXIT_CODE}" ]; then echo "$id ended $(cat "$id/{EXIT_CODE}")"
  elif {IS_RUNNING}; then echo "$id running"
  elif [ -d "$id" ]; then echo "$id gone"
  fi
done
echo answered"""
        return self._argv(script)

    def states(self, text: str) -> dict[str, JobStatus]:
        lines = [line.split() for line in text.splitlines()]
        if ["answered"] not in lines:
            return {each: JobStatus("unknown", f"no answer from {self.name}") for each in self._asked}
        states: dict[str, JobStatus] = {}
        for words in lines:
            if words[1:2] == ["running"]:
                states[words[0]] = JobStatus("running")
            elif words[1:2] == ["gone"]:
                states[words[0]] = JobStatus("failed", "it left no exit code: it was killed, or the head was restarted")
            elif words[1:2] == ["ended"] and words[2].isdecimal():
                states[words[0]] = JobStatus("done" if words[2] == "0" else "failed", exit_code=int(words[2]))
        return states

    def cancel_argv(self, job_id: str) -> list[str]:
        script = f'cd {{workdir}}/jobs && id={shlex.quote(job_id)} && touch "$id/{CANCELLED}" && if {IS_RUNNING}; then '
        return self._argv(f'{script}kill -s TERM "$(cat "$id/pid")"; fi')

    def copy_files(self, record: JobRecord, output_only: bool) -> None:
        """Copy into the job's folder here: new output, exit code, timeline and the small files of its run directory."""
        try:
            cluster, head = self._head()
            folder = f"{shlex.quote(cluster.workdir)}/jobs/{shlex.quote(record.id)}"
            _append(head, f"{folder}/{OUTPUT}", record.output)
            if output_only:
                return
            run = shlex.quote(record.run)
            script = f"""
cd {folder} || exit 1
set --
for each in {EXIT_CODE} {STARTS} {LAUNCH}/timeline.jsonl; do [ ! -e "$each" ] || set -- "$@" "$each"; done
if [ -n {run} ] && [ -d {run} ]; then
  mkdir -p {RUN}/logs
  for each in status.json summary.json logs/events.log; do cp {run}/"$each" {RUN}/"$each" 2>/dev/null; done
  tail -c {_TAIL_BYTES} {run}/metrics.jsonl >{RUN}/metrics.jsonl 2>/dev/null
  set -- "$@" {RUN}
fi
[ $# = 0 ] || tar -cf - "$@\""""
            if archive := _output(head, script):
                unpack = ["tar", "-xf", "-", "-C", str(record.folder)]
                subprocess.run(unpack, input=archive, timeout=_SECONDS, check=True, capture_output=True)
        except (UserError, RemoteError, OSError, subprocess.SubprocessError):
            return  # the old files stay; the state says that there was no answer

    def _argv(self, script: str) -> list[str]:
        try:
            cluster, head = self._head()
        except UserError:
            return ["false"]  # no answer: the state says so
        return head.argv(script.replace("{workdir}", shlex.quote(cluster.workdir)))

    def _head(self) -> tuple[ClusterState, RemoteHost]:
        cluster = load(self.name.removeprefix(PREFIX))
        return cluster, remote_hosts(cluster.config)[0]


def copy_job_files(record: JobRecord, *, output_only: bool = False) -> None:
    """Bring a job's folder here up to date; a scheduler's jobs write into it themselves."""
    if record.scheduler.startswith(PREFIX):
        ClusterJobs(record.scheduler).copy_files(record, output_only)


def run_folder(record: JobRecord) -> Path:
    """Where a job's run directory can be read: the copy of one on an ssh cluster."""
    return record.folder / RUN if record.scheduler.startswith(PREFIX) else Path(record.run)


def _append(head: RemoteHost, source: str, target: Path) -> None:
    size = target.stat().st_size if target.exists() else 0
    if new := _output(head, f"[ ! -e {source} ] || tail -c +{size + 1} {source}"):
        with target.open("ab") as file:
            file.write(new)


def _output(head: RemoteHost, script: str) -> bytes:
    done = subprocess.run(head.argv(script), capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    return done.stdout if done.returncode == 0 else b""
