"""`paceline submit --on cluster:NAME`: the code to every host, then a job on the head that outlives the terminal."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import UserError
from paceline.launch import environment, record
from paceline.launch.command import resumable, run_directory
from paceline.launch.gather import MEET
from paceline.launch.hosts_file import Machine, Up, load
from paceline.launch.job import Job
from paceline.launch.pack import Parcel, pack
from paceline.launch.profile import checked
from paceline.launch.remote import Reach, RemoteError, everywhere, reaches
from paceline.launch.script import EXIT_CODE, OUTPUT, SCRIPT, STARTS

PREFIX = "cluster:"
START_SECONDS = 120
KEPT_COPIES = 5
_INSTEAD = {
    "seeds": "there is no queue; submit one after the other, or a shell loop over seeds as COMMAND",
    "profile": "the hosts file says it",
    "interactive": "paceline cluster attach opens a shell",
    "walltime": "nothing ends a job there; paceline train --max-time stops by itself",
}
_FAILED = 1
_THERE = Path("/there")  # stands for the folder that a job begins in, wherever that will be

_JOB = """\
#!/bin/sh
# Made by `paceline submit --on cluster:{name}`.
folder={folder}
exec </dev/null >>"$folder/{output}" 2>&1
echo {id} "$(date +%s)" >>"$folder/{starts}"
echo "paceline: job {id} on $(uname -n), $(date)"
cd "$folder/work" || exit 1
signals=0
trap 'signals=$((signals + 1)); kill -s TERM "$child"' TERM INT HUP
# The shell runs a trap only when nothing is in the foreground: so the command is in the background.
# shellcheck disable=SC2016
{inside}\\
  {gather} -- \\
  {command} &
child=$!
while
  before=$signals
  wait "$child"
  code=$?
  [ "$before" != "$signals" ]  # a signal ended the wait, not the command
