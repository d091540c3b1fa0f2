"""An ssh cluster comes up, is looked at, and goes down."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.doctor.diagnosis import table
from paceline.ssh_cluster import cluster_state, environment, preflight
from paceline.ssh_cluster.cluster_state import ClusterState
from paceline.ssh_cluster.environment import PythonEnvironment
from paceline.ssh_cluster.head_job import LIST_RUNNING
from paceline.ssh_cluster.hosts_file import ClusterConfig, read_hosts_file
from paceline.ssh_cluster.remote import RemoteError, RemoteHost, on_all, remote_hosts

FAILED = 1
JOB_SECONDS = 60  # for COMMAND to save and the launcher to end everything
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
  $4 == "-m" && $5 ~ /^paceline[.](launch|ssh_cluster)[.]/ {split($5, module, "."); print module[3]}
' | sort | uniq -c | sed 's/^ *\([0-9]*\) /process=\1 /'
"""
# Ends processes by their pid files, and only if a process is still the one that was started.
_END = """
cd %(workdir)s/jobs 2>/dev/null || exit 0
left=%(seconds)d
while [ "$left" -gt 0 ]; do
  living=
  for file in %(files)s; do
    [ -e "$file" ] || continue
    pid=$(cat "$file")
    ps -ww -o args= -p "$pid" 2>/dev/null | grep -qE '%(pattern)s' || continue
    [ "$left" != %(seconds)d ] || kill -s TERM "$pid"
    living="$living $pid"
  done
  [ -n "$living" ] || exit 0
  left=$((left - 1))
  sleep 1
done
echo "still running after %(seconds)d s: process$living" >&2
exit 1
"""


def up(word: str) -> int:
    """Build the environment on the hosts of a file, or of a cluster that is known by name."""
    if cluster_state.is_file(word):
        config, notices = read_hosts_file(Path(word))
    else:
        config, notices = cluster_state.load(word).config, []
    for text in notices:
        print(f"paceline: {text}")
    hosts = remote_hosts(config)
    given = config.workdir or f"~/.paceline/{config.name}"
    place = f'"$HOME"{given[1:]}' if given.startswith("~") else given
    found, failed = on_all(hosts, lambda host: _values(host.run(_PROBE % (place, place)))["workdir"][0])
    if failed:
        return _print_errors(failed)
    workdir = _same_folder(found)
    if not cluster_state.is_up(config.name):  # so that `down --purge` removes what a failed build leaves
        cluster_state.save(ClusterState(config=config, workdir=workdir))
    wanted = None if config.python else environment.describe(config)
    digest = wanted.digest if wanted else ""
    python = config.python or f"{environment.folder(workdir, digest)}/bin/python"
    if wanted is not None:
        failed = _build(config, workdir, wanted, hosts[:1] if config.shared_filesystem else hosts)
        if failed:
            return _print_errors(failed)
    versions, failed = on_all(hosts, lambda host: environment.installed_versions(host, config, workdir, python))
    if errors := failed or environment.differences(versions) or preflight.unreachable(config, workdir, python):
        return _print_errors(errors)
    for host in hosts:
        print(f"{host.label:<20} ready")
    cluster_state.save(ClusterState(config=config, workdir=workdir, python=python, digest=digest))
    shown = ", ".join(f"{name} {version}" for name, version in versions[config.head.label].items() if version)
    print(f"cluster    {config.name}, {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}: {shown}")
    print(f"folder     {workdir}")
    print(f"train      paceline submit --on cluster:{config.name} -- paceline train --engine ray --workers auto …")
    return 0


def _build(
    config: ClusterConfig, workdir: str, wanted: PythonEnvironment, hosts: Sequence[RemoteHost]
) -> list[RemoteError]:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "environment.tar.gz"
        wanted.archive(archive)

        def work(host: RemoteHost) -> None:
            if environment.is_built(host, workdir, wanted.digest):
                print(f"{host.label:<20} environment {wanted.digest} is there", flush=True)
                return
            print(f"{host.label:<20} environment {wanted.digest} is being built; this may take minutes", flush=True)
            began = time.monotonic()
            environment.build(host, config, workdir, wanted, archive)
            print(f"{host.label:<20} environment built in {time.monotonic() - began:.0f} s", flush=True)

        return on_all(hosts, work)[1]


def _same_folder(found: dict[str, str]) -> str:
    if len(set(found.values())) > 1:
        paths = ", ".join(f"{path} on {host}" for host, path in found.items())
        raise UserError(f"the folder must have the same path everywhere: {paths}; set workdir: in the hosts file")
    return next(iter(found.values()))


def _print_errors(errors: Sequence[RemoteError | str]) -> int:
    for each in errors:
        print(f"paceline: failed: {each}", file=sys.stderr)
    return FAILED


def _values(text: str) -> dict[str, list[str]]:
    """Lines `name=value`, by name."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        values.setdefault(name, []).append(value.strip())
    return values


def status(cluster: ClusterState) -> int:
    hosts = remote_hosts(cluster.config)
    found, failed = on_all(hosts, lambda host: _values(host.run(_LOAD)))
    rows = [["host", "load", "cores", "memory free", "processes"]]
    for host in hosts:
        values = found.get(host.label)
        if values is None:
            rows.append([host.label, "", "", "", "not reached"])
            continue
        free, total = (
            int("".join(filter(str.isdigit, values[name][0]))) / 1e6 for name in ("MemAvailable", "MemTotal")
        )
        processes = [f"{word} {count}" for count, word in (each.split(None, 1) for each in values.get("process", []))]
        memory = f"{free:.1f} of {total:.1f} GB"
        rows.append([host.label, values["load"][0], values["cores"][0], memory, ", ".join(processes) or "-"])
    print(f"cluster    {cluster.name}, {'up' if cluster.is_up else 'down'}; folder {cluster.workdir}")
    print(table(rows))
    if cluster.config.head.label in found:
        running = hosts[0].run(f"cd {shlex.quote(cluster.workdir)}/jobs 2>/dev/null || exit 0; {LIST_RUNNING}").split()
        print(f"jobs       {', '.join(running) or 'none runs'}")
    return _print_errors(failed) if failed else 0


def down(cluster: ClusterState, purge: bool) -> int:
    """End all jobs; `purge`: remove the environments and copies of code too."""
    hosts, workdir = remote_hosts(cluster.config), shlex.quote(cluster.workdir)
    index = {host.label: number for number, host in enumerate(hosts)}

    def end(host: RemoteHost) -> None:
        if host is hosts[0]:
            files, pattern, seconds = "*/pid", "/job[.]sh", JOB_SECONDS
        else:
            files, seconds = f"*/supervisor-{index[host.label]}.pid", HOST_SECONDS
            pattern = "paceline[.]launch[.]supervisor"
        values = {"workdir": workdir, "files": files, "pattern": pattern, "seconds": seconds}
        host.run(_END % values, seconds=seconds + 30)

    failed = [*on_all(hosts[:1], end)[1], *on_all(hosts[1:], end)[1]]  # the head's jobs end the others' supervisors
    if purge and not failed:
        targets = hosts[:1] if cluster.config.shared_filesystem else hosts
        _, failed = on_all(targets, lambda host: host.run(f"cd {workdir} && rm -rf env code", seconds=300))
        cluster_state.save(cluster.model_copy(update={"digest": ""}))
    if failed:
        return _print_errors(failed)
    print(f"cluster    {cluster.name}: nothing of paceline's runs on {', '.join(host.host.name for host in hosts)}")
    if purge:
        print(f"           the environment is removed; {cluster.workdir}/runs and /jobs stay")
    return 0
