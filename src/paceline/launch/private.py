"""`paceline cluster`: machines of one's own, reached by ssh. Nothing of ours runs on them between two jobs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launch.hosts_file import Hosts, Up
    from paceline.launch.remote import Reach, RemoteError

FAILED = 1
JOB_SECONDS = 60  # for COMMAND to save, and for the launcher to end all it started
HOST_SECONDS = 20

_PROBE = """
set -e
for each in tar setsid ps; do
  command -v "$each" >/dev/null || { echo "$each is missing there: install it" >&2; exit 1; }
done
mkdir -p -m 700 %s
cd %s
echo "workdir=$(pwd)"
"""
_LOAD = r"""
echo "load=$(cut -d ' ' -f 1 /proc/loadavg)"
echo "cores=$(getconf _NPROCESSORS_ONLN)"
awk '/^MemTotal|^MemAvailable/ {print $1 $2}' /proc/meminfo | tr ':' '='
ps -ww -eo user:32=,args= | awk -v me="$(id -un)" '
  $1 != me || $2 ~ /^ray::.*Agent/ {next}
  {count = split($2, path, "/"); name = path[count]}
  name == "raylet" || name == "gcs_server" {print name}
  $2 ~ /^ray::/ {print $2}
  $3 == "-m" && $4 ~ /^paceline[.]launch[.]/ {print substr($4, 17)}
' | sort | uniq -c | sed 's/^ *\([0-9]*\) /process=\1 /'
"""
_RUNNING = """
cd %s/jobs 2>/dev/null || exit 0
for id in *; do
  if [ -e "$id/pid" ] && [ ! -e "$id/exit_code" ] && ps -ww -o args= -p "$(cat "$id/pid")" | grep -qF "$id/job.sh"; then
    echo "$id"
  fi
done
"""
# By their own files, and only if the process is still the one that was started.
_END = """
cd %(workdir)s/jobs 2>/dev/null || exit 0
left=%(seconds)d
while [ "$left" -gt 0 ]; do
  living=
  for file in %(files)s; do
    [ -e "$file" ] || continue
    pid=$(cat "$file")
    ps -ww -o args= -p "$pid" 2>/dev/null | grep -qE '%(sign)s' || continue
    [ "$left" != %(seconds)d ] || kill -s TERM "$pid"
    living="$living $pid"
  done
  [ -n "$living" ] || exit 0
  left=$((left - 1))
  sleep 1
