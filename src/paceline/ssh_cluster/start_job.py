"""`paceline submit --on cluster:NAME`: sends the code to every host, then starts a job that outlives the terminal."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.code_bundle import CodeBundle
from paceline.config import UserError
from paceline.launch.start_supervisor import supervisor_argv
from paceline.schedulers import job_record
from paceline.schedulers.job import Job
from paceline.schedulers.profile import validated
from paceline.schedulers.script import EXIT_CODE, OUTPUT, SCRIPT, STARTS, WAIT
from paceline.schedulers.ssh import SshHost
from paceline.schedulers.train_command import resumable, run_directory
from paceline.ssh_cluster import environment
from paceline.ssh_cluster.cluster_state import ClusterState, load
from paceline.ssh_cluster.head_job import CONTACTS, LIST_RUNNING
from paceline.ssh_cluster.pack import pack_job
from paceline.ssh_cluster.remote import RemoteError, RemoteHost, on_all, remote_hosts

PREFIX = "cluster:"
START_SECONDS = 120
KEPT_COPIES = 5
_OPTIONS = ("name", "nodes", "cores")
_ADVICE = {
    "seeds": "there is no queue; submit one after the other, or give a shell loop over seeds as COMMAND",
    "profile": "use the hosts file",
    "interactive": "paceline cluster attach opens a shell",
    "walltime": "jobs have no time limit; paceline train --max-time stops a run",
}
_FAILED = 1
_JOB_CWD = Path("/job")  # stands for the folder a job starts in, which is not known yet

_JOB = """\
#!/bin/sh
# Written by `paceline submit --on cluster:{name}`.
folder={folder}
exec </dev/null >>"$folder/{output}" 2>&1
echo {id} "$(date +%s)" >>"$folder/{starts}"
echo "paceline: job {id} on $(uname -n), $(date)"
cd "$folder/work" || exit 1
signals=0
trap 'signals=$((signals + 1)); kill -s TERM "$child"' TERM INT HUP
# A shell runs a trap only when no command is in the foreground, so the command runs in the background.
# shellcheck disable=SC2016
{prefix}\\
  {head_job} -- \\
  {command} &
