"""Jobs of a private cluster, as `jobs`, `logs`, `cancel` and `status` ask for them: by ssh, on its head."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import UserError
from paceline.launch.cluster_submit import PREFIX
from paceline.launch.hosts_file import Up, load
from paceline.launch.remote import Reach, RemoteError, reaches
from paceline.launch.scheduler import JobStatus
from paceline.launch.script import CANCELLED, EXIT_CODE, LAUNCH, OUTPUT, SCRIPT, STARTS

if TYPE_CHECKING:
    from paceline.launch.record import Record
    from paceline.launch.scheduler import Scheduler

RUN = "run"
"""In the folder of a job here: the small files of its run directory, as they were last seen."""
_TAIL_BYTES = 1 << 16
_SECONDS = 60.0
_IS_OURS = f'ps -ww -o args= -p "$(cat "$id/pid")" 2>/dev/null | grep -qF "$id/{SCRIPT}"'


def queue_of(name: str) -> Scheduler | PrivateCluster:
    """Whoever knows about the jobs that were submitted with `--on NAME`."""
    from paceline.launch import SCHEDULERS

    return PrivateCluster(name) if name.startswith(PREFIX) else SCHEDULERS[name]


def bring(record: Record, *, output_only: bool = False) -> None:
    """Has the files of a job here, where they are not already."""
    queue = queue_of(record.scheduler)
    if isinstance(queue, PrivateCluster):
        queue.bring(record, output_only)


def run_folder(record: Record) -> Path:
    """Where its run directory can be read; of one on a private cluster, what was brought of it."""
    return record.folder / RUN if record.scheduler.startswith(PREFIX) else Path(record.run)


class PrivateCluster:
    """What `jobs.py` wants of a scheduler."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._asked: tuple[str, ...] = ()

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        self._asked = tuple(ids)
        script = f"""
cd {{workdir}}/jobs || exit 1
for id in {shlex.join(ids)}; do
  if [ -e "$id/{EXIT_CODE}" ]; then echo "$id ended $(cat "$id/{EXIT_CODE}")"
  elif {_IS_OURS}; then echo "$id running"
  elif [ -d "$id" ]; then echo "$id gone"
  fi
done
echo answered"""
        return self._argv(script)

    def states(self, text: str) -> dict[str, JobStatus]:
        lines = [line.split() for line in text.splitlines()]
        if ["answered"] not in lines:
            return {each: JobStatus("unknown", f"no answer from {self.name}") for each in self._asked}
        made: dict[str, JobStatus] = {}
        for words in lines:
            if words[1:2] == ["running"]:
                made[words[0]] = JobStatus("running")
            elif words[1:2] == ["gone"]:
                made[words[0]] = JobStatus("failed", "it left no exit code: it was killed, or the head was restarted")
            elif words[1:2] == ["ended"] and words[2].isdecimal():
                made[words[0]] = JobStatus("done" if words[2] == "0" else "failed", exit_code=int(words[2]))
        return made

    def cancel_argv(self, job_id: str) -> list[str]:
        script = f'cd {{workdir}}/jobs && id={shlex.quote(job_id)} && touch "$id/{CANCELLED}" && if {_IS_OURS}; then '
        return self._argv(f'{script}kill -s TERM "$(cat "$id/pid")"; fi')

    def again(self, script: Path) -> list[str]:
        """Nothing restarts a job there; and so nobody is asked for its successor."""
        return ["false"]

    def bring(self, record: Record, output_only: bool) -> None:
        """The files of a job that its readers want, into its folder here: new output, exit code, what the hosts did,
        and the small files of its run directory."""
        try:
            up, head = self._head()
            place = f"{shlex.quote(up.workdir)}/jobs/{shlex.quote(record.ids[-1])}"
            _append(head, f"{place}/{OUTPUT}", record.output)
            if output_only:
                return
            run = shlex.quote(record.run)
            script = f"""
cd {place} || exit 1
set --
for each in {EXIT_CODE} {STARTS} {LAUNCH}/timeline.jsonl; do [ ! -e "$each" ] || set -- "$@" "$each"; done
if [ -n {run} ] && [ -d {run} ]; then
  mkdir -p {RUN}/logs
  for each in status.json summary.json logs/events.log; do cp {run}/"$each" {RUN}/"$each" 2>/dev/null; done
  tail -c {_TAIL_BYTES} {run}/metrics.jsonl >{RUN}/metrics.jsonl 2>/dev/null
  set -- "$@" {RUN}
fi
[ $# = 0 ] || tar -cf - "$@\""""
            done = subprocess.run(head.argv(script), capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
            if done.returncode == 0 and done.stdout:
                unpack = ["tar", "-xf", "-", "-C", str(record.folder)]
                subprocess.run(unpack, input=done.stdout, timeout=_SECONDS, check=True, capture_output=True)
        except (UserError, RemoteError, OSError, subprocess.SubprocessError):
            return  # what is here stays as it was; the state says that there was no answer

    def _argv(self, script: str) -> list[str]:
        try:
            up, head = self._head()
        except UserError:
            return ["false"]  # no answer: the state says so
        return head.argv(script.replace("{workdir}", shlex.quote(up.workdir)))

    def _head(self) -> tuple[Up, Reach]:
        up = load(self.name.removeprefix(PREFIX))
        return up, reaches(up.hosts)[0]


def _append(head: Reach, source: str, target: Path) -> None:
    size = target.stat().st_size if target.exists() else 0
    script = f"[ ! -e {source} ] || tail -c +{size + 1} {source}"
    done = subprocess.run(head.argv(script), capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode == 0 and done.stdout:
        with target.open("ab") as file:
            file.write(done.stdout)
