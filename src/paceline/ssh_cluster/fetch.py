"""`paceline fetch`: copies a run directory here, from an ssh cluster or from where a batch job left it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from paceline.config import UserError
from paceline.schedulers import job_record
from paceline.schedulers.script import OUTPUT, SCRIPT
from paceline.ssh_cluster.cluster_state import load
from paceline.ssh_cluster.remote import RemoteHost, remote_hosts
from paceline.ssh_cluster.start_job import PREFIX, project_of, runs_folder

ORIGIN = ".fetched"
"""File with the origin of a fetched folder, which another folder of the same name does not overwrite."""
_PASSES = 3
_FILES = "( -type f -o -type l )"  # the last checkpoint is a link


def fetch(what: str, to: Path) -> Path:
    """Returns the folder here. A second call copies only what is new."""
    if Path(what).is_dir():
        return _copy(Path(what), to)
    name, colon, path = what.partition(":")
    if colon:
        cluster = load(name)
        source = path if path.startswith("/") else f"{runs_folder(cluster, project_of(Path.cwd()))}/{path}"
        head = remote_hosts(cluster.config)[0]
        return _download(head, source, _FILES, to / Path(source).name, f"{name}:{source}")
    record = job_record.find(what)
    if not record.scheduler.startswith(PREFIX):
        if not record.run:
            raise UserError(f"{what}: the job does not run paceline, so its results are unknown; see {record.cwd}")
        return _copy(Path(record.run), to)
    cluster = load(record.scheduler.removeprefix(PREFIX))
    head, job = remote_hosts(cluster.config)[0], f"{cluster.workdir}/jobs/{record.id}"
    if record.run:
        return _download(head, record.run, _FILES, to / Path(record.run).name, f"{cluster.name}:{record.run}")
    new = f"{_FILES} ( -path ./work/* -newer {SCRIPT} -o -name {OUTPUT} )"  # files that the job has written
    return _download(head, job, new, to / record.id, f"{cluster.name}:{job}")


def _download(head: RemoteHost, source: str, condition: str, target: Path, origin: str) -> Path:
    _check_origin(target, origin)
    find = shlex.join(["find", ".", *condition.split(), "-printf", "%s %T@ %P\\n"])
    folder = shlex.quote(source)
    for _ in range(_PASSES):  # a running job writes meanwhile
        listing = head.run(f"[ -d {folder} ] || {{ echo {folder} does not exist >&2; exit 1; }}; cd {folder} && {find}")
        if not target.exists():
            target.mkdir(parents=True)
            (target / ORIGIN).write_text(f"{origin}\n")
        files = [line.split(" ", 2) for line in listing.splitlines()]
        names = [name for size, at, name in files if not _is_current(target / name, int(size), float(at))]
        if not names:
            break
        head.fetch(source, names, target)
    return target


def _is_current(path: Path, size: int, at: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_size == size and int(status.st_mtime) == int(at)


def _check_origin(target: Path, origin: str) -> None:
    if target.exists():
        mark = target / ORIGIN
        known = f"comes from {mark.read_text().strip()}" if mark.exists() else "was not fetched"
        if known != f"comes from {origin}":
            raise UserError(f"{target} exists and {known}: give another DEST")


def _copy(source: Path, to: Path) -> Path:
    if not source.is_dir():
        raise UserError(f"{source} does not exist: nothing was written yet, or it is on another machine's disk")
    target = to / source.name
    if target.exists() and target.resolve() == source.resolve():
        return target
    _check_origin(target, str(source.resolve()))
    for link in (path for path in target.rglob("*") if path.is_symlink()):
        link.unlink()  # copytree does not replace links
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    (target / ORIGIN).write_text(f"{source.resolve()}\n")
    return target