child=$!
{wait}
rm -rf "$folder/{contacts}"
echo "paceline: exit code $code, $(date)"
echo "$code" >"$folder/{exit_code}.part" && mv "$folder/{exit_code}.part" "$folder/{exit_code}"
exit "$code"
"""


@dataclass(frozen=True)
class JobPlan:
    """A job before anything is sent."""

    cluster: ClusterState
    id: str
    hosts: tuple[SshHost, ...]
    words: list[str]
    bundle: CodeBundle
    project: str
    out: str
    """Folder of its runs, relative to the working directory; empty where it lies outside."""

    @property
    def folder(self) -> str:
        return f"{self.cluster.workdir}/jobs/{self.id}"

    @property
    def runs(self) -> str:
        return runs_folder(self.cluster, self.project) + ("" if self.out in ("", "runs") else f"/{self.out}")

    @property
    def run(self) -> str:
        """The run directory on the head, as far as COMMAND tells."""
        found = run_directory(self.words, Path(f"{self.folder}/work"))
        return f"{self.runs}/{Path(found).name}" if found and self.out else found

    def command_prefix(self) -> str:
        work = f"{self.folder}/work"
        path = ":".join([work, *(f"{work}/{each}" for each in self.bundle.packages)])
        variable = f'PYTHONPATH={shlex.quote(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        return environment.command_prefix(self.cluster.config, self.cluster.workdir, self.cluster.python, [variable])

    def script(self) -> str:
        config = self.cluster.config
        hosts = json.dumps([(host.label.rpartition("@")[2], host.cpus, host.gpus) for host in self.hosts])
        head_job = [self.cluster.python, "-P", "-m", "paceline.ssh_cluster.head_job"]
        head_job += ["--folder", self.folder, "--hosts", hosts]
        head_job += ["--interface", config.interface] if config.interface else []
        head_job += ["--dashboard"] if config.dashboard else []
        return _JOB.format(
            name=self.cluster.name,
            folder=shlex.quote(self.folder),
            output=OUTPUT,
            starts=STARTS,
            id=self.id,
            prefix=self.command_prefix(),
            head_job=shlex.join(head_job),
            command=shlex.join(self.words),
            wait=WAIT,
            contacts=CONTACTS,
            exit_code=EXIT_CODE,
        )


def submit_on_cluster(name: str, command: Sequence[str], given: Mapping[str, object], *, dry_run: bool) -> int:
    """`given`: the options of `paceline submit` by name; those for a queue may not be set."""
    cluster = load(name.removeprefix(PREFIX))
    for key, value in given.items():
        if value and key not in _OPTIONS:
            advice = _ADVICE.get(key, "the hosts file describes the hosts; there are --name, --nodes and --cores")
            raise UserError(f"--{key.replace('_', '-')} {value}: not available on an ssh cluster; {advice}")
    if not command:
        raise UserError("submit needs a command: paceline submit … -- paceline train --env CartPole-v1")
    cluster.check_is_up()
    size = len(cluster.config.hosts)
    job = validated(Job, {"nodes": size, **{key: given[key] for key in _OPTIONS if key in given}}, "--")
    if job.nodes > size:
        raise UserError(f"--nodes {job.nodes}: cluster {cluster.name} has {size}")
    plan = make_plan(cluster, job, command, Path.cwd())
    if dry_run:
        sys.stdout.write(plan.script())
        print(f"# {_bundle_size(plan.bundle)} to {len(_targets(plan))} hosts")
        return 0
    return send_and_start(plan, job)


def make_plan(cluster: ClusterState, job: Job, command: Sequence[str], cwd: Path) -> JobPlan:
    config, number = cluster.config, f"{cluster.name}-{secrets.token_hex(3)}"
    words = resumable(command, f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    bundle = pack_job(cwd, command, config.packages, config.exclude, config.send_mb)
    found = run_directory(words, _JOB_CWD)
    out = os.path.relpath(Path(found).parent, _JOB_CWD) if found.startswith(f"{_JOB_CWD}/") else "" if found else "runs"
    hosts = tuple(host.model_copy(update={"cpus": job.cores or host.cpus}) for host in config.hosts[: job.nodes])
    return JobPlan(cluster, number, hosts, words, bundle, project_of(cwd), "" if out.startswith("..") else out)


def send_and_start(plan: JobPlan, job: Job) -> int:
    cluster, head = plan.cluster, remote_hosts(plan.cluster.config)[0]
    if cluster.digest and environment.describe(cluster.config).digest != cluster.digest:
        print(f"paceline: {cluster.name} has another paceline; update it with paceline cluster up {cluster.name}")
    print(f"sending    {_bundle_size(plan.bundle)} to {', '.join(target.host.name for target in _targets(plan))}")
    try:
        running = _send(plan)
        if running:
            print(f"paceline: {running} still runs on {cluster.name}: both share its cores")
        script, pid = (shlex.quote(f"{plan.folder}/{name}") for name in (SCRIPT, "pid"))
        start = f"cat >{script} && {{ setsid sh {script} </dev/null >/dev/null 2>&1 & echo $! >{pid}; }}"
        head.run(start, given=plan.script().encode())
        folder = job_record.new_folder(job.name)
        job_record.create_folder(folder)
        unlimited = job.model_copy(update={"walltime": 0})
        record = job_record.create(folder, PREFIX + cluster.name, unlimited, plan.id, plan.words, plan.run)
        failed = _start_supervisors(plan) if len(plan.hosts) > 1 else []
    except RemoteError as error:
        print(f"paceline: failed: {error}", file=sys.stderr)
        return _FAILED
    job_record.print_next_steps(record, f"{head.host.name}:{record.run}" if record.run else "")
    print(f"fetch      paceline fetch {plan.id} runs")
    for each in failed:
        print(f"paceline: failed: {each}", file=sys.stderr)
    return _FAILED if failed else 0


def _targets(plan: JobPlan) -> list[RemoteHost]:
    """The hosts that files are sent to."""
    chosen = remote_hosts(plan.cluster.config)[: len(plan.hosts)]
    return chosen[:1] if plan.cluster.config.shared_filesystem else chosen


def _send(plan: JobPlan) -> str:
    """Put a fresh copy of the working directory on every host; returns the ids of jobs that run on the head."""
    workdir = plan.cluster.workdir
    code = f"{workdir}/code/{plan.bundle.digest[:16]}"
    lines = [
        f"set -e; umask 077; cd {shlex.quote(workdir)}",
        f"mkdir -p jobs code {shlex.quote(plan.runs)}",
        f"(cd jobs; {LIST_RUNNING})",
        f"touch {code}; mkdir jobs/{plan.id}; cp -a {code} jobs/{plan.id}/work; cd jobs/{plan.id}",
    ]
    if plan.out:
        out = f"work/{plan.out}"
        link, parent, runs = (shlex.quote(each) for each in (out, str(Path(out).parent), plan.runs))
        lines.append(f"[ -e {link} ] || {{ mkdir -p {parent}; ln -s {runs} {link}; }}")
    lines.append(f'cd ../../code; ls -t | tail -n +{KEPT_COPIES + 1} | while read -r old; do rm -rf "$old"; done')
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "code.tar.gz"
        plan.bundle.archive(archive)

        def work(host: RemoteHost) -> str:
            exists = f"[ -d {shlex.quote(code)} ] && echo yes || mkdir -p {shlex.quote(workdir)}/code"
            if host.run(exists) != "yes\n":
                host.send(archive, code)
            return host.run("\n".join(lines))

        outputs, failed = on_all(_targets(plan), work)
    if failed:
        raise failed[0]
    return ", ".join(outputs[plan.hosts[0].label].split())


def _start_supervisors(plan: JobPlan) -> list[RemoteError]:
    """Start them with the launcher's contact, which travels only through ssh. The launcher is told of failures."""
    head, *others = remote_hosts(plan.cluster.config)[: len(plan.hosts)]
    last = len(others)
    wait = f"""
cd {shlex.quote(plan.folder)} || exit 1
left={START_SECONDS * 10}
until [ -e {CONTACTS}/{last} ]; do
  left=$((left - 1))
  if [ -e {EXIT_CODE} ] || [ "$left" = 0 ]; then tail -n 1 {OUTPUT} >&2; exit 1; fi
  sleep 0.1
done
cat {CONTACTS}/{last} && rm -f {CONTACTS}/*"""
    contact = head.run(wait, seconds=START_SECONDS + 30).encode()
    index = {host.label: number for number, host in enumerate(plan.hosts)}

    def start(host: RemoteHost) -> None:
        number = index[host.label]
        argv = shlex.join(supervisor_argv(number, START_SECONDS, plan.cluster.python))
        host.run(
            f"cd {shlex.quote(plan.folder)}/work && IFS= read -r contact || exit 1; "
            f"printf '%s\\n' \"$contact\" | setsid {plan.command_prefix()}{argv} >>../supervisor-{number}.log 2>&1 & "
            f"echo $! >{shlex.quote(plan.folder)}/supervisor-{number}.pid",
            given=contact,
        )

    _, failed = on_all(others, start)
    for error in failed:
        path = f"{shlex.quote(plan.folder)}/{CONTACTS}/{index[error.host.label]}.failed"
        head.run(f"cat >{path}", given=f"{error}\n".encode())
    return failed


def project_of(cwd: Path) -> str:
    """The folder's name and a digest of its path, which tells folders of one name apart."""
    return f"{cwd.name or 'root'}-{hashlib.sha256(str(cwd).encode()).hexdigest()[:6]}"


def runs_folder(cluster: ClusterState, project: str) -> str:
    return f"{cluster.workdir}/runs/{project}"


def _bundle_size(bundle: CodeBundle) -> str:
    return f"{len(bundle.files)} files, {bundle.size / 1e6:.1f} MB"