do :; done
rm -rf "$folder/{meet}"
echo "paceline: exit code $code, $(date)"
echo "$code" >"$folder/{exit_code}.part" && mv "$folder/{exit_code}.part" "$folder/{exit_code}"
exit "$code"
"""


@dataclass(frozen=True)
class Plan:
    """A job, before anything is sent."""

    up: Up
    id: str
    hosts: tuple[Machine, ...]
    words: list[str]
    parcel: Parcel
    project: str
    out: str
    """Folder of its runs, from the working directory; empty where that is outside."""

    @property
    def folder(self) -> str:
        return f"{self.up.workdir}/jobs/{self.id}"

    @property
    def runs(self) -> str:
        return runs_folder(self.up, self.project) + ("" if self.out in ("", "runs") else f"/{self.out}")

    @property
    def run(self) -> str:
        """The run directory there, as far as COMMAND tells."""
        found = run_directory(self.words, Path(f"{self.folder}/work"))
        return f"{self.runs}/{Path(found).name}" if found and self.out else found

    def inside(self) -> str:
        work = f"{self.folder}/work"
        path = ":".join([work, *(f"{work}/{each}" for each in self.parcel.packages)])
        return environment.inside(
            self.up.hosts,
            self.up.workdir,
            self.up.python,
            [f'PYTHONPATH={shlex.quote(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"'],
        )

    def script(self) -> str:
        hosts = json.dumps([(machine.label.rpartition("@")[2], machine.cpus, machine.gpus) for machine in self.hosts])
        gather = [self.up.python, "-P", "-m", "paceline.launch.gather", "--folder", self.folder, "--hosts", hosts]
        if self.up.hosts.interface:
            gather += ["--interface", self.up.hosts.interface]
        if self.up.hosts.dashboard:
            gather.append("--dashboard")
        return _JOB.format(
            name=self.up.name,
            folder=shlex.quote(self.folder),
            output=OUTPUT,
            starts=STARTS,
            id=self.id,
            inside=self.inside(),
            gather=shlex.join(gather),
            command=shlex.join(self.words),
            meet=MEET,
            exit_code=EXIT_CODE,
        )


def submit_on_cluster(name: str, options: argparse.Namespace) -> int:
    up = load(name.removeprefix(PREFIX))
    given = {key.removeprefix("job:"): value for key, value in vars(options).items() if key.startswith("job:")}
    given = {key: value for key, value in given.items() if value is not None}
    others = {key: getattr(options, key) for key in ("seeds", "profile", "interactive")}
    for key, value in {**{k: v for k, v in given.items() if k not in ("name", "nodes", "cores")}, **others}.items():
        if value:
            instead = _INSTEAD.get(key, "hosts are as the hosts file says; there are --name, --nodes and --cores")
            raise UserError(f"--{key.replace('_', '-')} {value}: not on a private cluster; {instead}")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UserError("submit needs a command: paceline submit … -- paceline train --env CartPole-v1")
    if not up.digest and not up.hosts.python:
        raise UserError(f"cluster {up.name} is down: paceline cluster up {up.name}")
    job = checked(Job, {"nodes": len(up.hosts.hosts), **given}, "--")
    if job.nodes > len(up.hosts.hosts):
        raise UserError(f"--nodes {job.nodes}: cluster {up.name} has {len(up.hosts.hosts)}")
    plan = make_plan(up, job, command, Path.cwd())
    if options.dry_run:
        sys.stdout.write(plan.script())
        print(f"# {_sent(plan.parcel)} to {len(_targets(plan))} hosts")
        return 0
    return send_and_start(plan, job)


def make_plan(up: Up, job: Job, command: Sequence[str], cwd: Path) -> Plan:
    number = f"{up.name}-{secrets.token_hex(3)}"
    words = resumable(command, f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    parcel = pack(cwd, command, up.hosts.packages, up.hosts.exclude, up.hosts.send_mb)
    found = run_directory(words, _THERE)
    out = os.path.relpath(Path(found).parent, _THERE) if found.startswith(f"{_THERE}/") else "" if found else "runs"
    machines = tuple(
        machine.model_copy(update={"cpus": job.cores or machine.cpus}) for machine in up.hosts.hosts[: job.nodes]
    )
    return Plan(up, number, machines, words, parcel, project_of(cwd), "" if out.startswith("..") else out)


def send_and_start(plan: Plan, job: Job) -> int:
    up, head = plan.up, reaches(plan.up.hosts)[0]
    if up.digest and environment.describe(up.hosts).digest != up.digest:
        print(f"paceline: this paceline is not the one on {up.name} any more: paceline cluster up {up.name} renews it")
    print(f"sending    {_sent(plan.parcel)} to {', '.join(reach.machine.name for reach in _targets(plan))}")
    try:
        running = _send(plan)
        if running:
            print(f"paceline: {running} still runs on {up.name}: both share its cores")
        place, pid = (shlex.quote(f"{plan.folder}/{name}") for name in (SCRIPT, "pid"))
        start = f"cat >{place} && {{ setsid sh {place} </dev/null >/dev/null 2>&1 & echo $! >{pid}; }}"
        head.run(start, given=plan.script().encode())
        made = _remember(plan, job)
        missing = _start_supervisors(plan) if len(plan.hosts) > 1 else []
    except RemoteError as error:
        print(f"paceline: failed: {error}", file=sys.stderr)
        return _FAILED
    print(f"job        {plan.id} ({made.scheduler}), {len(plan.hosts)} {'host' if len(plan.hosts) == 1 else 'hosts'}")
    if made.run:
        print(f"run        {head.machine.name}:{made.run}")
    for verb, words in (("follow", "logs {} -f"), ("watch", "status {} --watch"), ("cancel", "cancel {}")):
        print(f"{verb:<10} paceline {words.format(plan.id)}")
    print(f"fetch      paceline fetch {plan.id} runs")
    for each in missing:
        print(f"paceline: failed: {each}", file=sys.stderr)
    return _FAILED if missing else 0


def _remember(plan: Plan, job: Job) -> record.Record:
    local = record.new_folder(job.name)
    record.make(local)
    made = record.Record(
        key=local.name,
        scheduler=f"{PREFIX}{plan.up.name}",
        name=job.name,
        ids=(plan.id,),
        command=tuple(plan.words),
        cwd=str(Path.cwd()),
        nodes=len(plan.hosts),
        walltime=0,
        submitted=time.time(),
        run=plan.run,
        folder=local,
    )
    record.save(made)
    return made


def _targets(plan: Plan) -> list[Reach]:
    """The hosts that files are sent to."""
    chosen = reaches(plan.up.hosts)[: len(plan.hosts)]
    return chosen[:1] if plan.up.hosts.shared_filesystem else chosen


def _send(plan: Plan) -> str:
    """A fresh copy of the working directory on every host; the ids of jobs that run on the head."""
    up, digest = plan.up, plan.parcel.digest
    code = f"{up.workdir}/code/{digest}"
    link = f"work/{plan.out}"
    lines = [
        f"set -e; umask 077; cd {shlex.quote(up.workdir)}",
        f"mkdir -p jobs code {shlex.quote(plan.runs)}",
        *('for each in jobs/*; do if [ -e "$each/pid" ] && [ ! -e "$each/exit_code" ] &&',
          'ps -ww -o args= -p "$(cat "$each/pid")" | grep -qF "$each/job.sh"; then basename "$each"; fi; done',
          f"touch {code}; mkdir jobs/{plan.id}; cp -a {code} jobs/{plan.id}/work; cd jobs/{plan.id}"),
    ]  # fmt: skip
    if plan.out:
        parts = [shlex.quote(each) for each in (link, str(Path(link).parent), plan.runs)]
        lines.append(f"[ -e {parts[0]} ] || {{ mkdir -p {parts[1]}; ln -s {parts[2]} {parts[0]}; }}")
    lines.append(f'cd ../../code; ls -t | tail -n +{KEPT_COPIES + 1} | while read -r old; do rm -rf "$old"; done')
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "code.tar.gz"
        plan.parcel.archive(archive)

        def work(reach: Reach) -> str:
            if (
                reach.run(f"[ -d {shlex.quote(code)} ] && echo yes || mkdir -p {shlex.quote(up.workdir)}/code")
                != "yes\n"
            ):
                reach.send(archive, code)
            return reach.run("\n".join(lines))

        said, failed = everywhere(_targets(plan), work)
    if failed:
        raise failed[0]
    return ", ".join(said[plan.hosts[0].label].split())


def _start_supervisors(plan: Plan) -> list[RemoteError]:
    """With the contact of the launcher, which travels through ssh alone. What failed the launcher is told too."""
    head, *others = reaches(plan.up.hosts)[: len(plan.hosts)]
    last = len(others)
    wait = f"""