done
echo "still there after %(seconds)d s: process$living" >&2
exit 1
"""


def add_cluster(verbs: Any) -> None:
    cluster = verbs.add_parser("cluster", help="machines of your own, reached by ssh", description=__doc__)
    actions = cluster.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("hosts", metavar="HOSTS", help="a file of hosts, a cluster.yaml of Ray's, or a name")
        if name in ("dashboard", "tensorboard"):
            action.add_argument("--port", type=int, default=0, metavar="P", help="here (default: the usual, if free)")
        if name == "down":
            action.add_argument("--purge", action="store_true", help="remove the environment too; runs stay")
        action.set_defaults(run=_run, action=name)
    fetch = verbs.add_parser("fetch", help="bring the results of a job here")
    fetch.add_argument("what", metavar="JOB|RUN", help="id or name of a job, CLUSTER:RUN, or a run directory")
    fetch.add_argument("to", metavar="DEST", help="folder to put it into")
    fetch.set_defaults(run=_fetch)


ACTIONS = {
    "up": "reach every host and build the environment there, where it is not",
    "status": "hosts, their load and memory, and what runs",
    "attach": "a shell on the head, in the environment",
    "dashboard": "Ray's dashboard of the job that runs, on 127.0.0.1 here",
    "tensorboard": "TensorBoard of all runs there, on 127.0.0.1 here",
    "down": "end all that is ours there",
}


def _run(options: argparse.Namespace) -> int:
    import sys

    from paceline.launch.remote import RemoteError

    try:
        if options.action == "up":
            return _up(options.hosts)
        from paceline.launch import hosts_file, tunnel

        up = hosts_file.find(options.hosts)
        if options.action == "attach":
            return tunnel.attach(up)
        if options.action == "tensorboard":
            return tunnel.tensorboard(up, options.port)
        if options.action == "dashboard":
            return tunnel.dashboard(up, options.port)
        return _status(up) if options.action == "status" else _down(up, options.purge)
    except RemoteError as error:
        print(f"paceline: failed: {error}", file=sys.stderr)
        return FAILED


def _fetch(options: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    from paceline.launch.fetch import fetch
    from paceline.launch.remote import RemoteError

    try:
        print(fetch(options.what, Path(options.to)))
    except RemoteError as error:
        print(f"paceline: failed: {error}", file=sys.stderr)
        return FAILED
    return 0


# -- up -------------------------------------------------------------------------------------------------------------


def _up(word: str) -> int:
    from pathlib import Path

    from paceline.launch import environment, hosts_file, preflight
    from paceline.launch.hosts_file import Up
    from paceline.launch.remote import everywhere, reaches

    if hosts_file.is_file(word):
        hosts, notices = hosts_file.read_hosts(Path(word))
    else:
        hosts, notices = hosts_file.load(word).hosts, []
    for text in notices:
        print(f"paceline: {text}")
    every = reaches(hosts)
    asked = hosts.workdir or f"~/.paceline/{hosts.name}"
    place = f'"$HOME"{asked[1:]}' if asked.startswith("~") else asked
    found, failed = everywhere(every, lambda reach: _values(reach.run(_PROBE % (place, place)))["workdir"][0])
    if failed:
        return _tell(failed)
    workdir = _same_folder(found)
    wanted = None if hosts.python else environment.describe(hosts)
    python = hosts.python or f"{environment.folder(workdir, wanted.digest if wanted else '')}/bin/python"
    if wanted is not None:
        failed = _build(hosts, workdir, wanted, every[:1] if hosts.shared_filesystem else every)
        if failed:
            return _tell(failed)
    versions, failed = everywhere(every, lambda reach: environment.look(reach, hosts, workdir, python))
    if failed:
        return _tell(failed)
    if wrong := environment.differences(versions):
        return _tell(wrong)
    if failed := preflight.unreachable(hosts, workdir, python):
        return _tell(failed)
    first = versions[hosts.head.label]
    for reach in every:
        print(f"{reach.machine.label:<20} ready")
    hosts_file.save(Up(hosts=hosts, workdir=workdir, python=python, digest=wanted.digest if wanted else ""))
    said = ", ".join(f"{name} {version}" for name, version in first.items() if version)
    print(f"cluster    {hosts.name}, {len(every)} {'host' if len(every) == 1 else 'hosts'}: {said}")
    print(f"folder     {workdir}")
    print(f"train      paceline submit --on cluster:{hosts.name} -- paceline train --engine ray --workers auto …")
    return 0


def _build(hosts: Hosts, workdir: str, wanted: Any, chosen: list[Reach]) -> list[RemoteError]:
    import tempfile
    import time
    from pathlib import Path

    from paceline.launch import environment
    from paceline.launch.remote import everywhere

    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "environment.tar.gz"
        wanted.archive(archive)

        def work(reach: Reach) -> None:
            name = reach.machine.label
            if environment.is_built(reach, workdir, wanted.digest):
                print(f"{name:<20} environment {wanted.digest} is there", flush=True)
                return
            print(f"{name:<20} environment {wanted.digest} is being built; this may take minutes", flush=True)
            began = time.monotonic()
            environment.build(reach, hosts, workdir, wanted, archive)
            print(f"{name:<20} environment built in {time.monotonic() - began:.0f} s", flush=True)

        return everywhere(chosen, work)[1]


def _same_folder(found: dict[str, str]) -> str:
    from paceline.config import UserError

    if len(set(found.values())) > 1:
        said = ", ".join(f"{path} on {host}" for host, path in found.items())
        raise UserError(f"the folder must have the same path everywhere: {said}; set workdir: in the hosts file")
    return next(iter(found.values()))


def _tell(failed: list[RemoteError] | list[str]) -> int:
    import sys

    for each in failed:
        print(f"paceline: failed: {each}", file=sys.stderr)
    return FAILED


def _values(text: str) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        made.setdefault(name, []).append(value.strip())
    return made


# -- status and down ------------------------------------------------------------------------------------------------


def _status(up: Up) -> int:
    import shlex

    from paceline.launch.jobs import table
    from paceline.launch.remote import everywhere, reaches

    every = reaches(up.hosts)
    found, failed = everywhere(every, lambda reach: _values(reach.run(_LOAD)))
    rows = [["host", "load", "cores", "memory free", "ours"]]
    for reach in every:
        values = found.get(reach.machine.label)
        if values is None:
            rows.append([reach.machine.label, "", "", "", "not reached"])
            continue
        memory = [int("".join(filter(str.isdigit, values[name][0]))) / 1e6 for name in ("MemAvailable", "MemTotal")]
        processes = [f"{word} {count}" for count, word in (each.split(None, 1) for each in values.get("process", []))]
        free = f"{memory[0]:.1f} of {memory[1]:.1f} GB"
        rows.append([reach.machine.label, values["load"][0], values["cores"][0], free, ", ".join(processes) or "-"])
    state = "up" if up.digest or up.hosts.python else "down"
    print(f"cluster    {up.name}, {state}; folder {up.workdir}")
    print(table(rows))
    if up.hosts.head.label in found:
        running = every[0].run(_RUNNING % shlex.quote(up.workdir)).split()
        print(f"jobs       {', '.join(running) or 'none runs'}")
    return _tell(failed) if failed else 0


def _down(up: Up, purge: bool) -> int:
    import shlex

    from paceline.launch import hosts_file
    from paceline.launch.remote import everywhere, reaches

    every, workdir = reaches(up.hosts), shlex.quote(up.workdir)

    def end(files: str, sign: str, seconds: int) -> str:
        return _END % {"workdir": workdir, "files": files, "sign": sign, "seconds": seconds}

    _, failed = everywhere(every[:1], lambda reach: reach.run(end("*/pid", "/job[.]sh", JOB_SECONDS), seconds=90))
    numbers = {reach.machine.label: index for index, reach in enumerate(every)}
    _, more = everywhere(
        every[1:],
        lambda reach: reach.run(
            end(f"*/supervisor-{numbers[reach.machine.label]}.pid", "paceline[.]launch[.]supervisor", HOST_SECONDS)
        ),
    )
    failed += more
    if purge and not failed:
        targets = every[:1] if up.hosts.shared_filesystem else every
        _, failed = everywhere(targets, lambda reach: reach.run(f"cd {workdir} && rm -rf env code", seconds=300))
        hosts_file.save(up.model_copy(update={"digest": ""}))
    if failed:
        return _tell(failed)
    print(f"cluster    {up.name}: nothing of ours runs on {', '.join(reach.machine.name for reach in every)}")
    if purge:
        print(f"           the environment is removed; {up.workdir}/runs and /jobs stay")
    return 0