cd {shlex.quote(plan.folder)} || exit 1
left={START_SECONDS * 10}
until [ -e {MEET}/{last} ]; do
  left=$((left - 1))
  if [ -e {EXIT_CODE} ] || [ "$left" = 0 ]; then tail -n 1 {OUTPUT} >&2; exit 1; fi
  sleep 0.1
done
cat {MEET}/{last} && rm -f {MEET}/*"""
    contact = head.run(wait, seconds=START_SECONDS + 30).encode()

    def start(reach: Reach) -> None:
        index = [each.label for each in plan.hosts].index(reach.machine.label)
        words = shlex.join(
            [
                plan.up.python,
                "-P",
                "-m",
                "paceline.launch.supervisor",
                "--index",
                str(index),
                "--seconds",
                str(START_SECONDS),
            ]
        )
        reach.run(
            f"cd {shlex.quote(plan.folder)}/work && IFS= read -r contact || exit 1; "
            f"printf '%s\\n' \"$contact\" | setsid {plan.inside()}{words} >>../supervisor-{index}.log 2>&1 & "
            f"echo $! >{shlex.quote(plan.folder)}/supervisor-{index}.pid",
            given=contact,
        )

    _, failed = everywhere(others, start)
    for error in failed:
        index = [each.label for each in plan.hosts].index(error.machine.label)
        head.run(f"cat >{shlex.quote(plan.folder)}/{MEET}/{index}.failed", given=f"{error}\n".encode())
    return failed


def project_of(cwd: Path) -> str:
    """The folder's name, and something that tells two of that name apart."""
    return f"{cwd.name or 'root'}-{hashlib.sha256(str(cwd).encode()).hexdigest()[:6]}"


def runs_folder(up: Up, project: str) -> str:
    return f"{up.workdir}/runs/{project}"


def _sent(parcel: Parcel) -> str:
    return f"{len(parcel.files)} files, {parcel.size / 1e6:.1f} MB"
